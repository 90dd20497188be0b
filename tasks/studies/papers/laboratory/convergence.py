"""Steps until a task is solved, over the step size, the share of relevant tokens, the batch and the number of labels."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from mergeflow.analysis.provable.data import PatternTask, related_patterns
from mergeflow.analysis.provable.structure import large_rows
from mergeflow.analysis.provable.transformer import Training, Weights, fine_tune, initial, judge
from tasks.studies.papers.laboratory.options import Options, Row, start, task_of, test_set


def convergence_rows(options: Options, seed: int) -> Iterator[Row]:
    """Yield steps to `solved` over η, δ_* and c, and the loss after the same number of steps over B."""
    begin, output = start(options, seed)
    first, _, rest = related_patterns(0.0, options.dimensions)
    task = task_of(options, first, rest)
    for step in options.step_sizes:
        taken = steps_to(options, begin, output, task, step, seed)
        yield _row(seed, "step", step, steps=taken)
    for relevant in options.shares:
        changed = replace(task, relevant=relevant, confusing=0)
        yield _row(seed, "relevant", relevant / options.tokens, steps=steps_to(options, begin, output, changed, options.step, seed))
    for bits in options.bits:
        taken = steps_to(options, begin, output, _one_bit(options, bits), options.step, seed)
        yield _row(seed, "bits", bits, steps=taken)
    for batch in options.batches:
        ended = fine_tune(begin, output, task, Training(options.step, batch, options.steps, seed))
        yield _row(seed, "batch", batch, hinge=_hinge(options, ended, output, task, seed), large_rows=large_rows(ended.minus(begin)))


def row_norm_rows(options: Options, seed: int) -> Iterator[Row]:
    """Yield the share of large rows of ΔV over the width and over the spread of the initial weights."""
    first, _, rest = related_patterns(0.0, options.dimensions)
    task = task_of(options, first, rest)
    for name, width, spread in [
        *(("width", width, 0.5) for width in options.widths),
        *(("spread", options.width, spread) for spread in options.spreads),
    ]:
        begin, output = initial(options.dimensions, width, seed, spread)
        ended = fine_tune(begin, output, task, Training(options.step, 64, options.steps, seed))
        at = width if name == "width" else spread
        yield _row(seed, name, at, hinge=_hinge(options, ended, output, task, seed), large_rows=large_rows(ended.minus(begin)))


def steps_to(options: Options, begin: Weights, output: Tensor, task: PatternTask, step: float, seed: int) -> float:
    """Return the number of steps until the test hinge is at most `solved`, interpolated; at most 40/(η δ_*²)."""
    test = test_set(options, task, seed)
    found: list[tuple[int, float]] = []
    longest = round(40 / step * (options.tokens / task.relevant) ** 2)
    every = max(1, round(longest / 80))

    def watch(done: int, model: Weights) -> bool:
        if done % every:
            return False
        found.append((done, _mean_hinge(model, output, test)))
        return found[-1][1] <= options.solved

    fine_tune(begin, output, task, Training(step, options.batch, longest, seed), watch)
    (before, above), (after, below) = found[-2:]
    assert below <= options.solved, f"not solved after {after} steps"
    return before + (after - before) * (above - options.solved) / (above - below)


def _one_bit(options: Options, bits: int) -> PatternTask:
    """Return one label of a task of c: 1/c of the relevant tokens are its own, the others' patterns are irrelevant to it.

    The patterns of the other labels take part like irrelevant ones that come in both signs; the c outputs have weights
    of their own (Equation 170), so that one stands for all.
    """
    axes = torch.eye(options.dimensions, dtype=torch.float64)
    own, others, rest = axes[0], axes[1:bits], axes[bits:]
    return PatternTask(own, torch.cat([others, -others, rest]), options.tokens, 12 // bits, 0)


def _hinge(options: Options, model: Weights, output: Tensor, task: PatternTask, seed: int) -> float:
    return _mean_hinge(model, output, test_set(options, task, seed))


def _mean_hinge(model: Weights, output: Tensor, test: tuple[Tensor, Tensor]) -> float:
    return float(judge(Weights(model.attention[None], model.value[None]), output, *test).hinge[0])


def _row(seed: int, varied: str, at: float, **measured: float) -> Row:
    return {"part": "convergence", "seed": seed, "varied": varied, "at": float(at), **measured}
