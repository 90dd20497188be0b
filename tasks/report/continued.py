"""Texts of a project of causal models: how expert and merge go on from passages, and what they answer to questions."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mergeflow import layout

LOOKED_AT = 24  # passages of a task, or questions: two seconds for a model of half a million parameters
SHOWN = 3

Answers = list[dict[str, Any]]


def changed_passages(root: Path, winner: str, tasks: Sequence[str]) -> Answers:
    """Return where expert and merge write other texts: of each task those where the merge lost most words.

    Args:
        root: the project folder.
        winner: the merge.
        tasks: the tasks' names.

    Returns:
        `task`, `text`, `text_pair` (None), `right`, `expert` and `merge` of each.
    """
    from mergeflow.modalities.causal.opening import open_language

    opened = open_language(layout.BASE_MODEL, root)
    found: Answers = []
    for task in tasks:
        told = []
        for checkpoint in (layout.expert_model(task), layout.merge(winner)):
            opened.load(root / checkpoint)
            told.append(_told(opened, root / layout.split("validation", task), task))
        pairs = [pair for pair in zip(*told, strict=True) if pair[0]["told"] != pair[1]["told"]]
        pairs.sort(key=lambda pair: pair[1]["score"] - pair[0]["score"])
        found += [
            {
                "task": task,
                "text": expert["text"],
                "text_pair": None,
                "right": expert["right"],
                "expert": expert["told"],
                "merge": merge["told"],
            }
            for expert, merge in pairs[:SHOWN]
        ]
    return found


def _told(opened: Any, folder: Path, task: str) -> Answers:
    """Return what a model says of each of the first examples: `text`, `right`, `told`, and a `score`."""
    import pyarrow.parquet as pq
    import torch

    from mergeflow.modalities.causal.modality import open_examples
    from mergeflow.modalities.causal.passages import go_on, held_out
    from mergeflow.modalities.causal.questions import Questions

    passages = held_out(folder, "validation", LOOKED_AT)
    if passages:
        return [
            {"text": one.prompt, "right": one.own, "told": one.written, "score": one.right}
            for one in go_on(opened.model.module, opened.tokenizer, passages)
        ]
    examples = open_examples(task, folder, "validation", None, torch.device("cpu"))
    assert isinstance(examples, Questions)
    rows = torch.arange(min(LOOKED_AT, len(examples)))
    with torch.inference_mode():
        chosen = examples.likelihoods(opened.model, rows).argmax(dim=1).tolist()
    cells = pq.read_table(folder / "validation.parquet").slice(0, len(rows)).to_pylist()
    return [
        {
            "text": cell["text"],
            "right": cell["choices"][cell["answer"]],
            "told": cell["choices"][choice],
            "score": int(choice == cell["answer"]),
        }
        for cell, choice in zip(cells, chosen, strict=True)
    ]
