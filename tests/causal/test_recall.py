"""What a model recites: Rouge-L of the package, tokens that are exact, and a model that knows a passage by heart."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flows.rebuild.unlearn import Passages
from mergeflow.modalities.causal.generation import recited, rouge_l
from mergeflow.modalities.causal.modality import PackedText, cut
from mergeflow.modalities.causal.model import load_model
from mergeflow.modalities.causal.tokenizer import load_tokenizer
from suites.books.book import general

WORDS = st.lists(st.sampled_from(["red", "boat", "old", "the", "a"]), min_size=1, max_size=9)


def common(first: list[str], second: list[str]) -> int:
    """The length of the longest common subsequence, by the recursion of its definition."""
    rows = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
    for i, token in enumerate(first):
        for j, other in enumerate(second):
            rows[i + 1][j + 1] = rows[i][j] + 1 if token == other else max(rows[i][j + 1], rows[i + 1][j])
    return rows[-1][-1]


@given(WORDS, WORDS)
def test_rouge_l_is_the_longest_common_subsequence(reference: list[str], written: list[str]) -> None:
    length = common(reference, written)
    recall, f1 = rouge_l(" ".join(reference), " ".join(written))
    assert recall == pytest.approx(length / len(reference), abs=1e-12)
    assert f1 == pytest.approx(2 * length / (len(reference) + len(written)), abs=1e-12)


@pytest.mark.slow
def test_a_passage_that_was_learnt_is_recited(base: Path) -> None:
    model, _ = load_model(base.name, base.parent)
    tokenizer = load_tokenizer(base.name, base.parent)
    passages = ["the old boat lay by the red wall all night", "nobody had seen the boat since early spring"]
    before = recited(model.module, tokenizer, passages, 8, 24)
    ids = [token for passage in passages for token in tokenizer.encode(passage)[:36]]
    texts = PackedText("boats", cut(torch.tensor(ids).numpy(), 36, tokenizer.end), torch.device("cpu"))
    optimiser = torch.optim.Adam(model.module.parameters(), lr=0.01)
    for _ in range(160):
        optimiser.zero_grad()
        texts.loss(model, torch.arange(2)).backward()
        optimiser.step()
    for passage, then, now in zip(passages, before, recited(model.module, tokenizer, passages, 8, 24), strict=True):
        assert now.written == passage[8:32]
        assert (now.recall, now.f1, now.exact) == (1.0, 1.0, 24)
        assert then.recall < 0.5
        assert then.exact < 6
    with pytest.raises(ValueError, match="is not longer than the prompt"):
        recited(model.module, tokenizer, ["short"], 8)


def test_what_unlearning_asks_for_is_the_mean_over_the_passages_that_are_long_enough() -> None:
    model, _ = load_model("books", Path())
    tokenizer = load_tokenizer("books", Path())
    texts = [general(number, part="general/test") for number in range(3)]
    held = Passages(tokenizer, {"long": [*texts, "Too short."], "short": ["Too short."]})
    expected = sum(text.recall for text in recited(model.module, tokenizer, texts)) / 3
    assert 0 < expected < 1
    for batch_size in (2, 8):
        assert held.recall(model, batch_size) == {"long": pytest.approx(expected)}
