"""Run a sweep: every candidate merged in memory and scored on validation, resumable at every trial."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mergeflow.errors import MergeflowError
from mergeflow.evaluation.scoring import CandidateScorer, Score, score_of
from mergeflow.merging import MethodCall, Recipe, configure
from mergeflow.search.candidates import Strategy, candidate_key, score_all
from mergeflow.search.grid import grid
from mergeflow.search.journal import Journal
from mergeflow.search.optuna import optuna_search, trial_count
from mergeflow.search.space import Space, at_edge, values_of
from mergeflow.search.sweep_file import Sweep
from mergeflow.search.sweep_inputs import SweepInputs, open_sweep
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
        individual: Each task's expert on its own task; missing where a task has none.
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
        open_sweep(sweep, place, resolve, lambda what: tell(what, 0, total)) as inputs,
    ):
        journal.begin(inputs.record)
        board = _Scoreboard(sweep, inputs, journal)
        base, individual = board.references()
        trials: list[Trial] = []
        for trial in _trials(sweep, board, individual):
            trials.append(trial)
            tell(trial.method, len(trials), total)
        winner = max(trials, key=lambda trial: trial.objective)
        recipe = sweep.recipe(winner.method, winner.args, out=str(place / "merged.safetensors"))
        found = SweepResult(
            sweep, place, tuple(trials), winner, recipe, base, individual, board.scored, board.prepared, 0.0
        )
        write_parquet(place / TABLE, found.rows(), {"base": base.accuracy, "individual": individual})
        write_winner(place / WINNER, recipe, winner.row(), sweep.split)
    return replace(found, seconds=time.monotonic() - began)


class _Scoreboard:
    """Scores models, each once: what the journal knows is not computed again."""

    def __init__(self, sweep: Sweep, inputs: SweepInputs, journal: Journal) -> None:
        self._sweep, self._inputs, self._journal = sweep, inputs, journal
        self._scorer = CandidateScorer(
            inputs.model,
            inputs.tasks,
            inputs.checkpoints.base,
            inputs.checkpoints.experts,
            statistics=inputs.checkpoints.data,
            device=sweep.device,
            batch_size=sweep.batch_size,
        )
        self.scored = 0

    @property
    def prepared(self) -> int:
        """Directions computed so far."""
        return self._scorer.prepared

    def references(self) -> tuple[Score, dict[str, float] | None]:
        """Return the base's score on all tasks, and each task's expert on its own task."""
        base = self._known("base", lambda: self._scorer.state(self._inputs.checkpoints.base))
        owners = {task: self._sweep.expert_of(task) for task in self._inputs.tasks}
        individual = {task: self._individual(task, owner) for task, owner in owners.items() if owner is not None}
        whole = individual if len(individual) == len(owners) else None
        return score_of(base, whole), whole

    def _individual(self, task: str, expert: str) -> float:
        own = {task: self._inputs.tasks[task]}
        state = self._inputs.checkpoints.experts[expert]
        return self._known(f"expert {expert} on {task}", lambda: self._scorer.state(state, own))[task]

    def start(self, method: str, space: Space) -> None:
        """Get ready for the candidates of one method."""
        self._scorer.renew_cache(_largest_rank_ratio(method, space))

    def candidate(self, call: MethodCall) -> dict[str, float]:
        """Return a candidate's accuracy per task."""
        try:
            return self._known(candidate_key(call), lambda: self._scorer.candidate(call))
        except MergeflowError as error:
            raise MergeflowError(f"candidate {call.name} {call.args}: {error}") from None

    def _known(self, key: str, compute: Callable[[], dict[str, float]]) -> dict[str, float]:
        if key not in self._journal.entries:
            self._journal.append(key, compute())
            self.scored += 1
        found: dict[str, float] = self._journal.entries[key]
        # In this file's order of tasks, whatever it was when the journal was written.
        return {task: found[task] for task in self._inputs.tasks if task in found}


def _trials(sweep: Sweep, board: _Scoreboard, individual: dict[str, float] | None) -> Iterator[Trial]:
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
    if sweep.study is None:
        return grid(method, values_of(space))
    return optuna_search(method, space, sweep.study, sweep.seed)


def _trial_count(sweep: Sweep) -> int:
    if sweep.study is None:
        return len(sweep.grid())
    return sum(trial_count(space, sweep.study) for space in sweep.methods.values())


def _largest_rank_ratio(method: str, space: Space) -> float:
    """Return the largest rank ratio a method's candidates need, so that no factorisation is done twice."""
    found = (space or {}).get("rank_ratio", configure(method).args.get("rank_ratio", 1.0))
    if isinstance(found, dict):
        found = found.get("choices", found.get("high"))
    return min(1.0, max(map(float, found if isinstance(found, list) else [found])))
