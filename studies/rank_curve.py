"""Study `rank_curve` (C2): how good is the merge when only part of each task vector's rank is kept?

**Question.** Keep the k leading singular directions of every task vector and add them up. What does k / r do, for task
vectors centred at the experts' mean and for the original ones?

**Method.** For every matrix of attention and MLP, k = ceil(ratio · r) with r its smaller side,

    centred (`cart`):      θ̄ + λ Σ_t SVD_k(θ_t − θ̄),    θ̄ = mean θ_t
    original (`low_rank`): θ0 + λ Σ_t SVD_k(θ_t − θ0);

all other tensors are averaged or added with λ. A third curve, *matrices alone*, is the original one with all other
tensors left as they are in θ0: like the paper's it begins at the pre-trained model. At ratio 0 the centred merge is the
average, at 1 it is the average whatever λ is, since the centred task vectors add up to 0; the original one ends in task
arithmetic. These ends are identities, which only a mistake can break. λ is chosen on validation, in two ways: *once*,
at the ratio where a method is used (0.08 for centred, 1 for original), then fixed over all ranks as in the paper's
Figures 1 and 6; and *per rank*, where the largest ratio or λ that is tried, if it is taken, is no peak. Test is looked
at once for each point drawn. What is called a peak is that of the test curve, a description of the curve and not a
choice; bell and lead are judged at 8 % as well, which was fixed before. ± is over seeds: the order of the batches.

`texts_rank_curve` is the same on a pre-trained encoder and eight real tasks on texts (worlds/real-texts), and
`pictures_rank_curve` on a ViT-S/32 and four real tasks on pictures (worlds/pictures-vit-s).

**Source.** CART, Section 4.1, equation 4, Figures 1, 6 and 10.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import pandas as pd
from matplotlib.figure import Figure
from pydantic import Field, ValidationInfo, field_validator

from mergeflow.evaluation.scoring import CandidateScorer
from mergeflow.merging import configure
from mergeflow.merging.matrices import is_matrix
from studies.lab import Claim, Laboratory, Row, Section, Study, accuracy_rows, choose_scale, table
from studies.lab.claims import Samples, with_interval
from studies.lab.inputs import Accuracy, State
from studies.lab.methods import NAMES, OUTPERFORMS, PEAK, ends_note, leader
from studies.lab.plots import curves, listed
from studies.lab.rows import per_seed, samples, select
from studies.lab.study import Figures, Joined, Tables

ALONE = "matrices alone"
METHODS = {"centred": "cart", "original": "low_rank", ALONE: "low_rank"}
LEVELS = ("average", "experts", "zero_shot")
RULES = ("once", "per rank")
USED = 0.08  # the paper's rank ratio
LINES = ("ties", "adamerging_ta", "adamerging_cart")  # of the paper's Figure 1, from the study many_tasks
USED_AT = {"centred": USED, "original": 1.0}
VECTORS = {kind: f"{kind} task vectors" for kind in USED_AT}
NEAR = (0.04, 0.16)  # a factor of two around the paper's 8 %
NOISE = 0.5  # points


class Suite(Section):
    """The first `tasks` tasks. `ratios`: of the curve, from 0 to 1. `tuned`: those whose λ is also chosen per rank."""

    tasks: int = Field(ge=2)
    ratios: list[float] = Field(min_length=3)
    tuned: list[float] = Field(min_length=1)

    @field_validator("ratios", "tuned")
    @classmethod
    def _ascending(cls, ratios: list[float], info: ValidationInfo) -> list[float]:
        if ratios != sorted(set(ratios)):
            raise ValueError(f"{info.field_name} must ascend, found {ratios}")
        if info.field_name == "ratios" and (ratios[0], ratios[-1]) != (0, 1):
            raise ValueError(f"ratios go from 0 to 1, found {ratios[0]:g} to {ratios[-1]:g}")
        if info.field_name == "ratios" and USED not in ratios:
            raise ValueError(
                f"ratios need {USED:g}, at which the paper uses CART and the study compares, found {ratios}"
            )
        if info.field_name == "tuned" and not 0 < ratios[0] <= ratios[-1] <= 1:
            raise ValueError(f"tuned lie in (0, 1], found {ratios[0]:g} to {ratios[-1]:g}")
        return ratios


class Options(Section):
    """The study's choices. `run`: whose experts. `scales`: the λ tried, ascending, for `centred` and `original`."""

    run: str
    suites: list[Suite] = Field(min_length=1)
    scales: dict[str, list[float]]


def measure(lab: Laboratory, options: Options) -> list[Row]:
    """Return test accuracy for each number of tasks, seed, curve, rule of λ, ratio and task, and of the levels."""
    pieces = {
        f"{suite.tasks}_{seed}": lab.first(suite.tasks).of_run(
            options.run, seed, partial(measure_suite, suite=suite, scales=options.scales)
        )
        for suite in options.suites
        for seed in lab.run(options.run).seeds
    }
    return sorted(lab.cached(pieces, "suites and seeds"), key=lambda row: row["curve"] in LEVELS)


def measure_suite(
    lab: Laboratory, run: str, seed: int, suite: Suite, scales: Mapping[str, Sequence[float]]
) -> Iterator[Row]:
    """Yield the curves of one suite and seed, and the levels beside them."""
    experts = lab.run(run).experts(seed)
    walk = Walk(lab, lab.blind().scorer(experts), scales)
    about = {"seed": seed, "tasks": suite.tasks}
    for kind in USED_AT:
        rows = walk.curve(kind, suite)
        yield from ({**about, **row} for row in rows)
    scale = next(row["scale"] for row in rows if row["rule"] == "once")  # of the original curve
    for ratio in suite.ratios:
        yield from ({**about, **row} for row in walk.point(ALONE, "once", ratio, scale))
    average = lab.accuracy(walk.scorer.merge("average"), "test")
    yield from accuracy_rows(average, **about, curve="average")
    yield from accuracy_rows(lab.individual(experts, "test"), **about, curve="experts")
    yield from lab.accuracy_rows(lab.base, "test", **about, curve="zero_shot")


@dataclass
class Walk:
    """Points of the curves of one suite and seed; every matrix is factored once per kind."""

    lab: Laboratory
    scorer: CandidateScorer
    scales: Mapping[str, Sequence[float]]
    _seen: dict[tuple[str, float, float], Accuracy] = field(default_factory=dict)

    def curve(self, kind: str, suite: Suite) -> list[Row]:
        """Return the points with λ chosen once, and those with λ chosen per rank, walking from rank to rank."""
        usual = {"centred": 1.4, "original": 2.4 / suite.tasks}
        start = self.choose(kind, USED_AT[kind], usual[kind])
        once = [row for ratio in suite.ratios for row in self.point(kind, "once", ratio, start)]
        per_rank, scale = [], start
        for ratio in sorted(suite.tuned, reverse=kind == "original"):
            scale = start if ratio == USED_AT[kind] else self.choose(kind, ratio, scale)
            per_rank += self.point(kind, "per rank", ratio, scale)
        self.scorer.renew_cache(1.0)  # the other kind has other matrices
        return [*once, *sorted(per_rank, key=lambda row: float(row["ratio"]))]

    def choose(self, kind: str, ratio: float, start: float) -> float:
        """Return the λ that is best on validation at a ratio > 0, walking the scales from `start`."""
        args = {"rank_ratio": ratio}
        chosen = choose_scale(self.lab, self.scorer, METHODS[kind], self.scales[kind], start, args, test=False)
        return float(chosen.args["scale"])

    def point(self, kind: str, rule: str, ratio: float, scale: float) -> list[Row]:
        """Return a point of a curve with its test accuracy per task; the same point is looked at once."""
        key = (kind, ratio, scale)
        if key not in self._seen:
            self._seen[key] = self.lab.accuracy(self.merged(kind, ratio, scale), "test")
        return accuracy_rows(self._seen[key], curve=kind, rule=rule, ratio=float(ratio), scale=float(scale))

    def merged(self, kind: str, ratio: float, scale: float) -> State:
        """Return the merge; at ratio 0 no part of a treated matrix is added."""
        call = configure(METHODS[kind], {"rank_ratio": ratio or 1.0, "scale": scale})
        state, treated = self.scorer.merge(call), call.args["matrices"]
        matrices = {name for name, tensor in state.items() if is_matrix(name, tensor.shape, treated)}
        if kind == ALONE:
            return {name: state[name] if ratio > 0 and name in matrices else self.lab.base[name] for name in state}
        if ratio > 0:
            return state
        anchor = self.lab.base if kind == "original" else self.scorer.merge("average")
        return {name: anchor[name] if name in matrices else tensor for name, tensor in state.items()}


# What the rows of one suite are asked


def over(rows: pd.DataFrame, kind: str, rule: str = "once") -> pd.DataFrame:
    """Return mean test accuracy in %: a row for each ratio, a column for each seed."""
    return per_seed(rows, "ratio", curve=kind, rule=rule)


def peak(curve: pd.Series) -> float:
    """Return the ratio of the highest point; of equal ones the smallest.

    Example:
        >>> peak(pd.Series({0.0: 70.0, 0.08: 90.0, 0.16: 90.0, 1.0: 70.0}))
        0.08
    """
    return float(curve.sort_index().round(9).idxmax())


def inside(rows: pd.DataFrame) -> Samples:
    frame = over(rows, "centred")
    ends = frame.loc[[0.0, 1.0]].max()
    return {
        "highest point inside less the higher end": frame.drop([0.0, 1.0]).max() - ends,
        "at 8 %, less the higher end": frame.loc[USED] - ends,
    }


def off_the_average(rows: pd.DataFrame) -> Samples:
    apart = over(rows, "centred").loc[[0.0, 1.0]] - samples(rows, curve="average")
    return {"larger difference of the two ends": apart.abs().max()}


def smallest_steps(rows: pd.DataFrame) -> Samples:
    least = {kind: over(rows, kind).diff().min() for kind in ("original", ALONE)}
    return {"smallest step between neighbours": least["original"], "the same, matrices alone": least[ALONE]}


def off_the_base(kind: str, words: str, rows: pd.DataFrame) -> Samples:
    return {f"less zero-shot, {words}": over(rows, kind).loc[0.0] - samples(rows, curve="zero_shot")}


def ahead(rows: pd.DataFrame) -> Samples:
    centred, addition = over(rows, "centred"), over(rows, "original").loc[1.0]
    return {
        "peak less task arithmetic": centred.max() - addition,
        "at 8 %, less task arithmetic": centred.loc[USED] - addition,
    }


def share_ahead(rows: pd.DataFrame) -> Samples:
    """Return the same in % of the headroom, experts less zero-shot."""
    room = samples(rows, curve="experts") - samples(rows, curve="zero_shot")
    return {name: 100 * pd.Series(values) / room for name, values in ahead(rows).items()}


def ahead_by_task(ratio: float, rows: pd.DataFrame) -> Samples:
    """Return by task what the centred curve at 8 % is above the original one at a ratio (the paper's Figure 6)."""
    points = select(rows, rule="once").set_index(["seed", "task"])
    apart = (
        select(points, curve="centred", ratio=USED).accuracy - select(points, curve="original", ratio=ratio).accuracy
    )
    return dict(iter(apart.groupby("task", sort=False)))


def place(rule: str, rows: pd.DataFrame) -> Samples:
    """Return where the centred curve is highest; of two ranks and fewer that says nothing."""
    curve = over(rows, "centred", rule)
    return {"place of the peak": curve.apply(peak)} if len(curve) > 2 else {}


def near_share(rows: pd.DataFrame) -> Samples:
    """Return the share of tasks in % whose centred curve, λ chosen once, is highest near 8 %."""
    points = select(rows, curve="centred", rule="once").pivot(
        index="ratio", columns=["seed", "task"], values="accuracy"
    )
    return {"tasks with their peak there": 100 * points.apply(peak).between(*NEAR).groupby("seed").mean()}


# Claims, written before the run
# fmt: off

def claims(options: Options) -> list[Claim]:
    return [claim for suite in sorted(options.suites, key=lambda suite: suite.tasks) for claim in of_suite(suite.tasks)]


def of_suite(count: int) -> list[Claim]:
    """Return the claims on the first `count` tasks; TIES and AdaMerging are the study `many_tasks`'s."""
    def claim(says: str, measure: Callable[[pd.DataFrame], Samples], **limits) -> Claim:  # type: ignore[no-untyped-def]
        return Claim("C2", says, measure, **limits).of_part(partial(select, tasks=count), f"{count} tasks")

    twice = "paired difference, of the highest point as of one that no look at test chose,"
    near = {"low": NEAR[0], "high": NEAR[1], "unit": "", "digits": 3, "of": "rank ratio of the highest point"}
    return [
        claim("The centred curve is bell-shaped, with its peak strictly inside (0, 1).", inside, low=1, of=twice),
        claim("The centred curve is the average at both ends.", off_the_average,
              high=0.1, of="difference, of which rounding of float32 weights makes some,", digits=3),
        claim("The original curve rises monotonically with the rank.", smallest_steps,
              low=-NOISE, of="step between neighbours"),
        claim("At rank 0 the original curve is the pre-trained model.", partial(off_the_base, ALONE, ALONE),
              low=-0.1, high=0.1, of="difference"),
        claim("At rank 0 it is so too where all other tensors are added at every rank.",
              partial(off_the_base, "original", "all other tensors added"),
              low=-0.1, high=0.1, of="difference", ours=True),
        claim(OUTPERFORMS, share_ahead, **PEAK, caveat="of the rivals rank_curve has task arithmetic alone"),
        claim("The peak of the centred curve lies above task arithmetic.", ahead, low=0, of=twice, ours=True),
        claim("At 8 % CART is above task arithmetic on every task.", partial(ahead_by_task, USED),
              low=0, of="paired difference on each task"),
        claim("At 8 % CART is above task arithmetic of the full rank on every task.", partial(ahead_by_task, 1.0),
              low=0, of="paired difference on each task", ours=True),
        claim("The centred curve peaks near 8 % of the full rank.", partial(place, "once"), **near,
              caveat="λ was chosen at 8 %; chosen for each rank, the peak is elsewhere, see ours"),
        claim("Every task's own centred curve peaks near 8 %.", near_share,
              low=90, of="share of the tasks that peak between 4 % and 16 %", unit="%",
              caveat="λ was chosen at 8 %"),
        claim("With λ chosen for each rank the centred curve peaks near 8 % as well.", partial(place, "per rank"),
              **near, ours=True),
    ]

# fmt: on


def level_table(rows: pd.DataFrame) -> pd.DataFrame:
    lines = {}
    for count, of_count in rows.groupby("tasks"):
        highest = {rule: (frame := over(of_count, "centred", rule), peak(frame.mean(axis=1))) for rule in RULES}
        tops = {rule: f"{with_interval(frame.loc[ratio])} at {ratio:g}" for rule, (frame, ratio) in highest.items()}
        lines[f"{count} tasks"] = {
            "zero-shot": f"{samples(of_count, curve='zero_shot').iloc[0]:.1f}",
            "average": with_interval(samples(of_count, curve="average")),
            "task arithmetic": with_interval(over(of_count, "original").loc[1.0]),
            "centred, highest": tops["once"],
            "centred, λ per rank": tops["per rank"],
            "experts": with_interval(samples(of_count, curve="experts")),
        }
    return pd.DataFrame(lines).T


def curve_table(count: int, value: str, rows: pd.DataFrame) -> pd.DataFrame:
    of_count = select(rows, tasks=count).dropna(subset="ratio").sort_values("ratio", kind="stable")
    cell = listed if value == "scale" else None
    kinds = [*METHODS] if value == "accuracy" else [*USED_AT]
    of_count = of_count.assign(curve=of_count.curve + ", λ " + of_count.rule, ratio=of_count.ratio.map("{:g}".format))
    wide = table(of_count, "ratio", "curve", value=value, cell=cell)
    return wide[[name for kind in kinds for rule in RULES if (name := f"{kind}, λ {rule}") in wide.columns]]


def peak_table(count: int, rows: pd.DataFrame) -> pd.DataFrame:
    of_count = select(rows, tasks=count)
    lines = {}
    for task, points in of_count.groupby("task", sort=False):
        centred, original = (over(points, kind).mean(axis=1) for kind in USED_AT)
        lines[task] = {
            "centred peaks at": f"{peak(centred):g}",
            "accuracy there": f"{centred.max():.1f}",
            f"at {USED:g}": f"{centred.loc[USED]:.1f}",
            "average": f"{centred.loc[1.0]:.1f}",
            "original peaks at": f"{peak(original):g}",
            "task arithmetic": f"{original.loc[1.0]:.1f}",
            "expert": f"{samples(points, curve='experts').mean():.1f}",
        }
    return pd.DataFrame(lines).T


def tables(options: Options) -> Tables:
    shown: dict[str, Callable[[pd.DataFrame], pd.DataFrame]] = {"Mean test accuracy, %": level_table}
    for count in sorted(suite.tasks for suite in options.suites):
        first = f"First {count} tasks"
        shown |= {
            f"{first}: mean test accuracy over the rank ratio, %": partial(curve_table, count, "accuracy"),
            f"{first}: λ over the rank ratio, one value per seed": partial(curve_table, count, "scale"),
            f"{first}: each task's peak, λ chosen once, % (mean over seeds)": partial(peak_table, count),
        }
    return shown


def mean_figure(count: int, rows: pd.DataFrame, methods: pd.DataFrame | None = None) -> Figure:
    """Draw mean test accuracy over the ratio, a panel for each rule of λ (the paper's Figure 1).

    Args:
        methods: rows of the study many_tasks, of whose other methods lines are drawn.
    """
    of_count = select(rows, tasks=count)
    names = {rule: f"{count} tasks, λ chosen {rule}" for rule in RULES} | VECTORS
    heights = {name: samples(of_count, curve=name).mean() for name in ("average", "experts")}
    heights["task arithmetic"] = over(of_count, "original").loc[1.0].mean()
    if methods is not None:
        others = select(methods, tasks=count, split="test").groupby("model").accuracy.mean()
        heights |= {NAMES[name]: others[name] for name in LINES if name in others}
    return curves(
        select(of_count, curve=list(USED_AT)), "ratio", "curve", panel="rule", labels=names, x_label="rank ratio k / r",
        y_label="mean test accuracy, %", scale="root", ticks=(0, 0.04, 0.08, 0.16, 0.32, 0.64, 1),
        levels=lambda rule: heights,
    )  # fmt: skip


def figures_of_methods(study: str, options: Options) -> Joined:
    return {f"methods_{suite.tasks}": (study, partial(mean_figure, suite.tasks)) for suite in options.suites}


def task_figure(count: int, rows: pd.DataFrame) -> Figure:
    """Draw every task's test accuracy over the ratio, λ chosen once (the paper's Figure 6)."""
    of_count = select(rows, tasks=count)
    levels = {"average": "average", "experts": "expert"}
    return curves(
        select(of_count, curve=list(USED_AT), rule="once"), "ratio", "curve", panel="task", labels=VECTORS, height=2.5,
        x_label="k / r", y_label="accuracy, %", scale="root", ticks=(0, 0.08, 0.32, 1),
        levels=lambda task: {label: samples(of_count, curve=n, task=task).mean() for n, label in levels.items()},
    )  # fmt: skip


def figures(options: Options) -> Figures:
    counts = [suite.tasks for suite in options.suites]
    return {f"mean_{n}": partial(mean_figure, n) for n in counts} | {
        f"tasks_{n}": partial(task_figure, n) for n in counts
    }


def notes(rows: pd.DataFrame, options: Options) -> list[str]:
    return [note for count, of_count in rows.groupby("tasks") for note in suite_notes(count, of_count, options)]


def suite_notes(count: int, rows: pd.DataFrame, options: Options) -> list[str]:
    """Return notes on the place and the height of the peak."""
    frames = {(kind, rule): over(rows, kind, rule) for kind in USED_AT for rule in RULES}
    once, tuned = frames["centred", "once"], frames["centred", "per rank"]
    gains = (tuned - once).dropna()
    gain = float(gains.mean(axis=1).idxmax())
    scales = per_seed(rows, "ratio", value="scale", curve="centred", rule="per rank").mean(axis=1)
    tops = {key: (frame.mean(axis=1).max(), peak(frame.mean(axis=1))) for key, frame in frames.items()}
    highest = {
        kind: leader(
            dict(zip(curve.index, curve.to_numpy().tolist(), strict=True)), {r: f"{r:g}" for r in curve.index}
        )[1]
        for kind in USED_AT
        if len(curve := frames[kind, "per rank"])
    }
    own_curves = select(rows, curve="centred", rule="once").groupby(["ratio", "task"]).accuracy.mean().unstack("task")
    lost = own_curves.max() - own_curves.loc[USED]
    (top, _), (fixed, fixed_at), (original, _) = (
        tops["centred", "per rank"], tops["centred", "once"], tops["original", "per rank"],
    )  # fmt: skip
    return [
        f"{count} tasks, λ chosen per rank: the highest mean of the centred curve, {top:.1f} %, is at "
        f"{highest['centred']} (with λ chosen once {fixed:.1f} % at {fixed_at:g}); choosing λ per rank gains most in "
        f"the mean at {gain:g}, {with_interval(gains.loc[gain])} points. The mean chosen λ is "
        + ", ".join(f"{scale:.2f} at {ratio:g}" for ratio, scale in scales.items())
        + f". The highest mean of the original curve, {original:.1f} %, is at {highest['original']} (task arithmetic "
        f"{frames['original', 'once'].loc[1.0].mean():.1f} %).",
        f"{count} tasks: what one ratio for all tasks costs, λ chosen once: at {USED:g} a task lies {lost.mean():.1f} "
        f"points below its own peak in the mean, {lost.max():.1f} at worst.",
        *ends_note(at_ends(count, rows, options)),
    ]


def at_ends(count: int, rows: pd.DataFrame, options: Options) -> Iterator[str]:
    """Yield the λ at an end of their grids."""
    points = select(rows, rule="per rank").drop_duplicates(["curve", "ratio", "seed"])
    ends = points[[row.scale in (min(s := options.scales[row.curve]), max(s)) for row in points.itertuples()]]
    for (kind, ratio), group in ends.groupby(["curve", "ratio"]):
        yield f"λ of {kind} at rank {ratio:g} with {count} tasks ({len(group)} of {rows.seed.nunique()} seeds)"


STUDY = Study(
    options=Options,
    runs=lambda options: [options.run],
    splits=("validation", "test"),
    systems=("C2",),
    measure=measure,
    claims=claims,
    tables=tables,
    figures=figures,
    notes=notes,
)

STUDIES = {
    "rank_curve": replace(STUDY, joined=partial(figures_of_methods, "many_tasks")),
    "texts_rank_curve": replace(STUDY, joined=partial(figures_of_methods, "texts_many_tasks")),
    "pictures_rank_curve": STUDY,
}
