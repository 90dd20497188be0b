"""Steps until a task is solved, over step size, share of relevant tokens and labels; early loss over the batch."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from studies.old.papers.laboratory.options import Options, start, task_of, test_set
from studies.old.rows import Row
from studies.theory.laboratory import (
    PatternTask,
    Training,
    Weights,
    fine_tune,
    initial,
    judge,
    large_rows,
    related_patterns,
)


def convergence_rows(options: Options, seed: int) -> Iterator[Row]:
    """Yield the steps until the task is solved over η, δ_*, c and B, and over B the loss early and at the end."""
    begin, output = start(options, seed)
    first, _, rest = related_patterns(0.0, options.dimensions)
    task = task_of(options, first, rest)
    usual = Training(options.step, options.batch, options.steps, seed)
    varied = [
        *(("step", step, task, replace(usual, step=step)) for step in options.step_sizes),
        *(("relevant", count / options.tokens, _clean(task, count), usual) for count in options.shares),
        *(("bits", bits, _one_bit(options, bits), usual) for bits in options.bits),
        *(("batch", batch, task, replace(usual, batch=batch)) for batch in options.batches),
    ]
    for name, at, changed, training in varied:
        steps = steps_to(options, begin, output, changed, training)
        losses: dict[str, float] = {}
        if name == "batch":
            early = _ended(options, begin, output, changed, replace(training, steps=options.early))
            losses = _ended(options, begin, output, changed, training) | {"early_hinge": early["hinge"]}
        yield _row(seed, name, at, steps=steps, **losses)


def row_norm_rows(options: Options, seed: int) -> Iterator[Row]:
    """Yield the share of large rows of ΔV over the width and over the spread of the initial weights."""
    first, _, rest = related_patterns(0.0, options.dimensions)
    task = task_of(options, first, rest)
    training = Training(options.step, 64, options.steps, seed)
    for name, at, width, spread in [
        *(("width", width, width, 0.5) for width in options.widths),
        *(("spread", spread, options.width, spread) for spread in options.spreads),
    ]:
        begin, output = initial(options.dimensions, width, seed, spread)
        yield _row(seed, name, at, **_ended(options, begin, output, task, training))


def steps_to(options: Options, begin: Weights, output: Tensor, task: PatternTask, training: Training) -> float:
    """Return the number of steps until the test hinge is at most `solved`, interpolated.

    Args:
        options: for `solved` and the size of the test set.
        begin: Ψ^(0).
        output: a, [m].
        task: the task.
        training: its settings; of its steps as many are taken as are needed, up to 40/(η δ_*²).
    """
    test = test_set(options, task, training.seed)
    found: list[tuple[int, float]] = []
    longest = round(40 / training.step * (options.tokens / task.relevant) ** 2)
    every = max(1, round(longest / 160))

    def watch(done: int, model: Weights) -> bool:
        if done % every:
            return False
        found.append((done, _mean_hinge(model, output, test)))
        return found[-1][1] <= options.solved

    fine_tune(begin, output, task, replace(training, steps=longest), watch)
    (before, above), (after, below) = found[-2:]
    assert below <= options.solved, f"not solved after {after} steps"
    return before + (after - before) * (above - options.solved) / (above - below)


def _clean(task: PatternTask, relevant: int) -> PatternTask:
    """Return a task with other counts and no confusing tokens, so that δ_* alone varies."""
    return replace(task, relevant=relevant, confusing=0)


def _ended(options: Options, begin: Weights, output: Tensor, task: PatternTask, training: Training) -> dict[str, float]:
    """Return the test hinge after all steps, and the share of large rows of ΔV."""
    model = fine_tune(begin, output, task, training)
    loss = _mean_hinge(model, output, test_set(options, task, training.seed))
    return {"hinge": loss, "large_rows": large_rows(model.minus(begin))}


def _one_bit(options: Options, bits: int) -> PatternTask:
    """Return one label of a task of c: 1/c of the relevant tokens are its own.

    The patterns of the other labels take part like irrelevant ones that come in both signs; the c outputs have weights
    of their own (Equation 170), so that one stands for all.
    """
    axes = torch.eye(options.dimensions, dtype=torch.float64)
    own, others, rest = axes[0], axes[1:bits], axes[bits:]
    return PatternTask(own, torch.cat([others, -others, rest]), options.tokens, 12 // bits, 0)


def _mean_hinge(model: Weights, output: Tensor, test: tuple[Tensor, Tensor]) -> float:
    return float(judge(Weights(model.attention[None], model.value[None]), output, *test).hinge[0])


def _row(seed: int, varied: str, at: float, **measured: float) -> Row:
    return {"part": "convergence", "seed": seed, "varied": varied, "at": float(at), **measured}
