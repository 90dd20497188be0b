"""Run a sweep: every candidate merged in memory and scored on validation, resumable at every trial."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from mergeflow.checkpoints.fingerprint import SCHEME, scheme_of
from mergeflow.evaluation.scoring import score_of
from mergeflow.merging import configure
from mergeflow.search.candidates import Space, Strategy, at_edge, grid, score_all, values_of
from mergeflow.search.journal import Journal
from mergeflow.search.optuna import optuna_search, trial_count
from mergeflow.search.scoreboard import Scoreboard, SweepResult, Trial, open_sweep, write_parquet, write_winner
from mergeflow.search.sweep_file import Sweep
from mergeflow.training.arithmetic import arithmetic

JOURNAL, TABLE, WINNER = "trials.jsonl", "trials.parquet", "winner.yaml"

Progress = Callable[[str, int, int], None]
"""Called with what is being done, trials done and trials in all."""


@arithmetic()
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
        folder: For trials.jsonl (the journal), trials.parquet, winner.yaml and prepared sources.
        resolve: Turns references such as models:/name@alias into local paths.

    Raises:
        MergeflowError: inputs that are missing or do not fit, a folder with results of other inputs, or a candidate
            that cannot be merged (named); with `test: true` another winner than the one that was looked at, which
            leaves the files of that one as they are.
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
        if sweep.search is None:
            board.check_grid()
        base, individual = board.references()
        trials: list[Trial] = []
        for trial in _trials(sweep, board, individual):
            trials.append(trial)
            tell(trial.method, len(trials), total)
        winner = max(trials, key=lambda trial: trial.objective)
        call = configure(winner.method, winner.args)
        if sweep.test:
            board.check_choice(call)  # before the files of the first choice are written over
        whole = sweep.tokenizer is None and sweep.chat_template is None
        out = place / ("merged.safetensors" if whole else "merged")
        recipe = sweep.recipe(winner.method, winner.args, out=str(out))
        result = SweepResult(
            sweep, place, tuple(trials), winner, recipe, base, individual, None, board.scored, board.prepared, 0.0
        )
        prefix = "accuracy" if sweep.score is None else "score"
        write_parquet(place / TABLE, result.rows(), {"base": base.accuracy, "individual": individual}, prefix)
        write_winner(place / WINNER, result)
        if sweep.test:
            tell("test", len(trials), total)
            result = replace(result, test=board.look_at_test(call), scored=board.scored)
            write_winner(place / WINNER, result)
    return replace(result, seconds=time.monotonic() - began)


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
        for candidate in score_all(method, _strategy(sweep, method, space), board.candidate, objective):
            score, edges = score_of(candidate.scores, individual), tuple(at_edge(space, candidate.varied))
            yield Trial(number, method, candidate.call.args, candidate.varied, score, candidate.value, edges)
            number += 1


def _strategy(sweep: Sweep, method: str, space: Space) -> Strategy:
    if sweep.search is None:
        return grid(method, values_of(space))
    return optuna_search(method, space, sweep.search, sweep.seed)


def _trial_count(sweep: Sweep) -> int:
    if sweep.search is None:
        return len(sweep.grid())
    return sum(trial_count(space, sweep.search) for space in sweep.methods.values())
