"""What a model says of a text: continuations in the report, and what it recites by heart."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from flows.rebuild.unlearn import Passages
from mergeflow import layout
from mergeflow.modalities.causal.generation import PROMPT, WRITTEN, go_on, held_out, recited, rouge_l
from mergeflow.modalities.causal.modality import MODALITY, PackedText, cut
from mergeflow.modalities.causal.model import load_model, open_language
from mergeflow.modalities.causal.tokenizer import load_tokenizer
from suites.books.book import general
from tasks.report import texts, write_report
from tasks.report.files import read_run
from tasks.report.texts import UNLEARNED_TEXTS, texts_table, unlearned_table


def test_it_shows_what_expert_and_merge_say(project: Path, tmp_path: Path) -> None:
    page = write_report(project, tmp_path / "report.html").read_text()
    table = texts_table(project, read_run(project))
    assert table is not None
    assert "How the expert of a task and the winner go on" in page
    shown = [[cell.text for cell in row.cells] for row in table.rows]
    assert [column.title for column in table.columns] == ["task", "text", "right", "expert", "merge"]
    assert {"ships", "trees"} <= {row[0] for row in shown}
    assert all(row[3] != row[4] for row in shown)
    asked = MODALITY.open("colours", project / layout.split("validation", "colours"), "validation", None, "cpu")
    opened = open_language(layout.BASE_MODEL, project)
    opened.load(project / layout.expert_model("colours"))
    chosen = asked.likelihoods(opened.model, torch.arange(len(asked))).argmax(dim=1).tolist()  # type: ignore[attr-defined]
    names = ["red", "blue", "green"]
    for row in (row for row in shown if row[0] == "colours"):
        assert row[2] == row[1].rpartition(" ")[2].rstrip(":")  # the answer stands in the question
        assert row[3] in {names[number] for number in chosen}


def test_a_model_that_would_be_asked_for_minutes_is_not_asked(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "LARGEST", 1000)
    assert texts_table(project, read_run(project)) is None


def test_a_text_goes_on_as_transformers_generates_it(project: Path, base: Path) -> None:
    passages = held_out(project / layout.split("validation", "ships"), 3)
    opened = open_language(str(base), Path())
    continuations = go_on(opened.model.module, opened.tokenizer, [*passages, "too short"])
    words, model = AutoTokenizer.from_pretrained(base), AutoModelForCausalLM.from_pretrained(base).eval()
    assert len(continuations) == len(passages) == 3
    for passage, continuation in zip(passages, continuations, strict=True):
        ids = words(passage, return_tensors="pt")["input_ids"]
        assert continuation.prompt + continuation.reference == words.decode(ids[0, : PROMPT + WRITTEN])
        new = model.generate(ids[:, :PROMPT], max_new_tokens=WRITTEN, min_new_tokens=WRITTEN, do_sample=False)
        assert continuation.written == words.decode(new[0, PROMPT:])
        assert continuation.right == int((new[0, PROMPT:] == ids[0, PROMPT : PROMPT + WRITTEN]).sum())
    assert held_out(project / layout.split("validation", "colours"), 3) == []


def test_the_texts_of_another_registered_model_are_not_shown(project: Path) -> None:
    text = {"task": "ships", "text": "a", "right": "b", "before": "c", "after": "d"}
    facts = {"model": "writers", "version": 2, "parent": 1, "task": "ships", "weight": -0.5, "texts": [text]}
    path, run = project / UNLEARNED_TEXTS, read_run(project)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(facts))
    try:
        shown = []
        for registration in (None, {"model": "others"}, {"model": "writers"}):
            shown.append(unlearned_table(project, replace(run, registration=registration)))
    finally:
        path.unlink()
    assert shown[:2] == [None, None]
    assert shown[2] is not None
    assert [cell.text for cell in shown[2].rows[0].cells] == ["ships", "a", "b", "c", "d"]
    assert "version 2, which has unlearned ships (λ = -0.5)" in shown[2].caption


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
