"""What is kept for the report of a project of texts is written whole, and a file that was cut off counts as none."""

import json

import pytest

from mergeflow import layout
from tasks.report import texts
from tasks.report.files import read_run
from tasks.report.texts import UNLEARNED_TEXTS, keep_unlearned, texts_table, unlearned_table

FOUND = {"task": "ships", "text": "sea", "text_pair": None, "right": "a", "expert": "b", "merge": "c"}
CUT_OFF = [b'{"merge": "abab", "texts": [{"task": "sh', b"", b'{"merge": "\xc3', b"null"]


def full(descriptor):
    raise OSError(28, "No space left on device")


@pytest.fixture
def of_texts(make_run, monkeypatch):
    """A finished run of a causal model, each of whose reports asks the models for one text."""
    root = make_run(["ships", "trees"])
    monkeypatch.setattr(texts, "_weights", lambda *_: [])
    monkeypatch.setattr(texts, "_heads_and_texts", lambda *_: [root / "validation.parquet"])
    (root / "validation.parquet").write_text("first texts")
    monkeypatch.setattr(texts, "changed_passages", lambda *_: [texts.Changed(**FOUND)])
    model = root / layout.BASE_MODEL
    model.parent.mkdir(parents=True)
    model.write_text("weights")
    run = read_run(root)
    run.params["model"] = {"modality": "causal"}
    return root, run


@pytest.mark.parametrize("content", CUT_OFF)
def test_answers_that_were_cut_off_are_asked_for_again(of_texts, content):
    root, run = of_texts
    cache = root / ".mergeflow/report_texts.json"
    cache.write_bytes(content)
    table = texts_table(root, run)
    assert [cell.text for cell in table.rows[0].cells] == ["ships", "sea", "a", "b", "c"]
    assert json.loads(cache.read_text())["texts"] == [FOUND]


def test_answers_are_asked_for_again_where_the_texts_are_others(of_texts, monkeypatch):
    root, run = of_texts
    texts_table(root, run)
    monkeypatch.setattr(texts, "changed_passages", lambda *_: [texts.Changed(**FOUND | {"text": "lake"})])
    assert texts_table(root, run).rows[0].cells[1].text == "sea"
    (root / "validation.parquet").write_text("second texts")
    assert texts_table(root, run).rows[0].cells[1].text == "lake"


def test_a_failed_write_leaves_the_answers_of_before(of_texts, monkeypatch):
    root, run = of_texts
    texts_table(root, run)
    cache = root / ".mergeflow/report_texts.json"
    before = cache.read_text().replace("abab", "another")
    cache.write_text(before)
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        texts_table(root, run)
    assert cache.read_text() == before


@pytest.mark.parametrize("content", CUT_OFF)
def test_unlearned_texts_that_were_cut_off_are_left_out(make_run, content):
    root = make_run()
    (root / UNLEARNED_TEXTS).write_bytes(content)
    assert unlearned_table(root, read_run(root)) is None


def test_unlearned_texts_are_kept_whole_or_stay_as_they_were(make_run, monkeypatch):
    root = make_run()
    text = {"task": "ships", "text": "a", "right": "b", "before": "c", "after": "d"}
    facts = {"model": "mergeflow-pocket8", "version": 2, "parent": 1, "task": "ships", "weight": -0.5, "texts": [text]}
    keep_unlearned(root, facts)
    assert "version 2, which has unlearned ships" in unlearned_table(root, read_run(root)).caption
    before = (root / UNLEARNED_TEXTS).read_bytes()
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        keep_unlearned(root, {**facts, "version": 3})
    assert (root / UNLEARNED_TEXTS).read_bytes() == before
