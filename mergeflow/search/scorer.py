"""Scorers of whole models: functions, commands and tasks of lm-evaluation-harness, and the check of their scores."""

import hashlib
import importlib
import importlib.util
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager, suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from torch import Tensor

from mergeflow.checkpoints import LazyStateDict, open_checkpoint, write_checkpoint
from mergeflow.errors import MergeflowError, unknown_name
from mergeflow.merging.files.output import copy_companions, weights_stem
from mergeflow.plugins import last_place
from mergeflow.search.sweep_file import CommandScore, FunctionScore, LmEvalScore, ScorePart, name_of
from mergeflow.training.arithmetic import arithmetic

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
        complete: Gives a folder what is not the base's: tokenizer and chat template.
    """

    state: Mapping[str, Tensor]
    base: Path
    scratch: Path
    complete: Callable[[Path], None] = field(default=lambda _: None)

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """Give the path of a model folder, which is removed afterwards unless the model is a folder already."""
        state = self.state
        if isinstance(state, LazyStateDict) and not state.is_task_vector and Path(state.path, "config.json").exists():
            yield Path(state.path)
            return
        with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=self.scratch) as made:
            copy_companions(self.base, Path(made))
            _write_recorded(self.base, Path(made))
            self.complete(Path(made))
            weights = f"{weights_stem(self.base)}.safetensors"
            write_checkpoint(Path(made) / weights, self.state, {"format": "pt"})
            yield Path(made)


def _write_recorded(base: Path, folder: Path) -> None:
    """Write configuration and tokenizer where the base is the file of a causal project, which records them."""
    if not base.is_file():
        return
    from mergeflow.modalities.causal.model import is_causal, write_companions

    with open_checkpoint(base) as state:
        if is_causal(state.metadata):
            write_companions(state.metadata, folder)


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
    """A scorer whose answers are checked: a finite number for each of the same tasks, every time."""

    def __init__(self, score: Callable[[CandidateModel, Candidate], Any], name: str) -> None:
        self._score, self._name = score, name
        self.tasks: Sequence[str] = ()

    def __call__(self, model: CandidateModel, candidate: Candidate, only: str | None = None) -> dict[str, float]:
        """Return the scores."""
        try:
            with chdir(os.getcwd()):  # a scorer may leave it
                output = self._score(model, candidate)
        except MergeflowError as error:
            raise self._fault(str(error)) from None
        except (Exception, SystemExit) as error:  # whatever the code of a user raises
            place = last_place(error, lambda frame: True)
            raise self._fault(f"it raised {type(error).__name__}: {error} ({place})") from error
        scores = self._numbers(output)
        if self.tasks and set(scores) != set(self.tasks):
            returned, before = (", ".join(sorted(tasks)) for tasks in (scores, self.tasks))
            fault = f"it returned the tasks {returned}, and before {before}: every model is scored on the same tasks"
            raise self._fault(fault)
        self.tasks = self.tasks or tuple(scores)
        return scores if only is None else {only: scores[only]}

    def _numbers(self, output: Any) -> dict[str, float]:
        if not isinstance(output, Mapping) or not output:
            raise self._fault(f"it returned {output!r:.80}, expected a mapping of tasks to numbers")
        scores = {}
        for task, value in output.items():
            number = _number(value)
            if not isinstance(task, str) or number is None or not math.isfinite(number):
                raise self._fault(
                    f"it returned {value!r:.80} for task {task!r:.80}, expected a finite number by task name"
                )
            scores[task] = number
        return scores

    def _fault(self, what: str) -> MergeflowError:
        return MergeflowError(f"{self._name}: {what.removesuffix('.')}.")


def _number(value: Any) -> float | None:
    """Return a Python, NumPy or torch number as a float, and None for everything else."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


# Score with a command that prints a JSON object of scores by task.


_SHOWN = 200  # characters of a command's output that a message repeats


def command_scorer(part: CommandScore) -> tuple[CheckedScorer, str]:
    """Return the scorer, and a digest of the files that the command names.

    The command runs without a shell, with {model} and {split} filled in; the candidate is in the environment
    variable MERGEFLOW_CANDIDATE as JSON.
    """
    try:
        words = shlex.split(part.command)
    except ValueError as error:
        raise MergeflowError(f"score.command: {error}, found {part.command!r:.80}.") from None

    def score(model: CandidateModel, candidate: Candidate) -> Any:
        with model.folder() as folder:
            filled = [word.replace("{model}", str(folder)).replace("{split}", candidate.split) for word in words]
            return _json(_run(filled, candidate, part.timeout))

    return CheckedScorer(score, name_of(part)), _digest(Path(word) for word in words)


def _run(words: list[str], candidate: Candidate, timeout: float | None) -> str:
    document = json.dumps({"name": candidate.name, "args": dict(candidate.args), "split": candidate.split})
    environment = {**os.environ, "MERGEFLOW_CANDIDATE": document}
    try:
        # A new session, so that stopping a command stops all that it started.
        process = subprocess.Popen(
            words,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise MergeflowError(f"it cannot be started: {error.strerror}") from None
    try:
        printed, complaint = process.communicate(timeout=timeout)
    except BaseException as error:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise MergeflowError(f"it took longer than {timeout:g} s and was stopped") from None
        raise
    if process.returncode:
        raise MergeflowError(f"it ended with status {process.returncode}: {_tail(complaint or printed)}")
    return printed


def _json(text: str) -> Any:
    """Return the output as JSON, or its last line, where a command prints more than the scores."""
    lines = text.strip().splitlines()
    for part in (text, lines[-1] if lines else ""):
        try:
            return json.loads(part)
        except ValueError:
            continue
    raise MergeflowError(f"its output is not JSON: {_tail(text)}")


def _tail(text: str) -> str:
    last = text.strip()
    return repr(last[-_SHOWN:]) if last else "it printed nothing"


def _digest(paths: Iterable[Path], about: str = "") -> str:
    whole = hashlib.sha256(about.encode())
    for path in paths:
        if path.is_file():
            whole.update(hashlib.sha256(path.read_bytes()).digest())
    return whole.hexdigest()


# Score with a function of the user's, found by `module:function` or `file.py:function`.


def function_scorer(part: FunctionScore) -> tuple[CheckedScorer, str]:
    """Return the scorer, and a digest of the function's file."""
    place, _, name = part.function.rpartition(":")
    module = _module(place)
    function: Callable[[Any, Candidate], Any] | None = getattr(module, name, None)
    if not callable(function):
        raise unknown_name(
            f"function of {place}", name, [key for key, value in vars(module).items() if callable(value)]
        )

    def score(model: CandidateModel, candidate: Candidate) -> Any:
        assert function is not None
        if part.model == "state":
            return function(dict(model.state), candidate)
        with model.folder() as folder:
            return function(folder, candidate)

    source = getattr(module, "__file__", None)
    return CheckedScorer(score, name_of(part)), hashlib.sha256(Path(source).read_bytes()).hexdigest() if source else ""


def _module(place: str) -> ModuleType:
    try:
        if place.endswith(".py"):
            return _from_file(Path(place))
        with _importable(os.getcwd()):  # as `python -m` does it; the command `mergeflow` lies elsewhere
            return importlib.import_module(place)
    except MergeflowError:
        raise
    except (Exception, SystemExit) as error:  # whatever the module does when it is imported
        raise MergeflowError(f"score: cannot import '{place}': {type(error).__name__}: {error}.") from error


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise MergeflowError(f"score: there is no file '{path}': give `file.py:function` or `module:function`.")
    home = path.resolve().parent
    # A name of its own, so that the file shadows nothing that is installed.
    name = f"_scorer_{hashlib.sha256(str(home).encode()).hexdigest()[:12]}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up there
    try:
        with _importable(str(home)):
            spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


@contextmanager
def _importable(folder: str) -> Iterator[None]:
    """Find the modules of a folder first inside the block."""
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:  # the code that was imported may have changed the list
            sys.path.remove(folder)


def open_scorer(part: ScorePart, device: str, test: bool = False) -> tuple[CheckedScorer, dict[str, Any]]:
    """Return a user's scorer, and what its scores depend on.

    Args:
        test: whether test will be looked at too.
    """
    if isinstance(part, FunctionScore):
        score, digest = function_scorer(part)
    elif isinstance(part, CommandScore):
        score, digest = command_scorer(part)
    else:
        score, digest = lm_eval_scorer(part, device, test)
    return score, {"score": part.model_dump(mode="json"), "files of the scorer": digest}


def lm_eval_scorer(part: LmEvalScore, device: str, test: bool = False) -> tuple[CheckedScorer, str]:
    """Return the scorer, and a digest of the harness's version and of tasks in the included folder."""
    manager = find_tasks(part)
    for split in ("validation", "test") if test else ("validation",):
        _tasks(part, split, manager)

    def score(model: CandidateModel, candidate: Candidate) -> dict[str, float]:
        with model.folder() as folder:
            output = evaluate(part, folder, candidate.split, manager, device)
        better = output["higher_is_better"]
        return {task: _metric_score(task, output["results"][task], better[task], part.metric) for task in part.lm_eval}

    tasks = sorted(Path(part.include).rglob("*")) if part.include else ()
    return CheckedScorer(score, name_of(part)), _digest(tasks, version("lm_eval"))


def find_tasks(part: LmEvalScore) -> Any:
    """Return the harness's manager of tasks, which knows those of `part`."""
    if find_spec("lm_eval") is None:
        raise MergeflowError(
            "tasks of lm-evaluation-harness need it: install it with `pip install 'mergeflow[lm-eval]'`, or score "
            "with a function or a command."
        )
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=part.include)
    for task in part.lm_eval:
        if task not in manager.all_tasks:
            nearest = get_close_matches(task, manager.all_tasks, n=12, cutoff=0.0)  # of thousands
            raise unknown_name("task of lm-evaluation-harness", task, nearest)
        if task in (*manager.all_groups, *manager.all_tags):
            raise MergeflowError(
                f"'{task}' is a group or tag of lm-evaluation-harness, not a task: name its tasks, each by itself."
            )
    return manager


@arithmetic()
def evaluate(part: LmEvalScore, folder: Path, split: str, manager: Any, device: str) -> dict[str, Any]:
    """Run the harness and return `results` by task and metric, and `higher_is_better` by the same."""
    import lm_eval

    output: dict[str, Any] = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(folder)},
        tasks=_tasks(part, split, manager),
        num_fewshot=part.few_shot,
        limit=part.limit,
        batch_size=part.batch_size,
        device=device,
        task_manager=manager,
        bootstrap_iters=0,
        log_samples=False,
    )
    return output


def _tasks(part: LmEvalScore, split: str, manager: Any) -> list[Any]:
    """Return the harness's tasks, which look at test only where that is asked for."""
    from lm_eval.tasks import get_task_dict

    tasks = get_task_dict(list(part.lm_eval), manager)
    other = "test" if split == "validation" else "validation"
    for name, task in tasks.items():
        if not getattr(task, f"has_{split}_docs", bool)():
            raise MergeflowError(
                f"the task '{name}' has no {split} split, and the harness would take its {other} documents: name "
                f"another task{', or leave out `test: true` and `--split test`' * (split == 'test')}."
            )
        if split == "validation":
            task.config.test_split = None  # with one, the harness takes the documents of test
    return list(tasks.values())


def _metric_score(task: str, result: Mapping[str, Any], better: Mapping[str, bool | None], metric: str | None) -> float:
    """Return one task's metric, larger is better: the negative of a perplexity."""
    values = metrics_of(result, better)
    if not values:
        raise MergeflowError(f"the task '{task}' has no metric on this split")
    chosen = metric or next(iter(values))
    filtered = [name for name in values if name.startswith(f"{chosen},")]
    if filtered:
        raise MergeflowError(
            f"'{chosen}' of the task '{task}' is measured behind several filters: say as `metric` which one counts, "
            f"{' or '.join(filtered)}."
        )
    if chosen not in values:
        raise unknown_name(f"metric of {task}", chosen, values)
    larger = better[chosen.partition(",")[0]]
    if larger is None:
        raise MergeflowError(
            f"the task '{task}' does not say whether a larger '{chosen}' is better: write `higher_is_better` into "
            "the task's file, or choose another `metric`."
        )
    return values[chosen] if larger else -values[chosen]


def metrics_of(result: Mapping[str, Any], better: Mapping[str, bool | None]) -> dict[str, float]:
    """Return a task's metrics by name; one that is behind several filters keeps theirs, as in `exact_match,strict`."""
    metrics = {
        key: float(value)
        for key, value in result.items()
        if key.partition(",")[0] in better and isinstance(value, int | float)
    }
    plain = [key.partition(",")[0] for key in metrics]
    return {key if plain.count(name) > 1 else name: metrics[key] for key, name in zip(metrics, plain, strict=True)}
