"""Study `alignment` (M3): do task vectors align over the rounds of merge-and-tune while their increments do not?

**Question.** In round i every task tunes from the merge θ̄^(i−1) to θ_t^(i). How do the task vectors
τ_t^(i) = θ_t^(i) − θ0 and the increments δ_t^(i) = θ_t^(i) − θ̄^(i−1) of different tasks relate to each other?

**Method.** Cosines of all pairs of tasks after every round, in float64 over all weights. With the shared part
s = θ̄^(N−1) − θ0, τ_t = s + δ_t. If increments were orthogonal to each other and to s, every pair would have

    cos(τ_i, τ_j) = ‖s‖² / (‖s‖² + ‖δ‖²) = 1 / (1 + ρ²),    ρ = ‖δ‖ / ‖s‖,

so alignment is a matter of lengths: of how far one round goes compared with all the way before it. ρ, the cosine of δ
with s, and this prediction stand beside what was measured. `mima_N` has one learning rate schedule over the whole
budget, so that its last rounds are short from N = 8 on; `per_round_2_N` has one in every round and merges with
α = 2/T. ± is over seeds, of the mean over pairs of tasks where no pair is named. A round or a pair that a finding on
increments names is the one farthest from 0 in the mean over the seeds.

**Source.** MIMA, equations 5 to 8, Figures 5, 10 and 11, Appendix E.
"""

from collections.abc import Sequence
from functools import partial
from statistics import fmean
from typing import Any

from pydantic import Field
from torch import Tensor

from mergeflow.analysis.geometry import dot, norm
from studies.lab.inputs import Laboratory, TrainingRun
from studies.lab.scales import task_vector
from studies.old.papers.alignment.figures import final_figure, matrix_figure, rounds_figure
from studies.old.papers.alignment.findings import findings
from studies.old.papers.alignment.pairs import Matrix, mean_cosine, pair_names, pairs, tidy_rows
from studies.old.pieces import kept_by_run
from studies.old.results import StudyResult, Table, with_interval
from studies.old.rows import Row, of
from tasks.project.declaration import Declaration
from tasks.project.sections import Section
from tasks.project.stage import StageIO


class Options(Section):
    """The study's choices.

    rounds: the N of `mima_N`. shown: those with a panel over the rounds. compared: further runs. similar: pairs of
    tasks that are similar in meaning.
    """

    rounds: list[int]
    shown: list[int]
    compared: list[str]
    similar: list[list[str]] = Field(default_factory=list)


DECLARED = Declaration(
    Options, runs=lambda options: [*(f"mima_{n}" for n in options.rounds), *options.compared], systems=("M3",)
)


def run(io: StageIO) -> None:
    """Write `outputs/studies/alignment`."""
    inputs = Laboratory(io)
    options = DECLARED.chosen(io)
    names = [f"mima_{number}" for number in options.rounds]
    rows = kept_by_run(inputs, [*names, *options.compared], partial(measure, inputs))
    own = [row for row in rows if row["run"] in names]
    shown = [f"mima_{number}" for number in options.shown] + options.compared[-1:]
    tables = [lengths_table(rows), rounds_table(rows, shown)]
    named = pair_names(inputs.tasks)
    result = StudyResult(tables, findings(own, named, options.similar), notes(rows), tidy_rows(rows, named))
    result.write(io, figures(rows, names, shown, inputs.tasks))


def measure(inputs: Laboratory, name: str, seed: int) -> Row:
    """Return a run's cosines after every round, and the lengths of the last round's parts.

    Args:
        inputs: the study's inputs.
        name: an iterative run.
        seed: of the run.
    """
    source = inputs.run(name)
    rounds = source.rounds(seed)
    return {
        "run": name,
        "seed": seed,
        "steps": [row["steps"] for row in rounds],
        "tau": [row["cosine_tau"] for row in rounds],
        "delta": [row["cosine_delta"] for row in rounds],
        **_last_round(source, inputs.base, seed, inputs.tasks),
    }


def _last_round(source: TrainingRun, base: dict[str, Tensor], seed: int, tasks: Sequence[str]) -> Row:
    start = source.start(seed)
    shared = task_vector(start, base)
    length, increments, towards = norm(shared), [], []
    for task in tasks:
        expert = source.expert(seed, task)
        increment = task_vector(expert, start)
        increments.append(norm(increment))
        towards.append(dot(increment, shared) / (length * increments[-1]) if length else 0.0)
    return {"shared": length, "increment": fmean(increments), "towards": fmean(towards)}


def lengths_table(rows: Sequence[Row]) -> Table:
    """Return the last round's cosines beside what the lengths alone predict."""

    def line(name: str) -> dict[str, Any]:
        own = [row for row in rows if row["run"] == name]
        predicted = [row["shared"] ** 2 / max(row["shared"] ** 2 + row["increment"] ** 2, 1e-30) for row in own]
        return {
            "run": name,
            "cos τ": with_interval([mean_cosine(row["tau"][-1]) for row in own], 3),
            "cos δ": with_interval([mean_cosine(row["delta"][-1]) for row in own], 3),
            "‖s‖": with_interval([row["shared"] for row in own], 2),
            "‖δ‖": with_interval([row["increment"] for row in own], 2),
            "cos(δ, s)": with_interval([row["towards"] for row in own], 3),
            "1/(1 + ρ²)": f"{fmean(predicted):.3f}",
        }

    return Table("The last round: mean pairwise cosines, and the lengths of τ = s + δ", [line(n) for n in _runs(rows)])


def rounds_table(rows: Sequence[Row], shown: Sequence[str]) -> Table:
    """Return mean cosines at up to five rounds of the runs shown."""
    lines: list[dict[str, Any]] = []
    for name in shown:
        own = [row for row in rows if row["run"] == name]
        count = len(own[0]["steps"])
        for index in sorted({0, 1, count // 4, count // 2, 3 * count // 4, count - 1}):
            if index < count:
                lines.append(
                    {
                        "run": name,
                        "round": index + 1,
                        "steps": own[0]["steps"][index],
                        "cos τ": with_interval([mean_cosine(row["tau"][index]) for row in own], 3),
                        "cos δ": with_interval([mean_cosine(row["delta"][index]) for row in own], 3),
                    }
                )
    return Table("Mean pairwise cosines over the rounds", lines)


def notes(rows: Sequence[Row]) -> list[str]:
    """Return what decides the cosine."""
    parts = [
        f"{name}: ρ = {with_interval([row['increment'] / row['shared'] for row in of(rows, run=name)], 4)}"
        for name in _runs(rows)
        if all(row["shared"] for row in rows if row["run"] == name)
    ]
    return [
        "Lengths go with the cosine: it follows 1/(1 + ρ²), ρ = ‖δ‖/‖s‖ of the last round, and where ρ is not small it "
        f"lies above that, because δ keeps pointing along s ({'; '.join(parts)}). With one schedule over the whole "
        "budget the last rounds hardly move; with a schedule per round and α = 2/T ρ is larger."
    ]


def figures(rows: Sequence[Row], names: Sequence[str], shown: Sequence[str], tasks: Sequence[str]) -> dict[str, Any]:
    """Return the study's figures.

    Args:
        rows: as of `measure`, for each run and seed.
        names: the runs whose last round is shown.
        shown: the runs with a panel over the rounds.
        tasks: in the order of the matrices.
    """

    def boxes(name: str, kind: str) -> dict[int, list[float]]:
        own = [row for row in rows if row["run"] == name]
        steps = own[0]["steps"]
        return {step: [v for row in own for v in pairs(row[kind][index])] for index, step in enumerate(steps)}

    def final(kind: str) -> dict[int, list[float]]:
        return {
            int(name.rpartition("_")[2]): [v for r in rows if r["run"] == name for v in pairs(r[kind][-1])]
            for name in names
        }

    first, last = names[0], shown[0]
    matrices = {
        f"{name}: cosine of τ": _mean_matrix([r["tau"][-1] for r in rows if r["run"] == name]) for name in (first, last)
    }
    return {
        "final": final_figure(final("tau"), final("delta")),
        "rounds": rounds_figure({name: (boxes(name, "tau"), boxes(name, "delta")) for name in shown}),
        "matrix": matrix_figure(tasks, matrices),
    }


def _mean_matrix(matrices: Sequence[Matrix]) -> Matrix:
    return [[fmean(cells) for cells in zip(*lines, strict=True)] for lines in zip(*matrices, strict=True)]


def _runs(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["run"] for row in rows))
