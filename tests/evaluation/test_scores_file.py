"""Scores by example in a file: what was written is read, in the same bytes everywhere."""

import hashlib
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from mergeflow.evaluation import read_scores, write_scores

SCORES = arrays(np.float32, st.integers(0, 9), elements=st.floats(0, 1, width=32))


@given(scores=st.dictionaries(st.text("abcé_-.", min_size=1, max_size=9), SCORES, max_size=4))
def test_scores_come_back(tmp_path_factory, scores):
    path = tmp_path_factory.getbasetemp() / "scores.npz"
    write_scores(path, scores)
    again = read_scores(path)
    assert list(again) == list(scores)
    assert all(
        np.array_equal(again[task], values) and again[task].dtype == np.float32 for task, values in scores.items()
    )


def test_the_same_scores_are_the_same_bytes_on_any_python(tmp_path: Path) -> None:
    path = tmp_path / "scores.npz"
    write_scores(path, {"digits": np.array([0, 0.5, 1], np.float32), "land": np.ones(2, np.float32)})
    digest = "1141e474dafe9749f483aeee930412b753966815b31530ef05f1ce372f509279"
    assert hashlib.sha256(path.read_bytes()).hexdigest() == digest


def test_files_that_numpy_wrote_are_read(tmp_path: Path) -> None:
    path = tmp_path / "scores.npz"
    np.savez(path, digits=np.array([0, 1], np.float32))
    assert read_scores(path)["digits"].tolist() == [0, 1]
