"""How a causal model goes on from held-out passages before it unlearned a task and after, for people to read."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from mergeflow import layout
from mergeflow.checkpoints import open_checkpoint

SHOWN = 3  # passages of a task


def before_and_after(
    project: Path, model: Any, tasks: Sequence[str], before: Mapping[str, Tensor], after: Mapping[str, Tensor]
) -> list[dict[str, Any]]:
    """Return passages of validation with what two states of a causal model write behind their beginnings.

    Args:
        project: the folder with base and prepared splits.
        model: the causal model, whose weights become these states.
        tasks: whose passages; those to forget first.
        before: weights.
        after: weights.

    Returns:
        `task`, `text`, `right` (the passage's own next words), `before` and `after` of each.
    """
    from mergeflow.modalities.causal.passages import go_on, held_out
    from mergeflow.modalities.causal.tokenizer import CausalTokenizer

    with open_checkpoint(project / layout.BASE_MODEL) as base:
        tokenizer = CausalTokenizer(base.metadata["tokenizer"], int(base.metadata["end"]))
    folders = {task: project / layout.split("validation", task) for task in tasks}
    passages = {task: held_out(folder, "validation", 8 * SHOWN) for task, folder in folders.items()}
    told = []
    for state in (before, after):
        model.load(state)
        told.append(
            [
                (task, one)
                for task, texts in passages.items()
                for one in go_on(model.module, tokenizer, texts, most=SHOWN)
            ]
        )
    return [
        {"task": task, "text": one.prompt, "right": one.own, "before": one.written, "after": other.written}
        for (task, one), (_, other) in zip(*told, strict=True)
    ]
