"""Study `merge_frequency` (G7): is it better to merge more often at the same budget?

**Question.** Every task gets S steps. Merging after all of them is one-shot task arithmetic; merging after every S/N
steps and restarting from the merge is iterative task arithmetic. How does the merged model depend on N?

**Method.** Round i adds the increments of all tasks to the common start,

    θ̄^(i) = θ̄^(i−1) + α Σ_t δ_t^(i),    δ_t^(i) = θ_t^(i) − θ̄^(i−1).

Two things differ between ATM and MIMA: α, and whether the learning rate goes its course once over the *whole* budget or
anew *per round*. Both are crossed here: every schedule with every α, multiples of 1/T (1/T is the average), at every N.
The merged model is θ̄^(N) as it stands. *Tuned*: for each schedule, N and seed the α that is best on validation, of the
same values everywhere. With N = 1 there is one schedule, and α is that of one merge of plain experts. AdamW's moments
are forgotten at each merge (`mima` compares). The course shows validation accuracy of θ̄^(i) over the steps. Of α that
are equally good the smallest is taken. ± is over seeds: the order of the batches.

**Source.** Zhou et al. 2025, On Task Vectors and Gradients, Section 3.1 (iterative task arithmetic); MIMA, equation 4.
"""

from collections.abc import Sequence
from functools import partial
from statistics import fmean
from typing import Any

from pydantic import Field

from mergeflow.merging import configure
from studies.lab.inputs import Laboratory, State, mean_accuracy
from studies.old.claims import judge, paired, steps_between
from studies.old.papers.merge_frequency.figures import frequency_figure
from studies.old.pieces import kept_all
from studies.old.results import Cell, Finding, StudyResult, Table, with_interval
from studies.old.rows import Row, accuracy_rows, of, tidy
from tasks.project.declaration import Declaration
from tasks.project.sections import Section
from tasks.project.stage import StageIO

SCHEDULES = {"whole": "one schedule", "per_round": "a schedule per round"}


class Options(Section):
    """The study's choices.

    rounds: N, with 1 among them. multiples: of α in 1/T. The runs are `mima_N` for the average with one schedule, and
    SCHEDULE_MULTIPLE_N otherwise, such as `per_round_2_16`. course: runs shown over their steps.
    """

    rounds: list[int] = Field(min_length=2)
    multiples: list[int] = Field(min_length=1)
    course: list[str]


def name_of(schedule: str, multiple: int, rounds: int) -> str:
    """Return the run of a cell; with one round all cells have the same experts.

    Args:
        schedule: of the learning rate: "whole" or "per_round".
        multiple: of α = 1/T, the scale of the merge between rounds.
        rounds: N.

    Example:
        >>> name_of("whole", 1, 16), name_of("whole", 2, 16), name_of("per_round", 1, 16), name_of("per_round", 3, 1)
        ('mima_16', 'whole_2_16', 'per_round_1_16', 'mima_1')
    """
    if rounds == 1 or (schedule, multiple) == ("whole", 1):
        return f"mima_{rounds}"
    return f"{schedule}_{multiple}_{rounds}"


def _cells(options: Options) -> list[tuple[str, int, int]]:
    return [
        (schedule, multiple, rounds)
        for schedule in SCHEDULES
        for multiple in options.multiples
        for rounds in options.rounds
    ]


DECLARED = Declaration(
    Options,
    runs=lambda options: [*dict.fromkeys(name_of(*cell) for cell in _cells(options)), *options.course],
    splits=("validation", "test"),
    systems=("G7",),
)


def run(io: StageIO) -> None:
    """Write `outputs/studies/merge_frequency`."""
    inputs = Laboratory(io)
    options = DECLARED.chosen(io)
    pieces = [(cell, seed) for cell in _cells(options) for seed in inputs.run(name_of(*cell)).seeds]
    measures = {_label(*cell, seed): partial(measure, inputs, *cell, seed) for cell, seed in pieces}
    found = dict(zip(measures, kept_all(io, measures, "models"), strict=True))
    rows = common_seeds([found[_label(*cell, seed)] | {"schedule": cell[0]} for cell, seed in pieces])
    shown = [(name, seed) for name in options.course for seed in inputs.run(name).seeds]
    courses = kept_all(
        io, {f"course_{name}_{seed}": partial(course, inputs, name, seed) for name, seed in shown}, "courses"
    )
    best = tuned(rows)
    result = StudyResult(
        [cell_table(rows), tuned_table(best), course_table(courses)],
        findings(best),
        [*notes(rows), edge_note(best, options.multiples)],
        tidy_rows(rows, courses),
    )
    curves = {label: values(best, schedule) for schedule, label in SCHEDULES.items()}
    result.write(io, {"frequency": frequency_figure(curves, {name: over(courses, name) for name in options.course})})


def _label(schedule: str, multiple: int, rounds: int, seed: int) -> str:
    """Return the name of a piece; where nothing is merged on the way, both schedules have the same."""
    return f"{schedule if rounds > 1 else 'once'}_{multiple}_{rounds}_{seed}"


def measure(inputs: Laboratory, schedule: str, multiple: int, rounds: int, seed: int) -> Row:
    """Return validation and test accuracy of the merged model of one cell.

    Args:
        inputs: the study's inputs.
        schedule: of the learning rate: "whole" or "per_round".
        multiple: of α = 1/T, the scale of the merge between rounds.
        rounds: N.
        seed: of the run.
    """
    source = inputs.run(name_of(schedule, multiple, rounds))
    if rounds == 1:
        call = configure("task_arithmetic", {"scale": multiple / len(inputs.tasks)})
        merged: State = inputs.scorer(source.experts(seed)).merge(call)
    else:
        merged = source.merged(seed, rounds)
    return {
        "multiple": multiple,
        "rounds": rounds,
        "seed": seed,
        "steps": source.rounds(seed)[-1]["steps"],
        "validation": inputs.accuracy(merged, "validation"),
        "merged": inputs.accuracy(merged, "test"),
    }


def common_seeds(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the seeds that every cell has: α is chosen among the same values everywhere."""
    cells: dict[tuple[str, int, int], set[int]] = {}
    for row in rows:
        cells.setdefault((row["schedule"], row["multiple"], row["rounds"]), set()).add(row["seed"])
    common = set.intersection(*cells.values())
    return [row for row in rows if row["seed"] in common]


def tuned(rows: Sequence[Row]) -> list[Row]:
    """Return for each schedule, N and seed the row whose α is best on validation, of equals the smallest α."""
    groups: dict[tuple[str, int, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["schedule"], row["rounds"], row["seed"]), []).append(row)
    # Means of the same counts of images differ in their last bits, which must not decide.
    return [
        max(own, key=lambda row: (round(mean_accuracy(row["validation"]), 9), -row["multiple"]))
        for own in groups.values()
    ]


def course(inputs: Laboratory, name: str, seed: int) -> Row:
    """Return mean validation accuracy in % of a run's merges, and the steps per task before each.

    Args:
        inputs: the study's inputs.
        name: of the run.
        seed: of the run.
    """
    source = inputs.run(name)
    rounds = source.rounds(seed)
    merges = [source.merged(seed, row["round"]) for row in rounds]
    accuracy = [mean_accuracy(inputs.accuracy(state, "validation")) for state in merges]
    return {"run": name, "seed": seed, "steps": [row["steps"] for row in rounds], "accuracy": accuracy}


def over(courses: Sequence[Row], name: str) -> dict[int, list[float]]:
    """Return steps → mean validation accuracy of a run's merges in %, one value for each seed.

    Args:
        courses: as of `course`.
        name: of the run.
    """
    own = of(courses, run=name)
    return {step: [row["accuracy"][index] for row in own] for index, step in enumerate(own[0]["steps"])}


def tidy_rows(rows: Sequence[Row], courses: Sequence[Row]) -> list[dict[str, Any]]:
    """Return one row for each cell, seed, model and task, and one for each run, seed and merge of the courses.

    Args:
        rows: as of `measure`, with the schedule.
        courses: as of `course`.

    Returns:
        `model`: accuracy on a task in %, of the merged model on test and on validation. `course`: mean accuracy of the
        tasks on validation in %, after so many steps per task.
    """
    settings = ("seed", "schedule", "multiple", "rounds", "steps")
    models = [{"part": "model", **row} for row in accuracy_rows(rows, settings, ("validation", "merged"))]
    on_the_way = [
        {"part": "course", "seed": row["seed"], "run": row["run"], "steps": step, "accuracy": accuracy}
        for row in courses
        for step, accuracy in zip(row["steps"], row["accuracy"], strict=True)
    ]
    return tidy([*models, *on_the_way])


def values(best: Sequence[Row], schedule: str) -> dict[int, list[float]]:
    """Return N → mean test accuracy of the tuned merged models in %, one value for each seed."""
    numbers = sorted({row["rounds"] for row in best})
    return {n: [mean_accuracy(row["merged"]) for row in of(best, schedule=schedule, rounds=n)] for n in numbers}


def cell_table(rows: Sequence[Row]) -> Table:
    """Return the accuracy of every schedule and α over N."""

    def line(schedule: str, multiple: int) -> dict[str, Cell]:
        own = [row for row in rows if (row["schedule"], row["multiple"]) == (schedule, multiple)]
        cells: dict[str, Cell] = {"schedule": SCHEDULES[schedule], "α": f"{multiple}/T"}
        for number in sorted({row["rounds"] for row in own}):
            cells[f"N = {number}"] = with_interval([mean_accuracy(row["merged"]) for row in of(own, rounds=number)])
        return cells

    cells = dict.fromkeys((row["schedule"], row["multiple"]) for row in rows)
    return Table("Merged model after the whole budget: mean test accuracy, %", [line(*cell) for cell in cells])


def tuned_table(best: Sequence[Row]) -> Table:
    """Return accuracy over N where α is the best on validation, and which one it is."""
    lines: list[dict[str, Cell]] = [
        {
            "schedule": label,
            "N": number,
            "steps between merges": of(best, schedule=schedule, rounds=number)[0]["steps"] // number,
            "merged": with_interval(own),
            "α, in 1/T": ", ".join(str(row["multiple"]) for row in of(best, schedule=schedule, rounds=number)),
        }
        for schedule, label in SCHEDULES.items()
        for number, own in values(best, schedule).items()
    ]
    return Table("α chosen on validation for each schedule, N and seed: mean test accuracy, %", lines)


def course_table(courses: Sequence[Row]) -> Table:
    """Return the course of the runs shown, at a few steps."""
    lines: list[dict[str, Cell]] = []
    for name in dict.fromkeys(row["run"] for row in courses):
        values = over(courses, name)
        count = len(values)
        for index in sorted({0, count // 4, count // 2, count - 1}):
            step = list(values)[index]
            lines.append({"run": name, "steps": step, "validation accuracy, %": with_interval(values[step])})
    return Table("The merge over the steps", lines)


def findings(best: Sequence[Row]) -> list[Finding]:
    """Hold the paper's statement against both schedules, each with its α tuned alike."""
    found = [
        judge(
            "G7",
            f"At the same budget, merging more often consistently improves the merged model: {label}, α tuned.",
            steps_between(values(best, schedule)),
            "paired difference from each N to the next ≥ 0",
            low=0,
        )
        for schedule, label in SCHEDULES.items()
    ]
    whole, rounds = (values(best, schedule) for schedule in SCHEDULES)
    most = max(whole)
    found.append(
        judge(
            "G7",
            "With α tuned alike the schedule does not matter.",
            {f"per round less whole, N = {most}": paired(rounds[most], whole[most])},
            "paired difference within ± 1 point",
            low=-1,
            high=1,
            ours=True,
        )
    )
    return found


def notes(rows: Sequence[Row]) -> list[str]:
    """Return what α is worth at each schedule."""
    most, multiples = max(row["rounds"] for row in rows), sorted({row["multiple"] for row in rows})
    parts = []
    for schedule, label in SCHEDULES.items():
        means = [
            fmean(mean_accuracy(row["merged"]) for row in of(rows, schedule=schedule, multiple=m, rounds=most))
            for m in multiples
        ]
        listed = ", ".join(f"{value:.1f} (α = {m}/T)" for m, value in zip(multiples, means, strict=True))
        parts.append(f"{label}: {listed}")
    return [f"What α is worth at N = {most}, in %: {'; '.join(parts)}."]


def edge_note(best: Sequence[Row], multiples: Sequence[int]) -> str:
    """Return how often the best α is the largest of those tried.

    Args:
        best: as of `tuned`.
        multiples: of α in 1/T.
    """
    merged = [row for row in best if row["rounds"] > 1]
    edge = sum(row["multiple"] == max(multiples) for row in merged)
    return (
        f"With more than one round the best α on validation is the largest tried, {max(multiples)}/T, in {edge} of "
        f"{len(merged)} cases (schedule, N and seed)."
    )
