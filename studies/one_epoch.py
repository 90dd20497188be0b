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

import math
from collections.abc import Iterator
from functools import partial
from statistics import fmean

import pandas as pd
from matplotlib.figure import Figure
from pydantic import Field

from mergeflow.analysis.geometry import norm
from studies.lab import Claim, Laboratory, Row, Section, Study, accuracy_rows, choose_scale, curves, grid, select, table
from studies.lab.claims import Verdict, all_within, needs, with_interval, within
from studies.lab.plots import dots, listed
from studies.lab.rows import Samples, per_seed, samples
from studies.lab.tuning import task_vector

SHORT, LONG = "one_epoch", "converged"
EQUAL = 2.0  # points between experts that are equally good


class Options(Section):
    epochs: list[int] = Field(min_length=2)  # those of the run `converged` that are merged; the last is its end
    # a run of one epoch → a run trained to its end with epochs of as many steps, in which that number is another
    further: dict[str, str]


def measure(lab: Laboratory, options: Options) -> Iterator[Row]:
    """Yield test accuracy of a run's experts and of their merge, for each seed and task, and the base's."""
    pairs = [(name, None) for pair in options.further.items() for name in pair]
    asked = [(SHORT, None), *((LONG, epoch) for epoch in options.epochs), *pairs]
    for name, epoch in dict.fromkeys(asked):
        yield from lab.by_run([name], partial(measure_merge, epoch=epoch), name=f"{epoch}_")
    yield from lab.by_run([SHORT], measure_base, lab.run(SHORT).seeds[:1], "base_")


def measure_base(lab: Laboratory, run: str, seed: int) -> list[Row]:
    """Return the accuracy of θ0, which the heads of a run's experts read where tasks have heads."""
    return lab.accuracy_rows(lab.base, "test", seed=None, model="zero_shot")


def measure_merge(lab: Laboratory, run: str, seed: int, epoch: int | None) -> Iterator[Row]:
    """Yield the rows of one run's experts, after an epoch (from 1) or at the run's end, and of their merge."""
    trained, base = lab.run(run), lab.base
    states = {t: trained.expert(seed, t) if epoch is None else trained.epoch(seed, t, epoch) for t in lab.tasks}
    chosen = choose_scale(lab, lab.blind().scorer(states), "task_arithmetic", grid(0.05, 1, 0.05), 0.3)
    ends = [trained.training(seed, task)["epochs"][(epoch or 0) - 1] for task in lab.tasks]
    about = {
        "seed": seed,
        "run": run,
        "epoch": epoch,
        "steps": fmean(row["steps"] for row in ends),
        "scale": chosen.args["scale"],
        "length": fmean(norm(task_vector(state, base)) for state in states.values()),
    }
    yield from accuracy_rows(lab.individual(states, "test"), **about, model="experts")
    yield from accuracy_rows(chosen.test, **about, model="merged")


def epochs_of(rows: pd.DataFrame, model: str) -> pd.DataFrame:
    """Return mean accuracy over the epochs of the long run: epoch × seed."""
    return per_seed(rows, "epoch", run=LONG, model=model)


def converged(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the long run's last epoch."""
    return select(rows, run=LONG, epoch=rows.epoch.max())


def less_converged(rows: pd.DataFrame) -> Samples:
    short, long = samples(rows, run=SHORT, model="merged"), samples(converged(rows), model="merged")
    return {"one epoch less converged": short - long}


def by_task(rows: pd.DataFrame) -> dict[str, pd.Series]:
    """Return one epoch less converged of the merge on each task."""
    frames = [select(of_run, model="merged") for of_run in (select(rows, run=SHORT), converged(rows))]
    tasks = frames[0].task.unique()
    return {task: samples(frames[0], task=task) - samples(frames[1], task=task) for task in tasks}


def no_gain(rows: pd.DataFrame) -> tuple[Verdict, str]:
    """Judge whether converged experts surely merge better on at most half of the tasks."""
    sure = [within(values, low=0) is False for values in by_task(rows).values()]
    return sum(sure) <= len(sure) / 2, f"converged experts surely merge better on {sum(sure)} of {len(sure)} tasks"


def says(short: str, long: str, rows: pd.DataFrame) -> str:
    steps = select(rows, run=short).steps.iloc[0]
    return f"One epoch of {steps:.0f} steps ({short}) is competitive with convergence ({long}) as well."


def less(short: str, long: str, rows: pd.DataFrame) -> Samples:
    merges = select(rows, model="merged")
    return {"one epoch less converged": samples(merges, run=short) - samples(merges, run=long)}


def over_epochs(rows: pd.DataFrame) -> tuple[bool | None, str]:
    change = {model: epochs_of(rows, model) for model in ("experts", "merged")}
    gained, saturated = (frame.iloc[-1] - frame.iloc[0] for frame in change.values())
    first, last = change["merged"].index[[0, -1]]
    text = (
        f"from epoch {first:g} to {last:g} experts {with_interval(gained)} points, their merge "
        f"{with_interval(saturated)} points"
    )
    return all_within({"experts": (gained, 0, math.inf), "merge": (saturated, -math.inf, 2)}), text


def experts_gain(rows: pd.DataFrame) -> Samples:
    frame = epochs_of(rows, "experts")
    return {f"epoch {frame.index[0]:g} → {frame.index[-1]:g}": frame.iloc[-1] - frame.iloc[0]}


def lengths(rows: pd.DataFrame) -> pd.Series:
    return select(rows, run=LONG).groupby("epoch").length.mean()


def near_less_far(rows: pd.DataFrame) -> Samples:
    merges, length = epochs_of(rows, "merged"), lengths(rows)
    near, far = length.idxmin(), length.idxmax()
    return {f"merge after epoch {near:g} less after epoch {far:g}": merges.loc[near] - merges.loc[far]}


# fmt: off
def claims(options: Options) -> list[Claim]:
    first, last = min(options.epochs), max(options.epochs)
    equal = needs(experts_gain, "what the experts themselves gain on the way, for distance alone to differ,",
                  low=-EQUAL, high=EQUAL)
    return [
        Claim("G5", "In the mean over tasks merging models tuned for a single epoch is competitive with convergence.",
              less_converged, low=-3, of="paired difference", ours=True,
              paper="says competitive, and prints no difference of the means",
              also=lambda rows: f"; {with_interval(samples(rows, run=SHORT, model='merged'))} % against "
                                f"{with_interval(samples(converged(rows), model='merged'))} %"),
        Claim("G5", "Merging models tuned for a single epoch is competitive across all tasks, on each of them.",
              by_task, low=-3, of="one epoch less converged, on each task,",
              caveat="one rate of AdamW and batches of 5: the paper prints neither"),
        Claim("G5", "Merging models tuned to convergence often yields no gains compared to a single epoch.",
              decide=no_gain, paper="prints no number",
              of="converged experts gain with 95 % confidence on at most half of the tasks"),
        *(Claim("G5", partial(says, short, long), partial(less, short, long), low=-3, ours=True,
                of="paired difference, whatever else the two pairs of runs differ in,")
          for short, long in options.further.items()),
        Claim("G9", "Over the epochs expert accuracy rises while merged accuracy saturates or falls.",
              decide=over_epochs, ours=True,
              of=f"from epoch {first} to {last} experts gain ≥ 0 points and the merge ≤ 2 points"),
        Claim("G9", "Models that stay closer to the pre-trained base are more mergeable.",
              near_less_far, low=0, of="merge of the shortest task vectors less that of the longest", needs=equal,
              caveat="epochs of one schedule, before its rate has come down; a schedule for each would be the test",
              also=lambda rows: f"; mean ‖τ‖ {lengths(rows).min():.2f} and {lengths(rows).max():.2f}"),
    ]
# fmt: on


def trained_for(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of experts and merges with how long was trained: the run, and the epoch of the long one."""
    runs = select(rows, model=["experts", "merged"])
    labels = [
        run if pd.isna(epoch) else f"{run}, epoch {epoch:g}" for run, epoch in zip(runs.run, runs.epoch, strict=True)
    ]
    return runs.assign(trained=labels)


def compared(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the three sides of the paper's Figure 2: the one epoch, the long run's end, and the base."""
    runs = trained_for(pd.concat([select(rows, run=SHORT), converged(rows)]))
    base = select(rows, model="zero_shot").assign(trained="base", seed=0)
    both = pd.concat([base, runs])
    return both.assign(model=both.model + ", " + both.trained)


TABLES = {
    "Mean test accuracy, %": lambda rows: table(trained_for(rows), ["trained", "steps"], "model"),
    "λ chosen on validation": lambda rows: table(trained_for(rows), "trained", value="scale", cell=listed),
    "Mean ‖τ‖": lambda rows: table(trained_for(rows), "trained", value="length", digits=2),
}


def curve_figure(rows: pd.DataFrame) -> Figure:
    """Draw experts and merge over the epochs of the long run, and the run of one epoch as a level."""
    short = {model: samples(rows, run=SHORT, model=model).mean() for model in ("experts", "merged")}
    return curves(select(rows, run=LONG), "epoch", panel="model", x_label="epoch", y_label="mean test accuracy, %",
                  labels={"experts": "Proficiency: experts", "merged": "Mergeability: their merge"}, columns=2,
                  levels=lambda model: {"one epoch, own schedule": short[model]})  # fmt: skip


def notes(rows: pd.DataFrame, options: Options) -> list[str]:
    merges, steps = epochs_of(rows, "merged"), select(rows, run=SHORT).steps.mean()
    lag = [f"{epoch:g}: {with_interval(merges.loc[epoch] - merges.iloc[-1])}" for epoch in merges.index[:-1]]
    return [
        f"An epoch has {steps:.0f} steps on average, and a schedule of its own spends part of them near a rate of 0. "
        f"Against the end of the long schedule the merge stands, after epoch {'; '.join(lag)} points."
    ]


STUDY = Study(
    options=Options,
    runs=lambda options: [SHORT, LONG, *options.further.keys(), *options.further.values()],
    splits=("validation", "test"),
    systems=("G5", "G9"),
    measure=measure,
    claims=claims,
    tables=TABLES,
    figures={"tasks": lambda rows: dots(compared(rows), "task", "model", y_label="accuracy, %"), "curve": curve_figure},
    notes=notes,
)
