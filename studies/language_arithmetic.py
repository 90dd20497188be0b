"""Study `language_arithmetic`: do analogies, and sums of three domains, work with task vectors of a language model?

**Question.** "T' is to A as B is to C" of task vectors is defined by the papers and was measured on images; most models
that people merge write texts. Does Δ_A + (Δ_B − Δ_C) write texts that nobody trained on, by an author in a genre, or in
a tense and a style? And what is left of three domains when their experts are merged, by every method that needs no
data?

**Method.** Texts by the grammar of the corpus `books`, by the authors of each seed: an author has a cast
with facts, places, and a third of all words; a genre or style is a set of forms of sentences; the present tense, which
the base has never seen, replaces every verb. From the embedded base Ψ⁰, a Llama of half a million parameters, an expert
is fine-tuned on each of four tasks: two authors × two genres, and past or present × narrative or descriptive by one
author. Each task is then the target of the other three: A has its first attribute, B its second, C neither. λ in
Ψ⁰ + λ (Δ_A + Δ_B − Δ_C), in the same without C, and of each expert alone, is chosen by the target's validation texts,
and test is looked at once; the nearest expert is the one of the three that is best on validation. Beside it the analogy
with λ = 1, which needs no text of the target, and the expert that was trained on the target.

The three domains are tales, dialogues and annals by three authors. Every method of the catalog that takes three whole
experts and no data merges them; its arguments are chosen on validation, test is looked at once. Beside them the base,
each domain's own expert, and joint training on all three of as many steps as the experts together.

Every figure is the log-likelihood per token, in nats: minus the logarithm of the perplexity, larger is better. A pilot
on seed 0, of which validation alone was looked at, set the length of the training and the grids, and had genres made of
forms that the base knows. The rules beside the findings were planned before the pilot and written down after it, before
any run at this size; the seeds of the study are others, and no test text was read until then.

Of tenses × styles, that taking Δ_C away is worth it comes from the targets in the present tense: 0.50 ± 0.24
(descriptive) and 0.19 ± 0.16 (narrative). In the past tense it is −0.01 ± 0.02 and −0.04 ± 0.05.

**Source.** Li et al. 2025, Section 2.1; Ilharco et al. 2023, Editing models with task arithmetic, Section 5.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import pandas as pd
import torch
from matplotlib.figure import Figure
from pydantic import Field, field_validator

from mergeflow.evaluation.averages import mean
from mergeflow.merging import MethodCall
from mergeflow.merging.execution.direction import CandidateMerger
from mergeflow.modalities.causal.modality import PackedText, perplexity
from mergeflow.modalities.causal.model import LanguageModel, load_model
from mergeflow.modalities.causal.tokenizer import CausalTokenizer, load_tokenizer
from mergeflow.modality import State
from mergeflow.search.candidates import grid, grid_of, score_all
from studies.lab import Claim, Laboratory, Row, Section, Study, table
from studies.lab.analogies import (
    ANALOGY,
    BASE,
    LOOKED_AT,
    NEAREST,
    SUM,
    TRAINED,
    UNLABELLED,
    less,
    target_rows,
    targets_figure,
    ways_table,
    with_nearest,
)
from studies.lab.claims import Samples
from studies.lab.plots import ranked_dots
from studies.lab.rows import samples, select
from studies.lab.texts import check_places, folder_documents, packed
from studies.lab.tuning import CosineSteps, combined, drawn_weights, task_vector, trained
from suites.books.manners import Manner, documents

PLAIN = ("average", "task_arithmetic")  # methods that treat no interference

INDIVIDUAL, JOINT = "individual", "joint"
REFERENCES = (BASE, INDIVIDUAL, JOINT)
BEST, TREATING = "best merge", "best that treats interference"
NEARER, ABOVE_BASE, BEHIND = 0.05, 0.1, 0.1  # nats a token, of analogies
GAIN, SHARE, TREATED = 0.2, 50, 0.02  # nats, % and nats, of three domains


# The tasks: generated texts, or folders of your own

ATTRIBUTES: Mapping[str, Mapping[tuple[str, str], Manner]] = {
    "authors × genres": {
        (author, genre): Manner(author, genre) for author in ("first", "second") for genre in ("tales", "dialogues")
    },
    "tenses × styles": {
        (tense, style): Manner("narrator", style, tense)
        for tense in ("past", "present")
        for style in ("narrative", "descriptive")
    },
}
"""Two attributes with two values each → the four tasks."""

DOMAINS: Mapping[str, Manner] = {
    "tales": Manner("first", "tales"),
    "dialogues": Manner("second", "dialogues"),
    "annals": Manner("third", "annals"),
}
"""Three tasks that have neither author nor genre in common."""

Task = Manner | str
"""How generated texts are written, or a place `folder:PATH` with files or folders train, validation and test."""


class Folders(Section):
    """Texts of your own."""

    # two attributes, in words → a value of the first → a value of the second → the place of that task's texts,
    # `folder:PATH`; two values each
    attributes: dict[str, dict[str, dict[str, str]]] = Field(min_length=1)
    domains: dict[str, str] = Field(min_length=3, max_length=3)  # name → place, of three domains

    @field_validator("attributes")
    @classmethod
    def _two_by_two(cls, attributes: dict[str, dict[str, dict[str, str]]]) -> dict[str, dict[str, dict[str, str]]]:
        for name, first in attributes.items():
            if (
                len(first) != 2
                or {len(second) for second in first.values()} != {2}
                or len(set().union(*first.values())) != 2
            ):
                values = "; ".join(f"{value}: {', '.join(second)}" for value, second in first.items())
                raise ValueError(
                    f"'{name}' has {values or 'nothing'}; expected two values of the first attribute, each with the "
                    "same two of the second"
                )
        return attributes


class World(NamedTuple):
    attributes: Mapping[str, Mapping[tuple[str, str], Task]]
    domains: Mapping[str, Task]

    @classmethod
    def of(cls, folders: Folders | None) -> "World":
        """Return the tasks of these folders; without any, the generated ones."""
        if folders is None:
            return cls(ATTRIBUTES, DOMAINS)
        attributes = {
            name: {(value, other): place for value, second in first.items() for other, place in second.items()}
            for name, first in folders.attributes.items()
        }
        return cls(attributes, folders.domains)

    @property
    def tasks(self) -> list[Task]:
        four = (task for tasks in self.attributes.values() for task in tasks.values())
        return list(dict.fromkeys([*self.domains.values(), *four]))


def written(task: Task, split: str, count: int, seed: int, root: Path) -> Iterator[str]:
    """Yield the first texts of a split of a task."""
    if not isinstance(task, str):
        yield from documents(task, split, count, seed)
        return
    yield from folder_documents(task, split, count, root)


class Options(Section):
    seeds: list[int] = Field(min_length=1)  # of the texts and of the order of the batches
    base: str = "books"  # what every fine-tuning starts from, a place as `model.pretrained` of the modality `causal`
    block: int = Field(128, ge=8)  # tokens of a block
    # texts of your own in place of the generated ones; the seed is then that of the batches alone
    folders: Folders | None = None
    train: int = Field(ge=1)  # texts that each expert learns from; of a folder the first so many files
    validation: int = Field(ge=1)  # texts of each task that λ and the methods' arguments are chosen on
    test: int = Field(ge=1)  # texts of each task that are looked at once
    tune: CosineSteps  # of each expert; joint training takes as many steps as the experts together
    scales: list[float] = Field(min_length=1)  # λ of the analogies and of what they are held against
    methods: dict[str, dict[str, list[Any]]] = Field(min_length=1)  # name in the catalog → argument → the values to try

    @field_validator("methods")
    @classmethod
    def _taken(cls, methods: dict[str, dict[str, list[Any]]]) -> dict[str, dict[str, list[Any]]]:
        for name, values in methods.items():
            grid_of(name, values)
        if "task_arithmetic" not in methods or not methods.keys() - PLAIN:
            raise ValueError(
                f"found {', '.join(methods)}; expected task_arithmetic and a method that treats interference, such as "
                "ties: a finding compares them"
            )
        return methods


@dataclass(frozen=True)
class Bench:
    """The base and the texts of one seed."""

    options: Options
    seed: int
    model: LanguageModel
    start: State
    tokenizer: CausalTokenizer

    @classmethod
    def open(cls, options: Options, seed: int) -> "Bench":
        model, _ = load_model(options.base, Path.cwd())
        return cls(options, seed, model, drawn_weights(model), load_tokenizer(options.base, Path.cwd()))

    @cached_property
    def world(self) -> World:
        return World.of(self.options.folders)

    def texts(self, manners: Sequence[Task], split: str) -> PackedText:
        """Return the texts of some tasks in blocks, those of one task after those of the other."""
        count = {"train": self.options.train, "validation": self.options.validation, "test": self.options.test}[split]
        texts = (text for manner in manners for text in written(manner, split, count, self.seed, Path.cwd()))
        return packed(split, texts, self.tokenizer, self.options.block, torch.device("cpu"))

    def tuned(self, manners: Sequence[Task]) -> State:
        """Return the weights after fine-tuning on all texts of some tasks, as many steps for each."""
        tune = self.options.tune.model_copy(update={"steps": len(manners) * self.options.tune.steps})
        return trained(self.model, self.start, self.texts(manners, "train"), tune, self.seed)

    @cached_property
    def held_out(self) -> dict[tuple[Task, str], PackedText]:
        """The validation and test texts of every task."""
        return {(manner, split): self.texts([manner], split) for manner in self.world.tasks for split in LOOKED_AT}

    def likelihood(self, state: State, manner: Task, split: str) -> float:
        """Return the log-likelihood per token of a task's texts, in nats."""
        self.model.load(state)
        return -math.log(perplexity(self.model, self.held_out[manner, split]))


def measure(lab: Laboratory, options: Options) -> list[Row]:
    """Return each way to reach a target and each model of three domains, with what is best of them on validation."""
    check_places(lab.io.stage.name, World.of(options.folders).tasks, lab.io.root)
    rows = lab.by_seed(partial(measure_seed, options), options.seeds)
    analogies, domains = ([row for row in rows if key in row] for key in ("way", "model"))
    return [*with_nearest(analogies), *with_best(domains)]


def measure_seed(options: Options, seed: int) -> Iterator[Row]:
    bench = Bench.open(options, seed)
    experts = {manner: bench.tuned([manner]) for manner in bench.world.tasks}
    for name, tasks in bench.world.attributes.items():
        vectors = {" ".join(task): task_vector(experts[manner], bench.start) for task, manner in tasks.items()}
        for task, manner in tasks.items():
            reached = partial(likelihood_of_sum, bench, vectors, manner)
            for row in target_rows(reached, options.scales, " ".join(task), others(tasks, task)):
                yield {"seed": seed, "attributes": name, **row}
    for row in domain_rows(bench, experts):
        yield {"seed": seed, **row}


def with_best(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the three domains, and again those of the merges that are best on validation."""
    merged = [model for model in dict.fromkeys(row["model"] for row in rows) if model not in REFERENCES]
    best_rows = []
    for name, among in {BEST: merged, TREATING: [model for model in merged if model not in PLAIN]}.items():
        for seed in dict.fromkeys(row["seed"] for row in rows):
            of_model = {m: [row for row in rows if (row["seed"], row["model"]) == (seed, m)] for m in among}
            best = max(among, key=lambda model: fmean(row["validation"] for row in of_model[model]))
            best_rows += [{**row, "model": name, "method": best} for row in of_model[best]]
    return [*rows, *best_rows]


def others(tasks: Mapping[tuple[str, str], Task], target: tuple[str, str]) -> tuple[str, str, str]:
    """Return A, B and C: what has the target's first attribute alone, its second one alone, and neither.

    Example:
        >>> others(World.of(None).attributes["authors × genres"], ("first", "tales"))
        ('first dialogues', 'second tales', 'second dialogues')
    """
    by_agreement = {(first == target[0], second == target[1]): f"{first} {second}" for first, second in tasks}
    return by_agreement[True, False], by_agreement[False, True], by_agreement[False, False]


def likelihood_of_sum(
    bench: Bench, vectors: Mapping[str, State], manner: Task, scales: Mapping[str, float], split: str
) -> float:
    """Return the log-likelihood per token of a task's texts by the base plus Σ λ Δ, in nats."""
    return bench.likelihood(combined(bench.start, vectors, scales), manner, split)


def domain_rows(bench: Bench, experts: Mapping[Task, State]) -> Iterator[Row]:
    """Yield a row for each model and domain; the arguments of a merge are those that are best on validation."""
    domains = bench.world.domains
    of_domain = {name: experts[manner] for name, manner in domains.items()}
    merger = CandidateMerger(bench.start, of_domain)

    def score(call: MethodCall) -> dict[str, float]:
        state = merger.merge(call)
        return {name: bench.likelihood(state, manner, "validation") for name, manner in domains.items()}

    joint = bench.tuned(list(domains.values()))
    yield from judged(bench, BASE, dict.fromkeys(domains, bench.start))
    yield from judged(bench, INDIVIDUAL, of_domain)
    yield from judged(bench, JOINT, dict.fromkeys(domains, joint))
    for method, values in bench.options.methods.items():
        tried = list(score_all(method, grid(method, values), score, mean))
        best = max(tried, key=lambda trial: trial.value)
        choice = {"args": json.dumps(best.varied), "tried": len(tried)}
        yield from ({**row, **choice} for row in judged(bench, method, dict.fromkeys(domains, merger.merge(best.call))))


def judged(bench: Bench, model: str, states: Mapping[str, State]) -> Iterator[Row]:
    for name, manner in bench.world.domains.items():
        scores = {split: bench.likelihood(states[name], manner, split) for split in LOOKED_AT}
        yield {"model": model, "domain": name, **scores}


# What the rows are asked


def domains_of(rows: pd.DataFrame, model: str) -> pd.Series:
    """Return a model's log-likelihood per token on test, the mean over domains, by seed."""
    return samples(rows, "test", model=model)


def lead(model: str, other: str, label: str, rows: pd.DataFrame) -> Samples:
    return {label: domains_of(rows, model) - domains_of(rows, other)}


def closed_by_best(rows: pd.DataFrame) -> Samples:
    """Return how much of the way from the base to the experts the best merge has gone, in %."""
    best, base, experts = (domains_of(rows, model) for model in (BEST, BASE, INDIVIDUAL))
    return {"closed": 100 * (best - base) / (experts - base)}


# Claims: the rules were written before the run
# fmt: off

def claims(options: Options) -> list[Claim]:
    ours, of = "Δ_A + (Δ_B − Δ_C)", "paired difference, mean over the four targets,"
    about_targets = [
        claim.of_part(partial(select, attributes=name), name)
        for name in World.of(options.folders).attributes
        for claim in (
            *(Claim("P22", f"{ours} {says}.", partial(less, ANALOGY, way), low=low, of=of, unit="nat",
                    digits=2, ours=True)
              for says, way, low in (
                  ("reaches a task that nobody trained better than the nearest expert", NEAREST, NEARER),
                  ("is better on that task than the base", BASE, ABOVE_BASE),
                  ("is better than Δ_A + Δ_B: taking Δ_C away is worth it", SUM, 0),
                  ("is as good as training on the task", TRAINED, -BEHIND))),
            Claim("P22", f"{ours} with λ = 1, which asks for no labelled data, is better than the base.",
                  partial(less, UNLABELLED, BASE), low=0, of=of, unit="nat", digits=2, ours=True),
        )
    ]
    return [
        *about_targets,
        Claim("B7", "One merge of three experts writes all three domains better than the base.",
              partial(lead, BEST, BASE, "best merge less base"), low=GAIN, unit="nat", digits=2, ours=True,
              of="log-likelihood per token, mean over domains, method and arguments by validation: paired difference"),
        Claim("B7", "It closes at least half of the gap between the base and the experts.", closed_by_best, low=SHARE,
              unit="%", ours=True, of="share of the gap"),
        Claim("B7", "It is as good as joint training of as many steps as the three experts together.",
              partial(lead, BEST, JOINT, "best merge less joint training"), low=-BEHIND, unit="nat", digits=2,
              ours=True, of="paired difference"),
        Claim("B7", "A method that treats interference is better than task arithmetic.",
              partial(lead, TREATING, PLAIN[1], "best of them, by validation, less task arithmetic"), low=TREATED,
              unit="nat", digits=2, ours=True, of="paired difference"),
    ]
# fmt: on


def domain_table(rows: pd.DataFrame) -> pd.DataFrame:
    models = rows[rows.model.notna() & (rows.model != TREATING)]
    mean = table(models, "model", value="test", digits=2).rename(columns={"test": "mean"})
    return table(models, "model", "domain", value="test", digits=2).join(mean)


def domains_figure(rows: pd.DataFrame) -> Figure:
    """Draw the mean over domains of every model."""
    merges = rows[rows.model.notna() & ~rows.model.isin([BEST, TREATING])]
    means = merges.groupby(["model", "seed"]).test.mean().unstack()
    ordered = means.loc[means.mean(axis=1).sort_values(ascending=False).index]
    values = {model.replace("_", " "): {"": values.dropna()} for model, values in ordered.iterrows()}
    return ranked_dots(values, "Mean over three domains", "log-likelihood per token, nats")


def notes(rows: pd.DataFrame, options: Options) -> list[str]:
    best, treating = (", ".join(select(rows, model=m).groupby("seed").method.first()) for m in (BEST, TREATING))
    return [f"The best merge on validation, by seed: {best}; of those that treat interference: {treating}."]


STUDY = Study(
    options=Options,
    systems=("P22", "B7"),
    measure=measure,
    claims=claims,
    tables=lambda options: {
        **{
            f"{name}: log-likelihood per token of the target's test texts, nats": partial(ways_table, name, digits=2)
            for name in World.of(options.folders).attributes
        },
        "Three domains: log-likelihood per token of their test texts, nats": domain_table,
    },
    figures={
        "targets": partial(targets_figure, "log-likelihood per token, nats", height=3.4, wrap=12, sharey=False),
        "domains": domains_figure,
    },
    notes=notes,
)
