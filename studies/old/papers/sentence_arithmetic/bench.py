"""The encoder and the texts of one seed: heads fitted to features, experts, and figures of an encoder with a head."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from mergeflow.evaluation.accuracy import example_scores
from mergeflow.modalities.classification import Classification
from mergeflow.modalities.heads import Head
from mergeflow.modalities.metrics import find_metric
from mergeflow.modalities.text.batches import stack
from mergeflow.modalities.text.encoder import TextEncoder, check_length, load_encoder
from mergeflow.modalities.text.probing import probe
from mergeflow.modalities.text.tokenizer import TextTokenizer, load_tokenizer
from mergeflow.modality import Network, State
from studies.lab.tuning import drawn_weights, trained_together
from studies.old.papers.sentence_arithmetic.options import Options
from studies.old.papers.sentence_arithmetic.texts import TARGET, TASKS, Name

Weights = dict[str, Tensor]
Heads = Mapping[Name, Weights]
"""By task the weights of its head."""


@dataclass(frozen=True)
class Tuned:
    """An encoder after fine-tuning.

    Attributes:
        state: Its weights.
        heads: Those that were trained beside it.
    """

    state: Weights
    heads: Heads


@dataclass(frozen=True)
class Bench:
    """The base and the texts of one seed.

    Attributes:
        options: The study's choices.
        seed: Of the texts and of the order of the batches.
        model: Whose weights are overwritten.
        start: The base's weights.
        tokenizer: Of the base.
    """

    options: Options
    seed: int
    model: Network
    start: State
    tokenizer: TextTokenizer

    @classmethod
    def open(cls, options: Options, seed: int) -> "Bench":
        """Load the base."""
        encoder, _ = load_encoder(options.base, Path.cwd(), options.pooling)
        tokenizer = load_tokenizer(options.base, Path.cwd(), options.max_length)
        check_length(encoder, tokenizer.pad, options.max_length)
        model = Network(encoder)
        return cls(options, seed, model, drawn_weights(model), tokenizer)

    @cached_property
    def texts(self) -> dict[tuple[Name, str], Classification]:
        """The texts of every task and split, each with a head of its own."""
        counts = {"train": self.options.train, "validation": self.options.validation, "test": self.options.test}
        return {(task, split): self._drawn(task, split, count) for task in TASKS for split, count in counts.items()}

    def _drawn(self, task: Name, split: str, count: int) -> Classification:
        made = replace(TASKS[task], counts={split: count})
        rows = made.rows(split, self.seed)
        found = [self.tokenizer.encode(row.text) for row in rows]
        segments = [one.segments for one in found] if self.tokenizer.segments else None
        tokens = stack([one.ids for one in found], segments, self.tokenizer.pad)
        encoder, names = self.model.module, made.class_names
        assert isinstance(encoder, TextEncoder)
        assert names
        head = Head(torch.zeros(len(names), encoder.width), 1.0, names, torch.zeros(len(names)), trained=True)
        labels = torch.tensor([row.label for row in rows])
        return Classification(made.name, tokens, labels, head, metric=find_metric(made.metric))

    def fitted(self, state: State, tasks: Iterable[Name]) -> dict[Name, Weights]:
        """Return heads that are fitted to what an encoder makes of the tasks' training texts.

        Args:
            state: the encoder's weights.
            tasks: whose texts.
        """
        self.model.load(state)
        found = {}
        for task in tasks:
            data = self.texts[task, "train"]
            probe(self.model, data, data.labels.numpy())
            found[task] = _head_of(data)
        return found

    @cached_property
    def warm(self) -> dict[Name, Weights]:
        """The heads that training begins with, fitted to the base."""
        return self.fitted(self.start, [task for task in TASKS if task != TARGET])

    def tuned(self, tasks: Sequence[Name]) -> Tuned:
        """Return the encoder after fine-tuning with a head for each task, as many steps for each.

        Args:
            tasks: one, or several together.
        """
        data = [self.texts[task, "train"] for task in tasks]
        for task, one in zip(tasks, data, strict=True):
            _put(one, self.warm[task])
        state = trained_together(self.model, self.start, data, self.options.tune, self.seed)
        return Tuned(state, {task: _head_of(one) for task, one in zip(tasks, data, strict=True)})

    def figure(self, state: State, head: Weights, task: Name, split: str) -> float:
        """Return how good an encoder with a head is on a task: accuracy or Matthews' correlation, in %.

        Args:
            state: the encoder's weights.
            head: the head's weights.
            task: whose texts.
            split: validation or test.
        """
        self.model.load(state)
        data = self.texts[task, split]
        _put(data, head)
        return 100 * float(example_scores(self.model, data).mean(dtype="float64"))


def _put(data: Classification, head: Weights) -> None:
    assert data.head is not None
    data.head.load_state_dict(head)


def _head_of(data: Classification) -> Weights:
    assert data.head is not None
    return {name: value.detach().clone() for name, value in data.head.state_dict().items()}
