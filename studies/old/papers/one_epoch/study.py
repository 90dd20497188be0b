"""Study `one_epoch` (G5, G9): is one epoch of fine-tuning enough for merging?

**Question.** Experts after one epoch and experts at convergence, both merged by task arithmetic: which merged model is
better, and what does every further epoch do to the experts (proficiency) and to their merge (mergeability)?

**Method.** θ0 + λ Σ_t τ_t with λ chosen on validation (0.05 … 1 in steps of 0.05, walked from the usual value both ways
until validation accuracy has fallen by 1 point), one look at test. `one epoch` is a run of its own, whose learning rate
falls to 0 within the epoch; `converged` has one schedule over all its epochs, and the curve over epochs merges its
experts as they stand after each: before the last epoch their learning rate has not come down. Further pairs of runs
show what an epoch of another number of steps is worth; what else differs between them is in the choices of the runs. ±
is over seeds: the order of the batches.

**Source.** Zhou et al. 2025, On Task Vectors and Gradients, Section 2.1, Figure 2; the curve over epochs is our reading
of "proficiency and mergeability".
"""

from collections.abc import Sequence
from functools import partial
from statistics import fmean
from typing import Any

from pydantic import Field

from mergeflow.analysis.geometry import norm
from studies.lab.inputs import Laboratory, State, mean_accuracy
from studies.lab.scales import task_vector
from studies.old.claims import judge, paired
from studies.old.leading import leader
from studies.old.papers.one_epoch.figures import curve_figure, task_figure
from studies.old.pieces import choose_scale, grid, kept, kept_all
from studies.old.results import Cell, Finding, StudyResult, Table, with_interval
from studies.old.rows import Row, accuracy_rows, of, tidy
from studies.old.verdicts import all_hold, within
from tasks.project.declaration import Declaration
from tasks.project.sections import Section
from tasks.project.stage import StageIO

SHORT, LONG = "one epoch", "converged"
RUNS = {SHORT: "one_epoch", LONG: "converged"}
Pair = tuple[list[Row], list[Row]]


class Options(Section):
    """The study's choices.

    epochs: those of the run `converged` that are merged; the last is its end. further: a run of one epoch → a run
    trained to its end with epochs of as many steps, in which that number is another.
    """

    epochs: list[int] = Field(min_length=2)
    further: dict[str, str]


DECLARED = Declaration(
    Options,
    runs=lambda options: [*RUNS.values(), *options.further.keys(), *options.further.values()],
    splits=("validation", "test"),
    systems=("G5", "G9"),
)


def run(io: StageIO) -> None:
    """Write `outputs/studies/one_epoch`."""
    inputs = Laboratory(io)
    options = DECLARED.chosen(io)
    base = kept(io, "base", lambda: inputs.accuracy(inputs.base, "test"))
    asked = [(RUNS[SHORT], None), *((RUNS[LONG], epoch) for epoch in options.epochs)]
    asked += [(name, None) for pair in options.further.items() for name in pair]
    measures = {
        f"{name}_{epoch}_{seed}": partial(measure, inputs, name, seed, epoch)
        for name, epoch in dict.fromkeys(asked)
        for seed in inputs.run(name).seeds
    }
    rows = kept_all(io, measures, "merges")
    short, curve = of(rows, run=RUNS[SHORT]), of(rows, run=RUNS[LONG])
    compared = {SHORT: short, LONG: of(curve, epoch=options.epochs[-1])}
    further = [(of(rows, run=one), of(rows, run=other)) for one, other in options.further.items()]
    result = StudyResult(
        [task_table(compared, base), curve_table(short, curve), pair_table([(short, compared[LONG]), *further])],
        findings(compared, curve, further),
        notes(compared, curve),
        tidy_rows(rows, base),
    )
    result.write(io, figures(compared, curve, base))


def measure(inputs: Laboratory, name: str, seed: int, epoch: int | None) -> Row:
    """Return test accuracy of a run's experts, at their end or after an epoch, and of their merge.

    Args:
        inputs: the study's inputs.
        name: the training run.
        seed: of the run.
        epoch: from 1; None for the run's end.
    """
    source = inputs.run(name)
    states: dict[str, State] = {
        task: source.expert(seed, task) if epoch is None else source.epoch(seed, task, epoch) for task in inputs.tasks
    }
    scorer = inputs.blind().scorer(states)
    chosen = choose_scale(inputs, scorer, "task_arithmetic", grid(0.05, 1, 0.05), 0.3)
    ends = [source.training(seed, task)["epochs"][(epoch or 0) - 1] for task in inputs.tasks]
    base = inputs.base
    return {
        "seed": seed,
        "run": name,
        "epoch": epoch,
        "experts": inputs.individual(states, "test"),
        "merged": chosen.test,
        "scale": chosen.args["scale"],
        "steps": fmean(row["steps"] for row in ends),
        "length": fmean(norm(task_vector(state, base)) for state in states.values()),
    }


def task_table(compared: dict[str, list[Row]], base: dict[str, float]) -> Table:
    """Return the paper's Figure 2 as a table."""

    def cells(values: list[float], model: str, run_name: str) -> dict[str, Cell]:
        return {f"{model}, {run_name}": with_interval(values)}

    lines: list[dict[str, Cell]] = []
    for task in [*base, "mean"]:
        zero = mean_accuracy(base) if task == "mean" else 100 * base[task]
        line: dict[str, Cell] = {"task": task, "zero-shot": f"{zero:.1f}"}
        for model in ("experts", "merged"):
            for name, rows in compared.items():
                line |= cells([_accuracy(row[model], task) for row in rows], model, name)
        lines.append(line)
    return Table("Test accuracy of experts and of their merge by task arithmetic, %", lines)


def curve_table(short: Sequence[Row], curve: Sequence[Row]) -> Table:
    """Return proficiency and mergeability over the epochs."""

    def line(label: str, rows: Sequence[Row]) -> dict[str, Cell]:
        return {
            "trained": label,
            "steps": round(rows[0]["steps"]),
            "experts": with_interval([mean_accuracy(row["experts"]) for row in rows]),
            "merged": with_interval([mean_accuracy(row["merged"]) for row in rows]),
            "λ": ", ".join(f"{row['scale']:g}" for row in rows),
            "‖τ‖": with_interval([row["length"] for row in rows], 2),
        }

    epochs = _epochs(curve)
    lines = [line("one epoch, own schedule", short)]
    lines += [line(f"epoch {n} of {epochs[-1]}", [r for r in curve if r["epoch"] == n]) for n in epochs]
    return Table("Proficiency and mergeability over the epochs: mean test accuracy, %", lines)


def pair_table(pairs: Sequence[Pair]) -> Table:
    """Return the merges of one epoch and of converged experts, over the number of steps that an epoch has."""
    lines: list[dict[str, Cell]] = [
        {
            "steps of one epoch": round(first[0]["steps"]),
            "steps of the other run": round(last[0]["steps"]),
            "merged, one epoch": with_interval(_means(first)),
            "merged, converged": with_interval(_means(last)),
            "difference": with_interval(paired(_means(first), _means(last))),
        }
        for first, last in pairs
    ]
    return Table("One epoch against converged, by the steps that an epoch has: mean test accuracy, %", lines)


def tidy_rows(rows: Sequence[Row], base: dict[str, float]) -> list[dict[str, Any]]:
    """Return one row for each seed, run, epoch, model and task, and the base's accuracy, which has no seed.

    Args:
        rows: as of `measure`.
        base: the base's accuracy by task.
    """
    settings = ("seed", "run", "epoch", "steps", "scale", "length")
    zero_shot = [{"seed": None, "model": "zero_shot", "task": t, "accuracy": 100 * value} for t, value in base.items()]
    return tidy([*accuracy_rows(rows, settings, ("experts", "merged")), *zero_shot])


def findings(compared: dict[str, list[Row]], curve: Sequence[Row], further: Sequence[Pair] = ()) -> list[Finding]:
    """Hold the paper's statements against the rows.

    Args:
        compared: rows of the two lengths of training, by name.
        curve: rows over epochs.
        further: rows of one epoch and of converged experts, where an epoch has another number of steps.
    """
    short, long = (_means(compared[name]) for name in (SHORT, LONG))
    by_task = {
        task: paired(*([100 * row["merged"][task] for row in compared[name]] for name in (SHORT, LONG)))
        for task in compared[SHORT][0]["merged"]
    }
    no_gain = [100 * fmean(lead >= 0 for lead in leads) for leads in zip(*by_task.values(), strict=True)]
    experts, merges = (
        {n: [mean_accuracy(row[model]) for row in of(curve, epoch=n)] for n in _epochs(curve)}
        for model in ("experts", "merged")
    )
    first, last = _epochs(curve)[0], _epochs(curve)[-1]
    gained, saturated = paired(experts[last], experts[first]), paired(merges[last], merges[first])
    lengths = {n: fmean(row["length"] for row in of(curve, epoch=n)) for n in _epochs(curve)}
    near, far = min(lengths, key=lengths.__getitem__), max(lengths, key=lengths.__getitem__)
    return [
        judge(
            "G5",
            "In the mean over tasks merging models tuned for a single epoch is competitive with convergence.",
            {"one epoch less converged": paired(short, long)},
            "paired difference ≥ −3 points (the paper says competitive, and prints no difference of the means)",
            low=-3,
            ours=True,
            beside=f"; {with_interval(short)} % against {with_interval(long)} %",
        ),
        judge(
            "G5",
            "Merging models tuned for a single epoch is competitive across all tasks, on each of them.",
            by_task,
            "one epoch less converged ≥ −3 points, on each task",
            low=-3,
        ),
        judge(
            "G5",
            "Merging models tuned to convergence often yields no gains compared to a single epoch.",
            {"tasks on which converged experts merge no better": no_gain},
            "half of the tasks or more (the paper prints no number)",
            low=50,
            unit=" %",
        ),
        *[
            judge(
                "G5",
                f"One epoch of {first[0]['steps']:.0f} steps ({first[0]['run']}) is competitive with convergence "
                f"({last[0]['run']}) as well.",
                {"one epoch less converged": paired(_means(first), _means(last))},
                "paired difference ≥ −3 points, as above, whatever else the two pairs of runs differ in",
                low=-3,
                ours=True,
            )
            for first, last in further
        ],
        Finding(
            "G9",
            "Over the epochs expert accuracy rises while merged accuracy saturates or falls.",
            f"from epoch {first} to {last} experts {with_interval(gained)} points, their merge "
            f"{with_interval(saturated)} points",
            all_hold([within(gained, low=0), within(saturated, high=2)]),
            f"from epoch {first} to {last} experts gain ≥ 0 points and the merge ≤ 2 points",
            ours=True,
        ),
        judge(
            "G9",
            "Models that stay closer to the pre-trained base are more mergeable.",
            {f"merge after epoch {near} less after epoch {far}": paired(merges[near], merges[far])},
            "paired difference ≥ 0 points of the merge of the shortest task vectors and of the longest",
            low=0,
            beside=f"; mean ‖τ‖ {lengths[near]:.2f} and {lengths[far]:.2f}",
        ),
    ]


def notes(compared: dict[str, list[Row]], curve: Sequence[Row]) -> list[str]:
    """Return what decides it."""
    merges = {str(n): [mean_accuracy(row["merged"]) for row in of(curve, epoch=n)] for n in _epochs(curve)}
    *before, last = merges
    lag = [f"{epoch}: {with_interval(paired(merges[epoch], merges[last]))}" for epoch in before]
    _, best = leader(merges, {epoch: f"the one after epoch {epoch}" for epoch in merges})
    gain = {
        task: [100 * (s["merged"][task] - c["merged"][task]) for s, c in zip(*compared.values(), strict=True)]
        for task in compared[SHORT][0]["merged"]
    }
    steps = compared[SHORT][0]["steps"]
    return [
        f"An epoch has {steps:.0f} steps on average, and a schedule of its own spends part of them near a rate of 0. "
        f"Against the end of the long schedule the merge stands, after epoch {'; '.join(lag)} points.",
        f"The merge with the highest mean is {best}. By task, one epoch less converged is "
        + ", ".join(f"{with_interval(gain[task])} ({task})" for task in sorted(gain, key=lambda one: -fmean(gain[one])))
        + " points.",
    ]


def figures(compared: dict[str, list[Row]], curve: Sequence[Row], base: dict[str, float]) -> dict[str, Any]:
    """Return the study's figures.

    Args:
        compared: rows of the two lengths of training, by name.
        curve: rows over epochs.
        base: the base's accuracy by task.
    """
    bars = {
        f"{model}, {name}": {task: [_accuracy(row[model], task) for row in rows] for task in [*base, "mean"]}
        for model in ("experts", "merged")
        for name, rows in compared.items()
    }
    over = {
        model: {n: [mean_accuracy(r[model]) for r in curve if r["epoch"] == n] for n in _epochs(curve)}
        for model in ("experts", "merged")
    }
    short = {model: [mean_accuracy(row[model]) for row in compared[SHORT]] for model in ("experts", "merged")}
    return {"tasks": task_figure(bars), "curve": curve_figure(over, short)}


def _means(rows: Sequence[Row]) -> list[float]:
    """Return the merge's mean test accuracy in %, one value for each seed."""
    return [mean_accuracy(row["merged"]) for row in rows]


def _accuracy(accuracy: dict[str, float], task: str) -> float:
    return mean_accuracy(accuracy) if task == "mean" else 100 * accuracy[task]


def _epochs(curve: Sequence[Row]) -> list[int]:
    return sorted({row["epoch"] for row in curve})
