"""Study `subset_scaling` (C7): what does one more task cost each merge method?

**Question.** Normalised accuracy over the number N of merged tasks, as a mean over subsets of the twenty tasks: which
method loses least from few tasks to many?

**Method.** For each N, subsets are drawn without repetition, each equally likely. *How many.* The paper's rule is
m = ⌈(1.96 σ/ε)²⌉ with Popoviciu's bound σ = (b − a)/2 of the standard deviation of a value in [a, b]; a is the mean of
the N lowest zero-shot accuracies, b that of the N highest individual ones (on validation, so that test plays no part in
the plan). With an ε that means something that bound asks for hundreds of subsets, because it knows the ends alone. So
m is found in two stages (Stein 1945): the first `pilot` subsets give s, the largest standard deviation of mean
validation accuracy of any method, and m = ⌈(t s/ε)²⌉ with t of pilot − 1 degrees, at least `pilot`, at most `most` and
at most the number C(20, N) of subsets, which are then all measured. Both m are in the table, and whether the interval
of the mean then is as narrow as ε is measured on test. All methods merge the same subsets:

    average,    θ0 + λ Σ_t τ_t (task arithmetic),    TIES (λ = 1, share kept),    CART (λ = 1, rank ratio),

each with its argument chosen per subset by mean accuracy on the first validation images of the subset's own tasks, and
then one look at its first test images. The paper's λ of task arithmetic end at 0.3, less than the average's 1/N at N =
2, so the same choice is also made with larger ones ("wider λ"). Normalised accuracy is (1/N) Σ_t merged_t /
individual_t. Of two tasks CART is the average, whatever k and λ: the centred task vectors are ± (θ_1 − θ_2)/2, and
their low-rank parts cancel. The grids are the paper's; how often a choice stands at an end of one is told below the
findings. The interval is t_{m−1} s/√m √(1 − m/M) with M = C(20, N): zero where all
subsets were measured. Methods are compared subset by subset, and the same subsets are merged for the experts of every
seed. *±*: tables have the interval over subsets of the first seed's experts; verdicts are over seeds, of means over
subsets.

`texts_subset_scaling` is the same with eight real tasks on a pre-trained encoder, where every method but the average
has four candidates along λ, and one share kept or rank (worlds/real-texts).

**Source.** CART, Section 5.3 ("Scalability on number of tasks"), Figure 7 and Appendix D.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from math import ceil, comb, inf
from statistics import stdev
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from pydantic import Field
from scipy import stats

from mergeflow.evaluation.averages import (
    accuracy_range,
    draw_subsets,
    mean,
    popoviciu_bound,
    sample_size,
    subset_interval,
)
from mergeflow.evaluation.scoring import CandidateScorer
from mergeflow.merging import configure
from mergeflow.modalities.classification import Subset
from mergeflow.modality import Examples
from mergeflow.search.candidates import grid_of
from studies.lab import Claim, Laboratory, Row, Section, Study
from studies.lab.claims import Samples, Verdict
from studies.lab.inputs import State
from studies.lab.methods import at_end, ends_note
from studies.lab.rows import select, shares
from studies.lab.study import Tables
from tasks.plotting.drawing import FULL_WIDTH, dress, legend, panels, plain, series_style
from tasks.plotting.palette import MUTED

WIDER = ", wider λ"
OURS = "cart"
NAMES = {"average": "average", "task_arithmetic": "task arithmetic", "ties": "TIES", OURS: "CART"}
ARGUMENTS = ("scale", "keep", "rank_ratio")
SUPERIOR = 0.1  # points: the least that a table prints
SAME = ("average", 2)  # of two tasks CART is the average, whatever the rank

Split = Mapping[str, Examples]


class Options(Section):
    experts: str  # the run whose experts are merged
    sizes: list[int] = Field(min_length=2)  # the N
    starts: list[int] = Field(min_length=1)  # those from which the loss up to the largest N is told
    margin: float = Field(gt=0, le=0.03)  # ε, a share
    pilot: int = Field(ge=3)  # pilot, most: subsets of one N, in the first stage and at most
    most: int = Field(ge=3)
    draw: int = 0  # seed of the draw
    validation: int = Field(ge=1)  # validation, test: images per task
    test: int = Field(ge=1)
    grids: dict[str, dict[str, list[float]]]  # method → argument → values
    wider: dict[str, list[float]]  # method → further scales, with which the choice is made once more


def measure(lab: Laboratory, options: Options) -> Iterator[Row]:
    """Yield test accuracy for each seed, subset, method and task, with what was chosen and the plan of the sample."""
    first, *others = lab.run(options.experts).seeds
    rows = lab.by_run([options.experts], partial(measure_seed, options=options, plans=None), [first])
    yield from rows
    plans = []  # the first seed decides which subsets all merge
    for _, group in groupby(rows, key=lambda row: row["size"]):
        members = list(group)
        plan = {name: members[0][name] for name in ("size", "a", "b", "epsilon", "population")}
        plans.append(plan | {"subsets": [text.split() for text in dict.fromkeys(row["subset"] for row in members)]})
    yield from lab.by_run([options.experts], partial(measure_seed, options=options, plans=plans), others)


def measure_seed(lab: Laboratory, run: str, seed: int, options: Options, plans: list[Row] | None) -> Iterator[Row]:
    """Yield the rows of one seed's experts; which subsets are merged is decided here if no plans are given."""
    splits = [
        {task: Subset.first(data, count) for task, data in opened.items()}
        for opened, count in (
            (lab.blind().examples("validation"), options.validation),
            (lab.examples("test"), options.test),
        )
    ]
    experts = lab.run(run).experts(seed)
    validation, test = lab.keep(f"known_{seed}", partial(references, lab, experts, splits))

    def work(size: int, number: int, subset: Sequence[str]) -> list[Row]:
        return lab.keep(f"{seed}_{size}_{number}", partial(measure_subset, lab, options, splits, experts, subset))

    for plan in plans or [plan_sample(lab.tasks, validation, options, size, work) for size in options.sizes]:
        planned = {name: plan[name] for name in ("a", "b", "epsilon", "population")}
        for number, subset in enumerate(plan["subsets"]):
            about = {"seed": seed, "size": plan["size"], "subset": " ".join(subset)}
            for row in work(plan["size"], number, subset):
                levels = {name: 100 * test[name][row["task"]] for name in ("expert", "zero_shot")}
                yield {**about, **row, **levels, **planned}


def references(lab: Laboratory, experts: Mapping[str, State], splits: Sequence[Split]) -> Iterator[Row]:
    """Yield zero-shot and individual accuracy per task on the images that the study uses of each split."""
    scorer = lab.scorer({})
    for split in splits:
        experts_alone = {task: scorer.state(experts[task], {task: split[task]})[task] for task in split}
        yield {"zero_shot": scorer.state(lab.base, split), "expert": experts_alone}


def plan_sample(
    tasks: Sequence[str], references: Row, options: Options, size: int, work: Callable[..., list[Row]]
) -> dict[str, Any]:
    """Return which subsets of one N are merged: those of the pilot, and as many more as its spread asks for.

    Args:
        references: `zero_shot` and `expert`, accuracy per task on validation.
        size: N.
        work: returns the rows of a subset, by N, number and tasks.
    """
    low, high = accuracy_range(references["zero_shot"], references["expert"], size)
    pilot = draw_subsets(tasks, size, options.pilot, options.draw)
    chosen = [{row["method"]: row["validation"] for row in work(size, n, subset)} for n, subset in enumerate(pilot)]
    spread = max(stdev(row[method] for row in chosen) for method in options.grids) if len(pilot) > 1 else 0.0
    asked = two_stage_size(spread / 100, options.margin, max(len(pilot), 2))
    count = min(max(asked, len(pilot)), options.most)
    return {
        "size": size,
        "subsets": draw_subsets(tasks, size, count, options.draw),
        "a": 100 * low,
        "b": 100 * max(low, high),  # experts may be no better than the base
        "epsilon": 100 * options.margin,
        "population": comb(len(tasks), size),
    }


def two_stage_size(deviation: float, margin: float, pilot: int) -> int:
    """Return m = ⌈(t s/ε)²⌉ with t of pilot − 1 degrees of freedom, at least the pilot.

    Args:
        deviation: s of the pilot.
        margin: ε, in the units of s.

    Example:
        >>> two_stage_size(0.03, 0.02, 10)
        12

    Source: Stein 1945, A two-sample test for a linear hypothesis whose power is independent of the variance.
    """
    quantile = float(stats.t.ppf(0.975, pilot - 1))
    return max(ceil((quantile * deviation / margin) ** 2), pilot)


def measure_subset(
    lab: Laboratory, options: Options, splits: Sequence[Split], experts: Mapping[str, State], subset: Sequence[str]
) -> Iterator[Row]:
    """Yield test accuracy of one subset for each method and task, with what validation chose."""
    validation, test = ({task: split[task] for task in subset} for split in splits)
    scorer = lab.blind().scorer({task: experts[task] for task in subset})
    scorer.renew_cache(max(options.grids.get(OURS, {}).get("rank_ratio", [1.0])))
    looks: dict[str, dict[str, float]] = {}
    for name, (args, value) in choose(scorer, options, validation).items():
        call = configure(name.removesuffix(WIDER), args)
        if str(call) not in looks:  # a wider choice that is the same is not looked at again
            looks[str(call)] = scorer.state(scorer.merge(call), test)
        for task, accuracy in looks[str(call)].items():
            yield {"method": name, "task": task, "accuracy": 100 * accuracy, "validation": 100 * value, **args}


def choose(scorer: CandidateScorer, options: Options, examples: Split) -> dict[str, tuple[dict[str, Any], float]]:
    """Return by method the arguments that are best on validation, of equals the first, and the accuracy there.

    Args:
        options: grids, and the wider scales with which a method's choice is made once more.
    """

    def score(method: str, tried: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], float]]:
        return [(args, mean(scorer.state(scorer.merge(method, **args), examples))) for args in tried]

    chosen = {}
    for method, grid in options.grids.items():
        tried = grid_of(method, grid)
        scored = score(method, tried)
        chosen[method] = max(scored, key=lambda pair: pair[1])
        if method in options.wider:
            further = [{**args, "scale": scale} for args in tried for scale in options.wider[method]]
            chosen[method + WIDER] = max([*scored, *score(method, further)], key=lambda pair: pair[1])
    return chosen


# What the rows are asked


def by_subset(rows: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each seed, subset and method: mean and normalised accuracy in %, and how far CART is ahead."""
    key = ["method", "size", "seed", "subset"]
    first = rows.groupby(key, sort=False)[["validation", *ARGUMENTS, "a", "b", "epsilon", "population"]].first()
    whole = rows.assign(normalised=shares(rows.accuracy, rows.expert), zero=shares(rows.zero_shot, rows.expert))
    merged = first.join(whole.groupby(key, sort=False)[["accuracy", "normalised", "zero"]].mean()).reset_index()
    ours = merged.set_index(key[1:]).normalised[(merged.method == OURS).to_numpy()]
    return merged.assign(ahead=merged[key[1:]].merge(ours.reset_index(), how="left").normalised - merged.normalised)


def methods_of(rows: pd.DataFrame) -> list[str]:
    return list(rows.method.drop_duplicates())


def name_of(method: str) -> str:
    """Return a method's name for readers.

    Example:
        >>> name_of("task_arithmetic, wider λ")
        'task arithmetic, wider λ'
    """
    narrow = method.removesuffix(WIDER)
    return NAMES.get(narrow, narrow) + method[len(narrow) :]


def means(rows: pd.DataFrame, method: str, value: str) -> pd.DataFrame:
    """Return the mean over subsets: a row for each N, a column for each seed."""
    return select(by_subset(rows), method=method).groupby(["size", "seed"])[value].mean().unstack("seed")


def leads(methods: Sequence[str], rows: pd.DataFrame) -> Samples:
    frames = {method: means(rows, method, "ahead") for method in methods}
    pairs = [(method, size) for method, frame in frames.items() for size in frame.index if (method, size) != SAME]
    return {f"less {name_of(method)}, N = {size}": frames[method].loc[size] for method, size in pairs}


def falls(methods: Sequence[str], rows: pd.DataFrame) -> Samples:
    frames = {name_of(method): means(rows, method, "accuracy") for method in methods}
    first, last = rows["size"].min(), rows["size"].max()
    return {f"{name}, N = {first} → {last}": frame.loc[last] - frame.loc[first] for name, frame in frames.items()}


def growth(start: int, rows: pd.DataFrame) -> Samples:
    """Return how CART's lead grows from one N to the largest: it loses less where it grows."""
    frames = {name_of(method): means(rows, method, "ahead") for method in methods_of(rows) if method != OURS}
    return {f"CART's lead over {name} grows by": frame.iloc[-1] - frame.loc[start] for name, frame in frames.items()}


def spreads(rows: pd.DataFrame, value: str = "normalised") -> pd.DataFrame:
    """Return the standard deviation over subsets: a row for each N and seed, a column for each method."""
    return by_subset(rows).groupby(["size", "seed", "method"])[value].std().unstack("method")


def unsteadiness(methods: Sequence[str], rows: pd.DataFrame) -> Samples:
    """Return CART's spread over subsets less the smallest of the others', at each N that has more than one subset.

    The paper finds TIES's error bars comparable with four tasks. With two, CART is the average.
    """
    less: dict[str, pd.Series] = {}
    for size, frame in spreads(rows).dropna().groupby(level="size"):
        compared = [method for method in methods if (method, size) not in (("ties", 4), SAME)]
        if compared:
            less[f"N = {size}"] = frame[OURS] - frame[compared].min(axis=1)
    return less


def intervals(rows: pd.DataFrame, value: str) -> pd.DataFrame:
    """Return mean and half interval over subsets, by N, seed and method."""
    groups = by_subset(rows).groupby(["size", "seed", "method"], sort=False)
    spans = groups.apply(lambda group: subset_interval(list(group[value]), int(group.population.iloc[0])))
    return pd.DataFrame(spans.to_list(), spans.index, ["mean", "half"])


def widest(rows: pd.DataFrame, value: str) -> pd.DataFrame:
    """Return the widest half interval over subsets of all methods: a row for each N, a column for each seed."""
    return intervals(rows, value).half.groupby(["size", "seed"]).max().unstack("seed")


def counts(rows: pd.DataFrame) -> pd.Series:
    """Return by N how many subsets were measured."""
    return rows.groupby("size").subset.nunique()


def widest_of_samples(rows: pd.DataFrame) -> Samples:
    """Return the widest half interval of each N of which not all subsets were measured."""
    halves, populations = widest(rows, "accuracy"), rows.groupby("size").population.first()
    return {f"N = {n}, m = {m}": halves.loc[n] for n, m in counts(rows).items() if m < populations[n]}


def in_range(rows: pd.DataFrame) -> tuple[Verdict, str]:
    """Say whether every mean accuracy lies in [a, b]; the bound of σ rests on it, and merging does not guarantee it."""
    ends = by_subset(rows).groupby("size").agg(
        least=("accuracy", "min"), most=("accuracy", "max"), a=("a", "first"), b=("b", "first")
    )  # fmt: skip
    inside = bool(((ends.a <= ends.least) & (ends.most <= ends.b)).all())
    return inside, ", ".join(
        f"{bounds.least:.1f} … {bounds.most:.1f} in {bounds.a:.1f} … {bounds.b:.1f} (N = {size})"
        for size, bounds in ends.iterrows()
    )


# Claims, written before the run
# fmt: off

def claims(options: Options) -> list[Claim]:
    others = [method for method in options.grids if method != OURS]
    wide = [method + WIDER for method in options.wider]
    first, last = min(options.sizes), max(options.sizes)
    lead = "mean paired difference of normalised accuracy over the subsets, the least that is printed and more, at "
    lead += "every N (but for the average of two tasks, which CART is),"
    spread = "standard deviation of normalised accuracy over subsets less the smallest of the others (with two tasks "
    spread += "CART is the average, which does not count there)"
    return [
        Claim("C7", "CART is superior to averaging, task arithmetic and TIES at every number of tasks.",
              partial(leads, others), low=SUPERIOR, of=lead,
              caveat="the sample of subsets with N = 4 is smaller than the paper's rule asks for"),
        Claim("C7", "So it is against task arithmetic that may choose larger λ.", partial(leads, wide),
              low=SUPERIOR, of=lead, ours=True),
        Claim("C7", "Averaging, task arithmetic and TIES degrade notably as the number of tasks increases.",
              partial(falls, others),
              high=-1, of="change of mean accuracy over the subsets from the smallest number of tasks to the largest"),
        *(Claim("C7", f"CART degrades least from {start} to {last} tasks.", partial(growth, start),
                low=0, of="growth of the mean paired lead in normalised accuracy, against every method,", ours=True)
          for start in options.starts if first <= start),
        Claim("C7", "CART has the smallest error bars at every number of tasks, but for TIES with four.",
              partial(unsteadiness, others), high=0, of=spread),
        Claim("C7", "CART's error bars are no larger than those of task arithmetic that may choose larger λ.",
              partial(unsteadiness, wide), high=0, of=spread, ours=True),
        Claim("C7", "The sample is large enough: no method's 95 % interval of mean accuracy over subsets is wider than "
              "± ε.", widest_of_samples, high=100 * options.margin, of="widest half interval on test, against ε,",
              ours=True),
        Claim("C7", "Every measured mean accuracy lies in [a, b], as the bound of σ assumes.",
              of="no subset of any seed outside: one refutes it", decide=in_range),
    ]

# fmt: on

# What is shown: the subsets of the first seed


def of_first(rows: pd.DataFrame) -> pd.DataFrame:
    return select(rows, seed=rows.seed.iloc[0])


def shown(intervals: pd.DataFrame) -> pd.Series:
    """Return mean ± half-width as text; the mean alone where all subsets were measured or one tells of no others."""
    spreads = intervals.half.map(" ± {:.1f}".format).where(intervals.half.between(0, inf, inclusive="neither"), "")
    return intervals["mean"].map("{:.1f}".format) + spreads


def over_sizes(rows: pd.DataFrame) -> pd.DataFrame:
    first = of_first(rows)
    cells = shown(intervals(first, "normalised").droplevel("seed")).unstack("method")
    return cells[methods_of(rows)].rename(columns=name_of).assign(subsets=counts(first)).rename_axis("N")


def losses(options: Options, rows: pd.DataFrame) -> pd.DataFrame:
    """Return the cost of more tasks, with the interval of two independent samples."""
    curves, many = intervals(of_first(rows), "normalised").droplevel("seed"), max(options.sizes)
    last, columns = curves.xs(many), {}
    for few in options.starts:
        first = curves.xs(few)
        lost = pd.DataFrame({"mean": first["mean"] - last["mean"], "half": np.hypot(first.half, last.half)})
        columns[f"lost from N = {few} to {many}"] = shown(lost)
    return pd.DataFrame(columns).rename(index=name_of)


def sampling(options: Options, rows: pd.DataFrame) -> pd.DataFrame:
    first, lines = of_first(rows), {}
    halves = widest(first, "accuracy").iloc[:, 0]
    for size, group in by_subset(first).groupby("size"):
        plan, pilot = group.iloc[0], min(options.pilot, group.subset.nunique())
        planned = group[group.method.isin(list(options.grids))].groupby("method").head(pilot)
        spread = planned.groupby("method").validation.std().fillna(0).max()
        bound = popoviciu_bound(plan.a / 100, plan.b / 100)
        lines[size] = {
            "subsets there are": int(plan.population),
            "m by the rule": sample_size(bound, plan.epsilon / 100),
            "m in two stages": two_stage_size(spread / 100, plan.epsilon / 100, max(pilot, 2)),
            "m measured": group.subset.nunique(),
            "widest ±, accuracy": f"{halves[size]:.1f}",
        }
    return pd.DataFrame(lines).T.rename_axis("N")


def tables(options: Options) -> Tables:
    return {
        "Normalised test accuracy, %": over_sizes,
        "What more tasks cost, normalised accuracy in points": partial(losses, options),
        "The sample: promised and realised half intervals, points": partial(sampling, options),
    }


def scaling_figure(rows: pd.DataFrame) -> Figure:
    """Draw normalised accuracy over N (the paper's Figure 7), and how far CART is ahead subset by subset."""
    figure, axes = panels(2, 2, 3.9)
    first = of_first(rows)
    titles = {"normalised": "Normalised accuracy, %", "ahead": "CART's lead, points"}
    for axis, (value, title) in zip(axes, titles.items(), strict=True):
        dress(axis, title, "merged tasks N")
        spans = intervals(first, value).droplevel("seed").replace(inf, 0)
        for number, method in enumerate(methods_of(rows)):
            points = spans.xs(method, level="method").sort_index()
            label, style = plain(name_of(method)), series_style(number)
            axis.errorbar(points.index, points["mean"], yerr=points.half, label=label, capsize=2.5, **style)
        axis.set_xticks(first["size"].unique())
    zero = select(by_subset(first), method=OURS).groupby("size").zero.mean()
    axes[0].plot(zero.index, zero, color=MUTED, linestyle=(0, (4, 3)), label="zero-shot")
    legend(figure, FULL_WIDTH, loc="outside lower center")
    return figure


def at_ends(rows: pd.DataFrame, options: Options) -> Iterator[str]:
    """Yield the choices at an end of their grids, with their share of all subsets and seeds."""
    ends: Counter[tuple[str, str, int]] = Counter()
    for row in by_subset(rows).sort_values(["seed", "size"], kind="stable").to_dict("records"):
        narrow = row["method"].removesuffix(WIDER)
        tried = dict(options.grids[narrow])
        if narrow != row["method"]:
            tried["scale"] = [*tried["scale"], *options.wider[narrow]]
        ends.update((row["method"], name, row["size"]) for name in tried if at_end(row[name], tried[name]))
    subsets = rows.groupby("size").apply(lambda group: len(group.drop_duplicates(["seed", "subset"])))
    for (method, argument, size), times in ends.items():
        yield f"{name_of(method)}'s {argument} with {size} tasks ({100 * times / subsets[size]:.0f} %)"


STUDY = Study(
    options=Options,
    runs=lambda options: [options.experts],
    splits=("validation", "test"),
    systems=("C7",),
    measure=measure,
    claims=claims,
    tables=tables,
    figures={"scaling": scaling_figure},
    notes=lambda rows, options: ends_note(at_ends(rows, options)),
)

STUDIES = {"subset_scaling": STUDY, "texts_subset_scaling": STUDY}
