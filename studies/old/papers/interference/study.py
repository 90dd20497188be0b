"""Study `interference` (C3): do centred task vectors interfere less, and does that explain the rank curve?

**Question.** CART explains why a low rank of centred task vectors merges well by two curves: row-space interference
I(k), said to be lower for centred task vectors at every rank and layer, and the reconstruction error R(k), which falls
steeply first. A theorem bounds the interference L of a one-layer linear model by O(I²). Do curves and bound hold?

**Method.** For every weight matrix that inputs meet, with τ_t = θ_t − θ0, or centred at the experts' mean, and the k
leading singular values and right singular vectors of every task,

    I(k) = Σ_{i≠j} ‖Σ̃_i V_iᵀ V_j Σ̃_j‖_F,  Σ̃ = Σ / ‖τ‖_F;      R(k) = Σ_t ‖τ_t − SVD_k(τ_t)‖²_F.

Equation 5 prints the product the other way round, V_i Σ̃_i Σ̃_j V_jᵀ, whose norm is ‖Σ̃_i Σ̃_j‖_F: no direction enters
it, so that it tells how the singular values fall and nothing of row spaces. Both are measured
(`studies.theory.interference` says why the first is meant), the first also with Σ̃ normalised by what is kept.
Beside them stands what Theorem 1 calls task interference, for inputs isotropic in a task's own row space,

    L_k = Σ_t ‖Σ_{s≠t} SVD_k(τ_s) V_t‖²_F / Σ_t ‖SVD_k(τ_t)‖²_F,

with λ = 1 as there. Unlike I(k) it sees that contributions of opposite sign cancel.

*The bound.* Random tasks on the linear model in float64, with a known overlap of their row spaces, a known ratio
s_max / α of singular values and noise η on the inputs. `studies.theory.interference` has what is printed,
what must be read otherwise, and a constant that is smaller by s_max / α.

**Source.** CART, Section 4.2, equations 5 to 7 and 9, Figures 2, 3 and 8, appendices A and C.1. The constant called
derived is derived in `studies/theory/interference.py`.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from matplotlib.figure import Figure
from pydantic import Field
from torch import Tensor

from mergeflow.merging.matrices import rank_of
from studies.lab.inputs import Laboratory
from studies.old.papers.interference.figures import bound_figure, kinds_figure, layers_figure
from studies.old.papers.interference.results import findings, notes, tables, tidy_rows
from studies.old.papers.interference.theorem import theorem_findings, theorem_note, theorem_rows, theorem_tables
from studies.old.pieces import kept
from studies.old.results import StudyResult
from studies.old.rows import Row
from studies.theory.interference import (
    TaskFactors,
    factor_tasks,
    kind_of,
    reconstruction_error,
    row_space_interference,
    task_interference,
    task_matrices,
)
from tasks.project.declaration import Declaration
from tasks.project.sections import Section
from tasks.project.stage import StageIO

ORIGINS = {"centred": True, "original": False}


class Options(Section):
    """The study's choices.

    Attributes:
        run: whose experts.
        counts: the first so many of their tasks; `shown` of them have figures and findings.
        shown: see above.
        compared: run → number of tasks: experts that share more.
        ratios: k / r, ascending; 0.08 and 1 are among them.
        draws: random draws of the linear model for each of its settings.
    """

    run: str
    counts: list[int]
    shown: list[int]
    compared: dict[str, int]
    ratios: list[float]
    draws: int = Field(2, ge=1)


DECLARED = Declaration(Options, runs=lambda options: [options.run, *options.compared], systems=("C3",))


def run(io: StageIO) -> None:
    """Write `outputs/studies/interference`."""
    inputs = Laboratory(io)
    options = DECLARED.chosen(io)
    cases = [(options.run, count) for count in options.counts] + list(options.compared.items())
    pieces = [(name, count, seed) for name, count in cases for seed in inputs.run(name).seeds]
    rows = []
    for done, (name, count, seed) in enumerate(pieces):
        io.report("experts", done, len(pieces) + 1)
        work = partial(measure, inputs, name, count, seed, options.ratios)
        rows.append(kept(io, f"{name}_{count}_{seed}", work))
    theorem = kept(io, "theorem", partial(theorem_rows, options.draws))
    shown = [(options.run, count) for count in options.shown]
    result = StudyResult(
        [*tables(rows, shown), *theorem_tables(theorem)],
        [*findings(rows, shown), *theorem_findings(theorem)],
        [*notes(rows, shown), theorem_note(theorem)],
        tidy_rows(rows, theorem),
    )
    result.write(io, figures(rows, shown, theorem))


def measure(inputs: Laboratory, name: str, count: int, seed: int, ratios: Sequence[float]) -> Row:
    """Return the curves of every layer of one run's experts, and how much of their task vectors is common to all.

    Args:
        inputs: the study's inputs.
        name: the training run.
        count: how many tasks.
        seed: of the run.
        ratios: rank ratios at which the curves are read.
    """
    part = inputs.first(count)
    experts = part.run(name).experts(seed)
    layers: dict[str, Row] = {}
    common = torch.zeros(2, dtype=torch.float64)  # ‖mean τ‖², mean ‖τ‖²
    for origin, centred in ORIGINS.items():
        for tensor, vectors in task_matrices(part.base, experts, centred):
            layer = layers.setdefault(tensor, {"name": tensor, "kind": kind_of(tensor), "ratios": list(ratios)})
            layer[origin] = _curves(factor_tasks(vectors), ratios)
            if not centred:
                common += _common(vectors)
    shared = float(common[0] / common[1])
    return {"run": name, "tasks": count, "seed": seed, "common": shared, "layers": list(layers.values())}


def _common(vectors: Sequence[Tensor]) -> Tensor:
    stack = torch.stack(list(vectors))
    return torch.stack([stack.mean(dim=0).square().sum(), stack.square().sum() / len(stack)])


def _curves(factors: TaskFactors, ratios: Sequence[float]) -> dict[str, list[float]]:
    """Return what was measured at each ratio."""
    ranks = [rank_of(factors.shape, ratio, "ceil") for ratio in ratios]
    found, error = row_space_interference(factors), reconstruction_error(factors)
    pairs = len(factors.triples) * (len(factors.triples) - 1)
    return {
        "whole": (found.whole[ranks] / pairs).tolist(),
        "kept": (found.kept[ranks] / pairs).tolist(),
        "spectral": (found.spectral[ranks] / pairs).tolist(),
        "error": (error[ranks] / error[0]).tolist(),
        "loss": [task_interference(factors, rank) for rank in ranks],
        "theorem": [
            rank * _condition(factors, rank) ** 2 * float(found.kept[rank]) / pairs for rank in ranks
        ],  # k3 I over what ‖V_sᵀ V_t‖ ≤ 1 gives
    }


def _condition(factors: TaskFactors, rank: int) -> float:
    """Return s_max / α over the k leading singular values of all tasks."""
    values = [sigma[:rank] for _, sigma, _ in factors.triples]
    return float(max(one[0] for one in values) / min(one[-1] for one in values))


def figures(rows: Sequence[Row], shown: Sequence[tuple[str, int]], theorem: dict[str, Any]) -> dict[str, Figure]:
    """Return the study's figures, name → figure.

    Args:
        rows: as of `measure`.
        shown: the runs and numbers of tasks that are drawn.
        theorem: what was measured of the theorem's bound.
    """
    drawn = {}
    for name, count in shown:
        own = [row for row in rows if (row["run"], row["tasks"]) == (name, count)]
        drawn[f"layers_{count}"] = layers_figure(own)
        drawn[f"kinds_{count}"] = kinds_figure(own)
    return {**drawn, "bound": bound_figure(theorem)}
