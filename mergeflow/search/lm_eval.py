"""Score with tasks of lm-evaluation-harness: on their validation split, and on test for the winner alone."""

import hashlib
from collections.abc import Mapping
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mergeflow.errors import MergeflowError, unknown_name
from mergeflow.search.scorer import Candidate, CandidateModel, CheckedScorer
from mergeflow.search.sweep_file import LmEvalScore, name_of
from mergeflow.training.arithmetic import arithmetic


def lm_eval_scorer(part: LmEvalScore, device: str) -> tuple[CheckedScorer, str]:
    """Return the scorer, and a digest of the harness's version and of tasks in the included folder."""
    manager = find_tasks(part)

    def score(model: CandidateModel, candidate: Candidate) -> dict[str, float]:
        with model.folder() as folder:
            output = evaluate(part, folder, candidate.split, manager, device)
        better = output["higher_is_better"]
        return {task: _score(task, output["results"][task], better[task], part.metric) for task in part.lm_eval}

    return CheckedScorer(score, name_of(part)), _digest(part)


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
            raise unknown_name("task of lm-evaluation-harness", task, _near(task, manager.all_tasks))
        if task in (*manager.all_groups, *manager.all_tags):
            raise MergeflowError(
                f"'{task}' is a group or tag of lm-evaluation-harness, not a task: name its tasks, each by itself."
            )
    return manager


def _near(task: str, names: Any) -> list[str]:
    """Return the nearest tasks: the harness knows thousands, too many for a message."""
    return get_close_matches(task, names, n=12, cutoff=0.0)


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
    if split == "validation":
        for name, task in tasks.items():
            if not (hasattr(task, "has_validation_docs") and task.has_validation_docs()):
                raise MergeflowError(f"the task '{name}' has no validation split: a choice on it would be one on test")
            task.config.test_split = None  # with one, the harness takes the documents of test
    return list(tasks.values())


def _score(task: str, result: Mapping[str, Any], better: Mapping[str, bool], metric: str | None) -> float:
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
    return float(values[chosen]) if better[chosen.partition(",")[0]] is not False else -float(values[chosen])


def metrics_of(result: Mapping[str, Any], better: Mapping[str, bool]) -> dict[str, float]:
    """Return a task's metrics by name; one that stands behind several filters keeps theirs, as in `exact_match,strict`.

    Args:
        result: what the harness found for the task, by `metric,filter`.

    Example:
        >>> metrics_of({"acc,none": 0.5, "em,strict": 0.1, "em,loose": 0.2}, {"acc": True, "em": True})
        {'acc': 0.5, 'em,strict': 0.1, 'em,loose': 0.2}
    """
    metrics = {
        key: float(value)
        for key, value in result.items()
        if key.partition(",")[0] in better and isinstance(value, int | float)
    }
    plain = [key.partition(",")[0] for key in metrics]
    return {key if plain.count(name) > 1 else name: metrics[key] for key, name in zip(metrics, plain, strict=True)}


def _digest(part: LmEvalScore) -> str:
    from importlib.metadata import version

    whole = hashlib.sha256(version("lm_eval").encode())
    for path in sorted(Path(part.include).rglob("*")) if part.include else ():
        if path.is_file():
            whole.update(hashlib.sha256(path.read_bytes()).digest())
    return whole.hexdigest()
