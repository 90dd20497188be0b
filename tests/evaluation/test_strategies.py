"""Strategies ask for candidates; one loop scores them, and a journal makes the loop resumable at any byte."""

import tempfile
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergeflow.errors import MergeflowError
from mergeflow.merging import MethodCall
from mergeflow.search.candidates import (
    Journal,
    Scored,
    Strategy,
    best_on_line,
    climb,
    grid,
    grid_of,
    line,
    remembered,
    score_all,
)
from mergeflow.search.sweep import optuna_search
from mergeflow.search.sweep_file import SearchPart

GRID = {"keep": [0.1, 0.2, 0.4], "scale": [0.5, 1.0, 1.5, 2.0, 3.0]}
SPACE = {"scale": {"low": 0.5, "high": 3.0}}
STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "grid": lambda: grid("ties", GRID),
    "line": lambda: line("scale", GRID["scale"], 1.4, {"keep": 0.2}),
    "climb": lambda: climb(GRID, {"keep": 0.4, "scale": 0.5}),
    **{
        sampler: lambda sampler=sampler: optuna_search("ties", SPACE, SearchPart(trials=12, sampler=sampler), 0)
        for sampler in ("tpe", "random", "gp")
    },
}


def score_on(height: Callable[[dict[str, Any]], float], asked: list[Any] | None = None) -> Any:
    def score(call: MethodCall) -> dict[str, float]:
        if asked is not None:
            asked.append((call.args["keep"], call.args["scale"]))
        return {"task": height(call.args)}

    return score


def of_task(scores: Mapping[str, float]) -> float:
    return scores["task"]


def hill(args: Mapping[str, Any]) -> float:
    return -abs(args["scale"] - 1.6) - args["keep"]


@given(
    st.lists(st.integers(0, 4), min_size=15, max_size=15), st.sampled_from(GRID["keep"]), st.sampled_from(GRID["scale"])
)
def test_a_climb_ends_at_a_local_best_and_asks_nothing_twice(heights: list[int], keep: float, scale: float) -> None:
    height_at = {tuple(args.values()): height for args, height in zip(grid_of("ties", GRID), heights, strict=True)}
    asked: list[tuple[Any, ...]] = []
    walk = climb(GRID, {"keep": keep, "scale": scale, "rounding": "ceil"})
    trials = list(
        score_all("ties", walk, score_on(lambda args: height_at[args["keep"], args["scale"]], asked), of_task)
    )
    assert len(asked) == len(set(asked)) == len(trials)
    assert asked[0] == (keep, scale)
    best = max(trials, key=lambda trial: trial.value).varied
    for name, values in GRID.items():
        place = values.index(best[name])
        for other in values[max(0, place - 1) : place + 2]:
            neighbour = {**best, name: other}
            assert height_at[neighbour["keep"], neighbour["scale"]] <= height_at[best["keep"], best["scale"]]


def test_a_climb_from_outside_the_grid_starts_in_its_middle() -> None:
    trials = list(score_all("ties", climb(GRID, {"keep": 0.3}), score_on(lambda args: 0.0), of_task))
    assert trials[0].varied == {"keep": 0.2, "scale": 1.5}
    assert len(trials) == 5


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=21), st.integers(0, 20))
def test_a_line_finds_the_best_of_a_hump_from_any_start(values: list[int], start: int) -> None:
    hump = sorted(values[::2]) + sorted(values[1::2], reverse=True)
    walk = line("scale", list(range(len(hump))), start, slack=0)
    best = best_on_line(score_all("ties", walk, score_on(lambda args: hump[int(args["scale"])]), of_task), "scale")
    assert (best.varied["scale"], best.value) == (hump.index(max(hump)), max(hump))


def test_of_equal_scores_a_line_takes_the_smallest_value() -> None:
    flat = score_all("ties", line("scale", GRID["scale"], 1.5), score_on(lambda args: 0.5), of_task)
    assert best_on_line(flat, "scale").varied == {"scale": 0.5}


@given(st.dictionaries(st.sampled_from(["scale", "keep"]), st.sets(st.floats(0, 1), min_size=1, max_size=4)))
def test_a_grid_is_every_combination_once_with_scale_innermost(values: dict[str, set[float]]) -> None:
    calls = grid_of("ties", {name: list(some) for name, some in values.items()})
    expected = 1
    for some in values.values():
        expected *= len(some)
    assert len(calls) == expected
    changes = sum(a.get("keep") != b.get("keep") for a, b in pairwise(calls))
    assert changes == len(values.get("keep", [0])) - 1


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_replays_from_its_journal(name: str, tmp_path: Path) -> None:
    """Stopped after any candidate, the same search asks the scorer for the others alone and finds the same."""

    def run(path: Path, stop: int | None = None) -> tuple[list[Scored], list[Any]]:
        asked: list[Any] = []
        with Journal(path) as journal:
            journal.begin({})
            score = remembered(score_on(hill, asked), journal)
            trials = []
            for trial in score_all("ties", STRATEGIES[name](), score, of_task):
                trials.append(trial)
                if len(trials) == stop:
                    break
        return trials, asked

    whole, asked = run(tmp_path / "whole")
    assert len(whole) == len(asked) == len(set(asked)) >= 3
    for stop in (1, len(whole) - 1):
        run(tmp_path / f"{stop}", stop)
        again, further = run(tmp_path / f"{stop}")
        assert again == whole
        assert further == asked[stop:]
        assert (tmp_path / f"{stop}").read_bytes() == (tmp_path / "whole").read_bytes()


def test_arguments_that_the_method_does_not_take_are_refused() -> None:
    with pytest.raises(MergeflowError, match="did you mean 'scale'"):
        list(score_all("ties", line("scael", [1.0], 1.0), score_on(hill), of_task))


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
