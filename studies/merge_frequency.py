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

from collections.abc import Iterator
from functools import partial

import pandas as pd
from pydantic import Field

from mergeflow.merging import configure
from studies.lab import Claim, Laboratory, Row, Section, Study, curves, per_seed, select, table
from studies.lab.inputs import mean_accuracy
from studies.lab.plots import listed
from studies.lab.rows import Samples, steps

SCHEDULES = {"whole": "one schedule", "per_round": "a schedule per round"}
Cell = tuple[str, int, int]
"""Schedule, multiple of α in 1/T, N."""


class Options(Section):
    rounds: list[int] = Field(min_length=2)  # N, with 1 among them
    # of α in 1/T. The runs are `mima_N` for the average with one schedule, and SCHEDULE_MULTIPLE_N otherwise, such as
    # `per_round_2_16`
    multiples: list[int] = Field(min_length=1)
    course: list[str]  # runs shown over their steps


def run_of(schedule: str, multiple: int, rounds: int) -> str:
    """Return the run of a cell; with one round all cells have the same experts.

    Example:
        >>> run_of("whole", 1, 16), run_of("whole", 2, 16), run_of("per_round", 1, 16), run_of("per_round", 3, 1)
        ('mima_16', 'whole_2_16', 'per_round_1_16', 'mima_1')
    """
    if rounds == 1 or (schedule, multiple) == ("whole", 1):
        return f"mima_{rounds}"
    return f"{schedule}_{multiple}_{rounds}"


def cells(options: Options) -> list[Cell]:
    return [(s, m, n) for s in SCHEDULES for m in options.multiples for n in options.rounds]


def measure(lab: Laboratory, options: Options) -> Iterator[Row]:
    """Yield accuracy of the merged model of each cell, seed and task, then the courses of some runs.

    Cells have the seeds that all of them have: α is chosen among the same values everywhere.
    """
    seeds = sorted(set.intersection(*(set(lab.run(run_of(*cell)).seeds) for cell in cells(options))))
    pieces = {
        f"{schedule if rounds > 1 else 'once'}_{multiple}_{rounds}_{seed}": lab.of_run(
            run_of(schedule, multiple, rounds),
            seed,
            partial(measure_cell, schedule=schedule, multiple=multiple, rounds=rounds),
        )
        for schedule, multiple, rounds in cells(options)
        for seed in seeds
    }
    measured: dict[tuple[int, int, int, str], list[Row]] = {}
    for row in lab.cached(pieces, "models"):
        measured.setdefault((row["multiple"], row["rounds"], row["seed"], row["schedule"]), []).append(row)
    for schedule, multiple, rounds in cells(options):
        for seed in seeds:
            key = (multiple, rounds, seed, schedule if rounds > 1 else "once")
            yield from ({**row, "schedule": schedule} for row in measured[key])
    yield from lab.by_run(options.course, measure_course)


def measure_cell(lab: Laboratory, run: str, seed: int, schedule: str, multiple: int, rounds: int) -> Iterator[Row]:
    """Yield accuracy of the merged model of one cell, on validation and on test."""
    trained = lab.run(run)
    if rounds == 1:
        call = configure("task_arithmetic", {"scale": multiple / len(lab.tasks)})
        merged = lab.scorer(trained.experts(seed)).merge(call)
    else:
        merged = trained.merged(seed, rounds)
    about = {"part": "model", "seed": seed, "schedule": schedule if rounds > 1 else "once", "multiple": multiple}
    about |= {"rounds": rounds, "steps": trained.rounds(seed)[-1]["steps"]}
    yield from lab.accuracy_rows(merged, "validation", **about, model="validation")
    yield from lab.accuracy_rows(merged, "test", **about, model="merged")


def measure_course(lab: Laboratory, run: str, seed: int) -> Iterator[Row]:
    """Yield mean validation accuracy in % of each merge of a run, and the steps per task before it."""
    trained = lab.run(run)
    for row in trained.rounds(seed):
        accuracy = mean_accuracy(lab.accuracy(trained.merged(seed, row["round"]), "validation"))
        yield {"part": "course", "seed": seed, "run": run, "steps": row["steps"], "accuracy": accuracy}


def tuned(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the merged models whose α is best on validation, for each schedule, N and seed."""
    key = ["schedule", "rounds", "seed"]
    # Means of the same counts of images differ in their last bits, which must not decide.
    scores = select(rows, model="validation").groupby([*key, "multiple"]).accuracy.mean().round(9).reset_index()
    best = scores.sort_values(["accuracy", "multiple"], ascending=[False, True]).drop_duplicates(key)
    return select(rows, model="merged").merge(best[[*key, "multiple"]])


def over(rows: pd.DataFrame, schedule: str) -> pd.DataFrame:
    return per_seed(tuned(rows), "rounds", schedule=schedule)


def schedules_compared(rows: pd.DataFrame) -> Samples:
    whole, per_round = (over(rows, schedule) for schedule in SCHEDULES)
    most = max(whole.index)
    return {f"per round less whole, N = {most:g}": per_round.loc[most] - whole.loc[most]}


def notes(rows: pd.DataFrame, options: Options) -> list[str]:
    merged = tuned(rows).drop_duplicates(["schedule", "rounds", "seed"]).query("rounds > 1")
    edge, largest = sum(merged.multiple == max(options.multiples)), max(options.multiples)
    return [
        f"With more than one round the best α on validation is the largest tried, {largest}/T, in {edge} of "
        f"{len(merged)} cases (schedule, N and seed).",
    ]


# fmt: off
CLAIMS = [
    *(Claim("G7", "At the same budget, merging more often consistently improves the merged model.",
            lambda rows, schedule=schedule: steps(over(rows, schedule)),  # type: ignore[misc]
            low=0, of="paired difference from each N to the next, α by validation,", setting=label,
            caveat="N = 1, 4 and 16 alone; the largest α tried is taken in 8 of 20 cases; that other methods stop "
                   "improving as the budget grows (§3.1) is not tested")
      for schedule, label in SCHEDULES.items()),
    Claim("G7", "With α tuned alike the schedule does not matter.", schedules_compared,
          low=-1, high=1, of="paired difference", ours=True),
]
TABLES = {
    "Merged model after the whole budget: mean test accuracy, %": lambda rows: table(
        select(rows, model="merged"), ["schedule", "multiple"], "rounds"),
    "That α, in 1/T": lambda rows: table(tuned(rows), "schedule", "rounds", value="multiple", cell=listed),
}
# fmt: on

STUDY = Study(
    options=Options,
    runs=lambda options: [*dict.fromkeys(run_of(*cell) for cell in cells(options)), *options.course],
    splits=("validation", "test"),
    systems=("G7",),
    measure=measure,
    claims=CLAIMS,
    tables=TABLES,
    figures={
        "frequency": lambda rows: curves(
            tuned(rows), "rounds", "schedule", labels=SCHEDULES, title="After the whole budget, α tuned",
            x_label="rounds N", y_label="mean test accuracy, %", scale="rounds",
        ),
        "course": lambda rows: curves(
            select(rows, part="course"), "steps", "run", title="On the way", x_label="steps per task",
            y_label="mean validation accuracy, %",
        ),
    },
    notes=notes,
)  # fmt: skip
