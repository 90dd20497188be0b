"""Encoder-decoders with texts: a T5 from nothing that learns to edit rows of symbols, and published checkpoints."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor

from mergeflow.checkpoints import open_checkpoint
from mergeflow.errors import unknown_name
from mergeflow.linearity.networks import Opened, Sequences, open_network
from mergeflow.linearity.pairs import check_related, check_samples
from mergeflow.modalities.modules import own_generator
from mergeflow.modality import Model, Network, device_of
from studies.lab.linearity import TunedModels
from studies.lab.tuning import CosineSteps, drawn_weights, trained
from tasks.project.sections import Section

PAD, END, FIRST = 0, 1, 2  # ids: padding, which also begins an answer as in T5; the end; the first symbol
_IGNORED = -100  # as transformers' losses leave a position out

EDITS: dict[str, Callable[[list[int], int], list[int]]] = {
    "repeated": lambda row, _: row,
    "reversed": lambda row, _: row[::-1],
    "sorted": lambda row, _: sorted(row),
    "shifted": lambda row, symbols: [FIRST + (one - FIRST + 1) % symbols for one in row],
    "rotated": lambda row, _: row[1:] + row[:1],
    "swapped": lambda row, _: [one for n in range(0, len(row), 2) for one in row[n : n + 2][::-1]],
    "halved": lambda row, _: row[::2],
}
"""Task → what is asked and the number of symbols to what is answered."""


class TextWorld(Section):
    """A small T5 and its tasks.

    width, blocks, heads, inner: of the model; blocks are those of the encoder, and of the decoder. symbols: how many
    there are. longest: symbols in a row, at least four. train, test: rows of each task. tasks: names of EDITS; the
    model is pre-trained on the first.
    """

    width: int = Field(64, ge=4)
    blocks: int = Field(2, ge=1)
    heads: int = Field(4, ge=1)
    inner: int = Field(128, ge=4)
    symbols: int = Field(24, ge=2)
    longest: int = Field(8, ge=4)
    train: int = Field(ge=32)
    test: int = Field(ge=32)
    tasks: list[str] = Field(min_length=3)
    pretrain: CosineSteps
    tune: CosineSteps

    @field_validator("tasks")
    @classmethod
    def _known(cls, tasks: list[str]) -> list[str]:
        for task in tasks:
            if task not in EDITS:
                raise unknown_name("task of texts", task, EDITS)
        return tasks


@dataclass(frozen=True)
class Answers:
    """Rows of symbols and what is to be answered to them, as examples of a task.

    Attributes:
        task: The task's name.
        asked: Ids and mask.
        labels: int64 [N, T], −100 behind the end.
    """

    task: str
    asked: Sequences
    labels: Tensor
    head: None = field(default=None, init=False)
    metric: None = field(default=None, init=False)

    def __len__(self) -> int:
        return len(self.asked)

    def loss(self, model: Model, rows: Tensor) -> Tensor:
        """Return the mean cross-entropy over the tokens of the answers to `rows`, in nats, a scalar []."""
        found: Tensor = self._called(model, rows).loss
        return found

    def scores(self, model: Model, rows: Tensor) -> Tensor:
        """Return 1 where every token is the likeliest after the right ones before it, [n]: greedy answers are right."""
        labels = self.labels[rows].to(device_of(model))
        said = self._called(model, rows).logits.argmax(-1)
        return ((said == labels) | (labels == _IGNORED)).all(1).float()

    def log_p(self, model: Model, rows: Tensor) -> Tensor:
        """Return log-probabilities of every token of the answers, [m, C]."""
        kept = (self.labels[rows] != _IGNORED).to(device_of(model))
        found: Tensor = self._called(model, rows).logits.log_softmax(-1)[kept]
        return found

    def features(self, model: Model, rows: Tensor, layers: Sequence[str]) -> dict[str, Tensor]:
        """Return the features of the named blocks, [n, width] each."""
        return self.asked.features(model, rows, layers)

    def _called(self, model: Model, rows: Tensor) -> Any:
        device = device_of(model)
        ids, mask, labels = (part[rows].to(device) for part in (self.asked.ids, self.asked.mask, self.labels))
        return model.module(input_ids=ids, attention_mask=mask, labels=labels)


def draw_answers(world: TextWorld, task: str, count: int, seed: int) -> Answers:
    """Return rows of a task; the same seed gives all tasks the same questions.

    Args:
        world: symbols and lengths.
        task: a name of EDITS.
        count: how many rows.
        seed: of the symbols and lengths.

    Example:
        >>> drawn = draw_answers(TextWorld(train=32, test=32, tasks=["repeated", "reversed", "sorted"],
        ...     pretrain=CosineSteps(learning_rate=1e-3, steps=1), tune=CosineSteps(learning_rate=1e-3, steps=1)),
        ...     "reversed", 4, 0)
        >>> row = drawn.asked.ids[0][drawn.asked.mask[0] == 1]
        >>> bool((drawn.labels[0, : len(row) - 1] == row[:-1].flip(0)).all())
        True
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, world.longest + 1, (count,), generator=generator).tolist()
    symbols = torch.randint(FIRST, FIRST + world.symbols, (count, world.longest), generator=generator).tolist()
    rows = [row[:length] for row, length in zip(symbols, lengths, strict=True)]
    ids = torch.tensor([_padded([*row, END], world.longest + 1, PAD) for row in rows])
    answers = [[*EDITS[task](row, world.symbols), END] for row in rows]
    labels = torch.tensor([_padded(row, world.longest + 1, _IGNORED) for row in answers])
    return Answers(task, Sequences(ids, (ids != PAD).long()), labels)


def _padded(row: list[int], length: int, value: int) -> list[int]:
    return row + [value] * (length - len(row))


def new_model(world: TextWorld, seed: int) -> Network:
    """Return the world's model with weights drawn by a seed, without dropout."""
    from transformers import T5Config, T5ForConditionalGeneration

    config: Any = T5Config(
        vocab_size=FIRST + world.symbols,
        d_model=world.width,
        d_kv=world.width // world.heads,
        d_ff=world.inner,
        num_layers=world.blocks,
        num_heads=world.heads,
        dropout_rate=0.0,
        pad_token_id=PAD,
        eos_token_id=END,
    )
    config.decoder_start_token_id = PAD
    with own_generator(seed):
        return Network(T5ForConditionalGeneration(config).eval())


def train_texts(world: TextWorld, seed: int) -> TunedModels:
    """Pre-train on the first task and tune on each of the others.

    Args:
        world: model, tasks and settings.
        seed: of weights, rows and order.
    """
    first, *others = world.tasks
    model = new_model(world, seed)
    start = trained(
        model, drawn_weights(model), draw_answers(world, first, world.train, 2 * seed), world.pretrain, seed
    )
    tuned = {
        task: trained(model, start, draw_answers(world, task, world.train, 2 * seed), world.tune, seed)
        for task in others
    }
    tests = {task: draw_answers(world, task, world.test, 2 * seed + 1) for task in others}
    return TunedModels(model, start, tuned, tests)


class Checkpoints(Section):
    """base: a model folder with config.json. experts: task → checkpoint. texts: task → `text:FILE`, one text a line."""

    base: str
    experts: dict[str, str] = Field(min_length=2)
    texts: dict[str, str]

    @model_validator(mode="after")
    def _same(self) -> Self:
        if set(self.experts) != set(self.texts):
            raise ValueError(
                f"names experts {', '.join(sorted(self.experts))} and texts of {', '.join(sorted(self.texts))}: "
                "expected the same tasks"
            )
        return self


def open_checkpoints(asked: Checkpoints, root: Path, count: int) -> TunedModels:
    """Return the models and the first texts of each task.

    Args:
        asked: where they are.
        root: the folder that relative paths begin at.
        count: texts of each task.

    Raises:
        MergeflowError: a file is not there or does not fit, an expert is of another base, or there are too few texts.
    """
    base = root / asked.base
    opened = open_network(str(base), {})
    start = _read(opened, base)
    tuned = {task: _read(opened, root / path) for task, path in asked.experts.items()}
    check_related(start, tuned)
    texts = {
        task: opened.read(f"text:{root / path.removeprefix('text:')}", count) for task, path in asked.texts.items()
    }
    check_samples(texts)
    return TunedModels(opened.model, start, tuned, texts)


def _read(opened: Opened, path: Path) -> dict[str, Tensor]:
    with open_checkpoint(path) as state:
        return opened.weights(str(path), {name: state[name].clone() for name in state})
