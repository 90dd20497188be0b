"""Run a sweep: every candidate merged in memory and scored on validation, resumable at every trial."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mergeflow.checkpoints.fingerprint import SCHEME, scheme_of
from mergeflow.evaluation.scoring import Score, score_of
from mergeflow.merging import Recipe, configure
from mergeflow.search.candidates import Strategy, score_all
from mergeflow.search.grid import grid
from mergeflow.search.journal import Journal
from mergeflow.search.optuna import optuna_search, trial_count
from mergeflow.search.scoreboard import Scoreboard
from mergeflow.search.space import Space, at_edge, values_of
from mergeflow.search.sweep_file import Sweep
from mergeflow.search.sweep_inputs import open_sweep
from mergeflow.search.sweep_results import write_parquet, write_winner

JOURNAL, TABLE, WINNER = "trials.jsonl", "trials.parquet", "winner.yaml"

Progress = Callable[[str, int, int], None]
"""Called with what is being done, trials done and trials in all."""


@dataclass(frozen=True)
class Trial:
    """One candidate and its score.

    Attributes:
        number: From 0, in the order of the sweep.
        method: A name of the catalog.
        args: All arguments with their defaults.
        varied: Those that the sweep names.
        score: On validation.
        objective: What the sweep maximises.
        edges: Arguments that stand at an end of what was tried.
    """

    number: int
    method: str
    args: dict[str, Any]
    varied: dict[str, Any]
    score: Score
    objective: float
    edges: tuple[str, ...]

    def row(self) -> dict[str, Any]:
        """Return the trial as plain values, for a table or a tracking server."""
        kept = {"trial": self.number, "method": self.method, "args": self.args, "accuracy": self.score.accuracy}
        return {**kept, "mean": self.score.mean, "normalised": self.score.normalised, "objective": self.objective}


@dataclass(frozen=True)
class SweepResult:
    """What a sweep found.

    Attributes:
        sweep: What was asked.
        folder: Where trials.jsonl, trials.parquet and winner.yaml are.
        trials: In the order of the sweep.
        winner: The trial with the highest objective, the first of equals.
        recipe: The winner, as `mergeflow merge` takes it.
        base: The base itself on all tasks (zero-shot).
        individual: Each task's expert on its own task; missing where a task has none, or where nothing asks for it.
        test: The winner on test, where the sweep asks for that one look.
        scored: How many models were scored now; the others were known from an earlier run.
        prepared: How many directions were computed.
        seconds: Wall time.
    """

    sweep: Sweep
    folder: Path
    trials: tuple[Trial, ...]
    winner: Trial
    recipe: Recipe
    base: Score
    individual: dict[str, float] | None
    test: Score | None
    scored: int
    prepared: int
    seconds: float

    def rows(self) -> list[dict[str, Any]]:
        """Return all trials as plain values."""
        return [trial.row() for trial in self.trials]


def run_sweep(
    sweep: Sweep,
    folder: str | Path,
    *,
    resolve: Callable[[str], str] | None = None,
    progress: Progress | None = None,
) -> SweepResult:
    """Score every candidate of a sweep on validation and write the results.

    A killed sweep goes on where it stopped and ends with the same files. Values added to the sweep later are scored
    beside the known ones; changed checkpoints, data or heads are refused.

    Args:
        sweep: From `load_sweep` or `make_sweep`.
        folder: For trials.jsonl (the journal), trials.parquet, winner.yaml and prepared sources.
        resolve: Turns references such as models:/name@alias into local paths.
        progress: Called as work proceeds.

    Raises:
        MergeflowError: inputs that are missing or do not fit, a folder with results of other inputs, or a candidate
            that cannot be merged (named).
    """
    began, place = time.monotonic(), Path(folder)
    tell: Progress = progress or (lambda *_: None)
    total = _trial_count(sweep)
    with (
        Journal(place / JOURNAL) as journal,
        open_sweep(sweep, place, resolve, lambda what: tell(what, 0, total), _scheme(journal)) as inputs,
    ):
        journal.begin(inputs.record)
        board = Scoreboard(sweep, inputs, journal, place)
        base, individual = board.references()
        trials: list[Trial] = []
        for trial in _trials(sweep, board, individual):
            trials.append(trial)
            tell(trial.method, len(trials), total)
        winner = max(trials, key=lambda trial: trial.objective)
        whole = sweep.tokenizer is None and sweep.chat_template is None
        out = place / ("merged.safetensors" if whole else "merged")
        recipe = sweep.recipe(winner.method, winner.args, out=str(out))
        found = SweepResult(
            sweep, place, tuple(trials), winner, recipe, base, individual, None, board.scored, board.prepared, 0.0
        )
        prefix = "accuracy" if sweep.score is None else "score"
        write_parquet(place / TABLE, found.rows(), {"base": base.accuracy, "individual": individual}, prefix)
        write_winner(place / WINNER, found)
        if sweep.test:
            tell("test", len(trials), total)
            found = replace(found, test=board.look_at_test(configure(winner.method, winner.args)), scored=board.scored)
            write_winner(place / WINNER, found)
    return replace(found, seconds=time.monotonic() - began)


def _scheme(journal: Journal) -> str:
    """Return the scheme of a journal's fingerprints: one from before schemes had names goes on with its own."""
    base = journal.recorded().get("base")
    return SCHEME if base is None else scheme_of(str(base))


def _trials(sweep: Sweep, board: Scoreboard, individual: dict[str, float] | None) -> Iterator[Trial]:
    def objective(accuracy: Mapping[str, float]) -> float:
        score = score_of(accuracy, individual)
        value = score.mean if sweep.objective == "mean" else score.normalised
        assert value is not None
        return value

    number = 0
    for method, space in sweep.methods.items():
        board.start(method, space)
        for found in score_all(method, _strategy(sweep, method, space), board.candidate, objective):
            score, edges = score_of(found.scores, individual), tuple(at_edge(space, found.varied))
            yield Trial(number, method, found.call.args, found.varied, score, found.value, edges)
            number += 1


def _strategy(sweep: Sweep, method: str, space: Space) -> Strategy:
    if sweep.search is None:
        return grid(method, values_of(space))
    return optuna_search(method, space, sweep.search, sweep.seed)


def _trial_count(sweep: Sweep) -> int:
    if sweep.search is None:
        return len(sweep.grid())
    return sum(trial_count(space, sweep.search) for space in sweep.methods.values())
