"""The journal: whatever a kill leaves of it is a prefix, and goes on."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergeflow.errors import MergeflowError
from mergeflow.search.candidates import Journal

INPUTS = {"base": "a", "split": "validation"}


def written(path: Path, entries: dict[str, object]) -> bytes:
    with Journal(path) as journal:
        journal.begin(INPUTS)
        for key, value in entries.items():
            if key not in journal.entries:
                journal.append(key, value)
    return path.read_bytes()


@pytest.mark.slow
@given(
    entries=st.dictionaries(st.text(), st.floats(allow_nan=False) | st.text(), max_size=5),
    cut=st.floats(0, 1),
)
def test_cut_anywhere_it_ends_with_the_same_bytes(entries: dict[str, object], cut: float):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.jsonl"
        whole = written(path, entries)
        path.write_bytes(whole[: int(cut * len(whole))])
        assert written(path, entries) == whole
        with Journal(path) as journal:
            journal.begin(INPUTS)
            assert journal.entries == entries


def test_other_inputs_are_named(tmp_path: Path):
    path = tmp_path / "j"
    before = written(path, {"a": 1})
    with Journal(path) as journal, pytest.raises(MergeflowError, match=r"other inputs \(base, task red changed\)"):
        journal.begin({"base": "b", "split": "validation", "task red": 1})
    assert path.read_bytes() == before


@pytest.mark.parametrize("text", ["hello\n", "[]\n", '{"format": 99, "inputs": {}}\n', "1\n2\n", '{"key": 1}\n'])
def test_what_is_no_journal_is_refused_and_left_alone(tmp_path: Path, text: str):
    path = tmp_path / "j"
    path.write_text(text)
    with Journal(path) as journal, pytest.raises(MergeflowError, match="not a journal of this version"):
        journal.begin(INPUTS)
    assert path.read_text() == text


def test_an_unused_journal_leaves_nothing(tmp_path: Path):
    with Journal(tmp_path / "j"), pytest.raises(MergeflowError, match="another process"):
        Journal(tmp_path / "j")
    assert not list(tmp_path.iterdir())
