"""How a causal model goes on from held-out passages before it unlearned a task and after, for people to read."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from mergeflow import layout

SHOWN = 3  # passages of a task


def before_and_after(
    project: Path, tasks: Sequence[str], before: Mapping[str, Tensor], after: Mapping[str, Tensor]
) -> list[dict[str, Any]]:
    """Return passages of validation with what two states of a model write behind their beginnings.

    Args:
        project: the folder with base and prepared splits.
        tasks: whose passages; those to forget first.
        before: weights.
        after: weights.

    Returns:
        `task`, `text`, `right` (the passage's own next words), `before` and `after` of each.
    """
    from mergeflow.modalities.causal.opening import open_language
    from mergeflow.modalities.causal.passages import go_on, held_out

    opened, told = open_language(layout.BASE_MODEL, project), []
    for state in (before, after):
        opened.model.load(state)
        told.append(
            [
                (task, one)
                for task in tasks
                for one in go_on(
                    opened.model.module,
                    opened.tokenizer,
                    held_out(project / layout.split("validation", task), "validation", 8 * SHOWN),
                )[:SHOWN]
            ]
        )
    return [
        {"task": task, "text": one.prompt, "right": one.own, "before": one.written, "after": other.written}
        for (task, one), (_, other) in zip(*told, strict=True)
    ]
