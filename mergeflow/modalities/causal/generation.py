"""Continue texts with a causal model, sampled or greedily; compare with held-out passages, and measure recall."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from torch import Tensor

from mergeflow.errors import MergeflowError
from mergeflow.modalities.causal.model import LanguageModule
from mergeflow.modalities.causal.sections import Generation
from mergeflow.modalities.causal.tokenizer import CausalTokenizer
from mergeflow.modalities.modules import own_generator


@torch.no_grad()
def continued(module: LanguageModule, prompts: Sequence[Sequence[int]], how: Generation, end: int) -> list[list[int]]:
    """Return the tokens with which a model continues each prompt, without the prompt and the end token.

    Prompts are answered one at a time, each with the seed anew: an answer does not depend on its neighbours. On one
    machine the same model and prompt give the same answer.

    Args:
        prompts: tokens, at least one each, and fewer than the model has positions.
    """
    whole = module.eval().whole
    device = next(module.parameters()).device
    drawn = {"do_sample": True, "temperature": how.temperature, "top_k": 0} if how.temperature else {"do_sample": False}
    answers = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)], device=device)
        with own_generator(how.seed, device, alone=bool(how.temperature) and device.type == "cpu"):
            whole_ids = whole.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=min(how.tokens, module.positions - len(prompt)),
                pad_token_id=end,
                eos_token_id=end,
                logits_processor=[_checked],
                **drawn,
            )
        new = whole_ids[0, ids.shape[1] :].tolist()
        answers.append(new[: new.index(end)] if end in new else new)
    return answers


def _checked(_: Tensor, logits: Tensor) -> Tensor:
    """Return the logits [n, V] as they are; NaN among them would be the likeliest token."""
    if bool(logits.isnan().any()):
        raise MergeflowError(
            "the model's answer is no finite number: the merge lies too far from its base; take a smaller scale."
        )
    return logits


@torch.no_grad()
def greedy(module: LanguageModule, given: Sequence[Sequence[int]], tokens: int, end: int) -> list[list[int]]:
    """Return the likeliest continuation of prompts of one length, always `tokens` long.

    An end token would stop a row, and what is behind it would be padding.
    """
    prompts = torch.tensor([list(ids) for ids in given], device=next(module.parameters()).device)
    ids = module.eval().whole.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        pad_token_id=end,
    )
    written: list[list[int]] = ids[:, prompts.shape[1] :].tolist()
    return written


PROMPT, WRITTEN = 16, 32  # tokens: a sentence is given, two are written


@dataclass(frozen=True)
class Continued:
    """A model's continuation of a passage.

    Attributes:
        reference: The words that follow in the passage.
        right: How many of the model's tokens are at the same place in the passage.
    """

    prompt: str
    reference: str
    written: str
    right: int


def held_out(folder: Path, count: int) -> list[str]:
    """Return pieces of a task's texts of validation, spread evenly over them; none of a task of questions."""
    rows = pq.read_table(folder / "validation.parquet", columns=["text", "document"]).to_pylist()
    texts = [row["text"] for row in rows if row["document"] is not None]
    if not texts:
        return []
    return [texts[number] for number in np.unique(np.linspace(0, len(texts) - 1, min(count, len(texts))).astype(int))]


def go_on(
    module: LanguageModule, tokenizer: CausalTokenizer, passages: Sequence[str], most: int | None = None
) -> list[Continued]:
    """Continue each passage of 48 tokens or more greedily from its first 16 tokens by 32 more.

    Args:
        most: how many of these are continued, from the first; all by default.
    """
    encoded = [ids for ids in map(tokenizer.encode, passages) if len(ids) >= PROMPT + WRITTEN][:most]
    if not encoded:
        return []
    answers = greedy(module, [tokenizer.begun(ids[:PROMPT]) for ids in encoded], WRITTEN, tokenizer.end)
    continued = []
    for ids, new in zip(encoded, answers, strict=True):
        before, following = ids[:PROMPT], ids[PROMPT : PROMPT + WRITTEN]
        right = sum(a == b for a, b in zip(following, new, strict=True))
        rest, written = (tokenizer.decode_further(before, ids) for ids in (following, new))
        continued.append(Continued(tokenizer.decode(before), rest, written, right))
    return continued


@dataclass(frozen=True)
class Recalled:
    """A model's recall of a passage.

    Attributes:
        written: The model's continuation of the prompt.
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
    """Continue each passage greedily from its first tokens, and score the recall of the next `tokens`.

    Raises:
        ValueError: a passage is shorter than the prompt and a token.
    """
    encoded = [tokenizer.encode(passage)[: prompt + tokens] for passage in passages]
    if short := [passage for passage, ids in zip(passages, encoded, strict=True) if len(ids) <= prompt]:
        raise ValueError(f"'{short[0]}' is not longer than the prompt of {prompt} tokens")
    written = greedy(module, [tokenizer.begun(ids[:prompt]) for ids in encoded], tokens, tokenizer.end)
    pairs = zip(encoded, written, strict=True)
    return [_held(ids[prompt:], new[: len(ids) - prompt], tokenizer) for ids, new in pairs]


def rouge_l(reference: str, written: str) -> tuple[float, float]:
    """Return recall and F1 of Rouge-L, by the package rouge-score without stemming.

    L the length of the longest common subsequence of words: recall L/|reference|, precision L/|written|, F1 their
    harmonic mean. Words are runs of letters and digits in lower case.

    Source: Lin 2004, ROUGE: A package for automatic evaluation of summaries, section 3.
    """
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ModuleNotFoundError as error:
        raise MergeflowError("Rouge-L needs the package rouge-score: install mergeflow[rouge].") from error
    score = RougeScorer(["rougeL"], use_stemmer=False).score(reference, written)["rougeL"]
    return float(score.recall), float(score.fmeasure)


def _held(following: Sequence[int], new: Sequence[int], tokenizer: CausalTokenizer) -> Recalled:
    written, pairs = tokenizer.decode(new), zip(following, new, strict=False)
    exact = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return Recalled(written, *rouge_l(tokenizer.decode(following), written), exact)
