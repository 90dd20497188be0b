"""Scorers of whole models: what a scorer is given, and what it must return."""

import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from mergeflow.checkpoints import LazyStateDict, open_checkpoint, write_checkpoint
from mergeflow.errors import MergeflowError
from mergeflow.merging.files.output import copy_companions

_PREFIX = ".candidate-"


@dataclass(frozen=True)
class Candidate:
    """What is scored.

    Attributes:
        name: `base`, the name of an expert, or the method that merged.
        args: The method's arguments, all of them; none for base and experts.
        split: `validation`, or `test` for the winner's one look.
    """

    name: str
    args: Mapping[str, Any] = field(default_factory=dict)
    split: str = "validation"


@dataclass(frozen=True)
class CandidateModel:
    """A model to be scored, as a state dict or as a folder.

    Attributes:
        state: Its tensors, in memory or lazy.
        base: The base's path; a folder's configuration and tokenizer go with every candidate.
        scratch: Where a folder is made.
        complete: Gives a folder what is not the base's: tokenizer and chat template.
    """

    state: Mapping[str, Tensor]
    base: Path
    scratch: Path
    complete: Callable[[Path], None] = field(default=lambda _: None)

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """Give the path of a model folder, which is removed afterwards unless the model is a folder already."""
        if isinstance(self.state, LazyStateDict) and not self.state.is_task_vector and _is_model(Path(self.state.path)):
            yield Path(self.state.path)
            return
        with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=self.scratch) as made:
            copy_companions(self.base, Path(made))
            _write_recorded(self.base, Path(made))
            self.complete(Path(made))
            write_checkpoint(Path(made) / "model.safetensors", self.state, {"format": "pt"})
            yield Path(made)


def _write_recorded(base: Path, folder: Path) -> None:
    """Write configuration and tokenizer where the base is the file of a causal project, which records them."""
    if not base.is_file():
        return
    from mergeflow.modalities.causal.opening import is_causal, write_companions

    with open_checkpoint(base) as state:
        if is_causal(state.metadata):
            write_companions(state.metadata, folder)


def _is_model(path: Path) -> bool:
    return (path / "config.json").exists()


def remove_leftovers(scratch: Path) -> None:
    """Remove the folders that a killed sweep left behind."""
    for path in scratch.glob(f"{_PREFIX}*"):
        shutil.rmtree(path)


class SweepScorer(Protocol):
    """Scores whole models.

    Attributes:
        tasks: Their names, in order; those of a user's scorer are known when it has scored a first model.
    """

    tasks: Sequence[str]

    def __call__(self, model: CandidateModel, candidate: Candidate, only: str | None = None) -> Mapping[str, float]:
        """Return a score per task, larger is better; `only` names the one task whose score is asked for."""
        ...


class CheckedScorer:
    """A scorer whose answers are checked: a finite number for each of the same tasks, every time.

    Args:
        score: Takes a model and what it is.
        name: What messages call it.
    """

    def __init__(self, score: Callable[[CandidateModel, Candidate], Any], name: str) -> None:
        self._score, self._name = score, name
        self.tasks: Sequence[str] = ()

    def __call__(self, model: CandidateModel, candidate: Candidate, only: str | None = None) -> dict[str, float]:
        """Return the scores.

        Raises:
            MergeflowError: The scorer failed, or returned something else.
        """
        try:
            found = self._score(model, candidate)
        except MergeflowError as error:
            raise self._fault(str(error)) from None
        except Exception as error:  # whatever a scorer of somebody else raises
            raise self._fault(f"it raised {type(error).__name__}: {error}{_place_of(error)}") from error
        scores = self._numbers(found)
        if self.tasks and set(scores) != set(self.tasks):
            told = f"it returned the tasks {', '.join(sorted(scores))}, and before {', '.join(sorted(self.tasks))}"
            raise self._fault(f"{told}: every model is scored on the same tasks")
        self.tasks = self.tasks or tuple(scores)
        return scores if only is None else {only: scores[only]}

    def _numbers(self, found: Any) -> dict[str, float]:
        if not isinstance(found, Mapping) or not found:
            raise self._fault(f"it returned {found!r:.80}, expected a mapping of tasks to numbers")
        scores = {}
        for task, value in found.items():
            number = _number(value)
            if not isinstance(task, str) or number is None or not math.isfinite(number):
                raise self._fault(
                    f"it returned {value!r:.80} for task {task!r:.80}, expected a finite number by task name"
                )
            scores[task] = number
        return scores

    def _fault(self, told: str) -> MergeflowError:
        return MergeflowError(f"{self._name}: {told.removesuffix('.')}.")


def _number(value: Any) -> float | None:
    """Return a Python, NumPy or torch number as a float, and None for everything else."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def _place_of(error: BaseException) -> str:
    """Return the innermost file and line that an error came from."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else f" ({Path(trace.tb_frame.f_code.co_filename).name}, line {trace.tb_lineno})"
