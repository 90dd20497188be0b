"""How much of a passage a model knows by heart: it is given the beginning, and what it writes is held to the rest."""

from collections.abc import Sequence
from dataclasses import dataclass

from mergeflow.errors import MergeflowError
from mergeflow.modalities.causal.generation import greedy
from mergeflow.modalities.causal.model import LanguageModule
from mergeflow.modalities.causal.tokenizer import CausalTokenizer


@dataclass(frozen=True)
class Recalled:
    """What a model makes of a passage.

    Attributes:
        written: The text that it puts behind the prompt.
        recall: Rouge-L recall of it against the passage's own words, in [0, 1].
        f1: Rouge-L F1, in [0, 1].
        exact: Tokens from the first that are the passage's own.
    """

    written: str
    recall: float
    f1: float
    exact: int


def recited(
    module: LanguageModule, tokenizer: CausalTokenizer, passages: Sequence[str], prompt: int = 16, tokens: int = 32
) -> list[Recalled]:
    """Return how a model goes on, greedily, from the first tokens of each passage.

    Args:
        module: the model.
        tokenizer: of its base.
        passages: texts; of a passage the tokens behind the first `prompt + tokens` play no part.
        prompt: tokens that the model is given.
        tokens: tokens that it writes.

    Raises:
        MergeflowError: the package rouge-score is not installed.
        ValueError: a passage is shorter than the prompt and a token.
    """
    found = [tokenizer.encode(passage)[: prompt + tokens] for passage in passages]
    if short := [passage for passage, ids in zip(passages, found, strict=True) if len(ids) <= prompt]:
        raise ValueError(f"'{short[0]}' is not longer than the prompt of {prompt} tokens")
    told = greedy(module, [ids[:prompt] for ids in found], tokens, tokenizer.end)
    pairs = zip(found, told, strict=True)
    return [_held(own[prompt:], new[: len(own) - prompt], tokenizer) for own, new in pairs]


def rouge_l(reference: str, written: str) -> tuple[float, float]:
    """Return recall and F1 of Rouge-L, by the package rouge-score without stemming.

    L the length of the longest common subsequence of words: recall L/|reference|, precision L/|written|, F1 their
    harmonic mean. Words are runs of letters and digits in lower case.

    Returns:
        Both in [0, 1].

    Raises:
        MergeflowError: the package is not installed.

    Example:
        >>> [round(value, 3) for value in rouge_l("the red boat is old", "the boat was old")]
        [0.6, 0.667]

    Source: Lin 2004, ROUGE: A package for automatic evaluation of summaries, section 3.
    """
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ModuleNotFoundError as error:
        raise MergeflowError("Rouge-L needs the package rouge-score: install mergeflow[rouge].") from error
    score = RougeScorer(["rougeL"], use_stemmer=False).score(reference, written)["rougeL"]
    return float(score.recall), float(score.fmeasure)


def _held(own: Sequence[int], new: Sequence[int], tokenizer: CausalTokenizer) -> Recalled:
    written = tokenizer.decode(new)
    exact = next(
        (at for at, pair in enumerate(zip(own, new, strict=False)) if pair[0] != pair[1]), min(len(own), len(new))
    )
    return Recalled(written, *rouge_l(tokenizer.decode(own), written), exact)
