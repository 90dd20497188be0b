"""The one-layer Transformer of the study `laboratory`: its choices, and what is measured of it for one seed."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from mergeflow.errors import MergeflowError
from studies.lab.inputs import grid
from studies.lab.rows import Row
from studies.theory.coefficients import closed_form, out_of_domain
from studies.theory.laboratory import (
    PatternTask,
    Training,
    Weights,
    attention_mass,
    combined,
    fine_tune,
    frobenius_left,
    initial,
    irrelevant_energy,
    judge,
    large_rows,
    leading_cosine,
    related_patterns,
    row_pruned,
    truncated,
)
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
    """Return the task of a pattern with the study's usual counts; the vectors are [width] and [number, width]."""
    return PatternTask(pattern, irrelevant, options.tokens, options.relevant, options.confusing)


def trained(options: Options, begin: Weights, output: Tensor, task: PatternTask, seed: int) -> Weights:
    """Return ΔΨ of a task after the study's usual training; `output` is [width]."""
    settings = Training(options.step, options.batch, options.steps, seed)
    return fine_tune(begin, output, task, settings).minus(begin)


def test_set(options: Options, task: PatternTask, seed: int) -> tuple[Tensor, Tensor]:
    """Return a task's test sequences [n, P, d] and labels [n], which no training saw."""
    return task.draw(options.samples, torch.Generator().manual_seed(1_000_003 + seed))


def column(values: Sequence[float]) -> Tensor:
    """Return numbers as a tensor [n] in float64."""
    return torch.tensor(values, dtype=torch.float64)


def phase_rows(options: Options, seed: int) -> Iterator[Row]:
    """Yield, for every α, every λ and every kind of task vector, how Ψ^(0) + ΔΨ_1 + λ ΔΨ_2 does on both tasks.

    The kinds are the whole vectors (`whole`), their best approximations of rank 1 and 2, and vectors whose MLP keeps a
    share of its rows: the largest (`rows …`), or the smallest, as a control (`smallest …`).
    """
    begin, output = start(options, seed)
    first, _, rest = related_patterns(0.0, options.dimensions)  # both are the same for every α
    own = task_of(options, first, rest)
    vector = trained(options, begin, output, own, 2 * seed)
    for alpha in options.alphas:
        second = related_patterns(alpha, options.dimensions)[1]
        tasks = [own, task_of(options, second, rest)]
        vectors = [vector, trained(options, begin, output, tasks[1], 2 * seed + 1)]
        yield from _structure(options, seed, alpha, begin, vectors, tasks)
        tests = [test_set(options, task, 2 * seed + number) for number, task in enumerate(tasks)]
        for kind, change in _kinds(options, alpha).items():
            scales = options.scales if kind == "whole" else [scale for scale in options.scales if -2 <= scale <= 2]
            changed = [change(vector) for vector in vectors]
            yield from _sweep(seed, alpha, kind, scales, begin, output, changed, tests)


def _kinds(options: Options, alpha: float) -> dict[str, Callable[[Weights], Weights]]:
    kinds: dict[str, Callable[[Weights], Weights]] = {"whole": lambda vector: vector}
    if alpha in (-0.5, 0.0, 0.5):
        kinds |= {f"rank {rank}": lambda vector, rank=rank: truncated(vector, rank) for rank in (1, 2)}  # type: ignore[misc]
    if alpha == 0.0:
        for keep in options.keep:
            kinds[f"rows {keep:g}"] = lambda vector, keep=keep: row_pruned(vector, keep)  # type: ignore[misc]
            kinds[f"smallest {keep:g}"] = lambda vector, keep=keep: row_pruned(vector, keep, smallest=True)  # type: ignore[misc]
    return kinds


def _sweep(
    seed: int,
    alpha: float,
    kind: str,
    scales: list[float],
    begin: Weights,
    output: Tensor,
    vectors: list[Weights],
    tests: list[tuple[Tensor, Tensor]],
) -> Iterator[Row]:
    by = column(scales)
    models = combined(begin, vectors, torch.stack([torch.ones_like(by), by], 1))
    judged = [judge(models, output, *test) for test in tests]
    for index, scale in enumerate(scales):
        row: Row = {"part": "phase", "seed": seed, "alpha": alpha, "kind": kind, "scale": scale}
        for number, found in enumerate(judged, 1):
            row[f"hinge_{number}"] = float(found.hinge[index])
            row[f"accuracy_{number}"] = float(found.accuracy[index])
            row[f"margin_{number}"] = float(found.margin[index])
        yield row


def _structure(
    options: Options, seed: int, alpha: float, begin: Weights, vectors: list[Weights], tasks: list[PatternTask]
) -> Iterator[Row]:
    """Yield what the first task's vector looks like, seen from both patterns."""
    vector, (task, other) = vectors[0], tasks
    own, across = task.pattern, other.pattern
    inputs, labels = test_set(options, task, seed)
    quadratic = [float(pattern @ vector.attention @ pattern) for pattern in (own, across)]
    values = [float((vector.value @ pattern).norm()) for pattern in (own, across)]
    yield {
        "part": "structure",
        "seed": seed,
        "alpha": alpha,
        "attention_ratio": quadratic[1] / quadratic[0],
        "value_ratio": values[1] / values[0],
        "attention_mass": attention_mass(begin.plus(vector), inputs[labels > 0], own),
        "value_cosine": leading_cosine(vector.value, own),
        "attention_cosine": leading_cosine(vector.attention, own),
        "value_left_1": frobenius_left(vector.value, 1),
        "value_left_2": frobenius_left(vector.value, 2),
        "attention_left_1": frobenius_left(vector.attention, 1),
        "irrelevant_energy": irrelevant_energy(vector, own, task.irrelevant),
        "large_rows": large_rows(vector),
    }


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
    """Return the number of steps until the test hinge is at most `solved`, interpolated; `output` is [width]."""
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


def target_rows(options: Options, seed: int) -> Iterator[Row]:
    """Yield, for every target and every λ, the loss on the target and whether Equation 7 promises success.

    λ are drawn, and both closed forms are tried: `printed` and `derived`. β is measured: what the loss of task 1 rises
    per unit of λ when an orthogonal task is added or taken away, at most over λ in [−3, 3].
    """
    begin, output = start(options, seed)
    most = max(len(gammas) for gammas in options.targets)
    axes = torch.eye(options.dimensions, dtype=torch.float64)
    patterns, beyond, rest = axes[:most], axes[most], axes[most + 1 :]
    tasks = [task_of(options, pattern, rest) for pattern in patterns]
    vectors = [trained(options, begin, output, task, 10 * seed + number) for number, task in enumerate(tasks)]
    inputs, labels = test_set(options, tasks[0], seed)
    tried = column([-3, -2, -1, 1, 2, 3])
    cost = judge(combined(begin, vectors[:2], torch.stack([torch.ones_like(tried), tried], 1)), output, inputs, labels)
    beta = float((cost.hinge / tried.abs()).max())
    draw = np.random.default_rng(seed)
    for number, gammas in enumerate(options.targets):
        towards = column(gammas)
        kappa = float((1 - towards.square().sum()).clamp_min(0).sqrt())
        target = task_of(options, towards @ patterns[: len(gammas)] + kappa * beyond, rest)
        chance = draw.uniform(-1, 3, (options.drawn, len(gammas)))
        kinds = [*(("drawn", scales) for scales in chance), *_closed(gammas, options.c)]
        by = np.stack([scales for _, scales in kinds])
        models = combined(begin, vectors[: len(gammas)], torch.from_numpy(by))
        judged = judge(models, output, *test_set(options, target, 100 + seed))
        promised = out_of_domain(by, gammas, beta, options.c)
        for index, (kind, scales) in enumerate(kinds):
            yield {
                "part": "target",
                "seed": seed,
                "target": number,
                "gammas": " ".join(f"{gamma:g}" for gamma in gammas),
                "scales": " ".join(f"{scale:.4f}" for scale in scales),
                "kind": kind,
                "beta": beta,
                "first_sum": float(scales @ np.array(gammas)),
                "second_sum": float(scales @ np.array(gammas) ** 2),
                "promised": bool(promised[index]),
                "hinge_1": float(judged.hinge[index]),
                "accuracy_1": float(judged.accuracy[index]),
            }


def _closed(gammas: list[float], c: float) -> list[tuple[str, np.ndarray]]:
    try:
        return [("printed", closed_form(gammas, c, printed=True)), ("derived", closed_form(gammas, c))]
    except MergeflowError:
        return []
