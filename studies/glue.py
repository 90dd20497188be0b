"""Study `glue` (C5, C9): how do the merge methods compare on encoders of eight tasks on texts, each with a head?

**Question.** One expert per task, all of its encoder merged, its head kept: who leads? Does a merge lose in what the
encoder still tells, or in that the heads no longer read it? And should the embedding matrices be merged at all?

**Method.** Every method merges the same eight experts. Its scale is chosen on validation, walking a grid both ways
until the mean has fallen by one point; every combination of its other arguments is tried. CART's grid is the paper's,
ranks of 4 to 32 % and λ of 1 to 3; *wider grid* is CART chosen once more with smaller ones as well. Then one look at
test. Each task is judged by its figure (accuracy, F1, Matthews' or Pearson's correlation); the mean of the figures is
the paper's "Avg.". *Heads fixed*: those that were trained with the experts. *Heads probed*: the same merge, the heads
fitted to its features of the training examples, as the warm start of training fits them to the base's. *Embeddings of
the base*: the method's merge with the base's embeddings instead of the merged ones, its arguments chosen anew.
AdaMerging learns a coefficient per task and tensor from the entropy of unlabelled test batches, from task arithmetic as
chosen on validation and from CART as its paper has it, 8 % and λ = 1; its rate is chosen on validation, on the first
seed. Joint training sees every task in every step; MIMA merges and tunes in rounds; both have as many steps a task as
the experts, and heads of their own. Beside the merges the experts are compressed into one file and read back out of it,
by EMR and by CART-Indexing at 8 %; storage is the file with θ0 where that is needed, as a share of all experts' bytes.
± is over seeds: the order of the batches.

`texts_glue` is the same with eight real tasks on a pre-trained encoder and the merges of Table 2, each with one grid of
λ (worlds/real-texts).

**Source.** CART, Table 2 (eight tasks of GLUE, RoBERTa-base): individual 85.6, CART 70.8, task arithmetic 66.7, TIES
64.0, average 51.3, in per cent; Table 4 (the same tasks, compressed); the further methods as in
`mergeflow methods`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from pydantic import Field, field_validator
from torch import Tensor

from mergeflow.errors import MergeflowError
from mergeflow.evaluation.averages import mean
from mergeflow.evaluation.scoring import CandidateScorer
from mergeflow.merging import MethodCall
from studies.lab import Claim, Laboratory, Row, Section, Study, accuracy_rows
from studies.lab.claims import Samples, needs, with_interval
from studies.lab.inputs import Heads, State
from studies.lab.methods import (
    ADAPTED,
    CART_START,
    NAMES,
    Adaptation,
    Direction,
    Sweep,
    adapt_with_rates,
    arguments_of,
    at_end,
    best_of,
    ends_note,
    leader,
    measure_file,
    ranges_of,
)
from studies.lab.plots import ranked_dots
from studies.lab.rows import samples, select, shares
from studies.lab.study import Tables
from tasks.models import modality_of

WIDER = ", wider grid"
COMPRESSORS = {"emr": "EMR", "cart_indexing": "CART-Indexing"}
LADDER = ("average", "ties", "task_arithmetic", "cart", "individual")
BASELINES = ("task_arithmetic", "ties", "average")

# CART's Tables 2 and 4, mean over eight tasks of GLUE, in per cent.
PRINTED = {"individual": 85.56, "average": 51.34, "task_arithmetic": 66.65, "ties": 64.04, "cart": 70.78}
PRINTED |= {"emr": 80.18, "cart_indexing": 84.93}
IMPROVED = 28.4  # % of experts less average, half of the share in Table 2: 19.44 of 34.22 points
WORKS = 20  # % of what experts gain over the base: below it merging fails, and no order of merges is tested
READABLE = 1.0  # points by which heads that are fitted once more have to be better, to say that they matter
NEGLIGIBLE = 1.0  # points that merging the embeddings may change, to say that it does not matter
KEPT = 99  # per cent of the experts' figures; the paper keeps 99.3


class Adapting(Section):
    """AdaMerging. directions: what is scaled. rates: tried on validation. steps: of Adam."""

    directions: list[Direction]
    rates: list[float] = Field(min_length=1)
    steps: int = Field(ge=1)


class Options(Section):
    run: str = "experts"  # whose experts are merged
    methods: dict[str, Sweep]  # name in the catalog → what is tried
    wider: dict[str, Sweep] = Field(default_factory=dict)  # what is tried of some of them once more
    together: dict[str, str]  # joint and iterative runs, with labels for readers
    adapted: Adapting  # AdaMerging
    probed: list[str]  # models whose heads are fitted once more
    # what the names of embeddings contain, and the methods that are merged without them too
    embeddings: dict[str, list[str]]
    compressed: dict[str, dict[str, Any]] = Field(default_factory=dict)  # compressor → its arguments

    @field_validator("compressed")
    @classmethod
    def _check_compressors(cls, compressed: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        if unknown := set(compressed) - set(COMPRESSORS):
            raise ValueError(f"expected {' or '.join(COMPRESSORS)}, found {', '.join(sorted(unknown))}")
        return compressed

    @property
    def merges(self) -> dict[str, Sweep]:
        """Model → what is tried of its method, whose name the model's begins with."""
        return {**self.methods, **{name + WIDER: sweep for name, sweep in self.wider.items()}}


def measure(lab: Laboratory, options: Options) -> list[Row]:
    """Return one row for each seed, model and: heads and task; choice; storage; rate and step.

    `model`: test figure of a task in %. `choice`: the arguments, how many were tried, and the mean figure on validation
    in % that chose them. `stored`: the share in % of all experts' bytes. `rate`: AdaMerging's mean figure on validation
    in % after so many steps, for the first seed, whose course chose the rate of all.
    """
    first, *others = lab.run(options.run).seeds
    measured = partial(measure_seed, options=options)
    rows = lab.by_run([options.run], measured, [first])  # it chooses AdaMerging's rates, which the others read
    rows += lab.by_run([options.run], measured, others)
    return sorted(rows, key=lambda row: row["part"] != "model")


def measure_seed(lab: Laboratory, run: str, seed: int, options: Options) -> Iterator[Row]:
    yield from Bench.open(lab, options, seed).measure()


@dataclass(frozen=True)
class Bench:
    """The experts of one seed with their heads, and what merges and scores on validation; test is out of its reach."""

    lab: Laboratory
    options: Options
    seed: int
    experts: Mapping[str, State]
    scorer: CandidateScorer

    @classmethod
    def open(cls, lab: Laboratory, options: Options, seed: int) -> "Bench":
        experts = lab.run(options.run).experts(seed)
        scorer = lab.blind().scorer(experts)
        ratios = [ratio for sweep in options.merges.values() for ratio in sweep.args.get("rank_ratio", [])]
        scorer.renew_cache(max([0.01, *ratios]))
        return cls(lab, options, seed, experts, scorer)

    def measure(self) -> Iterator[Row]:
        """Yield the rows of each model, its figures per task with fixed and with probed heads and what was chosen."""
        measures: dict[tuple[str, str], Callable[[], list[Row]]] = {
            ("base", "base"): lambda: self.look_at("base", self.lab.base, self.lab),
            ("individual", "merged"): self.individual,
            **{(name, "merged"): self.lab.of_run(name, self.seed, self.together) for name in self.options.together},
            **{(name, "merged"): partial(self.merged, name, "") for name in self.options.merges},
            **{(name, "own"): partial(self.compressed, name) for name in self.options.compressed},
        }
        for pattern, methods in self.options.embeddings.items():
            measures |= {(name, "base"): partial(self.merged, name, pattern) for name in methods}
        scale = CART_START
        for (name, embeddings), measured in measures.items():
            rows = self.lab.keep(f"{self.seed}_{name}_{embeddings}", measured)
            if (name, embeddings) == ("task_arithmetic", "merged"):
                scale = next(row["scale"] for row in rows if row["part"] == "choice")
            yield from self.about(name, embeddings, rows)
        for on in self.options.adapted.directions:
            start = scale if on == "task_vectors" else CART_START
            adapted = partial(self.adapted, on, start)
            yield from self.about(ADAPTED[on], "merged", self.lab.keep(f"{self.seed}_{ADAPTED[on]}", adapted))

    def about(self, model: str, embeddings: str, rows: Sequence[Row]) -> Iterator[Row]:
        for row in rows:
            yield {"part": row["part"], "seed": self.seed, "model": model, "embeddings": embeddings, **row}

    def look_at(self, model: str, state: State, lab: Laboratory) -> list[Row]:
        """Look at test once, and once more with heads fitted to these features where that is asked for."""
        rows = accuracy_rows(lab.accuracy(state, "test"), part="model", heads="fixed")
        if model in self.options.probed:
            probed = lab.with_heads(probed_heads(lab, state)).accuracy(state, "test")
            rows += accuracy_rows(probed, part="model", heads="probed")
        return rows

    def individual(self) -> list[Row]:
        return accuracy_rows(self.lab.individual(self.experts, "test"), part="model", heads="fixed")

    def compressed(self, name: str) -> list[Row]:
        """Measure the experts as they are read out of one file, and its share of their bytes."""
        accuracy, size = measure_file(self.lab, self.experts, name, self.options.compressed[name], ("test",))
        needed = size["file"] + (size["base"] if size["needs_base"] else 0)
        stored = {"part": "stored", "stored": 100 * (needed / size["all_experts"])}
        return [*accuracy_rows(accuracy["test"], part="model", heads="fixed"), stored]

    def together(self, lab: Laboratory, name: str, seed: int) -> list[Row]:
        """Measure the one model that a joint or an iterative run ends with, with its own heads."""
        return self.look_at(name, lab.run(name).final(seed), lab)

    def merged(self, model: str, without: str) -> list[Row]:
        """Choose a method's arguments on validation; tensors whose names contain `without` stay the base's."""

        def merge(call: MethodCall) -> dict[str, Tensor]:
            state = self.scorer.merge(call)
            return state | {name: value for name, value in self.lab.base.items() if without and without in name}

        sweep, method = self.options.merges[model], model.removesuffix(WIDER)
        best, tried = best_of(sweep, method, lambda call: self.scorer.state(merge(call)))
        chosen = {"part": "choice", **best.varied, "tried": tried, "validation": 100 * mean(best.scores)}
        return [*self.look_at(model, merge(best.call), self.lab), chosen]

    def adapted(self, on: Direction, scale: float) -> list[Row]:
        """Adapt a coefficient per task and tensor on unlabelled test examples, with the rate that validation chose."""
        choices, first = self.options.adapted, self.lab.run(self.options.run).seeds[0]
        plan = Adaptation(on, "layer", "test", init=scale, lr=choices.rates[0], steps=choices.steps)
        made, tried = adapt_with_rates(self.lab, self.experts, plan, choices.rates, f"rates_{on}", self.seed, first)
        rows = [*self.look_at(ADAPTED[on], made.state, self.lab), {"part": "choice", "rate": tried[0]["lr"]}]
        return rows + [
            {"part": "rate", "rate": trial["lr"], "step": int(step), "validation": value}
            for trial in (tried if self.seed == first else [])
            for step, value in trial["course"].items()
        ]


def probed_heads(lab: Laboratory, state: State) -> Heads:
    """Return heads that are fitted to the features that a model gives for the training examples."""
    warm = modality_of(lab.io).warm
    if warm is None:
        raise MergeflowError("the study glue fits heads, but the tasks of this modality have none that are trained.")
    section = lab.io.section("model").model_copy(update={"head": "probed"})
    lab.model.load(state)
    heads = {}
    # The probe overwrites the heads that it is given: those of a copy.
    copied = lab.with_heads(lab.heads)
    for task, examples in copied.examples("train").items():
        warm(section, lab.model, examples)
        assert examples.head is not None
        heads[task] = {name: value.detach().clone() for name, value in examples.head.state_dict().items()}
    return heads


# What the rows are asked


def means(rows: pd.DataFrame, model: str, heads: str = "fixed", embeddings: str = "merged") -> pd.Series:
    """Return the mean figure over tasks in %, by seed; none where the model was not measured so."""
    return samples(rows, part="model", model=model, heads=heads, embeddings=embeddings_of(model, embeddings))


def embeddings_of(model: str, embeddings: str = "merged") -> str:
    """Return whose embeddings a model has: the base and what is read out of a file have no others than theirs."""
    return "base" if model == "base" else "own" if model in COMPRESSORS else embeddings


def lead(better: str, worse: str, rows: pd.DataFrame) -> Samples:
    apart = (means(rows, better) - means(rows, worse)).dropna()
    return {f"{name_of(better)} less {name_of(worse)}": apart} if len(apart) else {}


def name_of(model: str) -> str:
    narrow = model.removesuffix(WIDER)
    return {**NAMES, **COMPRESSORS}.get(narrow, narrow) + model[len(narrow) :]


def leads(pairs: Sequence[tuple[str, str]], rows: pd.DataFrame) -> Samples:
    return {name: apart for pair in pairs for name, apart in lead(*pair, rows).items()}


def relative(rows: pd.DataFrame, model: str) -> pd.Series:
    """Return the mean over tasks of a model's figure relative to the expert's, in %, by seed."""
    fixed = select(rows, part="model", heads="fixed").set_index(["seed", "task"])
    merged = select(fixed, model=model, embeddings=embeddings_of(model))
    return shares(merged.accuracy, select(fixed, model="individual").accuracy).groupby("seed").mean()


def best_share(rows: pd.DataFrame) -> Samples:
    """Return the gain of the best of the paper's merges over the base, in % of what the experts gain."""
    base, merges = means(rows, "base"), [model for model in (*BASELINES, "cart") if model in set(rows.model)]
    gained = {NAMES[model]: 100 * (means(rows, model) - base) / (means(rows, "individual") - base) for model in merges}
    best = max(gained, key=lambda name: float(gained[name].mean()))
    return {f"{best}, the best": gained[best]}


def improved(rows: pd.DataFrame) -> Samples:
    room = means(rows, "individual") - means(rows, "average")
    return {name: 100 * pd.Series(values) / room for name, values in lead("cart", "average", rows).items()}


def ladder(rows: pd.DataFrame) -> Samples:
    measured = [model for model in LADDER if model in set(rows.model)]
    return leads([(high, low) for low, high in pairwise(measured)], rows)


def probed(rows: pd.DataFrame) -> list[str]:
    """Return the merges whose heads were fitted once more."""
    return [model for model in NAMES if model != "individual" and len(means(rows, model, "probed"))]


def ahead_when_probed(rows: pd.DataFrame) -> Samples:
    ours = means(rows, "cart", "probed")
    others = [model for model in ("average", "task_arithmetic", "ties") if model in probed(rows)]
    return {f"CART less {NAMES[m]}": ours - means(rows, m, "probed") for m in others if len(ours)}


def merged_embeddings(rows: pd.DataFrame) -> Samples:
    pairs = {model: means(rows, model, embeddings="base") for model in NAMES}
    return {NAMES[model]: means(rows, model) - base_means for model, base_means in pairs.items() if len(base_means)}


# Claims, written before the run
# fmt: off

def claims(options: Options) -> list[Claim]:
    each = "each paired difference"
    reached = "share of the experts' gain that a merge of Table 2 with their heads reaches"
    works = needs(best_share, reached, "%", low=WORKS)
    order = " < ".join(name_of(model) for model in LADDER if model == "individual" or model in options.methods)
    ahead = [
        Claim("C9", f"On GLUE CART is ahead of {NAMES[m]}.", partial(lead, "cart", m), low=0, needs=works,
              of="paired difference", paper=f"{PRINTED['cart']:.1f} and {PRINTED[m]:.1f} %")
        for m in BASELINES if m in options.methods
    ]
    paper_claims = [
        Claim("C9", f"{order}: the order of Table 2.", ladder, low=0, of=each, needs=works),
        Claim("C9", "The low-rank parts that CART adds to the average improve it substantially.",
              improved, low=IMPROVED, unit="% of experts less average",
              of="paired difference, half of the paper's share,",
              paper="19.4 points, 57 % of experts less average", needs=works),
        Claim("C9", "The average is behind the approaches based on task vectors.",
              partial(leads, [("task_arithmetic", "average"), ("ties", "average")]), low=0, of=each,
              needs=works),
    ]
    compressed = [
        Claim("C5", "CART-Indexing keeps the figures of eight experts on texts.",
              lambda rows: {"relative to the experts": relative(rows, "cart_indexing")},
              low=KEPT, of="mean over tasks of compressed / expert", unit="%", paper="99.3 %"),
        Claim("C5", "On texts CART-Indexing is ahead of EMR.",
              partial(lead, "cart_indexing", "emr"), low=0, of="paired difference", paper="84.9 and 80.2"),
    ]
    refitted = [
        Claim("C9", "A merge tells more than the experts' heads read of it: heads fitted to its features are better.",
              lambda rows: {NAMES[m]: means(rows, m, "probed") - means(rows, m) for m in probed(rows)},
              low=READABLE, ours=True,
              of="paired difference, for every merge whose heads were fitted once more,"),
        Claim("C9", "CART comes ahead of the average, task arithmetic and TIES when heads are fitted to each merge.",
              ahead_when_probed, low=0, of=each, ours=True),
    ]
    without = [
        Claim("C9", "It does not matter whether the embeddings are merged.", merged_embeddings,
              low=-NEGLIGIBLE, high=NEGLIGIBLE, of="merged less the base's, for every method that was tried,",
              ours=True),
    ]
    wide = [
        Claim("C9", "With smaller ranks and λ than the paper's, CART is ahead of task arithmetic, TIES and the "
              "average.", partial(leads, [(f"cart{WIDER}", model) for model in BASELINES]), low=0, of=each, ours=True),
    ]
    return [
        *ahead, *paper_claims, *(compressed[:len(options.compressed)] if "cart_indexing" in options.compressed else []),
        *(refitted if options.probed else []), *(without if options.embeddings else []),
        *(wide if "cart" in options.wider else []),
    ]

# fmt: on


def names_of(rows: pd.DataFrame, options: Options) -> dict[str, str]:
    """Return model → what readers call it, in the order of the tables."""
    names = {"base": "base", "individual": "individual", **options.together}
    for name, label in NAMES.items():
        names |= {name: label, name + WIDER: label + WIDER}
    models = set(rows.model)
    return {model: label for model, label in {**names, **COMPRESSORS}.items() if model in models}


def figure_table(options: Options, rows: pd.DataFrame) -> pd.DataFrame:
    lines = {}
    for model, name in names_of(rows, options).items():
        scores = select(rows, part="model", heads="fixed", model=model, embeddings=embeddings_of(model))
        cells = {
            "mean": means(rows, model),
            "normalised": relative(rows, model),
            "heads probed": means(rows, model, "probed"),
            "embeddings of the base": means(rows, model, embeddings="base") if model in NAMES else pd.Series(),
            "stored, % of all experts": samples(rows, "stored", model=model) if model in COMPRESSORS else pd.Series(),
        }
        lines[name] = {
            **scores.groupby("task", sort=False).accuracy.mean().map("{:.1f}".format),
            **{words: with_interval(values) for words, values in cells.items() if len(values)},
            "in the paper": f"{PRINTED[model]:.1f}" if model in PRINTED else "",
        }
    return pd.DataFrame(lines).T.fillna("")


def choice_table(options: Options, rows: pd.DataFrame) -> pd.DataFrame:
    choices = select(rows, part="choice")
    tried = choices.tried.map("{:.0f}".format).replace("nan", "")
    choices = choices.assign(
        chosen=arguments_of(choices), tried=tried, model=choices.model.map(names_of(rows, options))
    )
    return choices.groupby(["model", "embeddings"], sort=False)[["chosen", "tried"]].agg("; ".join)


def tables(options: Options) -> Tables:
    return {
        "Test figures, %, mean over seeds; mean over tasks with its interval": partial(figure_table, options),
        "Chosen on validation, one value per seed": partial(choice_table, options),
    }


def heads_figure(options: Options, rows: pd.DataFrame) -> Figure:
    """Draw each model's mean figure with the experts' heads, and with heads fitted to it."""
    heads = {"fixed": "heads fixed", "probed": "heads probed"}
    figures = {
        name: {label: by_seed for kind, label in heads.items() if len(by_seed := means(rows, model, kind))}
        for model, name in names_of(rows, options).items()
    }
    return ranked_dots(figures, "Mean over eight tasks", "test figure, %")


def at_ends(rows: pd.DataFrame, options: Options) -> Iterator[str]:
    tried: dict[str, dict[str, Sequence[float]]] = {
        **{model: ranges_of(sweep) for model, sweep in options.merges.items()},
        **{ADAPTED[on]: {"rate": options.adapted.rates} for on in options.adapted.directions},
    }
    for model, label in names_of(rows, options).items():
        for embeddings, whose in (("merged", ""), ("base", " and the base's embeddings")):
            chosen = select(rows, part="choice", model=model, embeddings=embeddings)
            for name, values in tried.get(model, {}).items() if len(chosen) else ():
                if count := sum(at_end(value, values) for value in chosen[name]):
                    yield f"{name} of {label}{whose} ({count} of {len(chosen)} seeds)"


def notes(rows: pd.DataFrame, options: Options) -> list[str]:
    names = names_of(rows, options)
    apart = {"base", "individual", *options.together, *COMPRESSORS}
    _, best = leader({model: list(means(rows, model)) for model in names if model not in apart}, names)
    return [f"The highest mean of a merge is that of {best}.", *ends_note(at_ends(rows, options))]


STUDY = Study(
    options=Options,
    runs=lambda options: [options.run, *options.together],
    splits=("train", "validation", "test"),
    systems=("C5", "C9"),
    measure=measure,
    claims=claims,
    tables=tables,
    figures=lambda options: {"heads": partial(heads_figure, options)},
    notes=notes,
)

STUDIES = {"glue": STUDY, "texts_glue": STUDY}
