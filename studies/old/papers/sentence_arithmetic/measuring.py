"""What is measured of one seed: two tasks by one encoder, a task taken away, and a task that nobody trained.

A figure is the accuracy of sentiment or Matthews' correlation of acceptability, in %.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from statistics import fmean

import torch

from mergeflow.modality import State
from studies.lab.scales import best_scale, combined, task_vector
from studies.old.papers.analogy.results import ANALOGY, SUM
from studies.old.papers.sentence_arithmetic.bench import Bench, Heads, Tuned, Weights
from studies.old.papers.sentence_arithmetic.options import Options
from studies.old.papers.sentence_arithmetic.texts import (
    ACCEPTABILITY,
    NEITHER,
    SENTIMENT,
    TARGET,
    TASKS,
    Name,
)
from studies.old.rows import Row

ADDITION, NEGATION, ANALOGIES = "addition", "negation", "analogy"  # parts of the study
BASE, JOINT, AVERAGE, ADDED = "base", "joint training", "average", "Δ_sentiment + λ Δ_acceptability"
ALONE = {SENTIMENT: "Δ_sentiment", ACCEPTABILITY: "Δ_acceptability"}
BEFORE, AFTER, RANDOM = "before", "less λ Δ_acceptability", "less a random vector as long"
TRAINED_HEADS, FITTED = "trained", "fitted"
PAIR = (SENTIMENT, ACCEPTABILITY)
RETAINED = 2.0  # points of sentiment on validation that λ may cost where acceptability is taken away
_LOOKED_AT = ("validation", "test")


def seed_rows(options: Options, seed: int) -> list[Row]:
    """Return all rows of a seed.

    Args:
        options: the study's choices.
        seed: of the texts and of the order of the batches.
    """
    return [{"seed": seed, **row} for row in bench_rows(Bench.open(options, seed))]


def bench_rows(bench: Bench) -> Iterator[Row]:
    """Yield all rows of a bench.

    Args:
        bench: of a seed.
    """
    experts = {task: bench.tuned([task]) for task in TASKS if task != TARGET}
    vectors = {told(task): task_vector(expert.state, bench.start) for task, expert in experts.items()}
    joint = bench.tuned(PAIR)
    yield from _addition_rows(bench, experts, vectors, joint)
    yield from _negation_rows(bench, vectors[told(ACCEPTABILITY)], joint)
    yield from _analogy_rows(bench, experts, vectors)


def told(task: Name) -> str:
    """Return a task's name in words.

    Example:
        >>> told(SENTIMENT)
        'sentiment of reviews'
    """
    return " of ".join(task)


def _of_pair(bench: Bench, state: State, heads: Heads) -> Iterator[Row]:
    """Yield a row for each of the two tasks: an encoder with the task's head on validation and, once, on test."""
    for task in PAIR:
        found = {split: bench.figure(state, heads[task], task, split) for split in _LOOKED_AT}
        yield {"task": told(task), **found}


def _addition_rows(
    bench: Bench, experts: Mapping[Name, Tuned], vectors: Mapping[str, State], joint: Tuned
) -> Iterator[Row]:
    """Yield the rows of encoders that may do both tasks."""
    heads = {task: experts[task].heads[task] for task in PAIR}

    def added(sentiment: float, acceptability: float) -> Weights:
        return combined(bench.start, vectors, {told(SENTIMENT): sentiment, told(ACCEPTABILITY): acceptability})

    def score(scale: float) -> float:
        state = added(1.0, scale)
        return fmean(bench.figure(state, heads[task], task, "validation") for task in PAIR)

    best = best_scale(bench.options.scales, score)
    both = added(1.0, best)
    models: dict[tuple[str, str], tuple[State, Heads]] = {
        (BASE, FITTED): (bench.start, bench.warm),
        **{(ALONE[task], TRAINED_HEADS): (experts[task].state, heads) for task in PAIR},
        (AVERAGE, TRAINED_HEADS): (added(0.5, 0.5), heads),
        (ADDED, TRAINED_HEADS): (both, heads),
        (ADDED, FITTED): (both, bench.fitted(both, PAIR)),
        (JOINT, TRAINED_HEADS): (joint.state, joint.heads),
    }
    for (way, read_by), (state, own) in models.items():
        row = {"part": ADDITION, "way": way, "heads": read_by, "scale": best if way == ADDED else None}
        yield from ({**row, **found} for found in _of_pair(bench, state, own))


def _negation_rows(bench: Bench, vector: State, joint: Tuned) -> Iterator[Row]:
    """Yield the rows of the base and of joint training, before and after Δ_acceptability is taken away."""
    taken = {AFTER: vector, RANDOM: as_long(vector, bench.seed)}
    for start, state, heads in ((BASE, bench.start, bench.warm), (JOINT, joint.state, joint.heads)):
        edited = partial(combined, state, taken)

        def left(scale: float, edited: Callable[..., Weights] = edited, heads: Heads = heads) -> tuple[float, float]:
            """Return sentiment and the size of acceptability on validation."""
            model = edited({AFTER: -scale})
            sentiment, acceptability = (bench.figure(model, heads[task], task, "validation") for task in PAIR)
            return sentiment, abs(acceptability)

        scale = forgetting_scale({scale: left(scale) for scale in (0.0, *bench.options.negated)})
        for way in (BEFORE, AFTER, RANDOM):
            model = edited({way: -scale} if way in taken else {})
            row = {"part": NEGATION, "start": start, "way": way, "scale": None if way == BEFORE else scale}
            own = FITTED if start == BASE else TRAINED_HEADS
            yield from ({**row, "heads": own, **found} for found in _of_pair(bench, model, heads))
            if start == JOINT and way != RANDOM:
                fitted = bench.fitted(model, PAIR)
                yield from ({**row, "heads": FITTED, **found} for found in _of_pair(bench, model, fitted))


def forgetting_scale(left: Mapping[float, tuple[float, float]]) -> float:
    """Return the λ that forgets most among those that cost what is to be kept at most `RETAINED` points.

    Args:
        left: λ → the figure that is to be kept, and the size of the one that is to be lost; 0 is among them.

    Example:
        >>> forgetting_scale({0.0: (90.0, 70.0), 0.5: (89.0, 30.0), 1.0: (80.0, 0.0)})
        0.5
    """
    floor = left[0.0][0] - RETAINED
    return min((scale for scale, (kept, _) in left.items() if kept >= floor), key=lambda scale: left[scale][1])


def as_long(vector: State, seed: int) -> Weights:
    """Return a random vector, each of whose tensors is as long as the given one's.

    Args:
        vector: a task vector.
        seed: of the draw.
    """
    drawing = torch.Generator().manual_seed(seed)
    drawn = {name: torch.randn(value.shape, generator=drawing) for name, value in vector.items()}
    return {name: one * (vector[name].norm() / one.norm()) for name, one in drawn.items()}


def _analogy_rows(bench: Bench, experts: Mapping[Name, Tuned], vectors: Mapping[str, State]) -> Iterator[Row]:
    """Yield the rows of the target by the other three tasks, read by A's head, which knows what is asked."""
    a, b, c = told(ACCEPTABILITY), told(SENTIMENT), told(NEITHER)
    sums: dict[str, dict[str, float]] = {"A": {a: 1}, SUM: {a: 1, b: 1}, ANALOGY: {a: 1, b: 1, c: -1}}

    def read(signs: Mapping[str, float], scale: float, split: str) -> float:
        state = combined(bench.start, vectors, {task: scale * sign for task, sign in signs.items()})
        return bench.figure(state, experts[ACCEPTABILITY].heads[ACCEPTABILITY], TARGET, split)

    best = {
        way: best_scale(bench.options.scales, partial(read, signs, split="validation")) for way, signs in sums.items()
    }
    looked_at: dict[str, Callable[[str], float]] = {
        BASE: partial(bench.figure, bench.start, bench.warm[ACCEPTABILITY], TARGET),
        **{way: partial(read, signs, best[way]) for way, signs in sums.items()},
        f"{ANALOGY}, λ = 1": partial(read, sums[ANALOGY], 1),
    }
    for way, figure in looked_at.items():
        found = {split: figure(split) for split in _LOOKED_AT}
        yield {"part": ANALOGIES, "way": way, "scale": best.get(way), "task": told(TARGET), **found}
