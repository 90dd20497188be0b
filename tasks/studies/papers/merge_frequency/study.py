"""Study `merge_frequency` (G7): is it better to merge more often at the same budget?

**Question.** Every task gets S steps. Merging after all of them is one-shot task arithmetic; merging after every S/N
steps and restarting from the merge is iterative task arithmetic. How does the merged model depend on N?

**Method.** Round i adds the increments of all tasks to the common start,

    θ̄^(i) = θ̄^(i−1) + α Σ_t δ_t^(i),    δ_t^(i) = θ_t^(i) − θ̄^(i−1).

`ATM` has α = 0.25 and a learning-rate schedule per round. `MIMA` has α = 1/T (the average) and one schedule over the
whole budget. The merged model is θ̄^(N) as it stands: nothing is chosen after training. N = 1 of ATM merges the experts
of MIMA's N = 1, which are the same. The course shows validation accuracy of θ̄^(i) over the steps of one seed.

**Source.** Zhou et al. 2025, On Task Vectors and Gradients, Section 5 (iterative task arithmetic); MIMA, equation 4.
"""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from statistics import fmean

from mergeflow import layout
from mergeflow.merging import configure
from tasks.project.declaration import Declaration
from tasks.project.sections import Section
from tasks.project.stage import StageIO
from tasks.studies.inputs import State, StudyInputs, mean_accuracy
from tasks.studies.papers.merge_frequency.figures import frequency_figure
from tasks.studies.pieces import Row, kept
from tasks.studies.results import Cell, Finding, StudyResult, Table, with_interval

STUDY = "merge_frequency"
ATM, MIMA = "ATM", "MIMA"


class Options(Section):
    """The study's choices. `atm`, `mima`: the N of the runs that are read. `scale`: α of ATM. `course`: runs shown."""

    atm: list[int]
    mima: list[int]
    scale: float
    course: list[str]


def _runs(options: Options) -> list[str]:
    atm = [f"atm_{n}" if n > 1 else "mima_1" for n in options.atm]  # with one round ATM is one merge of plain experts
    return [*atm, *(f"mima_{n}" for n in options.mima), *options.course]


DECLARED = Declaration(Options, runs=_runs, splits=("validation", "test"), systems=("G7",))


def run(io: StageIO) -> None:
    """Write `outputs/studies/merge_frequency`."""
    inputs = StudyInputs(io)
    options = Options.model_validate(inputs.options(STUDY))
    chosen = [(ATM, number) for number in options.atm] + [(MIMA, number) for number in options.mima]
    pieces = [(kind, number, seed) for kind, number in chosen for seed in inputs.seeds]
    rows = []
    for done, (kind, number, seed) in enumerate(pieces):
        io.report("models", done, len(pieces) + len(options.course))
        piece = partial(measure, inputs, kind, number, seed, options.scale)
        rows.append(kept(io, f"{kind}_{number}_{seed}", piece))
    courses = {name: kept(io, f"course_{name}", partial(course, inputs, name)) for name in options.course}
    result = StudyResult([frequency_table(rows), course_table(courses)], findings(rows), notes(rows))
    curves = {kind: {number: values(rows, kind, number) for number in _numbers(rows, kind)} for kind in (ATM, MIMA)}
    over = {name: dict(zip(c["steps"], c["accuracy"], strict=True)) for name, c in courses.items()}
    result.write(io.out(layout.study(STUDY)), {"frequency": frequency_figure(curves, over)})


def measure(inputs: StudyInputs, kind: str, number: int, seed: int, scale: float) -> Row:
    """Return test accuracy of one run's merged model."""
    one_shot = kind == ATM and number == 1
    source = inputs.run(f"mima_{number}" if kind == MIMA or one_shot else f"atm_{number}")
    if one_shot:
        merged: State = inputs.scorer(source.experts(seed)).merge(configure("task_arithmetic", {"scale": scale}))
    else:
        merged = source.merged(seed, number)
    return {
        "kind": kind,
        "rounds": number,
        "seed": seed,
        "steps": source.rounds(seed)[-1]["steps"],
        "merged": inputs.accuracy(merged, "test"),
    }


def course(inputs: StudyInputs, name: str) -> Row:
    """Return validation accuracy in % of a run's merges over its steps, for the first seed."""
    source, seed = inputs.run(name), inputs.seeds[0]
    rounds = source.rounds(seed)
    merges = [source.merged(seed, row["round"]) for row in rounds]
    accuracy = [mean_accuracy(inputs.accuracy(state, "validation")) for state in merges]
    return {"steps": [row["steps"] for row in rounds], "accuracy": accuracy}


def values(rows: Sequence[Row], kind: str, number: int) -> list[float]:
    """Return the mean test accuracy of merged models in %, one value per seed."""
    return [mean_accuracy(row["merged"]) for row in rows if (row["kind"], row["rounds"]) == (kind, number)]


def frequency_table(rows: Sequence[Row]) -> Table:
    """Return accuracy of merged models over N."""

    def line(kind: str, number: int) -> dict[str, Cell]:
        return {
            "rule": kind,
            "N": number,
            "steps between merges": next(r["steps"] for r in rows if r["rounds"] == number) // number,
            "merged": with_interval(values(rows, kind, number)),
        }

    lines = [line(kind, number) for kind in (ATM, MIMA) for number in _numbers(rows, kind)]
    return Table("Merged model after the whole budget: mean test accuracy, %", lines)


def course_table(courses: dict[str, Row]) -> Table:
    """Return the course of the runs shown, at a few steps."""
    lines: list[dict[str, Cell]] = []
    for name, own in courses.items():
        count = len(own["steps"])
        for index in sorted({0, count // 4, count // 2, count - 1}):
            accuracy = round(own["accuracy"][index], 1)
            lines.append({"run": name, "steps": own["steps"][index], "validation accuracy, %": accuracy})
    return Table("The merge over the steps, one seed", lines)


def findings(rows: Sequence[Row]) -> list[Finding]:
    """Hold the paper's statement against the rows."""
    found = []
    for kind in (ATM, MIMA):
        numbers = _numbers(rows, kind)
        merged = [fmean(values(rows, kind, number)) for number in numbers]
        rising = all(later > earlier - 0.5 for earlier, later in pairwise(merged))
        listed = ", ".join(f"{value:.1f} (N = {n})" for n, value in zip(numbers, merged, strict=True))
        claim = f"More rounds at the same budget give a better merged model: {kind}."
        found.append(Finding("G7", claim, listed, rising and merged[-1] > merged[0] + 1))
    return found


def notes(rows: Sequence[Row]) -> list[str]:
    """Return what the two rules differ in."""
    both = [number for number in _numbers(rows, ATM) if number in _numbers(rows, MIMA)]
    lead = [f"{fmean(values(rows, ATM, n)) - fmean(values(rows, MIMA, n)):+.1f} points at N = {n}" for n in both]
    return [
        f"ATM against MIMA: {', '.join(lead)}. α = 0.25 is a step twice as long as the average of eight tasks, and "
        "pays most where merges are few. The rules differ in their learning-rate schedule too: with one per round "
        "every merge gets increments of the same length, with one for the whole budget the last ones change nothing."
    ]


def _numbers(rows: Sequence[Row], kind: str) -> list[int]:
    return sorted({row["rounds"] for row in rows if row["kind"] == kind})
