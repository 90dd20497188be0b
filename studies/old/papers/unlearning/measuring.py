"""What is measured of a model: how well it writes each book, recites it, and knows its people; and all of one seed."""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from mergeflow.analysis.provable.correlation import correlations
from mergeflow.evaluation.accuracy import accuracies
from mergeflow.modalities.causal.model import LanguageModel
from mergeflow.modalities.causal.perplexity import perplexity
from mergeflow.modalities.causal.recall import recited
from mergeflow.modalities.causal.tokenizer import load_tokenizer
from studies.lab.scales import task_vector
from studies.old.papers.unlearning.corpus import Corpus
from studies.old.papers.unlearning.options import BOOKS, FORGOTTEN, Options
from studies.old.papers.unlearning.training import State, Workshop
from studies.old.rows import Row
from suites.books.suite import GENERAL

_BLOCKS = 16  # of each book's validation split, whose tokens' logits give α̂


def seed_rows(options: Options, seed: int, scratch: Path, device: torch.device) -> list[Row]:
    """Return all rows of a seed.

    Args:
        options: the study's choices.
        seed: of the corpus.
        scratch: for resumable state.
        device: where models are trained and judged.
    """
    corpus = Corpus(seed, options, load_tokenizer(options.base, Path.cwd()), device)
    shop = Workshop(corpus, scratch)
    model, together, truth = shop.model(), shop.together(), shop.without()
    experts = {title: shop.alone(title) for title in BOOKS}
    rows = [*_judged(model, corpus, "together", together), *_judged(model, corpus, "without", truth)]
    until = next(row["validation"] for row in rows if row["way"] == "without" and row["book"] == FORGOTTEN)
    for way, expert in (("full", experts[FORGOTTEN]), ("adapters", shop.adapted(FORGOTTEN))):
        vector = task_vector(expert, shop.base)

        def edited(scale: float, vector: State = vector) -> State:
            return {name: value + scale * vector[name] for name, value in together.items()}

        def forgets(scale: float, edited: Callable[[float], State] = edited) -> bool:
            model.load(edited(scale))
            return math.log(perplexity(model, corpus.held_out[FORGOTTEN, "validation"])) >= until

        finest = smallest_scale(forgets, options.scales, options.within)
        for scale in dict.fromkeys([*options.scales, *finest]):
            rows += _judged(model, corpus, way, edited(scale), scale)
    ascended, steps = shop.ascended(together, until)
    rows += [{**row, "steps": steps} for row in _judged(model, corpus, "ascent", ascended)]
    rows += _judged(model, corpus, "rest", shop.after_the_rest(together))
    return [*rows, *_likeness(model, corpus, experts)]


def smallest_scale(enough: Callable[[float], bool], scales: Sequence[float], within: float) -> list[float]:
    """Return the scale nearest to 0 that is enough: of the grid first, then halving towards its neighbour; or none.

    Args:
        enough: whether a scale is; taken to stay true once it is, away from 0.
        scales: the grid.
        within: how far at most the scale found may lie beyond one that is not enough.
    """
    rising = sorted(scales, key=abs)
    place = next((index for index, scale in enumerate(rising) if enough(scale)), None)
    if place is None:
        return []
    found = rising[place]
    less = rising[place - 1] if place else found
    while abs(found - less) > within:
        middle = (found + less) / 2
        found, less = (middle, less) if enough(middle) else (found, middle)
    return [found]


def _judged(model: LanguageModel, corpus: Corpus, way: str, state: State, scale: float | None = None) -> Iterator[Row]:
    """Yield a row for each book and for general text.

    `validation` and `test` are logarithms of perplexities, in nats; the others are shares in %, `exact` tokens.
    """
    options = corpus.options
    model.load(state)
    model.module.eval()
    facts = accuracies(model, corpus.facts, 32)
    for book in (*BOOKS, GENERAL):
        row: Row = {"seed": corpus.seed, "way": way, "scale": scale, "book": book}
        for split in ("validation", "test"):
            row[split] = math.log(perplexity(model, corpus.held_out[book, split]))
        if book != GENERAL:
            found = recited(model.module, corpus.tokenizer, corpus.passages[book], options.prompt, options.written)
            row["recall"], row["f1"] = (
                100 * sum(getattr(one, name) for one in found) / len(found) for name in ("recall", "f1")
            )
            row["exact"] = sum(one.exact for one in found) / len(found)
            row["facts"] = 100 * facts[book]
        yield row


@torch.inference_mode()
def _likeness(model: LanguageModel, corpus: Corpus, experts: dict[str, State]) -> Iterator[Row]:
    """Yield α̂ of the forgotten book's expert and each other's, on the logits of all tokens at every place."""
    outputs: dict[str, dict[str, Tensor]] = {book: {} for book in BOOKS}
    for title, state in experts.items():
        model.load(state)
        for book in BOOKS:
            texts = corpus.held_out[book, "validation"]
            # Of each place the log-probabilities less their mean over tokens: logits up to what softmax leaves out.
            found = texts.log_p(model, torch.arange(min(_BLOCKS, len(texts))))
            outputs[book][title] = (found - found.mean(dim=1, keepdim=True)).cpu()
    alpha = correlations(outputs)
    for other in BOOKS:
        if other != FORGOTTEN:
            yield {"seed": corpus.seed, "way": "likeness", "book": other, "alpha": alpha.of(FORGOTTEN, other)}
