"""Study `cost` (M7): what do joint training, merge-and-tune and one-shot merging cost, and what do they reach?

**Question.** A team wants one model for T tasks. It can train on all data at once, tune and average in rounds, or
merge experts once. How good is each, for how many steps, images, seconds and how much sending of weights?

**Method.** Every row spends its budget on the same tasks with the same batch size and optimiser. Joint training
minimises Σ_t L_t, one batch of every task a step; its learning rate is chosen on validation, before any look at test,
by the mean over the seeds that every rate was trained with. Runs in rounds are taken as their last merge, with the rate
of single tasks. The one-shot rows merge the experts of a run once, by the best on validation of average, task
arithmetic, TIES, CART and TSV-M and their arguments; where CART takes the largest rank that is tried, more
may do better, and the best of these is the best that was tried, not the best there is. A *step* is one batch of one
task through the model and back (a joint step counts T). *Selection* is the validation accuracy of every candidate,
counted in examples through the model, without gradients; joint training's candidates are its learning rates, each of
which had to be trained as well, which the table does not count. *Sent* is what would cross a network if each task's
data stayed where it is: T experts to the place that merges, and the merge back to T tasks, once per round; for joint
training the examples themselves move. Times are processor seconds of the thread that trains or merges, which other
work on the machine changes little; they stand beside the result, because they differ from run to run. Two rows are
compared over the seeds that both have; of the one-shot rows the one that is best on validation is compared. ± is over
seeds: the order of the batches.

**Source.** MIMA, Sections 4 and 5.1 (equal budget S = K·N); the accounting is ours, as reviewers asked for.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from pydantic import Field

from mergeflow.evaluation.averages import mean
from studies.lab import Claim, Laboratory, Row, Section, Study
from studies.lab.claims import with_interval
from studies.lab.inputs import State, choose_scale, grid, mean_accuracy
from studies.lab.plots import table
from studies.lab.rows import Samples, accuracy_rows, per_seed, samples, select
from tasks.plotting.drawing import dress, legend, panels, series_style


class Options(Section):
    joint: list[str] = Field(min_length=1)  # runs of joint training
    # like the first of these but for the learning rate; the best one on validation takes its place
    rates: list[str] = Field(default_factory=list)
    iterative: list[str]  # runs whose last merge is the model
    one_shot: list[str]  # runs whose experts are merged once
    keep: list[float]  # keep, rank_ratio: values tried for TIES and CART beside their scale
    rank_ratio: list[float]


def measure(lab: Laboratory, options: Options) -> Iterator[Row]:
    """Yield test accuracy of every run, seed and task (`model`), and validation accuracy of every rate (`rate`).

    Times are kept as tables beside the study's cost: they differ from run to run, so no row has them.
    """
    rates = try_rates(lab, [options.joint[0], *options.rates])
    options = options.model_copy(update={"joint": [best_rate(rates), *options.joint[1:]]})
    names = [*options.joint, *options.iterative, *options.one_shot]
    measured = lab.by_run(names, partial(measure_model, options=options))
    lab.io.costs["tables"] = time_tables(pd.DataFrame([row for row in measured if row["part"] == "time"]))
    yield from (row for row in measured if row["part"] == "model")
    yield from rates


def try_rates(lab: Laboratory, names: Sequence[str]) -> list[Row]:
    """Return mean validation accuracy in % of joint training at every learning rate, of seeds that all runs have."""
    seeds = sorted(set.intersection(*(set(lab.run(name).seeds) for name in names)))
    return lab.blind().by_run(names, try_rate, seeds, "rate_")


def try_rate(lab: Laboratory, name: str, seed: int) -> Iterator[Row]:
    run = lab.run(name)
    reached = mean_accuracy(lab.accuracy(run.model(seed), "validation"))
    rate = run.settings(seed)["learning_rate"]
    yield {"part": "rate", "seed": seed, "run": name, "rate": rate, "validation": reached}


def best_rate(rates: Sequence[Row]) -> str:
    """Return the run of the highest mean validation accuracy; of equal ones the first."""
    runs = dict.fromkeys(row["run"] for row in rates)
    return max(runs, key=lambda name: fmean(row["validation"] for row in rates if row["run"] == name))


def measure_model(lab: Laboratory, name: str, seed: int, options: Options) -> Iterator[Row]:
    """Yield a run's test accuracy on each task, and one row of times."""
    source, joint = lab.run(name), name in options.joint
    about: Row = {"rounds": 0, "tried": 0}
    times: Row = {}
    if joint:
        test = lab.accuracy(source.model(seed), "test")
    elif name in options.iterative:
        about["rounds"] = source.rounds(seed)[-1]["round"]
        test = lab.accuracy(source.merged(seed, about["rounds"]), "test")
    else:
        merge = best_merge(lab, options, source.experts(seed))
        test, about["rounds"] = merge.pop("test"), 1
        times = {"selection": merge.pop("selecting"), "merging": merge.pop("merging")}
        about |= merge
    cost, steps = source.cost(seed), len(lab.tasks) if joint else 1
    trained = {"budget": cost["steps"] * steps // len(lab.tasks), "task_steps": cost["steps"] * steps}
    about |= {**trained, "examples": cost["examples"]}
    yield from accuracy_rows(test, part="model", seed=seed, run=name, **about, split="test")
    per_round = fmean(cost["rounds"]) if cost["rounds"] else None
    spent = {"training": cost["processor_seconds"], "a round": per_round, "GPU-seconds": cost["gpu_seconds"]}
    yield {"part": "time", "seed": seed, "run": name, **spent, "peak MiB": cost["peak_memory_mib"], **times}


def best_merge(lab: Laboratory, options: Options, experts: Mapping[str, State]) -> dict[str, Any]:
    """Return the best merge of the competing methods on validation: its test accuracy, and what finding it took."""
    blind, results, tried = lab.blind(), [], 0
    scorer, merging, begun = blind.scorer(experts), dict[str, float](), time.thread_time()
    for method, scales, start, args in competitors(options):
        chosen = choose_scale(blind, scorer, method, scales, start, args, test=False)
        tried += chosen.tried
        results.append((mean(chosen.validation), method, chosen.args))
    selecting = time.thread_time() - begun
    for _, method, args in results:
        begun = time.thread_time()
        lab.scorer(experts).merge(method, **args)
        merging[method] = time.thread_time() - begun
    validation, method, args = max(results, key=lambda result: result[0])
    test = lab.accuracy(scorer.merge(method, **args), "test")
    listed = ", ".join(f"{name} {value:g}" for name, value in args.items())
    choice = {"test": test, "chosen": f"{method} ({listed})", "tried": tried, "validation": 100 * validation}
    return {**choice, "selecting": selecting, "merging": merging}


def competitors(options: Options) -> Iterator[tuple[str, Sequence[float], float, dict[str, Any]]]:
    """Yield the competing methods: name, scales, where the walk over them begins, and the other arguments."""
    yield "average", [1.0], 1.0, {}
    yield "task_arithmetic", grid(0, 1, 0.05), 0.3, {}
    yield from (("ties", grid(0.2, 1.8, 0.1), 1.0, {"keep": keep}) for keep in options.keep)
    scales = [0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0]
    yield from (("cart", scales, 2.0, {"rank_ratio": ratio}) for ratio in options.rank_ratio)
    yield "tsv", [0.4, 0.6, 0.8, 1.0, 1.2, 1.5, 2.0, 2.5, 3.0], 1.2, {}


# What the rows are asked


def label(name: str) -> str:
    """Return the title of a row.

    Example:
        >>> [label(name) for name in ("mima_16", "mima_16_480", "joint", "per_round_2_16", "one_epoch")]
        ['MIMA N = 16', 'MIMA N = 16, S = 480', 'joint training', 'α = 2/T, schedule per round, N = 16', 'one epoch']
        >>> label("joint_half"), label("joint_480")
        ('joint training, half the rate', 'joint training, S = 480')
    """
    kind, *numbers = name.split("_")
    if kind == "mima" and numbers:
        return f"MIMA N = {numbers[0]}" + (f", S = {numbers[1]}" if len(numbers) > 1 else "")
    if kind == "joint":
        more = [f", S = {word}" if word.isdigit() else f", {word} the rate" for word in numbers]
        return "joint training" + "".join(more)
    for schedule, words in (("per_round_", "schedule per round"), ("whole_", "one schedule")):
        if name.startswith(schedule):
            multiple, rounds = name.removeprefix(schedule).split("_")
            return f"α = {multiple}/T, {words}, N = {rounds}"
    return name.replace("_", " ")


def models(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of models with what each is called; the run of a one-shot merge gave its experts alone."""
    part = select(rows, part="model")
    names = [
        f"one-shot merge of {run}" if tried else label(run) for run, tried in zip(part.run, part.tried, strict=True)
    ]
    return part.assign(model=names)


def difference(rows: pd.DataFrame, first: str, second: str) -> pd.Series:
    """Return the paired differences of two runs over the seeds that both have."""
    frame = models(rows)
    return (samples(frame, run=first) - samples(frame, run=second)).dropna()


def called(rows: pd.DataFrame, run: str) -> str:
    return str(select(models(rows), run=run).model.iloc[0])


def joint_run(rows: pd.DataFrame) -> str:
    frame = models(rows)
    return str(frame[frame.run.str.startswith("joint")].run.iloc[0])


def most_rounds(rows: pd.DataFrame) -> str:
    """Return the run of MIMA with the most rounds at joint training's budget."""
    frame = models(rows)
    budget = select(frame, run=joint_run(rows)).budget.iloc[0]
    mima = frame[frame.run.str.startswith("mima") & (frame.budget == budget) & (frame["rounds"] > 0)]
    return max(mima.run.unique(), key=lambda name: int(name.split("_")[1]))


def best_one_shot(rows: pd.DataFrame) -> str:
    """Return the one-shot run that is best on validation."""
    frame = models(rows)
    return str(frame[frame.tried > 0].groupby("run", sort=False).validation.mean().idxmax())


def less_joint(rows: pd.DataFrame) -> Samples:
    most = most_rounds(rows)
    return {f"{called(rows, most)} less joint training": difference(rows, most, joint_run(rows))}


def less_one_shot(rows: pd.DataFrame) -> Samples:
    most, once = most_rounds(rows), best_one_shot(rows)
    return {f"{called(rows, most)} less {called(rows, once)}": difference(rows, most, once)}


def time_tables(times: pd.DataFrame) -> list[dict[str, Any]]:
    """Return processor seconds of training and selection, and of one merge by each method, arguments as chosen."""
    columns = ["training", "a round", "selection", "GPU-seconds", "peak MiB"]
    means = times.groupby("run", sort=False)[[c for c in columns if c in times]].mean().round(1).reset_index()
    merging = pd.DataFrame(list(times.merging.dropna())) if "merging" in times else pd.DataFrame()
    merges = [{"method": name, "one merge": with_interval(merging[name], 3)} for name in merging]
    shown = means.astype(object).where(means.notna(), None)
    return [
        {"title": "Processor seconds of one seed", "rows": shown.to_dict("records")},
        {"title": "Processor seconds of one merge of all experts, arguments as chosen", "rows": merges},
    ]


def cost_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return accuracy beside what does not depend on the machine; every round sends T experts and the merge back."""
    frame = models(rows)
    tasks = frame.task.nunique()
    spent = frame.groupby("model", sort=False)[["budget", "task_steps", "examples", "rounds", "tried"]].mean().round()
    spent = spent.astype(int)
    sent = [f"{2 * n * tasks} models" if n else "the data" for n in spent["rounds"]]
    return pd.concat([table(frame, "model"), spent.assign(sent=sent)], axis=1)


def choice_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the arguments that validation chose for the one-shot rows."""
    frame = models(rows)
    chosen = frame[frame.tried > 0].groupby(["model", "seed"], sort=False)
    made = chosen.agg(candidates=("tried", "first"), chosen=("chosen", "first"), validation=("validation", "first"))
    return made.assign(validation=made.validation.round(1), test=chosen.accuracy.mean().round(1)).reset_index()


def rate_table(rows: pd.DataFrame) -> pd.DataFrame:
    rates = select(rows, part="rate")
    return table(rates.assign(model=rates.run.map(label)), ["model", "rate"], value="validation")


def cost_figure(rows: pd.DataFrame) -> Figure:
    """Draw accuracy over the examples that training saw."""
    frame = models(rows)
    figure, (panel,) = panels(1, 1, 4.6)
    dress(panel, "Accuracy and training", "examples through the model", "mean test accuracy, %", grid="both")
    for number, (name, model) in enumerate(frame.groupby("model", sort=False)):
        panel.plot([model.examples.mean()], [model.accuracy.mean()], label=name, **series_style(number))
    legend(figure, 5.0, loc="outside lower center")
    return figure


def notes(rows: pd.DataFrame, options: Options) -> list[str]:
    frame = models(rows)
    joint = frame[frame.run.str.startswith("joint")].drop_duplicates("budget").set_index("budget").run
    runs = frame[(frame["rounds"] > 0) & frame.budget.isin(joint.index)].drop_duplicates("run")
    behind = []
    for run, budget in runs[["run", "budget"]].itertuples(index=False):
        lead = with_interval(difference(rows, run, joint[budget]))
        behind.append(f"{called(rows, run)} {lead}")
    return [
        f"Points against joint training of the same budget: {'; '.join(behind)}. At the same S, what runs in "
        "rounds cost beyond a one-shot merge is N − 1 more exchanges; steps and examples are the same.",
        rate_note(rows),
    ]


def rate_note(rows: pd.DataFrame) -> str:
    """Return whether the best learning rate of joint training is the largest or the smallest of those tried."""
    means = per_seed(rows, "rate", value="validation", part="rate").mean(axis=1)
    if len(means) == 1:
        return "Joint training has one learning rate here, that of single tasks: it may do better with another."
    best, tried = means.idxmax(), list(means.index)
    place = "inside" if tried[0] < best < tried[-1] else "at the end of"
    return (
        f"The best learning rate of joint training, {best:g}, stands {place} those tried, "
        f"{', '.join(f'{rate:g}' for rate in tried)}; the table does not count the other {len(tried) - 1} trainings. "
        "Joint runs of another budget have the rate of single tasks."
    )


STUDY = Study(
    options=Options,
    runs=lambda options: [*options.joint, *options.rates, *options.iterative, *options.one_shot],
    splits=("validation", "test"),
    systems=("M7",),
    measure=measure,
    claims=[
        Claim("M7", "With many rounds MIMA comes within 2 points of joint training at the same budget.", less_joint,
              low=-2, of="paired difference", ours=True,
              caveat="joint training had four rates, MIMA one; its budget is 240 steps; no card was used"),
        Claim("M7", "At the same budget MIMA with many rounds beats the best one-shot merge.", less_one_shot,
              low=0, of="paired difference", ours=True),
    ],
    tables={
        "Accuracy in % and cost of one seed": cost_table,
        "What validation chose for the one-shot merges": choice_table,
        "Joint training by its learning rate: mean validation accuracy, %": rate_table,
    },
    figures={"accuracy": cost_figure},
    notes=notes,
)  # fmt: skip
