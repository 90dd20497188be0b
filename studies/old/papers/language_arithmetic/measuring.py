"""What is measured of one seed: every analogy, and three domains merged by every method.

A figure of a text is its log-likelihood per token in nats, log p = −log(perplexity): larger is better.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mergeflow.evaluation.averages import mean
from mergeflow.merging import MethodCall
from mergeflow.merging.direction import CandidateMerger
from mergeflow.modalities.causal.blocks import cut
from mergeflow.modalities.causal.model import LanguageModel, load_model
from mergeflow.modalities.causal.packed import PackedText
from mergeflow.modalities.causal.perplexity import perplexity
from mergeflow.modalities.causal.tokenizer import CausalTokenizer, load_tokenizer
from mergeflow.modality import State
from mergeflow.search.candidates import grid, score_all
from studies.lab.scales import best_scale, combined, task_vector
from studies.lab.tuning import drawn_weights, trained
from studies.old.papers.analogy.results import ANALOGY, SUM, TRAINED
from studies.old.papers.language_arithmetic.options import Options
from studies.old.papers.language_arithmetic.world import Task, World, written
from studies.old.rows import Row

CPU = torch.device("cpu")
BASE, INDIVIDUAL, JOINT = "base", "individual", "joint"
_LOOKED_AT = ("validation", "test")


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
    model: LanguageModel
    start: State
    tokenizer: CausalTokenizer

    @classmethod
    def open(cls, options: Options, seed: int) -> "Bench":
        """Load the base."""
        model, _ = load_model(options.base, Path.cwd())
        return cls(options, seed, model, drawn_weights(model), load_tokenizer(options.base, Path.cwd()))

    @cached_property
    def world(self) -> World:
        """The tasks."""
        return World.of(self.options.folders)

    def texts(self, manners: Sequence[Task], split: str) -> PackedText:
        """Return the texts of some tasks in blocks, those of one task after those of the other.

        Args:
            manners: of the tasks.
            split: train, validation or test.
        """
        count = {"train": self.options.train, "validation": self.options.validation, "test": self.options.test}[split]
        told = (text for manner in manners for text in written(manner, split, count, self.seed, Path.cwd()))
        ids = [token for text in told for token in (*self.tokenizer.encode(text), self.tokenizer.end)]
        return PackedText(split, cut(np.array(ids), self.options.block, self.tokenizer.end), CPU)

    def tuned(self, manners: Sequence[Task]) -> State:
        """Return the weights after fine-tuning on all texts of some tasks, as many steps for each.

        Args:
            manners: of the tasks.
        """
        tune = self.options.tune.model_copy(update={"steps": len(manners) * self.options.tune.steps})
        return trained(self.model, self.start, self.texts(manners, "train"), tune, self.seed)

    @cached_property
    def held_out(self) -> dict[tuple[Task, str], PackedText]:
        """The validation and test texts of every task."""
        return {(manner, split): self.texts([manner], split) for manner in self.world.tasks for split in _LOOKED_AT}

    def likelihood(self, state: State, manner: Task, split: str) -> float:
        """Return the log-likelihood per token of a task's texts, in nats.

        Args:
            state: the model's weights.
            manner: of the task.
            split: validation or test.
        """
        self.model.load(state)
        return -math.log(perplexity(self.model, self.held_out[manner, split]))


def seed_rows(options: Options, seed: int) -> list[Row]:
    """Return all rows of a seed.

    Args:
        options: the study's choices.
        seed: of the texts and of the order of the batches.
    """
    bench = Bench.open(options, seed)
    experts = {manner: bench.tuned([manner]) for manner in bench.world.tasks}
    rows: list[Row] = []
    for name, tasks in bench.world.attributes.items():
        vectors = {" ".join(task): task_vector(experts[manner], bench.start) for task, manner in tasks.items()}
        for task in tasks:
            rows += ({"attributes": name, **row} for row in _target_rows(bench, tasks, vectors, task))
    return [{"seed": seed, **row} for row in (*rows, *_domain_rows(bench, experts))]


def others(tasks: Mapping[tuple[str, str], Task], target: tuple[str, str]) -> tuple[str, str, str]:
    """Return A, B and C: what has the target's first attribute alone, its second one alone, and neither.

    Args:
        tasks: all four.
        target: one of them.

    Example:
        >>> others(World.of(None).attributes["authors × genres"], ("first", "tales"))
        ('first dialogues', 'second tales', 'second dialogues')
    """
    told = {(one == target[0], two == target[1]): f"{one} {two}" for one, two in tasks}
    return told[True, False], told[False, True], told[False, False]


def _target_rows(
    bench: Bench,
    tasks: Mapping[tuple[str, str], Task],
    vectors: Mapping[str, Mapping[str, Tensor]],
    target: tuple[str, str],
) -> Iterator[Row]:
    """Yield the rows of one target: signs of the other tasks' vectors with λ by validation, and what has no λ."""
    a, b, c = others(tasks, target)

    def likelihood(signs: Mapping[str, float], scale: float, split: str) -> float:
        state = combined(bench.start, vectors, {task: scale * sign for task, sign in signs.items()})
        return bench.likelihood(state, tasks[target], split)

    sums: dict[str, dict[str, float]] = {
        "A": {a: 1},
        "B": {b: 1},
        "C": {c: 1},
        SUM: {a: 1, b: 1},
        ANALOGY: {a: 1, b: 1, c: -1},
    }
    picked: dict[str, tuple[dict[str, float], float | None]] = {
        BASE: ({}, None),
        f"{ANALOGY}, λ = 1": (sums[ANALOGY], None),
        TRAINED: ({" ".join(target): 1}, None),
    }
    for way, own in sums.items():
        best = best_scale(bench.options.scales, partial(likelihood, own, split="validation"))
        picked[way] = (own, best)
    for way, (signs, scale) in picked.items():
        found = {split: likelihood(signs, 1 if scale is None else scale, split) for split in _LOOKED_AT}
        yield {"target": " ".join(target), "way": way, "scale": scale, **found}


def _domain_rows(bench: Bench, experts: Mapping[Task, State]) -> Iterator[Row]:
    """Yield a row for each model and domain; the arguments of a merge are those that are best on validation."""
    domains = bench.world.domains
    own = {name: experts[manner] for name, manner in domains.items()}
    merger = CandidateMerger(bench.start, own)

    def score(call: MethodCall) -> dict[str, float]:
        state = merger.merge(call)
        return {name: bench.likelihood(state, manner, "validation") for name, manner in domains.items()}

    joint = bench.tuned(list(domains.values()))
    for model, states in {
        BASE: dict.fromkeys(domains, bench.start),
        INDIVIDUAL: own,
        JOINT: dict.fromkeys(domains, joint),
    }.items():
        yield from _judged(bench, model, states)
    for method, values in bench.options.methods.items():
        tried = list(score_all(method, grid(method, values), score, mean))
        best = max(tried, key=lambda one: one.value)
        told = {"args": json.dumps(best.varied), "tried": len(tried)}
        yield from ({**row, **told} for row in _judged(bench, method, dict.fromkeys(domains, merger.merge(best.call))))


def _judged(bench: Bench, model: str, states: Mapping[str, State]) -> Iterator[Row]:
    for name, manner in bench.world.domains.items():
        found = {split: bench.likelihood(states[name], manner, split) for split in _LOOKED_AT}
        yield {"model": model, "domain": name, **found}
