"""The report of a project of texts shows texts: those that the expert and the merge answer differently."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from mergeflow import layout
from mergeflow.modalities.heads import load_head
from mergeflow.modalities.text.modality import build, open_examples
from mergeflow.modalities.text.sections import ModelSection
from tasks.report import write_report
from tasks.report.files import read_run
from tasks.report.texts import texts_table
from tests.text.small_project import TASKS


def test_it_shows_texts_with_the_experts_answer_and_the_merges(project: Path, tmp_path: Path) -> None:
    page = write_report(project, tmp_path / "report.html").read_text()
    table = texts_table(project, read_run(project))
    assert table is not None
    assert "Texts whose answer changed" in page
    shown = [[cell.text for cell in row.cells] for row in table.rows]
    assert "near" in {row[0] for row in shown} <= set(TASKS)
    assert all(row[4] != row[5] and row[1] in page for row in shown)
    winner = json.loads((project / layout.SELECTION).read_text())["winner"]
    with safe_open(project / layout.BASE_MODEL, framework="pt") as file:
        model = build(ModelSection(modality="text", pretrained="-"), file.metadata())
    folder = project / layout.split("validation", "near")
    head = load_head(project / layout.expert_head("near"))
    examples = open_examples("near", folder, "validation", head, torch.device("cpu"))
    texts = pq.read_table(folder / "validation.parquet").to_pylist()
    moved = []
    for checkpoint in (layout.expert_model("near"), layout.merge(winner)):
        model.load(load_file(project / checkpoint))
        moved.append(examples.scores(model, torch.arange(len(examples)))[:, 1].detach())
    row = int((moved[1] - moved[0]).abs().argmax())
    first = next(passage for passage in shown if passage[0] == "near")
    assert first[1:3] == [texts[row]["text"], texts[row]["text_pair"]]
    assert first[3:] == [f"{value:.2f}" for value in (texts[row]["label"], float(moved[0][row]), float(moved[1][row]))]


def test_answers_are_kept_for_the_next_report_of_the_same_merge(project: Path, tmp_path: Path) -> None:
    first = write_report(project, tmp_path / "one.html").read_bytes()
    cache = project / ".mergeflow/report_texts.json"
    cached = json.loads(cache.read_text())
    cache.write_text(json.dumps({**cached, "texts": []}))
    assert b"Texts whose answer changed" not in write_report(project, tmp_path / "two.html").read_bytes()
    cache.write_text(json.dumps({**cached, "merge": "of another merge"}))
    assert write_report(project, tmp_path / "three.html").read_bytes() == first


def test_a_project_of_other_examples_has_no_such_table(project: Path) -> None:
    run = read_run(project)
    run.params["model"]["modality"] = "toy"
    assert texts_table(project, run) is None
