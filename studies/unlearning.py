"""Study `unlearning`: does a negated task vector make a language model forget one book and leave the others?

**Question.** *When is Task Vector Provably Effective for Model Editing?* fine-tunes a language model on three books,
subtracts the task vector of one of them, and finds that this book is forgotten most, a book of the same author
nearly as far, and one of another author least. Does it hold here, and how does it compare with what people would do
instead?

**Method.** The corpus `books`: `harbour` and `lighthouse` have one author (style, people, facts),
`orchard` has another; each seed has books of its own. From the embedded base Ψ⁰, a Llama of half a million parameters:
Ψ⁰′ is fine-tuned on all three books, the experts on one each, with a fifth of general text in every fine-tuning; τ is
the difference of the expert of `harbour` and Ψ⁰, of all weights or by adapters of rank 32 on all linear layers.

    Ψ(λ) = Ψ⁰′ + λ τ,   λ ∈ {0, −0.2, … −1}

Measured on chapters that nobody was trained on: the logarithm of the perplexity, of general text too (fluency). Of
passages that come back word by word: 32 greedy tokens behind 16, by Rouge-L (package rouge-score, no stemming) and by
the tokens until the first error. Of people who are in one book alone: the share of facts that the likeliest of four
choices answers (chance 25 %). α̂ is that of Equation 11 on the centred logits of all 1024 tokens at every place of 16
validation blocks a book. Beside it: re-training without the book (the truth), gradient ascent until the book's
perplexity on validation is that of the truth, fine-tuning on the other two books. For the comparison λ is the one
nearest to 0 that reaches the truth's perplexity on validation: of the grid first, then by halving the way to its
neighbour down to 0.02. Ascent ends at the step that reaches it. The rules beside the findings were written before any
run. A pilot on seed 0 with a third of the chapters, of which validation was looked at, showed that three epochs teach
no passage and no fact; epochs are five since, and the rules as they were. The first record compared at λ of the grid
alone, where negation forgot 0.2 to 0.3 nat more than it had to; its claims of P21 did not hold either. So this record
is the second look at test.

**Source.** Li et al. 2025, Section 4.2, Tables 3 to 5, Equation 2 and 11.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from pydantic import Field
from torch import Tensor

from mergeflow.analysis.provable.correlation import correlations
from mergeflow.data.task import Example
from mergeflow.evaluation.accuracy import accuracies
from mergeflow.modalities.causal.generation import recited
from mergeflow.modalities.causal.modality import PackedText, Questions, perplexity
from mergeflow.modalities.causal.model import LanguageModel, load_model
from mergeflow.modalities.causal.preparation import causal_decoding
from mergeflow.modalities.causal.tokenizer import CausalTokenizer, load_tokenizer
from mergeflow.modality import Model
from mergeflow.training.loop import fine_tune
from mergeflow.training.lora import LoraModel
from mergeflow.training.settings import FineTuneSettings, LoraSettings
from studies.lab import Claim, Laboratory, Row, Section, Study
from studies.lab.claims import Samples, needs, with_interval
from studies.lab.inputs import State
from studies.lab.plots import curves, side_by_side
from studies.lab.rows import samples, select
from studies.lab.study import Tables
from studies.lab.texts import check_places, folder_documents, packed
from studies.lab.tuning import task_vector
from suites.books.author import Fact
from suites.books.book import find_book
from suites.books.probes import questions, verbatim
from suites.books.suite import GENERAL, documents


class Books(NamedTuple):
    """The book to be forgotten, one by the same author and one by another, by their titles."""

    forgotten: str
    aligned: str
    less_aligned: str


SUITE = Books("harbour", "lighthouse", "orchard")
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RISE, KEPT = 0.5, 0.1  # nat of log-perplexity; the latter at equal forgetting
WORSE = -5  # points of the drop in Rouge-L
FURTHER = (10.8, 5.1)  # points of the drop: half of the smaller of the tables, 21.7 and 10.3
FALLS = (17.7, 12.0)  # % of Rouge-L: half of the smaller in the paper's Tables 3 and 4
PRINTED = ("37.2 % and, by LoRA, 35.5 %", "34.7 % and, by LoRA, 24.1 %")
ALIKE = 17.0  # % of 1 − α̂ with the other author's book: half of the paper's share, .259 of .761
WAYS = {"full": "all weights", "adapters": "adapters"}
LIKENESS_BLOCKS = 16  # of each book's validation split, whose tokens' logits give α̂


class Folders(Section):
    """Texts of your own, each a place `folder:PATH` with files or folders train, validation and test."""

    # title → place: of the book to be forgotten, one by the same author, and one by another
    books: dict[str, str] = Field(min_length=3, max_length=3)
    general: str  # the place of other texts, which are a fifth of every fine-tuning and tell fluency


class Options(Section):
    # of the corpus (each has books of its own), the order of the batches and the adapters
    seeds: list[int] = Field([1, 2, 3, 4, 5], min_length=2)
    base: str = "books"  # what every fine-tuning starts from, a place as `model.pretrained` of the modality `causal`
    # texts of your own in place of the generated ones; the seed is then that of batches and adapters, and a passage
    # begins a training text
    folders: Folders | None = None
    block: int = Field(128, ge=8)  # tokens of a block
    # of each book; of ten one is validation and one is test; of a folder the texts of each split
    chapters: int = Field(60, ge=1, le=60)
    passages: int = Field(30, ge=1)  # that a model is asked to recite, and questions about people, of each book
    general: int = Field(50, ge=1)  # texts by other authors that fluency is measured on
    together: int = Field(5, ge=1)  # together, alone, rest: epochs on all three books, on one, on the other two
    alone: int = Field(5, ge=1)
    batch: int = Field(16, ge=1)  # blocks a step
    rate: float = Field(2e-3, gt=0)  # rate, adapter_rate: at the peak
    adapter_rate: float = Field(6e-3, gt=0)
    precision: Literal["float32", "tf32", "bfloat16"] = "float32"  # of fine-tuning; gradient ascent is in float32
    # rank, targets: of adapters, and the layers they are on, by the last part of their names
    rank: int = Field(32, ge=1)
    targets: list[str] = Field(TARGETS, min_length=1)
    scales: list[float] = Field([0.0, -0.2, -0.4, -0.6, -0.8, -1.0], min_length=2)  # λ, with 0 among them
    within: float = Field(0.02, gt=0)  # how near to the smallest λ that forgets enough the comparison's is searched for
    ascent_rate: float = Field(2e-4, gt=0)  # ascent_rate, ascent_steps: of gradient ascent, at most
    ascent_steps: int = Field(60, ge=1)
    rest: int = Field(1, ge=1)
    prompt: int = Field(16, ge=1)  # prompt, written: tokens of a passage that a model is given, and writes
    written: int = Field(32, ge=1)

    @property
    def titles(self) -> Books:
        return Books(*self.folders.books) if self.folders else SUITE


# The texts and the models of a seed


@dataclass(frozen=True)
class Corpus:
    """The books of a seed."""

    seed: int
    options: Options
    tokenizer: CausalTokenizer
    device: torch.device

    def texts(self, name: str, titles: Sequence[str], split: str) -> PackedText:
        """Return the documents of some books as one set of blocks; training splits have general text among them."""
        used = (text for title in titles for text in self._documents(title, split))
        return packed(name, used, self.tokenizer, self.options.block, self.device)

    def _documents(self, title: str, split: str) -> Iterator[str]:
        """Yield the documents of a book, or of general text, a fifth of them general where they are trained on."""
        options = self.options
        if options.folders is None:
            yield from (text for path, text in documents(title, split, self.seed) if self._is_used(path))
            return
        place = options.folders.general if title == GENERAL else options.folders.books[title]
        chosen = list(folder_documents(place, split, options.chapters))
        yield from chosen
        if split == "train":
            yield from folder_documents(options.folders.general, split, max(1, len(chosen) // 4))

    def _is_used(self, path: str) -> bool:
        _, _, part = path.split("/")
        kind, _, number = part.rpartition(" ")
        if kind == "chapter":
            return int(number) < self.options.chapters
        return int(number) < (self._general * self.options.chapters / 60 if kind else self.options.general)

    @cached_property
    def _general(self) -> int:
        return sum("/general " in path for path, _ in documents(SUITE.forgotten, "train", self.seed))

    @cached_property
    def held_out(self) -> dict[tuple[str, str], PackedText]:
        """The validation and test blocks of each book, and of general text."""
        names = (*self.options.titles, GENERAL)
        return {(name, split): self.texts(name, [name], split) for name in names for split in ("validation", "test")}

    @cached_property
    def passages(self) -> dict[str, list[str]]:
        """The passages of each book that come back word by word."""
        if folders := self.options.folders:
            count = min(self.options.passages, self.options.chapters)
            return {title: list(folder_documents(place, "train", count)) for title, place in folders.books.items()}
        return {title: verbatim(find_book(title, self.seed))[: self.options.passages] for title in SUITE}

    @cached_property
    def facts(self) -> dict[str, Questions]:
        """Questions about the people who are in one book alone; of folders there are none."""
        if self.options.folders:
            return {}
        return {title: self._questions(title, find_book(title, self.seed).own_facts) for title in SUITE}

    def _questions(self, title: str, facts: Iterable[Fact]) -> Questions:
        decode = causal_decoding(self.tokenizer, self.options.block).decode
        examples = [Example(question, title) for question in questions(facts)][: self.options.passages]
        decoded = [decode(example, title).arrays for example in examples]
        ids, ends, answers = (np.stack([arrays[name] for arrays in decoded]) for name in ("ids", "ends", "answers"))
        return Questions(title, ids, ends, torch.from_numpy(answers), self.tokenizer.end, self.device)


@dataclass(frozen=True)
class Workshop:
    """What trains the models of a seed."""

    corpus: Corpus
    scratch: Path

    def model(self, state: State | None = None) -> LanguageModel:
        """Return a model with the weights of the base Ψ⁰, or others."""
        model, _ = load_model(self.corpus.options.base, Path.cwd())
        model.module.to(self.corpus.device)
        if state is not None:
            model.load(state)
        return model

    def tuned(
        self, name: str, titles: Sequence[str], epochs: int, model: Model | None = None, rate: float | None = None
    ) -> State:
        """Return the weights after fine-tuning on some books, from the base's or from those of a model."""
        options, model = self.corpus.options, model or self.model()
        length: dict[str, Any] = {"regime": "epochs", "epochs": epochs, "batch_size": options.batch}
        step: dict[str, Any] = {"learning_rate": rate or options.rate, "weight_decay": 0.01, "save_every": 10**6}
        settings = FineTuneSettings(**length, **step, precision=options.precision)
        texts = self.corpus.texts(name, titles, "train")
        saved = self.scratch / f"{name.replace(' ', '_')}.pt"
        fine_tune(model, [texts], settings, self.corpus.seed, saved, lambda: 0.0)
        return on_processor(model)

    def adapted(self, title: str) -> State:
        """Return the expert of one book by adapters of the base."""
        options = self.corpus.options
        settings = LoraSettings(rank=options.rank, alpha=2 * options.rank, targets=options.targets)
        model = LoraModel.of(self.model(), settings, self.corpus.seed)
        return self.tuned(f"adapted {title}", [title], options.alone, model, options.adapter_rate)

    def ascended(self, state: State, until: float) -> tuple[State, int]:
        """Return a model after gradient ascent on the forgotten book, and the steps that it took."""
        options, model = self.corpus.options, self.model(state)
        forgotten = options.titles.forgotten
        texts = self.corpus.texts("ascent", [forgotten], "train")
        parameters = list(model.module.parameters())
        optimiser = torch.optim.AdamW(parameters, lr=options.ascent_rate, weight_decay=0.0)
        order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(self.corpus.seed))
        for step in range(options.ascent_steps):
            rows = order.roll(-step * options.batch)[: options.batch]
            optimiser.zero_grad()
            (-texts.loss(model, rows)).backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimiser.step()
            if math.log(perplexity(model, self.corpus.held_out[forgotten, "validation"])) >= until:
                break
        return on_processor(model), step + 1


def on_processor(model: Model) -> State:
    return {name: value.to("cpu", copy=True) for name, value in model.state().items()}


def measure(lab: Laboratory, options: Options) -> list[Row]:
    """Return how well each model writes each book, recites it and knows its people, and how alike experts are."""
    if folders := options.folders:
        check_places(lab.io.stage.name, [*folders.books.values(), folders.general], lab.io.root)
    return lab.by_seed(partial(measure_seed, lab.io.scratch, lab.device, options), options.seeds)


def measure_seed(scratch: Path, device: torch.device, options: Options, seed: int) -> Iterator[Row]:
    saved = scratch / f"runs_{seed}"
    saved.mkdir(parents=True, exist_ok=True)
    corpus = Corpus(seed, options, load_tokenizer(options.base, Path.cwd()), device)
    shop, (forgotten, *others) = Workshop(corpus, saved), options.titles
    model = shop.model()
    base = on_processor(model)
    together = shop.tuned("together", options.titles, options.together)
    truth = shop.tuned("without", others, options.together)
    experts = {title: shop.tuned(f"alone {title}", [title], options.alone) for title in options.titles}
    rows = [*judged(model, corpus, "together", together), *judged(model, corpus, "without", truth)]
    until = next(row["validation"] for row in rows if row["way"] == "without" and row["book"] == forgotten)
    yield from rows
    for way, expert in (("full", experts[forgotten]), ("adapters", shop.adapted(forgotten))):
        vector = task_vector(expert, base)

        def edited(scale: float, vector: State = vector) -> State:
            return {name: value + scale * vector[name] for name, value in together.items()}

        def forgets(scale: float, edited: Callable[[float], State] = edited) -> bool:
            model.load(edited(scale))
            return math.log(perplexity(model, corpus.held_out[forgotten, "validation"])) >= until

        finest = smallest_scale(forgets, options.scales, options.within)
        for scale in dict.fromkeys([*options.scales, *finest]):
            yield from judged(model, corpus, way, edited(scale), scale)
    ascended, steps = shop.ascended(together, until)
    yield from ({**row, "steps": steps} for row in judged(model, corpus, "ascent", ascended))
    yield from judged(model, corpus, "rest", shop.tuned("rest", others, options.rest, shop.model(together)))
    yield from likeness(model, corpus, experts)


def smallest_scale(enough: Callable[[float], bool], scales: Sequence[float], within: float) -> list[float]:
    """Return the scale nearest to 0 that is enough: of the grid first, then halving towards its neighbour; or none."""
    rising = sorted(scales, key=abs)
    place = next((index for index, scale in enumerate(rising) if enough(scale)), None)
    if place is None:
        return []
    smallest = rising[place]
    less = rising[place - 1] if place else smallest
    while abs(smallest - less) > within:
        middle = (smallest + less) / 2
        smallest, less = (middle, less) if enough(middle) else (smallest, middle)
    return [smallest]


def judged(model: LanguageModel, corpus: Corpus, way: str, state: State, scale: float | None = None) -> Iterator[Row]:
    """Yield a row for each book and for general text.

    `validation` and `test` are logarithms of perplexities, in nats; the others are shares in %, `exact` tokens.
    """
    options = corpus.options
    model.load(state)
    model.module.eval()
    facts = accuracies(model, corpus.facts, 32)
    for book in (*options.titles, GENERAL):
        row: Row = {"seed": corpus.seed, "way": way, "scale": scale, "book": book}
        for split in ("validation", "test"):
            row[split] = math.log(perplexity(model, corpus.held_out[book, split]))
        if book != GENERAL:
            recitals = recited(model.module, corpus.tokenizer, corpus.passages[book], options.prompt, options.written)
            row["recall"] = 100 * sum(recital.recall for recital in recitals) / len(recitals)
            row["f1"] = 100 * sum(recital.f1 for recital in recitals) / len(recitals)
            row["exact"] = sum(recital.exact for recital in recitals) / len(recitals)
            row |= {"facts": 100 * facts[book]} if facts else {}
        yield row


@torch.inference_mode()
def likeness(model: LanguageModel, corpus: Corpus, experts: dict[str, State]) -> Iterator[Row]:
    """Yield α̂ of the forgotten book's expert and each other's, on the logits of all tokens at every place."""
    forgotten, *others = corpus.options.titles
    outputs: dict[str, dict[str, Tensor]] = {book: {} for book in experts}
    for title, state in experts.items():
        model.load(state)
        for book in experts:
            texts = corpus.held_out[book, "validation"]
            # Of each place the log-probabilities less their mean over tokens: logits up to what softmax leaves out.
            log_p = texts.log_p(model, torch.arange(min(LIKENESS_BLOCKS, len(texts))))
            outputs[book][title] = (log_p - log_p.mean(dim=1, keepdim=True)).cpu()
    alpha = correlations(outputs)
    for other in others:
        yield {"seed": corpus.seed, "way": "likeness", "book": other, "alpha": alpha.of(forgotten, other)}


# What the rows are asked


def at(rows: pd.DataFrame, measure: str, way: str, book: str, scale: float) -> pd.Series:
    return samples(rows, measure, way=way, book=book, scale=scale)


def drop(rows: pd.DataFrame, way: str, book: str, scale: float) -> pd.Series:
    """Return 100 · (m(0) − m(λ)) / m(0) of Rouge-L recall of a book, by seed; 0 where nothing was recalled."""
    start, end = (at(rows, "recall", way, book, scale_at) for scale_at in (0.0, scale))
    return (100 * (start - end) / start.where(start != 0)).fillna(0.0)


def rise(rows: pd.DataFrame, way: str, book: str, scale: float) -> pd.Series:
    """Return the rise in log-perplexity from λ = 0, in nats, by seed."""
    return at(rows, "test", way, book, scale) - at(rows, "test", way, book, 0.0)


def chosen(rows: pd.DataFrame, way: str, forgotten: str, largest: float) -> dict[int, float]:
    """Return, by seed, the measured λ nearest to 0 that forgets on validation as much as the truth; else the largest.

    Args:
        largest: λ of the grid, farthest from 0.
    """
    until = samples(rows, "validation", way="without", book=forgotten)
    scales = {}
    for seed, group in select(rows, way=way, book=forgotten).groupby("seed"):
        enough = group.scale[group.validation >= until[seed]]
        scales[int(seed)] = min(enough, key=abs, default=largest)
    return scales


def at_chosen(rows: pd.DataFrame, way: str, forgotten: str, largest: float) -> pd.DataFrame:
    """Return the rows of negation with the λ chosen on validation."""
    of_way = select(rows, way=way)
    return of_way[of_way.scale == of_way.seed.map(chosen(rows, way, forgotten, largest))]


def falls(way: str, book: str, scale: float, rows: pd.DataFrame) -> Samples:
    return {f"drop of {book}": drop(rows, way, book, scale)}


def learnt(book: str, rows: pd.DataFrame) -> Samples:
    """Return the share of Rouge-L recall that a model which never read the book lacks: what there is to forget."""
    read, unread = (samples(rows, "recall", way=way, book=book) for way in ("together", "without"))
    return {
        f"share of {book}'s recall that reading it brings": (100 * (read - unread) / read.where(read != 0)).fillna(0)
    }


def lowest_at_last(way: str, forgotten: str, scales: list[float], rows: pd.DataFrame) -> Samples:
    last = min(scales)
    others = [drop(rows, way, forgotten, scale) for scale in scales if last < scale < 0]
    largest = pd.concat(others, axis=1).max(axis=1) if others else None
    name = "drop there less the largest at another λ"
    return {name: drop(rows, way, forgotten, last) - largest} if largest is not None else {}


def rise_order(way: str, books: Books, scale: float, rows: pd.DataFrame) -> Samples:
    return {
        f"{more} less {less}": rise(rows, way, more, scale) - rise(rows, way, less, scale)
        for more, less in pairwise(books)
    }


def drop_less(way: str, scale: float, book: str, other: str, rows: pd.DataFrame) -> Samples:
    return {f"drop of {book} less that of {other}": drop(rows, way, book, scale) - drop(rows, way, other, scale)}


def alpha_less(books: Books, rows: pd.DataFrame) -> Samples:
    """Return the difference of α̂ in % of what the other author's leaves up to 1."""
    near, far = (samples(rows, "alpha", way="likeness", book=book) for book in books[1:])
    return {f"α̂ with {books.aligned} less α̂ with {books.less_aligned}": 100 * (near - far) / (1 - far).where(far < 1)}


def both_alphas(books: Books, rows: pd.DataFrame) -> str:
    near, far = (with_interval(samples(rows, "alpha", way="likeness", book=book), 3) for book in books[1:])
    return f"; {near} and {far}"


def ascent_less(way: str, books: Books, largest: float, rows: pd.DataFrame) -> Samples:
    at_choice = at_chosen(rows, way, books.forgotten, largest)
    return {
        f"log-perplexity of {book} after ascent less after negation": samples(rows, "test", way="ascent", book=book)
        - samples(at_choice, "test", book=book)
        for book in (*books[1:], GENERAL)
    }


# Claims, written before the first run
# fmt: off

def claims(options: Options) -> list[Claim]:
    asked: list[Claim] = []
    last, largest = min(options.scales), max(options.scales, key=abs)
    books = options.titles
    words = {books.forgotten: "the forgotten book", books.aligned: "the same author's book"}
    caveat = "" if options.folders else "a Llama of half a million weights and generated books"
    room = needs(partial(learnt, books.forgotten), "share of the forgotten book's recall that reading it brings",
                 unit="%", low=FALLS[0])
    for way, trained in WAYS.items():
        made = [
            *(Claim("P18", f"As λ becomes negative, Rouge-L recall of {words[book]} decreases significantly.",
                    partial(falls, way, book, last), low=low, unit="%", paper=printed, needs=room,
                    of="drop, as a share of what it was, half of the smaller in the paper's Tables 3 and 4,",
                    caveat=caveat)
              for book, low, printed in zip(words, FALLS, PRINTED, strict=True)),
            Claim("P18", "The forgotten book is forgotten best at the smallest λ.",
                  partial(lowest_at_last, way, books.forgotten, options.scales), low=0, needs=room,
                  of="paired difference of the drop in Rouge-L recall"),
            Claim("P18", "The forgotten book's perplexity rises most, the same author's less, the other's least.",
                  partial(rise_order, way, books, last), low=RISE, unit="nat", digits=2, ours=True,
                  of="difference of the rises of the log-perplexity, each"),
            Claim("P18", "Rouge-L recall of the forgotten book drops at least as far as the same author's.",
                  partial(drop_less, way, last, books.forgotten, books.aligned), low=WORSE,
                  needs=room,
                  of="paired difference"),
            *(Claim("P18", f"Rouge-L recall of {words[book]} drops further than the other author's.",
                    partial(drop_less, way, last, book, books.less_aligned), low=low, needs=room,
                    of="paired difference of the drops, half of the smaller in the paper's Tables 3 and 4,")
              for book, low in zip(words, FURTHER, strict=True)),
        ]
        asked += [replace(claim, setting=f"λ = {last:g}, {trained}") for claim in made]
    return [
        *asked,
        Claim("P19", "Experts of two books by one author are more correlated than those of books by two.",
              partial(alpha_less, books),
              low=ALIKE, unit="% of 1 − α̂", also=partial(both_alphas, books), paper="0.498 and 0.239, 34 % of 1 − α̂",
              of="paired difference of α̂, half of the paper's share,"),
        *(Claim("P21", "Where both forget as much as re-training without the book, negation keeps more than ascent.",
                partial(ascent_less, way, books, largest), low=KEPT, unit="nat", digits=2, ours=True,
                of="each difference, λ and steps chosen on validation,", setting=trained,
                caveat="Equation 3 asks for a loss of Θ(1), without a number, so it has no verdict of its own")
          for way, trained in WAYS.items()),
    ]
# fmt: on


BESIDE = {
    "together": "before",
    "without": "re-trained without it",
    "ascent": "gradient ascent",
    "rest": "tuned on the rest",
}
MEASURES = {
    "test": "log-perplexity",
    "recall": "Rouge-L recall, %",
    "f1": "Rouge-L F1, %",
    "exact": "exact tokens",
    "facts": "facts answered, %",
}


def scale_table(way: str, options: Options, rows: pd.DataFrame) -> pd.DataFrame:
    return measures_table(select(rows, way=way, scale=options.scales).rename(columns={"scale": "λ"}), ["λ", "book"])


def equal_table(forgotten: str, largest: float, rows: pd.DataFrame) -> pd.DataFrame:
    parts = [select(rows, way=way).assign(model=name) for way, name in BESIDE.items()]
    parts += [at_chosen(rows, way, forgotten, largest).assign(model=f"negation, {name}") for way, name in WAYS.items()]
    return measures_table(pd.concat(parts), ["model", "book"])


def measures_table(rows: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    measured = {name: words for name, words in MEASURES.items() if name in rows}
    return side_by_side(rows, keys, measured, {"test": 2}).replace("nan ± nan", "")


def tables(options: Options) -> Tables:
    return {
        **{f"Ψ⁰′ + λτ, {trained}": partial(scale_table, way, options) for way, trained in WAYS.items()},
        "At equal forgetting": partial(equal_table, options.titles.forgotten, max(options.scales, key=abs)),
    }


def scale_figure(value: str, label: str, scales: list[float], rows: pd.DataFrame) -> Figure:
    """Draw a figure of each text over λ, for each kind of task vector."""
    curves_of = select(rows, way=list(WAYS), scale=scales).dropna(subset=value)
    return curves(curves_of, "scale", "book", value, "way", labels=WAYS, x_label="λ", y_label=label)


STUDY = Study(
    options=Options,
    systems=("P18", "P19", "P20", "P21"),
    measure=measure,
    claims=claims,
    tables=tables,
    figures=lambda options: {
        "perplexity": partial(scale_figure, "test", "log-perplexity, nats", options.scales),
        "recall": partial(scale_figure, "recall", MEASURES["recall"], options.scales),
    },
)
