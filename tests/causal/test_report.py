"""The report of a project of causal models shows how expert and merge go on from texts, and answer questions."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mergeflow import layout
from mergeflow.modalities.causal.generation import PROMPT, WRITTEN, go_on, held_out
from mergeflow.modalities.causal.modality import MODALITY
from mergeflow.modalities.causal.model import open_language
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
