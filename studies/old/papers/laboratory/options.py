"""The choices of the study `laboratory`, and the parts that all its experiments share."""

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor

from studies.old.pieces import grid
from studies.theory.laboratory import PatternTask, Training, Weights, fine_tune, initial
from tasks.project.sections import Section


class Options(Section):
    """The study's choices.

    Attributes:
        seeds: of Ψ^(0), a, the batches and the test sets.
        dimensions: d.
        width: m.
        tokens: P.
        relevant: δ_* P.
        confusing: δ_# P.
        batch: B.
        step: η.
        steps: T.
        samples: test sequences per task.
        alphas: α of the phase diagrams.
        scales: λ of the phase diagrams, ascending, with 0 among them.
        solved: hinge loss up to which a task counts as solved.
        forgotten: hinge loss from which a task counts as forgotten; c of Theorem 2 is chosen as in the row.
        step_sizes: η of the convergence table.
        shares: δ_* P of the convergence table.
        batches: B of the convergence table and of the rows' table.
        early: steps after which the error over B is taken, before any B has brought it to 0.
        widths: m of the rows' table.
        spreads: ξ√m of the rows' table.
        bits: c of the tasks with c labels.
        targets: γ of the tasks that nobody trained; κ completes each to length 1.
        drawn: λ drawn per target, uniformly in [−1, 3] per coordinate.
        c: of Equation 7.
        keep: shares of rows kept in pruning.
    """

    seeds: list[int] = Field([0, 1, 2, 3, 4], min_length=2)
    dimensions: int = Field(16, ge=8)
    width: int = Field(512, ge=8)
    tokens: int = Field(20, ge=2)
    relevant: int = Field(8, ge=1)
    confusing: int = Field(2, ge=0)
    batch: int = Field(264, ge=1)
    step: float = Field(0.5, gt=0)
    steps: int = Field(70, ge=1)
    samples: int = Field(256, ge=8)
    alphas: list[float] = Field([-0.8, -0.65, -0.5, -0.2, 0.0, 0.2, 0.5, 0.8], min_length=2)
    scales: list[float] = Field(
        [*range(-12, -4), -4, -3.5, -3, -2.5, -2, -1.5, -1, -0.75, -0.5, -0.25, *grid(0, 1.2, 0.1), 1.5, 2, 3],
        min_length=2,
    )
    solved: float = Field(0.05, gt=0)
    forgotten: float = Field(0.5, gt=0)
    step_sizes: list[float] = Field([0.125, 0.25, 0.5], min_length=2)
    shares: list[int] = Field([4, 6, 8], min_length=2)
    batches: list[int] = Field([4, 16, 64, 264], min_length=2)
    early: int = Field(35, ge=1)
    widths: list[int] = Field([128, 512, 1024], min_length=1)
    spreads: list[float] = Field([0.1, 0.5, 1.0], min_length=1)
    bits: list[int] = Field([1, 2, 3], min_length=2)
    targets: list[list[float]] = Field(
        [*([0.8, 0.4], [0.6, -0.5], [0.792, -0.6], [0.5, 0.5, 0.5], [0.7, -0.4, 0.3]), [0.0, 0.0], [-0.5, -0.5]],
        min_length=1,
    )
    drawn: int = Field(40, ge=1)
    c: float = Field(0.2, gt=0, lt=1)
    keep: list[float] = Field([0.05, 0.1, 0.25, 0.5, 0.75, 0.9], min_length=1)


def start(options: Options, seed: int) -> tuple[Weights, Tensor]:
    """Return Ψ^(0) and a."""
    return initial(options.dimensions, options.width, seed)


def task_of(options: Options, pattern: Tensor, irrelevant: Tensor) -> PatternTask:
    """Return the task of a pattern with the study's usual counts.

    Args:
        options: for the counts of tokens.
        pattern: μ, [d].
        irrelevant: the patterns that do not matter, [M, d].
    """
    return PatternTask(pattern, irrelevant, options.tokens, options.relevant, options.confusing)


def trained(options: Options, begin: Weights, output: Tensor, task: PatternTask, seed: int) -> Weights:
    """Return ΔΨ of a task after the study's usual training.

    Args:
        options: the study's usual settings.
        begin: Ψ^(0).
        output: a, [m].
        task: the task.
        seed: of the batches.
    """
    settings = Training(options.step, options.batch, options.steps, seed)
    return fine_tune(begin, output, task, settings).minus(begin)


def test_set(options: Options, task: PatternTask, seed: int) -> tuple[Tensor, Tensor]:
    """Return a task's test sequences [n, P, d] and labels [n], which no training saw.

    Args:
        options: for the size of the test set.
        task: the task.
        seed: of the draws.
    """
    return task.draw(options.samples, torch.Generator().manual_seed(1_000_003 + seed))


def column(values: Sequence[float]) -> Tensor:
    """Return numbers as a tensor [n] in float64."""
    return torch.tensor(values, dtype=torch.float64)
