"""Study `equivalence` (G1–G4): are task vectors gradients, and is task arithmetic joint gradient descent?

**Question.** Fine-tune T tasks by full-batch gradient descent with step η for k epochs and merge with scale α; train
one model on Σ_t L_t with step αη for as long. Are the two the same model, and how far apart are they if not?

**Method.** Everything is in float64: random three-layer nets (tanh and ReLU, no biases) on T = 3 random tasks with
three seeds, and the image encoder of the embedded CLIP on three tasks of pocket8. Experts are trained by torch's SGD
on accumulated micro-batches; gradients, Hessian-vector products and the nets' whole Hessians come from autograd.

*G1, G2.* τ_t^(1) = −η ∇L_t(θ0), and θ_TA^(1) = θ_MT^(1): both are identities and hold to rounding.

*G3.* For k > 1, with r_t(θ) = α Σ_t' ∇L_t'(θ) − ∇L_t(θ) at the joint iterates θ^(e),

    θ_TA − θ_MT = −α η² Σ_t Σ_{e=1}^{k−1} ∇²L_t(θ^(e)) Σ_{m=0}^{e−1} r_t(θ^(m)) + O(η³).

Theorem 1 prints +η² C with C = Σ_t Σ_{e=0}^{k−2} ∇²L_t(θ^(e)) Σ_{m=0}^{e} r_t(θ^(m)). What is left of the gap after
subtracting a term must fall as η³ if the term is right and falls as η² if it is not. To leading order the gap is
−α η² k(k−1)/2 Σ_t ∇²L_t(θ0) r_t(θ0): it grows with the number of pairs of epochs.

*G4.* Theorem 2 bounds ‖C‖₂ by T · pairs · (task factor) · H · G. What is printed and what can be derived is in
`mergeflow.analysis.equivalence.bounds`; here both are put beside the measured norm, over α and over the size of the
weights.

**Source.** Zhou et al. 2025, On Task Vectors and Gradients, Theorems 1 and 2. The signs, factors and bounds called
derived are derived in `mergeflow/analysis/equivalence/second_order.py` and `bounds.py`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from matplotlib.figure import Figure
from pydantic import Field

from mergeflow import layout
from mergeflow.analysis.equivalence.problems import Problem, encoder_problem, feed_forward_problem
from mergeflow.analysis.equivalence.theorem_one import (
    coefficient_rows,
    epoch_rows,
    gap_rows,
    joint_rows,
    one_epoch_rows,
    slope_row,
)
from mergeflow.analysis.equivalence.theorem_two import factor_rows, network_row
from tasks.project.declaration import Declaration
from tasks.project.sections import Section
from tasks.project.stage import CHOICES, StageIO
from tasks.studies.papers.equivalence.figures import bounds_figure, coefficient_figure, gap_figure
from tasks.studies.papers.equivalence.results import first_seed, study_result
from tasks.studies.pieces import kept

Row = dict[str, Any]
Tables = dict[str, list[Row]]
Work = Callable[[], Tables]
STUDY = "equivalence"
ACTIVATIONS = ("tanh", "relu")
TABLES = ("one_epoch", "joint", "gap", "slopes", "coefficient", "growth", "task_factor", "network")


class Options(Section):
    """The study's choices.

    Attributes:
        scale: α of most tables.
        epochs: k of most tables.
        widths: input width, hidden widths and classes of the nets.
        samples: inputs per task of the nets.
        seeds: of the nets and their tasks.
        net_step: η of the nets in G1, G2 and G4.
        net_steps: η of the nets in G3, ascending.
        scales: α where it varies.
        gains: factors on the nets' initial weights.
        encoder_tasks: three tasks of pocket8.
        images: training images per task for the encoder.
        encoder_steps: η of the encoder in G3, ascending; the last also in G1 and G2.
        encoder_scales: α of the encoder where it varies.
    """

    scale: float = Field(0.7, gt=0)
    epochs: int = Field(3, ge=2)
    widths: list[int] = Field([8, 16, 16, 4], min_length=2)
    samples: int = Field(32, ge=1)
    seeds: list[int] = Field([0, 1, 2], min_length=1)
    net_step: float = Field(0.1, gt=0)
    net_steps: list[float] = Field([1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1], min_length=2)
    scales: list[float] = Field([0.1, 0.2, 0.25, 1 / 3, 0.5, 0.7, 0.85, 1.0, 1.25, 1.5], min_length=1)
    gains: list[float] = Field([0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 4.0], min_length=1)
    encoder_tasks: list[str] = Field(min_length=1)
    images: int = Field(12, ge=1)
    encoder_steps: list[float] = Field([1e-6, 1e-5, 1e-4, 3e-4], min_length=2)
    encoder_scales: list[float] = Field([1 / 3, 0.7], min_length=1)


@dataclass(frozen=True)
class Case:
    """One model in the study: a problem, its seed (nets), η of the exact tables, η of G3, and α where it varies."""

    problem: Problem
    seed: int | None
    step: float
    steps: Sequence[float]
    scales: Sequence[float]


DECLARED = Declaration(Options, systems=("G1", "G2", "G3", "G4"))


def run(io: StageIO) -> None:
    """Write `outputs/studies/equivalence`."""
    options = Options.model_validate(io.section(f"{CHOICES}:studies.{STUDY}"))

    def measured(name: str, done: int, total: int, work: Work) -> Tables:
        io.report("models", done, total)
        return kept(io, name, work)

    tables = measure(options, measured)
    study_result(tables).write(io.out(layout.study(STUDY)), figures(tables))


def measure(options: Options, measured: Callable[[str, int, int, Work], Tables]) -> Tables:
    """Return the study's tables, name → rows.

    Args:
        options: the choices.
        measured: called as `measured(name, done, total, work)` for each model; returns what `work()` returns or, in a
            study that was killed, returned.
    """
    cases = _cases(options)
    tables: Tables = {name: [] for name in TABLES}
    for done, case in enumerate(cases):
        work = partial(rows_of, case, options)
        for name, rows in measured(f"{case.problem.name} {case.seed}", done, len(cases) + 1, work).items():
            tables[name] += [{"seed": case.seed, **row} for row in rows]
    networks = measured("weights", len(cases), len(cases) + 1, lambda: {"network": list(_network(options))})
    return {**tables, **networks}


def _cases(options: Options) -> list[Case]:
    common = options.net_step, options.net_steps, options.scales
    size = {"widths": tuple(options.widths), "samples": options.samples}
    nets = [
        Case(feed_forward_problem(activation, seed=seed, **size), seed, *common)  # type: ignore[arg-type]
        for activation in ACTIVATIONS
        for seed in options.seeds
    ]
    encoder = encoder_problem(options.encoder_tasks, options.images)
    return [*nets, Case(encoder, None, options.encoder_steps[-1], options.encoder_steps, options.encoder_scales)]


def rows_of(case: Case, options: Options) -> Tables:
    """Return the tables of one model."""
    problem, scale, epochs = case.problem, options.scale, options.epochs
    gaps = list(gap_rows(problem, scale, case.steps, epochs))
    growth = epoch_rows(problem, scale, case.steps[0], (2, 3, 5, 8)) if problem.net else ()
    return {
        "one_epoch": list(one_epoch_rows(problem, case.step)),
        "joint": list(joint_rows(problem, case.step, case.scales, epochs)),
        "gap": gaps,
        "slopes": [slope_row(gaps)],
        "coefficient": list(coefficient_rows(problem, case.scales, case.steps[0], epochs)),
        "growth": list(growth),
        "task_factor": list(factor_rows(problem, case.scales, case.step, epochs if problem.net else 2)),
    }


def _network(options: Options) -> Iterator[Row]:
    """Yield bounds over the size of the weights, and softmax regression from zero, which the printed ones call flat."""
    for activation in ACTIVATIONS:
        for gain in options.gains:
            problem = feed_forward_problem(
                activation, tuple(options.widths), samples=options.samples, seed=options.seeds[0], gain=gain
            )
            yield network_row(problem, gain, options.scale, options.net_step, options.epochs)
    ends = (options.widths[0], options.widths[-1])
    flat = replace(feed_forward_problem("relu", ends, samples=options.samples, gain=0.0), name="softmax regression")
    yield network_row(flat, 0.0, options.scale, options.net_step, 2)


def figures(tables: Tables) -> dict[str, Figure]:
    """Return the study's figures, name → figure, of each model's first seed."""
    networks = [row for row in tables["network"] if row["gain"] > 0]
    return {
        "gap": gap_figure(first_seed(tables["gap"]), first_seed(tables["slopes"])),
        "coefficient": coefficient_figure(first_seed(tables["coefficient"])),
        "bounds": bounds_figure(first_seed(tables["task_factor"]), networks),
    }
