"""What a sweep reads, the scores that it computed once, and the files that it leaves."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mergeflow.checkpoints import LazyStateDict, fingerprint, write_text
from mergeflow.checkpoints.fingerprint import SCHEME
from mergeflow.checkpoints.writer import write_atomically
from mergeflow.errors import MergeflowError
from mergeflow.evaluation.scoring import Score, score_of
from mergeflow.merging import MethodCall, Recipe, configure, make_recipe, prepare
from mergeflow.merging.catalog import code_of
from mergeflow.merging.device import check_device
from mergeflow.merging.direction import CandidateMerger
from mergeflow.merging.files.plan import Inputs, open_inputs
from mergeflow.merging.files.recipe import recipe_text
from mergeflow.search.candidates import Space, candidate_key
from mergeflow.search.journal import Journal
from mergeflow.search.lm_eval import lm_eval_scorer
from mergeflow.search.scorer import (
    Candidate,
    CandidateModel,
    SweepScorer,
    command_scorer,
    function_scorer,
    remove_leftovers,
)
from mergeflow.search.sweep_file import CommandScore, FunctionScore, Sweep
from mergeflow.version import version


@dataclass(frozen=True)
class SweepInputs:
    """The opened inputs of a sweep.

    Attributes:
        record: A digest of each input, by name.
    """

    checkpoints: Inputs
    score: SweepScorer
    record: dict[str, Any]


@contextmanager
def open_sweep(
    sweep: Sweep,
    folder: Path,
    resolve: Callable[[str], str] | None = None,
    say: Callable[[str], None] = lambda _: None,
    scheme: str = SCHEME,
) -> Iterator[SweepInputs]:
    """Open everything a sweep reads; `source:` tasks are prepared where they are not yet.

    Args:
        scheme: Of the fingerprints: that of the journal where there is one.
    """
    check_device(sweep.device)
    scorer = None if sweep.score is None else _open_scorer(sweep)
    # The average takes any experts and needs no statistics: it opens and checks what all methods share.
    data = {kind: dict(paths) for kind, paths in sweep.data.items()}
    opening = make_recipe({**sweep.inputs(), "method": "average", "data": data})
    with open_inputs(opening, resolve) as checkpoints:
        score, facts = scorer or _images(sweep, folder, checkpoints.base, say)
        say("fingerprints")
        record = {
            "version": version(),
            "split": sweep.split,
            "base": fingerprint(checkpoints.base, scheme),
            **{f"expert {name}": fingerprint(state, scheme) for name, state in checkpoints.experts.items()},
            **{
                f"{kind} {name}": fingerprint(state, scheme)
                for kind, states in checkpoints.data.items()
                for name, state in states.items()
            },
            **_choices(sweep),
            **facts,
        }
        yield SweepInputs(checkpoints, score, record)


def _choices(sweep: Sweep) -> dict[str, Any]:
    """Return the candidates' companion files; nothing where the sweep names none."""
    return {key: value for key, value in sweep.inputs().items() if key in ("tokenizer", "chat_template") and value}


def _open_scorer(sweep: Sweep) -> tuple[SweepScorer, dict[str, Any]]:
    """Return the user's scorer, and what its scores depend on."""
    part = sweep.score
    if isinstance(part, FunctionScore):
        score, digest = function_scorer(part)
    elif isinstance(part, CommandScore):
        score, digest = command_scorer(part)
    else:
        assert part is not None
        score, digest = lm_eval_scorer(part, sweep.device)
    return score, {"score": part.model_dump(mode="json"), "files of the scorer": digest}


def _images(
    sweep: Sweep, folder: Path, base: LazyStateDict, say: Callable[[str], None]
) -> tuple[SweepScorer, dict[str, Any]]:
    from mergeflow.search.images import open_images  # what merges language models needs no open_clip

    return open_images(sweep, folder, base, say)


# Scores of base, experts and candidates, each computed once: what the journal knows is not computed again.


_TEST = '["test", '  # how the journal's keys of looks at test begin


class Scoreboard:
    """Scores the models of a sweep."""

    def __init__(self, sweep: Sweep, inputs: SweepInputs, journal: Journal, folder: Path) -> None:
        self._sweep, self._inputs, self._journal, self._folder = sweep, inputs, journal, folder
        checkpoints = inputs.checkpoints
        self._merger = CandidateMerger(
            checkpoints.base, checkpoints.experts, statistics=checkpoints.data, device=sweep.device
        )
        self.scored = 0
        remove_leftovers(folder)

    @property
    def prepared(self) -> int:
        """Directions computed so far."""
        return self._merger.prepared

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
        def compute() -> dict[str, float]:
            return dict(self._score(self._expert(expert), Candidate(expert), task))

        with _named(f"expert {expert}"):
            return self._known(f"expert {expert} on {task}", compute)[task]

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
                with _named(f"candidate {method} {args}"):
                    self._merger.check(call)
            except MergeflowError as error:
                faults[method] = str(error)
        if faults:
            raise MergeflowError("\n".join(faults.values()))

    def start(self, method: str, space: Space) -> None:
        """Get ready for the candidates of one method."""
        self._merger.renew_cache(largest_rank_ratio(method, space))

    def candidate(self, call: MethodCall) -> dict[str, float]:
        """Return a candidate's score per task, on validation."""
        return self._of(call, _with_code(candidate_key(call), call), "validation")

    def check_choice(self, call: MethodCall) -> None:
        """Check that test was not looked at for another winner than this one."""
        key = _test_key(call)
        if any(entry.startswith(_TEST) and entry != key for entry in self._journal.entries):
            code = " of this code" if code_of(call) else ""
            raise MergeflowError(
                f"test was looked at already, for another winner than {call.name} {call.args}{code}: to choose again "
                "after that would be to choose on test. Keep that winner, or use other test data and another folder "
                "(--out)."
            )

    def look_at_test(self, call: MethodCall) -> Score:
        """Return the winner's score on test, which is looked at once."""
        self.check_choice(call)
        return score_of(self._of(call, _test_key(call), "test"), None)

    def _of(self, call: MethodCall, key: str, split: str) -> dict[str, float]:
        candidate = Candidate(call.name, call.args, split)
        # Only the scorer of images keeps its model on the sweep's device: all others are given files or functions.
        judged_on = torch.device("cpu" if self._sweep.score is not None else self._sweep.device)
        with _named(f"candidate {call.name} {call.args}" + " on test" * (split == "test")):
            return self._known(key, lambda: self._score(self._merger.merge_for(call, judged_on), candidate))

    def _score(self, state: Mapping[str, Tensor], candidate: Candidate, only: str | None = None) -> Mapping[str, float]:
        checkpoints = self._inputs.checkpoints
        model = CandidateModel(state, Path(checkpoints.base.path), self._folder, checkpoints.write_tokenizer)
        return self._inputs.score(model, candidate, only)

    def _known(self, key: str, compute: Callable[[], Mapping[str, float]]) -> dict[str, float]:
        self.scored += key not in self._journal.entries
        scores: dict[str, float] = self._journal.known(key, lambda: dict(compute()))
        # In this sweep's order of tasks, whatever it was when the journal was written.
        return {task: scores[task] for task in self._inputs.score.tasks or scores if task in scores}


def _test_key(call: MethodCall) -> str:
    return _with_code(json.dumps(["test", call.name, call.args], sort_keys=True), call)


def _with_code(key: str, call: MethodCall) -> str:
    """Return a journal's key with digests of the code of methods that are not the package's own, where it uses any."""
    code = {name: origin.sha256 for name, origin in code_of(call).items()}
    return json.dumps([*json.loads(key), code], sort_keys=True) if code else key


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Say in a message which model it is about."""
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


# What a sweep found, and the files that it leaves: one Parquet row per trial, and the winner as a recipe.


@dataclass(frozen=True)
class Trial:
    """One candidate and its score.

    Attributes:
        number: From 0, in the order of the sweep.
        varied: Those that the sweep names.
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
        columns = {"trial": self.number, "method": self.method, "args": self.args, "accuracy": self.score.accuracy}
        return {**columns, "mean": self.score.mean, "normalised": self.score.normalised, "objective": self.objective}


@dataclass(frozen=True)
class SweepResult:
    """What a sweep found.

    Attributes:
        folder: Where trials.jsonl, trials.parquet and winner.yaml are.
        trials: In the order of the sweep.
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
    """Write trials as Parquet: trial, method, args (JSON), accuracy.<task> ..., mean, normalised, objective.

    The columns of tasks are score.<task> where a scorer of the user's gave them.

    Args:
        references: Accuracies of base and experts, stored as JSON in the file's metadata.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns: dict[str, Any] = {
        "trial": pa.array([row["trial"] for row in rows], pa.int64()),
        "method": pa.array([row["method"] for row in rows], pa.string()),
        "args": pa.array([json.dumps(row["args"], sort_keys=True) for row in rows], pa.string()),
    }
    for task in rows[0]["accuracy"]:
        columns[f"{prefix}.{task}"] = pa.array([row["accuracy"][task] for row in rows], pa.float64())
    for name in ("mean", "normalised", "objective"):
        columns[name] = pa.array([row[name] for row in rows], pa.float64())
    table = pa.table(columns).replace_schema_metadata({"mergeflow.references": json.dumps(dict(references))})
    content = pa.BufferOutputStream()
    pq.write_table(table, content)
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
