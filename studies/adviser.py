"""Studies `adviser`, `adviser_suites`, `adviser_regimes`: does what `mergeflow advise` predicts stand for a sweep?

**Question.** From a few hundred samples without labels and the task vectors alone, `mergeflow advise` suggests four λ
for a sum of task vectors and says what unlearning one task will cost the others. The theory of task vectors offers
one rule for each, the lengths and cosines of the task vectors another. Which predicts better, and is either good
enough to stand instead of a sweep: on coloured digits (`adviser`), on suites of 8, 14 and 20 tasks of a small CLIP, on
pairs and triples of their tasks (`adviser_suites`), and however the experts were trained (`adviser_regimes`)?

**Method.** In `adviser`, experts on coloured digits at many r_o (a small vision transformer that has learnt the ten
digits in white), tuned for several lengths; all pairs and triples. In the others, experts of the shared training runs;
nothing is trained, and pairs and triples are drawn anew for each run and seed. Of a run in rounds the experts are those
of the last round, which are near to each other, and the base is what that round began with; experts after one epoch
have short task vectors, converged ones long. For every set λ in θ + λ Σ τ_t is chosen on validation, by mean accuracy,
and looked at once on test:

- `grid`: twenty λ, 0.1 to 2.0 by 0.1 (on suites 0.05 to 0.5 by 0.05 and 0.6 to 1.5 by 0.1);
- `theory`: four λ from 1 / min_i Σ_j α̂_ij to twice that, α̂ by Equation 11 on what tuning changed of the logits; where
  the theory sees no λ, 0.4 alone;
- `lengths`: four λ from 0.8 to 1.6 times λ° = mean ‖τ_i‖ / ‖Σ τ_i‖, as of `mergeflow advise` for two or three;
- `optuna`: four trials of TPE between the ends of the grid;
- `fixed`: λ = 0.4, as Ilharco et al. 2023 recommend.

Unlearning: for every ordered pair of colourings, what task 1 loses on test in Ψ^(0) + ΔΨ_1 − ΔΨ_2, in points below its
expert. On suites, in the sum of the largest one with λ°·1.13, the middle of the range, one task's vector has weight 0
or −λ, and what each other task loses between the two counts; how far leaving out unlearns by itself is not judged. The
rank correlation of the loss over the pairs of a seed and a length (or run) is held against four predictions: α̂ of the
logits as printed, α̂ of what tuning changed, the response A_12 (how far expert 2 moves the answers to task 1), and the
cosine of the task vectors; where nothing varies it counts as 0. Logits are taken less their mean over the classes; with
two classes a sample's cosine is then the agreement in sign.

Rules, ranges and grids were written before the first run. The settings of the training of `adviser` were chosen on
validation with another seed, by the experts' accuracies alone, and then made shorter for the time at hand; on the
experts of the suites nothing was tried before. Findings of `adviser_regimes` are means over the ways of training.

**Source.** Li et al. 2025, Theorems 1 and 2, Equation 11; Ilharco et al. 2023, Editing models with task arithmetic.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import combinations, permutations
from operator import itemgetter
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from pydantic import Field
from torch import Tensor

from mergeflow.analysis.geometry import cosine_matrix, norm
from mergeflow.analysis.provable.advice import scales_of_lengths, suggested
from mergeflow.analysis.provable.answers import Answers, ask, one_each
from mergeflow.analysis.provable.conditions import Interval
from mergeflow.analysis.provable.correlation import correlations
from mergeflow.evaluation.averages import draw_subsets, mean
from mergeflow.modalities.classification import Subset
from mergeflow.search.candidates import score_all
from mergeflow.search.sweep import optuna_search
from mergeflow.search.sweep_file import SearchPart
from studies.lab import Claim, Laboratory, Row, Section, Study, grid
from studies.lab.claims import Parts, Samples, Verdict, all_within, with_interval
from studies.lab.digits import (
    Coloured,
    ColouredWorld,
    Digits,
    accuracy,
    name_of,
    open_digits,
    pretrained,
    tuned,
)
from studies.lab.inputs import Lazy, State, over_seeds, regime_of
from studies.lab.plots import scatter, side_by_side
from studies.lab.rows import rank_correlation, samples, select
from studies.lab.tuning import best_scale, combined, task_vector
from studies.theory.coefficients import responses, scales_of_theory
from tasks.plotting.palette import INK

GRID, SUITE_GRID = grid(0.1, 2.0, 0.1), [*grid(0.05, 0.5, 0.05), *grid(0.6, 1.5, 0.1)]
FIXED = 0.4
TRIALS = 4
RANGES = {"theory": "the theory's range", "lengths": "the range by lengths"}
WAYS = ("grid", "theory", "lengths", "optuna", "fixed")
PREDICTIONS = {
    "eq11": "α̂ of the logits",
    "changes": "α̂ of what tuning changed",
    "response": "response A_12",
    "cosine": "cosine of the task vectors",
}
LOSS, FEWER = 0.3, 5  # points lost at most, with so many times fewer candidates
BATCH = 256
FEW, WHOLE = "pairs and triples", "whole suites"
Score = Callable[[float], float]


class Options(Section):
    """The choices of `adviser`."""

    seeds: list[int] = Field(min_length=1)  # of the net, the orders and Optuna
    world: ColouredWorld  # digits, net and training
    colours: list[float] = Field(min_length=3)  # r_o of the tasks
    lengths: list[int] = Field(min_length=1)  # steps of tuning
    samples: int = Field(200, ge=8)  # without labels, of each task
    sizes: list[int] = Field([2, 3], min_length=1)  # how many tasks are added at a time


class SuiteOptions(Section):
    """The choices of a study of the adviser on suites."""

    runs: list[str] = Field(min_length=1)  # whose experts
    counts: list[int] = Field(min_length=1)  # the first so many tasks as whole suites; the largest is unlearned from
    pairs: int = Field(3, ge=0)  # pairs, triples: drawn anew for each run and seed, of the tasks of the largest suite
    triples: int = Field(3, ge=0)
    samples: int = Field(100, ge=8)  # without labels, of each task
    validation: int = Field(80, ge=8)  # validation, test: images of each task with which λ is chosen and looked at
    test: int = Field(100, ge=8)
    edited: int = Field(50, ge=8)  # test images of each task on which unlearning is measured


# Measurement: what both have in common


class Predictions:
    """What is known of experts before any sum of their task vectors is judged: λ, and what unlearning costs."""

    def __init__(self, answers: Answers, vectors: Mapping[str, Mapping[str, Tensor]]) -> None:
        self.names, self.norms = list(vectors), [norm(vector) for vector in vectors.values()]
        self.cosines = cosine_matrix(list(vectors.values()))
        self.alphas, self.changes = correlations(answers.experts).values, correlations(answers.changes).values
        self.moved = responses(answers.experts, answers.base)

    def ranges(self, part: Sequence[str]) -> dict[str, Interval]:
        """Return the predicted range of λ for the sum of some task vectors, by way."""
        chosen = [self.names.index(task) for task in part]
        changes, cosines = ([[m[i][j] for j in chosen] for i in chosen] for m in (self.changes, self.cosines))
        lengths = scales_of_lengths([self.norms[i] for i in chosen], cosines)
        return {"theory": scales_of_theory(changes), "lengths": lengths}

    def cost(self, keep: str, forget: str) -> Row:
        """Return the predictions of a task's loss when another is unlearned."""
        i, j = self.names.index(keep), self.names.index(forget)
        alike = {"eq11": self.alphas[i][j], "changes": self.changes[i][j], "response": self.moved[i][j]}
        return {"keep": keep, "forget": forget, **alike, "cosine": self.cosines[i][j]}


def set_row(
    part: Sequence[str], ranges: Mapping[str, Interval], scales: Sequence[float], scores: tuple[Score, Score], seed: int
) -> Row:
    """Return the scores of each way of choosing λ on validation; test is looked at once for each.

    Args:
        ranges: predicted ones of λ, by way.
        scales: the grid; Optuna tries λ between its ends.
        scores: mean accuracy over λ, in %, on validation and on test.
    """
    validation, test = scores
    tried: dict[str, Sequence[float]] = {
        way: [FIXED] if span.empty else suggested(span) for way, span in ranges.items()
    }
    tried |= {"grid": scales, "fixed": [FIXED], "optuna": optuna_scales(scales, validation, seed)}
    row: Row = {"tasks": " ".join(part), "size": len(part)}
    for way in WAYS:
        best = best_scale(tried[way], validation)
        row |= {f"scale_{way}": best, f"tried_{way}": len(tried[way])}
        row |= {f"validation_{way}": validation(best), f"test_{way}": test(best)}
    for way, span in ranges.items():
        row |= {f"low_{way}": None if span.empty else span.low, f"high_{way}": None if span.empty else span.high}
        row[f"hit_{way}"] = not span.empty and span.low <= row["scale_grid"] <= span.high
    return row


def optuna_scales(scales: Sequence[float], score: Score, seed: int) -> list[float]:
    """Return the λ that Optuna tries between the ends of the grid."""
    space = {"scale": {"low": scales[0], "high": scales[-1]}}
    strategy = optuna_search("task_arithmetic", space, SearchPart(trials=TRIALS), seed)
    tried = score_all("task_arithmetic", strategy, lambda call: {"all": score(call.scale)}, itemgetter("all"))
    return [candidate.call.scale for candidate in tried]


# Measurement: coloured digits


def measure_seed(options: Options, digits: Lazy[dict[str, Digits]], seed: int) -> Iterator[Row]:
    """Yield sets of tasks that are added, and edits that take one away."""
    splits = digits()
    base = pretrained(options.world, splits, seed)
    for steps in options.lengths:
        experts = tuned(options.world, base, splits["train"], options.colours, steps, seed)
        trained = Coloured(base, splits, {task: task_vector(state, base.start) for task, state in experts.items()})
        asked = {name_of(r): Subset.first(trained.task(r, "validation"), options.samples) for r in options.colours}
        predicted = Predictions(ask(base.model, base.start, experts, asked), trained.vectors)
        for colours in (part for size in options.sizes for part in combinations(options.colours, size)):
            part = [name_of(r) for r in colours]
            scores = score_of(trained, colours, "validation"), score_of(trained, colours, "test")
            row = set_row(part, predicted.ranges(part), GRID, scores, seed)
            looked_at = {key: value for key, value in row.items() if not key.startswith("validation")}
            yield {"part": "sets", "seed": seed, "steps": steps, **looked_at}
        tests = {r: {name_of(r): trained.task(r, "test")} for r in options.colours}
        alone = {r: accuracy(base.model, experts[name_of(r)], test)[name_of(r)] for r, test in tests.items()}
        for keep, forget in permutations(options.colours, 2):
            left, forgotten = trained.accuracies({keep: 1.0, forget: -1.0}, (keep, forget), "test")
            row = {**predicted.cost(name_of(keep), name_of(forget)), "loss": alone[keep] - left, "left": forgotten}
            yield {"part": "edits", "seed": seed, "steps": steps, **row}


def score_of(trained: Coloured, colours: Sequence[float], split: str) -> Score:
    """Return mean accuracy over λ, in %, of the sum of some task vectors on their tasks; each λ is judged once."""

    def score(scale: float) -> float:
        return sum(trained.accuracies(dict.fromkeys(colours, scale), colours, split)) / len(colours)

    return cache(score)


# Measurement: suites


@dataclass(frozen=True)
class Suite:
    """The experts of one run and seed.

    Attributes:
        start: what the experts were tuned from: θ0, or of a run in rounds what its last round began with.
    """

    inputs: Laboratory
    start: State
    experts: Mapping[str, State]

    @cached_property
    def vectors(self) -> dict[str, State]:
        """τ_t by task."""
        return {task: task_vector(state, self.start) for task, state in self.experts.items()}

    def merged(self, scales: Mapping[str, float]) -> dict[str, Tensor]:
        """Return θ + Σ λ_t τ_t."""
        return combined(self.start, self.vectors, scales)

    def first(self, split: str, count: int) -> dict[str, Subset]:
        """Return the first examples of each task; test can be opened by inputs that are not blind alone."""
        inputs = self.inputs if split == "test" else self.inputs.blind()
        return {task: Subset.first(inputs.examples(split)[task], count) for task in self.experts}

    def score(self, part: Sequence[str], examples: Mapping[str, Subset]) -> Score:
        """Return mean accuracy over λ, in %, of the sum of some task vectors on their tasks; each λ is judged once."""
        scorer, judged = self.inputs.scorer({}), {task: examples[task] for task in part}

        def score(scale: float) -> float:
            return 100 * mean(scorer.state(self.merged(dict.fromkeys(part, scale)), judged))

        return cache(score)


def open_suite(lab: Laboratory, run: str, seed: int) -> Suite:
    trained = lab.run(run)
    iterative = regime_of(trained, seed) == "iterative"
    return Suite(lab, trained.start(seed) if iterative else lab.base, trained.experts(seed))


def measure_suites(lab: Laboratory, options: SuiteOptions) -> list[Row]:
    """Return sets of tasks that are added, and edits that unlearn one, of every run and seed."""
    return lab.first(max(options.counts)).by_run(options.runs, partial(measure_suite, options=options))


def measure_suite(lab: Laboratory, run: str, seed: int, options: SuiteOptions) -> Iterator[Row]:
    suite = open_suite(lab, run, seed)
    asked = {task: one_each(data) for task, data in suite.first("validation", options.samples).items() if len(data)}
    predicted = Predictions(ask(lab.model, suite.start, suite.experts, asked, BATCH), suite.vectors)
    parts = [list(suite.experts)[:count] for count in options.counts]
    for size, count in ((2, options.pairs), (3, options.triples)):
        parts += [list(drawn) for drawn in draw_subsets(list(suite.experts), size, count, seed)] if count else []
    validation, test = suite.first("validation", options.validation), suite.first("test", options.test)
    for part in parts:
        scores = suite.score(part, validation), suite.score(part, test)
        row = set_row(part, predicted.ranges(part), SUITE_GRID, scores, seed)
        yield {"run": run, "seed": seed, "part": "set", **row}
    for row in edit_rows(suite, predicted, suite.first("test", options.edited)):
        yield {"run": run, "seed": seed, "part": "edit", **row}


def edit_rows(suite: Suite, predicted: Predictions, test: Mapping[str, Subset]) -> Iterator[Row]:
    """Yield for each task what the others lose when its vector is taken away with −λ instead of left out with 0.

    λ is the middle of the range by the lengths of the whole suite, so that nothing is chosen here.
    """
    names, scorer, lengths = predicted.names, suite.inputs.scorer({}), predicted.ranges(predicted.names)["lengths"]
    if lengths.empty:
        return
    scale = (lengths.low * lengths.high) ** 0.5
    for forget in names:
        left_out, negated = (
            scorer.state(suite.merged({**dict.fromkeys(names, scale), forget: weight}), test)
            for weight in (0.0, -scale)
        )
        left = {"left_out": 100 * left_out[forget], "left": 100 * negated[forget]}
        for keep in (task for task in names if task != forget):
            loss = {"scale": scale, "loss": 100 * (left_out[keep] - negated[keep])}
            yield {**predicted.cost(keep, forget), **loss, **left}


# What the rows are asked


def sets(rows: pd.DataFrame) -> pd.DataFrame:
    return select(rows, part=["set", "sets"])


def edits(rows: pd.DataFrame) -> pd.DataFrame:
    return select(rows, part=["edit", "edits"])


def group(name: str, rows: pd.DataFrame) -> pd.DataFrame:
    """Return the sets of a few tasks, or those of whole suites."""
    all_sets = sets(rows)
    return all_sets[all_sets["size"] <= 3] if name == FEW else all_sets[all_sets["size"] > 3]


def hits(way: str, rows: pd.DataFrame) -> Samples:
    all_sets = sets(rows)
    return {"sets": 100 * all_sets[f"hit_{way}"].astype(float).groupby(all_sets.seed).mean()}


def fewer(way: str, rows: pd.DataFrame) -> float:
    """Return how many times fewer candidates a way of choosing λ tries than the grid."""
    return float(sets(rows).tried_grid.mean() / sets(rows)[f"tried_{way}"].mean())


def lost(way: str, parts: Sequence[str], rows: pd.DataFrame) -> tuple[Verdict, str]:
    """Judge what four λ lose against the grid, and whether they are few enough."""
    all_sets, times = sets(rows), fewer(way, rows)
    losses = {part: samples(all_sets, f"{part}_grid") - samples(all_sets, f"{part}_{way}") for part in parts}
    text = "; ".join(f"{part}: {with_interval(values, 2)} points" for part, values in losses.items())
    judged: Parts = {part: (values, -math.inf, LOSS) for part, values in losses.items()}
    return all_within(judged) if times >= FEWER - 1e-9 else False, f"{text}; {times:.1f} × fewer candidates"


def lead(way: str, rows: pd.DataFrame) -> Samples:
    return {"test": samples(sets(rows), "test_lengths") - samples(sets(rows), f"test_{way}")}


def ranks(rows: pd.DataFrame, prediction: str) -> list[float]:
    """Return Spearman's correlation of a prediction with the loss, a mean over lengths or runs, for each seed."""
    by = "run" if "run" in rows else "steps"
    records = [group.to_dict("records") for _, group in edits(rows).groupby("seed")]
    return [rank_correlation(record, itemgetter(prediction), by) for record in records]


def better(prediction: str, rows: pd.DataFrame) -> Samples:
    return {"rank correlation": np.subtract(ranks(rows, prediction), ranks(rows, "cosine")).tolist()}


def both_ranks(prediction: str, rows: pd.DataFrame) -> str:
    predicted, cosine = (with_interval(ranks(rows, key), 2) for key in (prediction, "cosine"))
    return f"; {predicted} against {cosine}"


# Claims, written before the run
# fmt: off

def set_claims(parts: Sequence[str]) -> list[Claim]:
    others = {"optuna": f"Optuna's {TRIALS} trials", "fixed": f"λ = {FIXED:g}"}
    others["theory"] = f"those of {RANGES['theory']}"
    return [
        *(Claim("P10", f"The best λ of the grid lies in {name}.", partial(hits, way), low=50, unit="%",
                of="share of the sets", ours=True, also=lambda rows: f" of {len(sets(rows))} sets")
          for way, name in RANGES.items()),
        *(Claim("P10", f"Four λ of {name} stand instead of the grid of {len(GRID)}.",
                decide=partial(lost, way, parts), ours=True,
                of=f"≤ {LOSS:g} points lost on {' and on '.join(parts)}, with ≥ {FEWER} × fewer candidates")
          for way, name in RANGES.items()),
        *(Claim("P10", f"Four λ of {RANGES['lengths']} are better than {name}.", partial(lead, way), low=0, digits=2,
                of="paired difference", ours=True)
          for way, name in others.items()),
    ]


def cost_claims() -> list[Claim]:
    """Return the claims about what unlearning a task costs another one."""
    return [
        Claim("P10", f"What unlearning costs is better predicted by the {PREDICTIONS[key]} than by the cosine.",
              partial(better, key), low=0, of="paired difference of rank correlations", unit="", digits=2, ours=True,
              also=partial(both_ranks, key))
        for key in ("eq11", "changes", "response")
    ]


def claims(options: Options) -> list[Claim]:
    return [*set_claims(["test"]), *cost_claims()]


def claims_of_suites(options: SuiteOptions) -> list[Claim]:
    few = options.pairs or options.triples or min(options.counts) <= 3
    groups = [FEW] * bool(few) + [WHOLE] * (max(options.counts) > 3)
    return [
        *(claim.of_part(partial(group, name), name)
          for name in groups for claim in set_claims(["validation", "test"])),
        *cost_claims(),
        Claim("P10", "Negating a task's vector unlearns it further than leaving the vector out.",
              lambda rows: {"accuracy from 0 to −λ falls by":
                  samples(edits(rows), "left_out") - samples(edits(rows), "left")},
              low=5, of="paired difference", ours=True),
    ]
# fmt: on


def set_table(by: str, rows: pd.DataFrame) -> pd.DataFrame:
    """Return a table of the ways of choosing λ, by length or run and size of the set."""
    all_sets, keys = sets(rows), [by, "size", "λ by"]
    kinds = ("scale", "tried", "validation", "test", "hit")
    long = pd.concat(
        all_sets[[by, "size", "seed"]].assign(
            **{"λ by": way}, **{k: all_sets[f"{k}_{way}"] for k in kinds if f"{k}_{way}" in all_sets}
        )
        for way in WAYS
    )
    shown = {"tried": "candidates", "validation": "validation, %", "test": "test, %", "scale": "mean λ"}
    columns = {key: name for key, name in shown.items() if key in long}
    inside = long.dropna(subset="hit").assign(hit=lambda frame: 100 * frame.hit.astype(float))
    whole = side_by_side(long, keys, columns, {"validation": 2, "test": 2, "scale": 2})
    return (
        whole.join(side_by_side(inside, keys, {"hit": "best λ of the grid inside, %"}))
        .fillna("")
        .sort_index(level=[0, 1])
    )


def edit_table(by: str, rows: pd.DataFrame) -> pd.DataFrame:
    """Return a table of the effect and cost of unlearning, and how well that was predicted, by length or run."""
    lines = {
        name: {f"rank correlation, {label}": with_interval(ranks(group, key), 2) for key, label in PREDICTIONS.items()}
        for name, group in edits(rows).groupby(by)
    }
    shown = {"left_out": "the task, left out, %", "left": "the task, negated, %", "loss": "others lose, points"}
    lost = side_by_side(edits(rows), by, {key: name for key, name in shown.items() if key in rows})
    return lost.join(pd.DataFrame(lines).T)


def scales_figure(by: str, largest: float, rows: pd.DataFrame) -> Figure:
    """Draw the best λ of the grid over the middle of each predicted range, a point for each set."""
    all_sets = sets(rows)
    middles = all_sets.assign(**{way: (all_sets[f"low_{way}"] * all_sets[f"high_{way}"]) ** 0.5 for way in RANGES})
    labels = {way: f"middle of {name}" for way, name in RANGES.items()}
    figure = points(middles, labels, "scale_grid", by, y_label="best λ of the grid", height=3.6)
    for panel in figure.axes:
        panel.axline((0, 0), slope=1, color=INK, linewidth=0.8)
        panel.set(xlim=(0, 3.2), ylim=(0, largest))
    return figure


def costs_figure(by: str, rows: pd.DataFrame) -> Figure:
    """Draw what a task loses when another is unlearned, over each prediction."""
    return points(edits(rows), PREDICTIONS, "loss", by, y_label="points lost")


def points(frame: pd.DataFrame, x: Mapping[str, str], y: str, by: str, **how: Any) -> Figure:
    units = {"steps": "{:g} steps", "size": "{:g} tasks", "run": "{}"}
    labels = {name: units[by].format(name) for name in frame[by].unique()}
    return scatter(frame.sort_values(by, kind="stable"), x, y, by, labels=labels, **how)


SUITES = Study(
    options=SuiteOptions,
    runs=lambda options: options.runs,
    splits=("validation", "test"),
    systems=("P10",),
    measure=measure_suites,
    claims=claims_of_suites,
    tables={
        "λ of a sum of task vectors, chosen on validation": partial(set_table, "run"),
        "One task of the suite negated (−λ) against left out (0): test accuracy": partial(edit_table, "run"),
    },
    figures={"scales": partial(scales_figure, "size", 1.6), "costs": partial(costs_figure, "run")},
)
STUDIES = {
    "adviser": Study(
        options=Options,
        systems=("P10",),
        measure=over_seeds(open_digits, measure_seed),
        claims=claims,
        tables={
            "λ of a sum of task vectors, chosen on validation": partial(set_table, "steps"),
            "What task 1 loses in Ψ⁰ + ΔΨ₁ − ΔΨ₂, over all ordered pairs": partial(edit_table, "steps"),
        },
        figures={"scales": partial(scales_figure, "steps", 2.1), "costs": partial(costs_figure, "steps")},
    ),
    "adviser_suites": SUITES,
    "adviser_regimes": SUITES,
}
