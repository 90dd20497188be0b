"""Run a sweep: every candidate merged in memory and scored on validation, resumable at every trial."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mergeflow.checkpoints import LazyStateDict, fingerprint, write_text
from mergeflow.checkpoints.formats import local_folder
from mergeflow.checkpoints.writer import write_atomically
from mergeflow.errors import MergeflowError
from mergeflow.evaluation.scoring import Score, score_of
from mergeflow.late import quiet
from mergeflow.merging import MethodCall, Recipe, configure, make_recipe, prepare
from mergeflow.merging.catalog import code_of
from mergeflow.merging.execution.device import check_device
from mergeflow.merging.execution.direction import CandidateMerger
from mergeflow.merging.files.plan import Inputs, open_inputs
from mergeflow.merging.files.recipe import recipe_text
from mergeflow.merging.preflight import Remark
from mergeflow.search.candidates import (
    Journal,
    Space,
    Strategy,
    at_edge,
    candidate_key,
    grid,
    is_whole,
    score_all,
    values_of,
)
from mergeflow.search.scorer import (
    Candidate,
    CandidateModel,
    SweepScorer,
    open_scorer,
    remove_leftovers,
)
from mergeflow.search.sweep_file import SearchPart, Sweep
from mergeflow.training.arithmetic import arithmetic
from mergeflow.version import version
from mergeflow.yaml_text import in_words


def optuna_search(method: str, space: Space, wanted: SearchPart, seed: int) -> Strategy:
    """Ask for the arguments that a sampler proposes from the objectives of those before.

    Proposals depend on the space, the sampler, its seed and the objectives told, and on nothing else.
    """
    import optuna

    samplers = optuna.samplers
    kinds = {"tpe": samplers.TPESampler, "random": samplers.RandomSampler, "gp": samplers.GPSampler}
    searched: dict[str, Any] = {}
    fixed: dict[str, Any] = {}
    choices: dict[str, list[Any]] = {}  # by position: Optuna takes plain values, and a choice may be a list of patterns
    for name, values in (space or {}).items():
        listed = values["choices"] if isinstance(values, Mapping) and "choices" in values else values
        if isinstance(listed, list):
            choices[name] = listed
            searched[name] = optuna.distributions.CategoricalDistribution(range(len(listed)))
        elif isinstance(values, Mapping):
            searched[name] = _range(values, is_whole(method, name))
        else:
            fixed[name] = values
    seed = seed if wanted.seed is None else wanted.seed
    with quiet("optuna"):
        search = optuna.create_study(direction="maximize", sampler=kinds[wanted.sampler](seed=seed))
    for _ in range(trial_count(space, wanted)):
        with quiet("optuna"):
            trial = search.ask(searched)
        chosen = {name: choices[name][v] if name in choices else v for name, v in trial.params.items()}
        value = yield {**fixed, **chosen}
        with quiet("optuna"):
            search.tell(trial, value)


def trial_count(space: Space, wanted: SearchPart) -> int:
    """Return how many candidates a method gets: one where nothing is searched."""
    return wanted.trials if any(isinstance(values, list | Mapping) for values in (space or {}).values()) else 1


def _range(bounds: Mapping[str, Any], whole: bool) -> Any:
    from optuna.distributions import FloatDistribution, IntDistribution

    low, high, log = float(bounds["low"]), float(bounds["high"]), bool(bounds.get("log"))
    step = None if bounds.get("step") is None else float(bounds["step"])
    if whole:
        return IntDistribution(int(low), int(high), log=log, step=int(step or 1))
    return FloatDistribution(low, high, log=log, step=step)


@dataclass(frozen=True)
class SweepInputs:
    """The opened inputs of a sweep, and a record with a digest of each by name."""

    checkpoints: Inputs
    score: SweepScorer
    record: dict[str, Any]


@contextmanager
def open_sweep(
    sweep: Sweep,
    folder: Path,
    resolve: Callable[[str], str] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[SweepInputs]:
    """Open everything a sweep reads; `source:` tasks are prepared where they are not yet."""
    check_device(sweep.device)
    scorer: tuple[SweepScorer, dict[str, Any]] | None = None
    if sweep.score is not None:
        scorer = open_scorer(sweep.score, sweep.device, sweep.test)
    # The average takes any experts and needs no statistics: it opens and checks what all methods share.
    data = {kind: dict(paths) for kind, paths in sweep.data.items()}
    opening = make_recipe({**sweep.inputs(), "method": "average", "data": data})
    with open_inputs(opening, resolve) as checkpoints:
        if scorer is None:
            from mergeflow.search.images import open_images  # what merges language models needs no open_clip

            scorer = open_images(sweep, folder, checkpoints.base, say)
        score, facts = scorer
        say("fingerprints")
        record = {
            "version": version(),
            "split": sweep.split,
            "base": fingerprint(checkpoints.base),
            **{f"expert {name}": fingerprint(state) for name, state in checkpoints.experts.items()},
            **{
                f"{kind} {name}": fingerprint(state)
                for kind, states in checkpoints.data.items()
                for name, state in states.items()
            },
            **{key: value for key in ("tokenizer", "chat_template") if (value := sweep.inputs()[key])},
            **facts,
        }
        yield SweepInputs(checkpoints, score, record)


# Scores of base, experts and candidates, each computed once: what is in the journal is not computed again.

_TEST = '["test", '  # how the journal's keys of looks at test begin


class Scoreboard:
    """Scores the models of a sweep."""

    def __init__(self, sweep: Sweep, inputs: SweepInputs, journal: Journal, folder: Path) -> None:
        self._sweep, self._inputs, self._journal, self._folder = sweep, inputs, journal, folder
        checkpoints = inputs.checkpoints
        self.merger = CandidateMerger(
            checkpoints.base, checkpoints.experts, statistics=checkpoints.data, device=sweep.device
        )
        self.scored = 0
        remove_leftovers(folder)

    def references(self) -> tuple[Score, dict[str, float] | None]:
        """Return the base's score on all tasks, and each task's expert on its own task."""
        with _named("base"):
            base = self._known("base", lambda: self._score(self._inputs.checkpoints.base, Candidate("base")))
        self._inputs.score.tasks = self._inputs.score.tasks or tuple(base)
        owners = {task: self._sweep.expert_of(task) for task in base}
        missing = [task for task, owner in owners.items() if owner is None]
        if self._sweep.score is not None and self._sweep.objective == "mean":
            return score_of(base, None), None
        if missing and self._sweep.objective == "normalised":
            raise MergeflowError(
                f"tasks {', '.join(missing)} have no expert of their name to be normalised by: use `objective: mean`."
            )
        individual = {task: self._individual(task, owner) for task, owner in owners.items() if owner is not None}
        whole = individual if not missing else None
        return score_of(base, whole), whole

    def _individual(self, task: str, expert: str) -> float:
        with _named(f"expert {expert}"):
            key = f"expert {expert} on {task}"
            return self._known(key, lambda: self._score(self._expert(expert), Candidate(expert), task))[task]

    def _expert(self, name: str) -> Mapping[str, Tensor]:
        """Return an expert's own weights, also where its file holds differences from the base."""
        state = self._inputs.checkpoints.experts[name]
        if isinstance(state, LazyStateDict) and state.is_task_vector:
            return prepare(configure("task_arithmetic"), self._inputs.checkpoints.base, {name: state}).at(1.0)
        return state

    def check_grid(self) -> None:
        """Check, before anything is scored, that every candidate of a grid can be merged."""
        faults: dict[str, str] = {}
        checked: MethodCall | None = None
        for method, args in self._sweep.grid():
            call = configure(method, args).without_scale()
            if call == checked or method in faults:
                continue
            checked = call
            try:
                with _named(f"candidate {_in_words(method, args)}"):
                    self.merger.check(call)
            except MergeflowError as error:
                faults[method] = str(error)
        if faults:
            raise MergeflowError("\n".join(faults.values()))

    def candidate(self, call: MethodCall) -> dict[str, float]:
        return self._of(call, _with_code(candidate_key(call), call), "validation")

    def check_choice(self, call: MethodCall) -> None:
        """Check that test was not looked at for a different winner."""
        key = _test_key(call)
        if any(entry.startswith(_TEST) and entry != key for entry in self._journal.entries):
            code = " of this code" if code_of(call) else ""
            raise MergeflowError(
                f"test was looked at already, for another winner than {_in_words(call.name, call.args)}{code}: to "
                "choose again after that would be to choose on test. Keep that winner, or use other test data and "
                "another folder (--out)."
            )

    def look_at_test(self, call: MethodCall) -> Score:
        """Return the winner's score on test, which is looked at once."""
        return score_of(self._of(call, _test_key(call), "test"), None)

    def _of(self, call: MethodCall, key: str, split: str) -> dict[str, float]:
        candidate = Candidate(call.name, call.args, split)
        # Only the scorer of images keeps its model on the sweep's device: all others are given files or functions.
        judged_on = torch.device("cpu" if self._sweep.score is not None else self._sweep.device)
        with _named(f"candidate {_in_words(call.name, call.args)}" + " on test" * (split == "test")):
            return self._known(key, lambda: self._score(self.merger.merge_for(call, judged_on), candidate))

    def _score(self, state: Mapping[str, Tensor], candidate: Candidate, only: str | None = None) -> Mapping[str, float]:
        checkpoints = self._inputs.checkpoints
        model = CandidateModel(state, Path(checkpoints.base.path), self._folder, checkpoints.write_tokenizer)
        return self._inputs.score(model, candidate, only)

    def _known(self, key: str, compute: Callable[[], Mapping[str, float]]) -> dict[str, float]:
        self.scored += key not in self._journal.entries
        scores: dict[str, float] = self._journal.cached(key, lambda: dict(compute()))
        # In this sweep's order of tasks, whatever it was when the journal was written.
        return {task: scores[task] for task in self._inputs.score.tasks or scores if task in scores}


def _in_words(method: str, args: Mapping[str, Any]) -> str:
    return f"{method} ({in_words(args)})" if args else method


def _test_key(call: MethodCall) -> str:
    return _with_code(json.dumps(["test", call.name, call.args], sort_keys=True), call)


def _with_code(key: str, call: MethodCall) -> str:
    """Return a journal's key with digests of the code of methods that are not the package's own, where it uses any."""
    code = {name: origin.sha256 for name, origin in code_of(call).items()}
    return json.dumps([*json.loads(key), code], sort_keys=True) if code else key


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Prefix errors with the model's name."""
    try:
        yield
    except MergeflowError as error:
        raise MergeflowError(f"{what}: {error}") from error.__cause__


def largest_rank_ratio(method: str, space: Space) -> float:
    """Return the largest rank ratio a method's candidates need, so that no factorisation is done twice."""
    ratio = (space or {}).get("rank_ratio", configure(method).args.get("rank_ratio", 1.0))
    if isinstance(ratio, dict):
        ratio = ratio.get("choices", ratio.get("high"))
    return min(1.0, max(map(float, ratio if isinstance(ratio, list) else [ratio])))


# Results of a sweep and its files: one Parquet row per trial, and the winner as a recipe.


@dataclass(frozen=True)
class Trial:
    """One candidate and its score; the sweep names the arguments `varied`, of which `edges` are at an end of theirs."""

    number: int
    method: str
    args: dict[str, Any]
    varied: dict[str, Any]
    score: Score
    objective: float
    edges: tuple[str, ...]

    def row(self) -> dict[str, Any]:
        """Return the trial as plain values, for a table or a tracking server."""
        columns = {"trial": self.number, "method": self.method, "args": self.args, "accuracy": self.score.accuracy}
        return {**columns, "mean": self.score.mean, "normalised": self.score.normalised, "objective": self.objective}


@dataclass(frozen=True)
class SweepResult:
    """Results of a sweep.

    Attributes:
        folder: Where trials.jsonl, trials.parquet and winner.yaml are.
        recipe: The winner, as `mergeflow merge` takes it.
        base: The base itself on all tasks (zero-shot).
        individual: Each task's expert on its own task; missing where a task has none, or where nothing asks for it.
        test: The winner on test, where the sweep asks for that one look.
        scored: How many models were scored now; the others were known from an earlier run.
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


def write_parquet(path: Path, rows: Sequence[Mapping[str, Any]], references: Mapping[str, Any], prefix: str) -> None:
    """Write trials as Parquet: trial, method, args (JSON), a column `prefix.task` each, mean, normalised, objective.

    Args:
        references: Accuracies of base and experts, stored as JSON in the file's metadata.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    scores = [{f"{prefix}.{task}": value for task, value in row["accuracy"].items()} for row in rows]
    flat = [
        {**row, "args": json.dumps(row["args"], sort_keys=True), **of_tasks}
        for row, of_tasks in zip(rows, scores, strict=True)
    ]
    columns = [("trial", pa.int64()), ("method", pa.string()), ("args", pa.string())]
    columns += [(name, pa.float64()) for name in (*scores[0], "mean", "normalised", "objective")]
    schema = pa.schema(columns, metadata={"mergeflow.references": json.dumps(dict(references))})
    content = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(flat, schema=schema), content)
    write_atomically(path, content.getvalue().to_pybytes())


def write_winner(path: Path, result: SweepResult) -> None:
    """Write the winner's recipe, complete with every default, as `mergeflow merge` takes it."""
    images = result.sweep.score is None
    head = f"# Winner of a sweep, on {result.sweep.split}: {_summary(result.winner.score, images)}.\n"
    if result.test is not None:
        head += f"# On test, looked at once: {_summary(result.test, images)}.\n"
    write_text(path, head + recipe_text(result.recipe))


def _summary(score: Score, images: bool) -> str:
    normalised = "" if score.normalised is None else f", normalised {100 * score.normalised:.2f} %"
    mean = f"mean accuracy {100 * score.mean:.2f} %" if images else f"mean score {score.mean:.6g}"
    return mean + normalised


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
    remark: Remark = lambda _notes, _warnings: None,
) -> SweepResult:
    """Score every candidate of a sweep on validation and write the results.

    mean: 1/T Σ_t a_t;  normalised: 1/T Σ_t a_t / e_t, with a_t the accuracy in [0, 1] (or a scorer's number) of a
    candidate on task t, and e_t that of the task's expert; the winner has the largest objective

    A killed sweep goes on where it stopped and ends with the same files. Values added to the sweep later are scored in
    addition; changed checkpoints, data or heads are refused.

    Args:
        folder: For trials.jsonl (the journal), trials.parquet, winner.yaml and prepared sources.
        resolve: Turns references such as models:/name@alias into local paths.
    """
    began, place = time.monotonic(), Path(folder)
    tell: Progress = progress or (lambda *_: None)
    total = _trial_count(sweep)
    with (
        Journal(place / JOURNAL) as journal,
        open_sweep(sweep, place, resolve, lambda what: tell(what, 0, total)) as inputs,
    ):
        remark(inputs.checkpoints.notes, inputs.checkpoints.warnings)
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
        model = local_folder(sweep.base)
        is_folder = model is not None and (model / "config.json").is_file()
        to_folder = is_folder or sweep.tokenizer is not None or sweep.chat_template is not None
        out = place / ("merged" if to_folder else "merged.safetensors")
        recipe = sweep.recipe(winner.method, winner.args, out=str(out))
        counts = (board.scored, board.merger.prepared)
        result = SweepResult(sweep, place, tuple(trials), winner, recipe, base, individual, None, *counts, seconds=0.0)
        prefix = "accuracy" if sweep.score is None else "score"
        write_parquet(place / TABLE, result.rows(), {"base": base.accuracy, "individual": individual}, prefix)
        write_winner(place / WINNER, result)
        if sweep.test:
            tell("test", len(trials), total)
            result = replace(result, test=board.look_at_test(call), scored=board.scored)
            write_winner(place / WINNER, result)
    return replace(result, seconds=time.monotonic() - began)


def _trials(sweep: Sweep, board: Scoreboard, individual: dict[str, float] | None) -> Iterator[Trial]:
    def objective(accuracy: Mapping[str, float]) -> float:
        score = score_of(accuracy, individual)
        value = score.mean if sweep.objective == "mean" else score.normalised
        assert value is not None
        return value

    number = 0
    for method, space in sweep.methods.items():
        board.merger.renew_cache(largest_rank_ratio(method, space))
        strategy = grid(method, values_of(space))
        if sweep.search is not None:
            strategy = optuna_search(method, space, sweep.search, sweep.seed)
        for candidate in score_all(method, strategy, board.candidate, objective):
            score, edges = score_of(candidate.scores, individual), tuple(at_edge(space, candidate.varied))
            yield Trial(number, method, candidate.call.args, candidate.varied, score, candidate.value, edges)
            number += 1


def _trial_count(sweep: Sweep) -> int:
    if sweep.search is None:
        return len(sweep.grid())
    return sum(trial_count(space, sweep.search) for space in sweep.methods.values())
