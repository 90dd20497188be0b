"""Scores of base, experts and candidates, each computed once: what the journal knows is not computed again."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from mergeflow.checkpoints import LazyStateDict
from mergeflow.errors import MergeflowError
from mergeflow.evaluation.scoring import Score, score_of
from mergeflow.merging import MethodCall, configure, prepare
from mergeflow.merging.candidates import CandidateMerger
from mergeflow.merging.code import code_of
from mergeflow.search.candidates import candidate_key
from mergeflow.search.journal import Journal
from mergeflow.search.scorer import Candidate, CandidateModel, remove_leftovers
from mergeflow.search.space import Space
from mergeflow.search.sweep_file import Sweep
from mergeflow.search.sweep_inputs import SweepInputs

_TEST = '["test", '  # how the journal's keys of looks at test begin


class Scoreboard:
    """Scores the models of a sweep.

    Args:
        sweep: What was asked.
        inputs: The opened inputs.
        journal: What is known; begun.
        folder: Where model folders are made for scorers that need them.
    """

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
        """Return the base's score on all tasks, and each task's expert on its own task.

        Raises:
            MergeflowError: The objective needs an expert of each task, and a task has none.
        """
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

    def start(self, method: str, space: Space) -> None:
        """Get ready for the candidates of one method."""
        self._merger.renew_cache(largest_rank_ratio(method, space))

    def candidate(self, call: MethodCall) -> dict[str, float]:
        """Return a candidate's score per task, on validation."""
        return self._of(call, _with_code(candidate_key(call), call), "validation")

    def check_choice(self, call: MethodCall) -> None:
        """Check that test was not looked at for another winner than this one.

        Raises:
            MergeflowError: It was.
        """
        key = _test_key(call)
        if any(known.startswith(_TEST) and known != key for known in self._journal.entries):
            code = " of this code" if code_of(call) else ""
            raise MergeflowError(
                f"test was looked at already, for another winner than {call.name} {call.args}{code}: to choose again "
                "after that would be to choose on test. Keep that winner, or use other test data and another folder "
                "(--out)."
            )

    def look_at_test(self, call: MethodCall) -> Score:
        """Return the winner's score on test, which is looked at once.

        Raises:
            MergeflowError: Another winner was scored on test before.
        """
        self.check_choice(call)
        return score_of(self._of(call, _test_key(call), "test"), None)

    def _of(self, call: MethodCall, key: str, split: str) -> dict[str, float]:
        candidate = Candidate(call.name, call.args, split)
        with _named(f"candidate {call.name} {call.args}" + " on test" * (split == "test")):
            return self._known(key, lambda: self._score(self._merger.merge(call), candidate))

    def _score(self, state: Mapping[str, Tensor], candidate: Candidate, only: str | None = None) -> Mapping[str, float]:
        checkpoints = self._inputs.checkpoints
        model = CandidateModel(state, Path(checkpoints.base.path), self._folder, checkpoints.write_tokenizer)
        return self._inputs.score(model, candidate, only)

    def _known(self, key: str, compute: Callable[[], Mapping[str, float]]) -> dict[str, float]:
        self.scored += key not in self._journal.entries
        found: dict[str, float] = self._journal.known(key, lambda: dict(compute()))
        # In this sweep's order of tasks, whatever it was when the journal was written.
        return {task: found[task] for task in self._inputs.score.tasks or found if task in found}


def _test_key(call: MethodCall) -> str:
    return _with_code(json.dumps(["test", call.name, call.args], sort_keys=True), call)


def _with_code(key: str, call: MethodCall) -> str:
    """Return a journal's key with digests of the code of methods that are not the package's own, where it uses any."""
    code = {name: one.sha256 for name, one in code_of(call).items()}
    return json.dumps([*json.loads(key), code], sort_keys=True) if code else key


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Say in a message which model it is about."""
    try:
        yield
    except MergeflowError as error:
        raise MergeflowError(f"{what}: {error}") from error.__cause__


def largest_rank_ratio(method: str, space: Space) -> float:
    """Return the largest rank ratio a method's candidates need, so that no factorisation is done twice.

    Args:
        method: the method's name.
        space: what is tried of it.
    """
    found = (space or {}).get("rank_ratio", configure(method).args.get("rank_ratio", 1.0))
    if isinstance(found, dict):
        found = found.get("choices", found.get("high"))
    return min(1.0, max(map(float, found if isinstance(found, list) else [found])))
