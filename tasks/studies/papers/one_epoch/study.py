"""Study `one_epoch` (G5, G9): is one epoch of fine-tuning enough for merging?

**Question.** Experts after one epoch and experts at convergence, both merged by task arithmetic: which merged model is
better, and what does every further epoch do to the experts (proficiency) and to their merge (mergeability)?

**Method.** θ0 + λ Σ_t τ_t with λ chosen on validation (0.05 … 1 in steps of 0.05, walked from the usual value both ways
until validation accuracy has fallen by 1 point), one look at test. `one epoch` is a run of its own, whose learning
rate falls to 0 within the epoch; `converged` has one schedule over all its epochs, and the curve over epochs merges
its experts as they stand after each: before the last epoch their learning rate has not come down.

**Source.** Zhou et al. 2025, On Task Vectors and Gradients, Section 2.1, Figure 2; the curve over epochs is our
reading of "proficiency and mergeability".
"""

from collections.abc import Sequence
from functools import partial
from statistics import fmean
from typing import Any

from mergeflow import layout
from mergeflow.analysis.geometry import norm
from tasks.project.declaration import Declaration
from tasks.project.sections import Section
from tasks.project.stage import StageIO
from tasks.studies.inputs import State, StudyInputs, mean_accuracy
from tasks.studies.papers.one_epoch.figures import curve_figure, task_figure
from tasks.studies.pieces import Row, choose_scale, grid, kept
from tasks.studies.results import Cell, Finding, StudyResult, Table, with_interval

STUDY = "one_epoch"
SHORT, LONG = "one epoch", "converged"


class Options(Section):
    """The study's choices. `epochs`: those of the run `converged` that are merged; the last is its end."""

    epochs: list[int]


DECLARED = Declaration(
    Options, runs=lambda options: ["one_epoch", "converged"], splits=("validation", "test"), systems=("G5", "G9")
)


def run(io: StageIO) -> None:
    """Write `outputs/studies/one_epoch`."""
    inputs = StudyInputs(io)
    options = Options.model_validate(inputs.options(STUDY))
    base = kept(io, "base", lambda: inputs.accuracy(inputs.base, "test"))
    short, curve = [], []
    for done, seed in enumerate(inputs.seeds):
        io.report("seeds", done, len(inputs.seeds))
        short.append(kept(io, f"short_{seed}", partial(measure, inputs, seed, None)))
        curve += [kept(io, f"{seed}_{epoch}", partial(measure, inputs, seed, epoch)) for epoch in options.epochs]
    compared = {SHORT: short, LONG: [row for row in curve if row["epoch"] == options.epochs[-1]]}
    result = StudyResult(
        [task_table(compared, base), curve_table(short, curve)], findings(compared, curve), notes(compared, curve)
    )
    result.write(io.out(layout.study(STUDY)), figures(compared, curve, base))


def measure(inputs: StudyInputs, seed: int, epoch: int | None) -> Row:
    """Return test accuracy of the experts and of their merge: `converged` after an epoch, or (None) `one_epoch`."""
    source = inputs.run("one_epoch" if epoch is None else "converged")
    states: dict[str, State] = {
        task: source.expert(seed, task) if epoch is None else source.epoch(seed, task, epoch) for task in inputs.tasks
    }
    scorer = inputs.scorer(states)
    chosen = choose_scale(inputs, scorer, "task_arithmetic", grid(0.05, 1, 0.05), 0.3)
    rows = [source.training(seed, task)["epochs"][(epoch or 1) - 1] for task in inputs.tasks]
    base = inputs.base
    return {
        "seed": seed,
        "epoch": epoch,
        "experts": inputs.individual(states, "test"),
        "merged": chosen.test,
        "scale": chosen.args["scale"],
        "steps": fmean(row["steps"] for row in rows),
        "length": fmean(norm({name: state[name] - base[name] for name in base}) for state in states.values()),
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


def findings(compared: dict[str, list[Row]], curve: Sequence[Row]) -> list[Finding]:
    """Hold the paper's statements against the rows."""
    merged = {name: fmean(mean_accuracy(row["merged"]) for row in rows) for name, rows in compared.items()}
    experts, merges = _course(curve, "experts"), _course(curve, "merged")
    best = max(merges)
    return [
        Finding(
            "G5",
            "Merging after the first epoch of the schedule is at most 3 points worse than merging at its end.",
            f"{merges[0]:.1f} % against {merges[-1]:.1f} %",
            merges[0] >= merges[-1] - 3,
        ),
        Finding(
            "G5",
            "Merging one-epoch experts with a schedule of their own is at most 3 points worse than converged ones.",
            f"{merged[SHORT]:.1f} % against {merged[LONG]:.1f} %",
            merged[SHORT] >= merged[LONG] - 3,
        ),
        Finding(
            "G9",
            "Over the epochs expert accuracy rises while merged accuracy saturates or falls: from its second epoch on "
            "the merge gains less than 2 points.",
            f"experts {_listed(experts)}; merged {_listed(merges)}",
            experts[-1] > experts[0] and best - merges[min(1, len(merges) - 1)] < 2,
        ),
    ]


def notes(compared: dict[str, list[Row]], curve: Sequence[Row]) -> list[str]:
    """Return what decides it."""
    merges, epochs = _course(curve, "merged"), _epochs(curve)
    best = max(range(len(merges)), key=merges.__getitem__)
    gain = {
        task: fmean(100 * (s["merged"][task] - c["merged"][task]) for s, c in zip(*compared.values(), strict=True))
        for task in compared[SHORT][0]["merged"]
    }
    short = compared[SHORT][0]
    lag = [f"{epochs[i]}: {value - merges[-1]:+.1f}" for i, value in enumerate(merges)]
    least, most = min(gain, key=gain.__getitem__), max(gain, key=gain.__getitem__)
    return [
        f"The number of steps decides: an epoch of the suite has {short['steps']:.0f} on average, and a schedule "
        "of its own spends part of them near a rate of 0, so its task vectors stay shorter. Against the end of the "
        f"long schedule the merge stands, after epoch {'; '.join(lag)} points.",
        f"The merge is best after epoch {epochs[best]} of {epochs[-1]} ({merges[best]:.1f} %). One epoch is worth most "
        f"on {most} ({gain[most]:+.1f} points against converged) and least on {least} ({gain[least]:+.1f}). λ makes up "
        "for the length of the task vectors, so what differs is their direction.",
    ]


def figures(compared: dict[str, list[Row]], curve: Sequence[Row], base: dict[str, float]) -> dict[str, Any]:
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


def _accuracy(accuracy: dict[str, float], task: str) -> float:
    return mean_accuracy(accuracy) if task == "mean" else 100 * accuracy[task]


def _epochs(curve: Sequence[Row]) -> list[int]:
    return sorted({row["epoch"] for row in curve})


def _course(curve: Sequence[Row], model: str) -> list[float]:
    return [fmean(mean_accuracy(row[model]) for row in curve if row["epoch"] == n) for n in _epochs(curve)]


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.1f}" for value in values)
