"""Study `equivalence` (G1–G4): are task vectors gradients, and is task arithmetic joint gradient descent?

**Question.** Fine-tune T tasks by full-batch gradient descent with step η for k epochs and merge with scale α; train
one model on Σ_t L_t with step αη for as long. Are the two the same model, and how far apart are they if not?

**Method.** Everything is in float64: random three-layer nets (tanh and ReLU, no biases) on T = 3 random tasks with
several seeds, and the project's own model, its base, on the first training examples of some of its tasks. Experts are
trained by torch's SGD on accumulated micro-batches; gradients, Hessian-vector products and the nets' whole Hessians
come from autograd.

*G1, G2.* τ_t^(1) = −η ∇L_t(θ0), and θ_TA^(1) = θ_MT^(1): both are identities and hold to rounding.

*G3.* For k > 1, with r_t(θ) = α Σ_t' ∇L_t'(θ) − ∇L_t(θ) at the joint iterates θ^(e),

    θ_TA − θ_MT = −α η² Σ_t Σ_{e=1}^{k−1} ∇²L_t(θ^(e)) Σ_{m=0}^{e−1} r_t(θ^(m)) + O(η³).

Theorem 1 prints +η² C with C = Σ_t Σ_{e=0}^{k−2} ∇²L_t(θ^(e)) Σ_{m=0}^{e} r_t(θ^(m)). What is left of the gap after
subtracting a term must fall as η³ if the term is right and falls as η² if it is not. To leading order the gap is −α η²
k(k−1)/2 Σ_t ∇²L_t(θ0) r_t(θ0): it grows with the number of pairs of epochs. Slopes over η leave out the step sizes at
which a ReLU unit has switched sides (rows with `switched` > 0). The coefficient is measured at the smallest η alone.

*G4.* Theorem 2 bounds ‖C‖₂ by T · pairs · (task factor) · H · G. What is printed and what can be derived is in
`studies.theory.equivalence`; here both are put beside the measured norm, over α and over the size of the
weights. What is called the appendix's bound has the task factor |α(T+1) − 1| of Equations 24 and 25, the end of its
proof; the theorem as the appendix restates it has |αT − 1|.

**Source.** Zhou et al. 2025, On Task Vectors and Gradients, Theorems 1 and 2. The signs, factors and bounds called
derived are derived in `studies/theory/equivalence.py` and `bounds.py`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from matplotlib.figure import Figure
from pydantic import Field

from mergeflow.errors import MergeflowError, unknown_name
from mergeflow.modalities.classification import Classification
from studies.lab.inputs import Laboratory
from studies.old.papers.equivalence.figures import bounds_figure, coefficient_figure, gap_figure
from studies.old.papers.equivalence.results import first_seed, study_result
from studies.old.pieces import kept
from studies.old.rows import Row
from studies.theory.equivalence import (
    coefficient_rows,
    epoch_rows,
    factor_rows,
    gap_rows,
    joint_rows,
    network_row,
    one_epoch_rows,
    slope_row,
)
from studies.theory.gradient_descent import Problem, feed_forward_problem, model_problem
from tasks.models import load_base_head, load_examples
from tasks.project.declaration import Declaration
from tasks.project.sections import Section
from tasks.project.stage import StageIO

Tables = dict[str, list[Row]]
Work = Callable[[], Tables]
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
        model_tasks: tasks of the project, for its own model; none: the nets alone.
        examples: training examples of each of these tasks.
        model_steps: η of that model in G3, ascending; the last also in G1 and G2.
        model_scales: its α where it varies.
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
    model_tasks: list[str]
    examples: int = Field(12, ge=1)
    model_steps: list[float] = Field([1e-6, 1e-5, 1e-4, 3e-4], min_length=2)
    model_scales: list[float] = Field([1 / 3, 0.7], min_length=1)


@dataclass(frozen=True)
class Case:
    """One model in the study: a problem, its seed (of nets), η of the exact tables, η of G3, and α where it varies."""

    problem: Problem
    seed: int | None
    step: float
    steps: Sequence[float]
    scales: Sequence[float]


DECLARED = Declaration(Options, splits=("train",), systems=("G1", "G2", "G3", "G4"))


def run(io: StageIO) -> None:
    """Write `outputs/studies/equivalence`."""
    options = DECLARED.chosen(io)

    def measured(name: str, done: int, total: int, work: Work) -> Tables:
        io.report("models", done, total)
        return kept(io, name, work)

    tables = measure(options, project_cases(io, options), measured)
    study_result(tables).write(io, figures(tables))


def project_cases(io: StageIO, options: Options) -> list[Case]:
    """Return the project's own model on its first training examples; nothing where no task is named.

    Raises:
        MergeflowError: a task that the project has not, or one that the theorems say nothing about.
    """
    if not options.model_tasks:
        return []
    inputs = Laboratory(io)
    for task in options.model_tasks:
        if task not in inputs.tasks:
            raise unknown_name("task", task, inputs.tasks)
    problem = model_problem(inputs.model, [_few(inputs, task, options.examples) for task in options.model_tasks])
    return [Case(problem, None, options.model_steps[-1], options.model_steps, options.model_scales)]


def _few(inputs: Laboratory, task: str, count: int) -> Classification:
    """Return a task's first training examples, in memory."""
    head = load_base_head(inputs.io, task, inputs.device)
    whole = load_examples(inputs.io, "train", task, inputs.device, head)
    if not isinstance(whole, Classification):
        raise MergeflowError(f"task '{task}' is not one of classes, which the theorems are measured on: name another.")
    return replace(whole, inputs=whole.inputs[:count], labels=whole.labels[:count])


def measure(options: Options, own: Sequence[Case], measured: Callable[[str, int, int, Work], Tables]) -> Tables:
    """Return the study's tables, name → rows.

    Args:
        options: the choices.
        own: the project's model, as of `project_cases`.
        measured: called as `measured(name, done, total, work)` for each model; returns what `work()` returns or, in a
            study that was killed, returned.
    """
    cases = [*_nets(options), *own]
    works = {f"{one.problem.name} {one.seed}": (one.seed, partial(rows_of, one, options)) for one in cases}
    works |= {f"weights {seed}": (seed, partial(_networks, options, seed)) for seed in options.seeds}
    tables: Tables = {name: [] for name in TABLES}
    for done, (piece, (seed, work)) in enumerate(works.items()):
        for name, rows in measured(piece, done, len(works), work).items():
            tables[name] += [{"seed": seed, **row} for row in rows]
    return tables


def _nets(options: Options) -> list[Case]:
    size = {"widths": tuple(options.widths), "samples": options.samples}
    return [
        Case(
            feed_forward_problem(activation, seed=seed, **size),  # type: ignore[arg-type]
            seed,
            options.net_step,
            options.net_steps,
            options.scales,
        )
        for activation in ACTIVATIONS
        for seed in options.seeds
    ]


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


def _networks(options: Options, seed: int) -> Tables:
    return {"network": list(_network(options, seed))}


def _network(options: Options, seed: int) -> Iterator[Row]:
    """Yield bounds over the size of the weights, and softmax regression from zero, which the printed ones call flat."""
    size = {"samples": options.samples, "seed": seed}
    for activation in ACTIVATIONS:
        for gain in options.gains:
            problem = feed_forward_problem(activation, tuple(options.widths), gain=gain, **size)
            yield network_row(problem, gain, options.scale, options.net_step, options.epochs)
    ends = (options.widths[0], options.widths[-1])
    flat = replace(feed_forward_problem("relu", ends, gain=0.0, **size), name="softmax regression")
    yield network_row(flat, 0.0, options.scale, options.net_step, 2)


def figures(tables: Tables) -> dict[str, Figure]:
    """Return the study's figures, name → figure, of each model's first seed."""
    networks = [row for row in first_seed(tables["network"]) if row["gain"] > 0]
    return {
        "gap": gap_figure(first_seed(tables["gap"]), first_seed(tables["slopes"])),
        "coefficient": coefficient_figure(first_seed(tables["coefficient"])),
        "bounds": bounds_figure(first_seed(tables["task_factor"]), networks),
    }
