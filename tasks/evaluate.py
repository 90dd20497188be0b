"""Stage `evaluate`: the one look at the locked test set, for the base, the experts and each method's chosen merge."""

from collections.abc import Mapping
from typing import Any

from mergeflow import layout
from mergeflow.checkpoints import open_checkpoint
from mergeflow.documents import Selection, Test, TestRow, read_document, write_document
from mergeflow.evaluation import Judge, mean, normalised
from mergeflow.modality import Examples
from tasks.models import choose_device, load_for_experts, load_model
from tasks.project.stage import StageIO


def run(io: StageIO) -> None:
    """Write `outputs/results/test.json` (a row per model) and `outputs/results/metrics.json` (for `dvc metrics`)."""
    device, tasks = choose_device(io), list(io.section("tasks"))
    selection = read_document(io.dep(layout.SELECTION), Selection)
    model = load_model(io, layout.BASE_MODEL, device)
    judge = Judge(model, **dict(io.section("evaluation")))
    data = load_for_experts(io, "test", tasks, device)
    checkpoints = {method: layout.merge(method) for method in selection["methods"]}
    total = len(checkpoints) + 2

    def score(checkpoint: str, chosen: list[str]) -> dict[str, float]:
        with open_checkpoint(io.dep(checkpoint)) as state:
            model.load(state)
        return judge.accuracies({task: data[task] for task in chosen})

    individual: dict[str, float] = {}
    for task in tasks:
        individual |= score(layout.expert_model(task), [task])
    io.report("models", 1, total)
    rows = [
        _row(_base_name(data), {}, score(layout.BASE_MODEL, tasks), individual),
        _row("individual", {}, individual, individual),
    ]
    io.report("models", 2, total)
    for done, (method, checkpoint) in enumerate(checkpoints.items(), start=3):
        args = selection["methods"][method]["args"]
        rows.append(_row(method, args, score(checkpoint, tasks), individual))
        io.report("models", done, total)
    examples = {task: len(data[task]) for task in tasks}
    test: Test = {"split": "test", "tasks": tasks, "examples": examples, "winner": selection["winner"], "rows": rows}
    if judged := {task: metric.name for task in tasks if (metric := data[task].metric) is not None}:
        test["metrics"] = judged
    # What the report tells of base and data is this run's, whatever params.yaml says by then.
    origin = {"model": io.section("model").model_dump(mode="json", exclude_unset=True), "sources": io.section("tasks")}
    write_document(io.out(layout.TEST), test | origin)
    metrics = {
        row["name"]: {"mean": row["mean"], "normalised": row["normalised"], "accuracy": row["accuracy"]} for row in rows
    }
    write_document(io.out(layout.METRICS), metrics)


def _base_name(data: Mapping[str, Examples]) -> str:
    """Name the base's row: `zero_shot`, or `base` where experts' training made the heads that judge it."""
    heads = [task.head for task in data.values() if task.head is not None]
    return "base" if any(weight.requires_grad for head in heads for weight in head.parameters()) else "zero_shot"


def _row(name: str, args: dict[str, Any], accuracy: dict[str, float], individual: dict[str, float]) -> TestRow:
    return {
        "name": name,
        "args": args,
        "accuracy": accuracy,
        "mean": mean(accuracy),
        "normalised": normalised(accuracy, individual),
    }
