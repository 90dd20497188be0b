"""Sources of causal models: rows of questions whose test answers are secret, and choices that look like dates."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mergeflow.errors import MergeflowError
from mergeflow.modalities.causal.preparation import SOURCES, open_folder


def question(number: int, answer: Any, choices: Sequence[str] = ("a cat", "a dog")) -> dict[str, Any]:
    return {"ctx": f"number {number} is", "endings": list(choices), "label": answer}


def write(folder: Path, **splits: list[dict[str, Any]]) -> Path:
    folder.mkdir()
    for split, rows in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize("secret", ["", "-1", -1, None])
def test_a_test_split_whose_answers_are_secret_is_not_used(secret: Any, tmp_path: Path) -> None:
    """As HellaSwag has it: the answers of test are empty, and validation stands for it."""
    questions = [question(k, str(k % 2)) for k in range(4)]
    write(tmp_path / "rows", train=questions, validation=questions[:2], test=[question(k, secret) for k in range(3)])
    raw = SOURCES["jsonl"]("swag", "rows", 0, tmp_path)
    assert raw.ignored_splits == ("test (its answers are secret), for which validation stands",)
    assert {split: len(list(examples())) for split, examples in raw.splits.items()} == {"train": 4, "test": 2}
    write(tmp_path / "two", train=questions, test=[question(9, secret)])
    raw = SOURCES["jsonl"]("swag", "two", 0, tmp_path)
    assert (raw.ignored_splits, list(raw.splits)) == (("test (its answers are secret)",), ["train"])


def test_one_missing_answer_is_still_refused(tmp_path: Path) -> None:
    write(tmp_path / "rows", train=[question(0, "0")], test=[question(1, "1"), question(2, "")])
    with pytest.raises(MergeflowError, match="label is ''; expected the number of a choice"):
        list(SOURCES["jsonl"]("swag", "rows", 0, tmp_path).splits["test"]())


def test_choices_that_look_like_dates_are_texts(tmp_path: Path) -> None:
    dates = ["1914-07-28", "1939-09-01"]
    write(tmp_path / "rows", train=[question(0, 1, dates), question(1, 0, dates)])
    first = next(iter(SOURCES["jsonl"]("wars", "rows", 0, tmp_path).splits["train"]()))
    assert first.content["choices"] == dates


def test_a_folder_reads_endings_in_capitals_and_tells_what_it_does_not_read(tmp_path: Path) -> None:
    (tmp_path / "one.TXT").write_text("some words")
    (tmp_path / "two.Md").write_text("other words")
    for about in ("LICENSE", "metadata.json"):
        (tmp_path / about).write_text("about them")
    source = open_folder("task", str(tmp_path), 0, tmp_path)
    assert len(list(source.splits["train"]())) == 2
    (tmp_path / "three.rst").write_text("more words")
    with pytest.raises(MergeflowError, match=r"holds 'three.rst', which is not read as text"):
        open_folder("task", str(tmp_path), 0, tmp_path)


def test_blank_rows_of_texts_are_left_out_and_counted(tmp_path: Path) -> None:
    """As WikiText has them between paragraphs."""
    write(tmp_path / "rows", train=[{"text": text} for text in ("", " = A title = \n", " \n", "Words.\n")])
    split = SOURCES["jsonl"]("wiki", "rows", 0, tmp_path).splits["train"]
    with pytest.warns(UserWarning, match=r"train.jsonl: 2 of 4 rows are blank and left out"):
        examples = list(split())
    assert [example.content["text"] for example in examples] == [" = A title = \n", "Words.\n"]
    assert [example.content["document"] for example in examples] == [0, 1]
