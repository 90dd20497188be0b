"""Study `many_tasks` (C1, C2, C4, C6): how do the merge methods compare as tasks are added?

**Question.** One expert per task, merged by every method of the field: who leads, and who loses least as tasks are
added? Above them stand the experts and joint training, below them the base.

**Method.** Every method merges the same experts of the first 8, 14 and 20 tasks. Its scale is chosen on validation,
walking a grid from its usual value until the mean has fallen by one point; every combination of its other arguments is
tried. Larger ranks than are tried here are the study rank_curve's. Then one look at test. AdaMerging learns its
coefficients, one per task and tensor, from the entropy of unlabelled test batches, starting from task arithmetic as
chosen on validation and from CART as the paper has it, 8 % and λ = 1; it is held against CART of the same rank, λ from
validation. Its rate is chosen on validation for each number of tasks, on the first seed, by the rule of the study
`adaptation`. Joint training sees every task's images in every step; MIMA merges and tunes in rounds; all training has
as many steps a task as the experts. Normalised accuracy is
(1/T) Σ_t merged_t / expert_t. ± is over seeds: the order of the batches.

`texts_many_tasks` is the same with 4 and 8 real tasks on texts, tuned on a pre-trained encoder (worlds/real-texts).

**Source.** CART, Tables 1 and 3, Figures 4 and 9, Appendix B; the further methods as `mergeflow methods` explains them.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import pairwise

import pandas as pd
from matplotlib.figure import Figure
from pydantic import Field

from mergeflow.evaluation.scoring import CandidateScorer
from studies.lab import Claim, Laboratory, Row, Section, Study, accuracy_rows, curves, table
from studies.lab.claims import Samples, with_interval
from studies.lab.inputs import State
from studies.lab.methods import (
    ADAPTED,
    CART_START,
    FURTHER,
    IMPROVES,
    NAMES,
    NOT_WORSE,
    OUTPERFORMS,
    PEAK,
    USED,
    Adaptation,
    Direction,
    Sweep,
    adapt_with_rates,
    arguments_of,
    at_end,
    best_of,
    ends_note,
    leader,
    ranges_of,
)
from studies.lab.rows import select, shares
from studies.lab.study import Tables
from tasks.plotting.drawing import FULL_WIDTH, NORMAL, SMALL, dress, new_figure, plain, series_style
from tasks.plotting.palette import INK

BASELINES = ("task_arithmetic", "ties", "consensus")
LADDER = ("zero_shot", "average", "task_arithmetic", "cart", "individual")
RADAR = ("task_arithmetic", "ties", "consensus", "cart", "adamerging_cart")
PEAKED = ("task_arithmetic", "ties", "adamerging_ta")
WITH_DATA = ("zero_shot", "individual", *ADAPTED.values())
# Half of the shares in the paper's Table 1, in % of the headroom, individual less pre-trained
SUBSTANTIAL = 11.2  # CART less Consensus TA, 8 tasks: 9.5 of 42.5 points
FAR = 25.0  # individual less average, the smallest: 14.6 of 29.2 points, ViT-L/14, 8 tasks
FIXED_RANK = "cart_8"  # CART at the rank that AdaMerging scales, λ from validation


class Adapting(Section):
    """AdaMerging. directions: what is scaled. counts: numbers of tasks. rates: tried on validation. steps: of Adam."""

    directions: list[Direction]
    counts: list[int]
    rates: list[float]
    steps: int = Field(ge=1)


class Together(Section):
    """Training beside the merges. label: for readers. counts: the numbers of tasks of its runs NAME_COUNT."""

    label: str
    counts: list[int] = Field(min_length=1)


class Options(Section):
    counts: list[int] = Field(min_length=1)  # numbers of tasks
    methods: dict[str, Sweep]  # name in the catalog → what is tried
    together: dict[str, Together]  # joint and iterative runs by name
    adapted: Adapting  # AdaMerging
    drawn: bool = True  # whether base and tasks are those of the drawn suite, whose base a rule has chosen


def runs(options: Options) -> list[str]:
    return ["experts", *(f"{name}_{count}" for name, together in options.together.items() for count in together.counts)]


def measure(lab: Laboratory, options: Options) -> list[Row]:
    """Return the accuracy of every model for each number of tasks, seed, split and task, with what was chosen.

    The split `start` has the test accuracy of what AdaMerging starts from; `tried` is how many candidates validation
    chose from; rows with `rate` and `step` are the course of AdaMerging on validation, the chosen rate first.
    """
    first, *others = lab.run("experts").seeds
    rows: list[Row] = []
    for seeds in ([first], others):  # the first chooses AdaMerging's rates, which the others read
        # the longest first, so that no processor waits long at the end
        asked = [(count, seed) for count in sorted(options.counts, reverse=True) for seed in seeds]
        pieces = {
            f"{n}_{seed}": lab.first(n).of_run("experts", seed, partial(measure_models, options=options))
            for n, seed in asked
        }
        rows += lab.cached(pieces, "counts and seeds")
    return sorted(rows, key=lambda row: options.counts.index(row["tasks"]))


def measure_models(lab: Laboratory, run: str, seed: int, options: Options) -> Iterator[Row]:
    count, experts = len(lab.tasks), lab.run(run).experts(seed)
    scorer = lab.blind().scorer(experts)
    ranks = ranks_of(options)
    scorer.renew_cache(max([0.01, *ranks]))  # the largest ratio that is asked for: factors beyond need not be kept
    trained = {
        name: f"{name}_{count}"
        for name, together in options.together.items()
        if count in together.counts and seed in lab.run(f"{name}_{count}").seeds
    }
    measures: dict[str, Callable[[], list[Row]]] = {
        "zero_shot": lambda: lab.accuracy_rows(lab.base, "test"),
        "individual": lambda: accuracy_rows(lab.individual(experts, "test")),
        **{name: lab.of_run(together, seed, measure_trained) for name, together in trained.items()},
        **{name: partial(measure_method, lab, scorer, name, sweep) for name, sweep in options.methods.items()},
    }
    if USED in ranks and len(ranks) > 1:
        fixed = options.methods["cart"].model_copy(update={"args": {"rank_ratio": [USED]}})
        measures[FIXED_RANK] = partial(measure_method, lab, scorer, "cart", fixed)
    scale = math.nan
    for model, measured in measures.items():
        about = {"seed": seed, "tasks": count, "model": model, "split": "test"}
        rows = lab.keep(f"{count}_{seed}_{model}", measured)
        scale = rows[0]["scale"] if model == "task_arithmetic" else scale
        yield from ({**about, **row} for row in rows)
    for on in options.adapted.directions if count in options.adapted.counts else []:
        init = scale if on == "task_vectors" else CART_START
        plan = Adaptation(on, "layer", "test", init=init, lr=options.adapted.rates[0], steps=options.adapted.steps)
        adapted = partial(measure_adapted, lab, experts, plan, options.adapted.rates, count, seed)
        yield from lab.keep(f"{count}_{seed}_{ADAPTED[on]}", adapted)


def ranks_of(options: Options) -> list[float]:
    return list(options.methods.get("cart", Sweep()).args.get("rank_ratio", []))


def measure_trained(lab: Laboratory, name: str, seed: int) -> list[Row]:
    return lab.accuracy_rows(lab.run(name).final(seed), "test")


def measure_method(lab: Laboratory, scorer: CandidateScorer, method: str, sweep: Sweep) -> list[Row]:
    """Choose a method's arguments on validation, look at test once."""
    best, tried = best_of(sweep, method, scorer.candidate)
    splits = {"test": lab.accuracy(scorer.merge(best.call), "test"), "validation": best.scores}
    chosen = {**best.varied, "tried": tried}
    return [row | chosen for split, accuracies in splits.items() for row in accuracy_rows(accuracies, split=split)]


def measure_adapted(
    lab: Laboratory, experts: Mapping[str, State], plan: Adaptation, rates: list[float], count: int, seed: int
) -> Iterator[Row]:
    """Adapt a coefficient per task and tensor on unlabelled test images, with the rate that validation chose."""
    about = {"seed": seed, "tasks": count, "model": ADAPTED[plan.on]}
    start = lab.accuracy(lab.scorer(experts).merge(plan.static), "test")
    first, name = lab.run("experts").seeds[0], f"{count}_rates_{plan.on}"
    made, tried = adapt_with_rates(lab, experts, plan, rates, name, seed, first)
    yield from lab.accuracy_rows(made.state, "test", **about, split="test")
    yield from accuracy_rows(start, **about, split="start")
    for trial in tried:
        for step, value in trial["course"].items():
            yield {**about, "split": "validation", "rate": trial["lr"], "step": int(step), "accuracy": value}


# What the rows are asked


def mean_test(rows: pd.DataFrame, model: str, split: str = "test") -> pd.DataFrame:
    """Return the mean test accuracy: a row for each number of tasks, a column for each seed."""
    return select(rows, split=split, model=model).groupby(["tasks", "seed"]).accuracy.mean().unstack("seed")


def relative(rows: pd.DataFrame, model: str) -> pd.DataFrame:
    """Return the normalised accuracy in %, as `mean_test` does."""
    test = select(rows, split="test").set_index(["tasks", "seed", "task"])
    ratios = shares(select(test, model=model).accuracy, select(test, model="individual").accuracy)
    return ratios.dropna().groupby(["tasks", "seed"]).mean().unstack("seed")


def by_count(frame: pd.DataFrame) -> Samples:
    """Return the values at each number of tasks, for the seeds that have them."""
    return {f"{count} tasks": of_count for count in frame.index if len(of_count := frame.loc[count].dropna())}


def lead(better: str, worse: str, rows: pd.DataFrame) -> pd.DataFrame:
    return mean_test(rows, better) - mean_test(rows, worse)


def leads(better: str, worse: str, rows: pd.DataFrame) -> Samples:
    return by_count(lead(better, worse, rows))


def share_leads(better: str, worse: str, rows: pd.DataFrame) -> Samples:
    """Return leads in % of the headroom, experts less zero-shot."""
    return by_count(100 * lead(better, worse, rows) / lead("individual", "zero_shot", rows))


def gain(model: str, rows: pd.DataFrame) -> Samples:
    """Return the gain of adapting over its static start."""
    return by_count(mean_test(rows, model) - mean_test(rows, model, "start"))


def ladder(rows: pd.DataFrame) -> Samples:
    steps = [(high, leads(high, low, rows)) for low, high in pairwise(m for m in LADDER if m in set(rows.model))]
    lower = dict(zip(LADDER[1:], LADDER, strict=False))
    names = {
        f"{count}, {NAMES[high]} less {NAMES[lower[high]]}": gains[count] for high, gains in steps for count in gains
    }
    return dict(sorted(names.items(), key=lambda item: int(item[0].split()[0])))


def lost(model: str, rows: pd.DataFrame) -> pd.Series:
    """Return by seed what a model loses of normalised accuracy from the fewest tasks to the most, in points."""
    shares_kept = relative(rows, model)
    return (shares_kept.iloc[0] - shares_kept.iloc[-1]).dropna()


def more_lost(rows: pd.DataFrame) -> Samples:
    others = [model for model in NAMES if model in set(rows.model) and model not in (*WITH_DATA, "cart")]
    return {f"{NAMES[m]} loses more by": (lost(m, rows) - lost("cart", rows)).dropna() for m in others}


def ahead_at_the_peak(rows: pd.DataFrame) -> Samples:
    fewest = rows.tasks.min()
    rivals = [model for model in PEAKED if model in set(rows.model)]
    room = lead("individual", "zero_shot", rows).loc[fewest]
    return {f"less {NAMES[model]}": 100 * lead("cart", model, rows).loc[fewest] / room for model in rivals}


# CART's leads in the paper's Table 1, ViT-B/32
AHEAD = {
    "task_arithmetic": "15.6, 14.1, 15.8 points with 8, 14, 20 tasks",
    "ties": "12.3, 14.3, 13.4 points with 8, 14, 20 tasks",
    "consensus": "9.5, 9.5, 11.3 points with 8, 14, 20 tasks",
    "adamerging_ta": "4.6, 2.8, 7.1 points with 8, 14, 20 tasks",
}
CHOSEN = (
    "the suite's base was adopted by a rule that asks for this sign, which holds on four bases (study bases); "
    "validation chooses among 25 to 38 candidates for CART, 4 to 6 for task arithmetic"
)
MISSING = "no claim holds joint training and MIMA in Table 1's order: some numbers of tasks lack them"

# fmt: off

def claims(options: Options) -> list[Claim]:
    always, fewest, most = "paired difference at every number of tasks", min(options.counts), max(options.counts)
    chosen_base = CHOSEN if options.drawn else ""
    return [
        *(Claim("C1", f"CART beats {NAMES[m]}, whatever the number of tasks.", partial(leads, "cart", m),
                low=0, of=always, caveat=chosen_base, paper=AHEAD[m]) for m in BASELINES),
        Claim("C1", "CART outperforms Consensus TA by a substantial margin, whatever the number of tasks.",
              partial(share_leads, "cart", "consensus"), low=SUBSTANTIAL, unit="% of the headroom",
              of=f"{always}, half of the paper's share,", paper="9.5 points, 22.4 % of the headroom, 8 tasks",
              caveat=chosen_base),
        Claim("C6", "Weight averaging is far below the individual experts.",
              partial(share_leads, "individual", "average"), low=FAR, unit="% of the headroom",
              of=f"{always}, half of the paper's smallest share,", caveat=MISSING,
              paper="14.6 points, 50 % of the headroom, the smallest of Table 1"),
        Claim("C6", "Weight averaging generally performs worse than task arithmetic.",
              lambda rows: {"mean over the numbers of tasks": lead("task_arithmetic", "average", rows).mean()},
              low=0, of="task arithmetic less average, in the mean over the numbers of tasks,", caveat=MISSING,
              paper="3.2, 1.1, −0.5 points with 8, 14, 20 tasks"),
        Claim("C6", "zero-shot < average < task arithmetic < CART < individual, whatever the number of tasks.", ladder,
              low=0, of="each paired difference", ours=True,
              paper="task arithmetic is below the average with 20 tasks (Table 1)"),
        *(Claim("C2", OUTPERFORMS, ahead_at_the_peak, setting=f"{fewest} tasks, rank and λ by validation", **PEAK)
          for _ in ranks_of(options)[1:2]),
        Claim("C6", f"From {fewest} to {most} tasks CART loses least of all merges without data.", more_lost,
              low=0, of="paired difference of what is lost, normalised, against every other merge without data",
              paper="does not say so: in its Table 1 the average loses less", ours=True,
              also=lambda rows: f"; CART loses {with_interval(lost('cart', rows))}"),
        *(adapted_claims(always) if options.adapted.directions else []),
    ]


def adapted_claims(always: str) -> list[Claim]:
    return [
        Claim("C1", "CART beats AdaMerging + TA, whatever the number of tasks.",
              partial(leads, "cart", "adamerging_ta"), low=0, of=always, paper=AHEAD["adamerging_ta"]),
        Claim("C4", IMPROVES, partial(leads, "adamerging_cart", FIXED_RANK), setting="per layer", **FURTHER),
        Claim("C4", "AdaMerging on CART at 8 % is better than CART that may choose its rank and larger λ as well.",
              partial(leads, "adamerging_cart", "cart"), low=0, of="paired difference", ours=True),
        Claim("C4", "An adapted merge is at least as good as its static start.", partial(gain, "adamerging_ta"),
              low=NOT_WORSE, of="paired difference", setting="per layer on task arithmetic, λ from validation"),
        Claim("C4", "An adapted merge is at least as good as its static start.", partial(gain, "adamerging_cart"),
              low=NOT_WORSE, of="paired difference", setting="per layer on CART, 8 %, λ = 1"),
        Claim("C4", "AdaMerging on CART's directions is better than on task vectors.",
              partial(leads, "adamerging_cart", "adamerging_ta"), low=0, of="paired difference",
              paper="5.7, 5.6, 13.5 points with 8, 14, 20 tasks"),
    ]

# fmt: on


def names_of(rows: pd.DataFrame, options: Options) -> dict[str, str]:
    """Return model → what readers call it, in the order of the tables."""
    labels = {name: together.label for name, together in options.together.items()}
    zero_shot, individual, *rest = NAMES.items()
    return {
        m: name for m, name in dict([zero_shot, individual, *labels.items(), *rest]).items() if m in set(rows.model)
    }


def summary(options: Options, values: Callable[[pd.DataFrame, str], pd.DataFrame], rows: pd.DataFrame) -> pd.DataFrame:
    """Return a line for each model: its values at each number of tasks, and the change from the fewest to the most."""
    lines, fewest, most = {}, rows.tasks.min(), rows.tasks.max()
    for model, name in names_of(rows, options).items():
        frame = values(rows, model).reindex(sorted(rows.tasks.unique()))
        measured = {**by_count(frame), f"{fewest} → {most}": (frame.loc[most] - frame.loc[fewest]).dropna()}
        lines[name] = {what: with_interval(values) for what, values in measured.items() if len(values)}
    columns = [*(f"{count} tasks" for count in sorted(rows.tasks.unique())), f"{fewest} → {most}"]
    return pd.DataFrame(lines).T.reindex(columns=columns).fillna("")


def per_task(options: Options, count: int, rows: pd.DataFrame) -> pd.DataFrame:
    of_count, names = select(rows, split="test", tasks=count), names_of(rows, options)
    means = of_count.pivot_table(index="model", columns="task", values="accuracy", sort=False).round(1)
    return means.loc[[model for model in names if model in means.index]].rename(names)


def chosen(options: Options, rows: pd.DataFrame) -> pd.DataFrame:
    """Return the arguments that validation chose, most frequent first, with seeds and the number of candidates."""
    choices = select(rows, split="test")
    choices = choices[choices.tried.notna()].drop_duplicates(["tasks", "seed", "model"])
    words = [text or "–" for text in arguments_of(choices)]
    choices = choices.assign(chosen=words, model=choices.model.map(names_of(rows, options)))
    lines: dict[str, dict[str, str]] = {}
    for (model, count), seeds in choices.groupby(["model", "tasks"], sort=False):
        counted = Counter(seeds.chosen).most_common()
        said = "; ".join(text if text == "–" else f"{text} ({times} of {len(seeds)})" for text, times in counted)
        least, most = int(seeds.tried.min()), int(seeds.tried.max())
        lines.setdefault(model, {})[f"{count} tasks"] = f"{said}, tried {least}" + f" to {most}" * (most > least)
    return pd.DataFrame(lines).T


def rates(options: Options, rows: pd.DataFrame) -> pd.DataFrame:
    """Return the course of AdaMerging for each rate, the chosen one first."""
    courses = rows[rows.rate.notna() & (rows.seed == rows.seed.iloc[0])]
    courses = courses.assign(model=courses.model.map(NAMES), step=courses.step.astype(int))
    return table(courses, ["model", "tasks", "rate"], "step") if len(courses) else courses


ADAPTED_RATES = "AdaMerging's rates on validation images, first seed, % over the steps, the chosen first"


def tables(options: Options) -> Tables:
    return {
        "Mean test accuracy, %": partial(summary, options, mean_test),
        "Normalised test accuracy, %": partial(summary, options, relative),
        **{
            f"Test accuracy per task, %, {count} tasks, mean over seeds": partial(per_task, options, count)
            for count in options.counts
        },
        "Chosen on validation, in so many of the seeds": partial(chosen, options),
        **({ADAPTED_RATES: partial(rates, options)} if options.adapted.directions else {}),
    }


def radar_figure(options: Options, rows: pd.DataFrame) -> Figure:
    """Draw normalised accuracy per task around a circle, from 40 % on, for each number of tasks (Figure 4)."""
    figure = new_figure(FULL_WIDTH, 4.6)
    counts = sorted(rows.tasks.unique())
    axes = figure.subplots(1, len(counts), subplot_kw={"projection": "polar"}, squeeze=False)[0]
    for panel, count in zip(axes, counts, strict=True):
        dress(panel, f"{count} tasks\n", grid="both")
        of_count = select(rows, split="test", tasks=count)
        means = of_count.pivot_table(index="model", columns="task", values="accuracy", sort=False)
        angles = [2 * math.pi * index / means.shape[1] for index in range(means.shape[1])]
        for number, model in enumerate(model for model in RADAR if model in means.index):
            heights = list(100 * means.loc[model] / means.loc["individual"])
            style = {**series_style(number), "marker": ""}
            panel.plot([*angles, angles[0]], [*heights, heights[0]], label=plain(NAMES[model]), **style)
        panel.set_theta_offset(math.pi / 2)
        panel.set_theta_direction(-1)
        panel.set_rlabel_position(180 / len(angles))
        panel.set_ylim(40, 103)  # what matters lies above zero-shot
        panel.set_yticks([50, 75, 100], labels=["50", "75", "100"])
        panel.set_xticks(angles, labels=[plain(task) for task in means.columns])
        panel.tick_params(axis="x", labelcolor=INK, labelsize=NORMAL if len(angles) < 10 else SMALL - 1)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=SMALL, frameon=False)
    return figure


def loss_figure(options: Options, rows: pd.DataFrame) -> Figure:
    """Draw normalised accuracy over the number of tasks, a line per model (Figure 9)."""
    names = {m: name for m, name in names_of(rows, options).items() if m != "individual"}  # 100 by definition
    shares = {name: relative(rows, model).stack() for model, name in names.items()}
    long = pd.concat(shares, names=["model"]).rename("share").reset_index()
    return curves(long, "tasks", "model", "share", title="Accuracy and number of tasks", x_label="tasks",
                  y_label="normalised test accuracy, %", ticks=sorted(rows.tasks.unique()), height=5.6)  # fmt: skip


def notes(rows: pd.DataFrame, options: Options) -> list[str]:
    names, below = names_of(rows, options), []
    merged = [model for model in names if model not in ("zero_shot", "individual", *options.together)]
    for count in sorted(rows.tasks.unique()):
        at = {m: list(test.loc[count].dropna()) for m in merged if count in (test := mean_test(rows, m)).index}
        best, words = leader(at, names)
        below.append(f"{with_interval(lead('individual', best, rows).loc[count])} points ({count} tasks)")
    return [
        f"Of the merges of {rows.tasks.max()} tasks the highest mean is that of {words}. The highest mean of a merge "
        f"stays below the experts by {', '.join(below)}.",
        "Tasks differ in what there is to lose: the tables per task show where merging fails.",
        *ends_note(at_ends(rows, options, names)),
    ]


def at_ends(rows: pd.DataFrame, options: Options, names: Mapping[str, str]) -> Iterator[str]:
    ends: Counter[str] = Counter()
    for row in select(rows, split="test").drop_duplicates(["tasks", "seed", "model"]).to_dict("records"):
        tried = ranges_of(options.methods[row["model"]]) if row["model"] in options.methods else {}
        taken = [name for name, values in tried.items() if at_end(row[name], values)]
        ends.update(f"{name} of {names[row['model']]} with {row['tasks']} tasks" for name in taken)
    if options.adapted.directions:
        rated = rows[rows.rate.notna()].drop_duplicates(["tasks", "model"])  # one choice, for all seeds
        for row in rated[rated.rate.map(lambda rate: at_end(rate, options.adapted.rates))].to_dict("records"):
            ends[f"rate of {names[row['model']]} with {row['tasks']} tasks"] += 1
    yield from (f"{name} ({times} seed{'s' * (times > 1)})" for name, times in ends.items())


STUDY = Study(
    options=Options,
    runs=runs,
    splits=("validation", "test"),
    systems=("C1", "C2", "C4", "C6"),
    measure=measure,
    claims=claims,
    tables=tables,
    figures=lambda options: {"radar": partial(radar_figure, options), "counts": partial(loss_figure, options)},
    notes=notes,
)
STUDIES = {"many_tasks": STUDY, "texts_many_tasks": STUDY}
