"""How a causal model goes on from held-out passages: what is asked of unlearning, and texts for people to read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mergeflow import layout
from mergeflow.checkpoints import open_checkpoint

if TYPE_CHECKING:
    from mergeflow.modalities.causal.tokenizer import CausalTokenizer

SHOWN = 3  # passages of a task, for people to read
RECITED = 256  # at most, whose Rouge-L is taken


@dataclass(frozen=True)
class Passages:
    """Held-out passages of the tasks that are texts.

    Attributes:
        tokenizer: Of the base.
        texts: Task → pieces of its validation split, spread evenly over it.
    """

    tokenizer: CausalTokenizer
    texts: dict[str, list[str]]

    @classmethod
    def read(cls, project: Path, tasks: Sequence[str]) -> Passages:
        """Read them from a project.

        Args:
            project: the folder with base and prepared splits.
            tasks: texts; those to forget first.
        """
        from mergeflow.modalities.causal.generation import held_out
        from mergeflow.modalities.causal.tokenizer import CausalTokenizer

        with open_checkpoint(project / layout.BASE_MODEL) as base:
            tokenizer = CausalTokenizer(base.metadata["tokenizer"], int(base.metadata["end"]))
        folders = {task: project / layout.split("validation", task) for task in tasks}
        return cls(tokenizer, {task: held_out(folder, "validation", RECITED) for task, folder in folders.items()})

    def recall(self, model: Any, batch_size: int) -> dict[str, float]:
        """Return the mean Rouge-L recall of what a model writes behind the beginnings of each task's passages.

        Args:
            model: the causal model as it stands.
            batch_size: passages at once.

        Returns:
            By task, in [0, 1]; tasks whose passages are all too short are left out.

        Raises:
            MergeflowError: the package rouge-score is not installed.
        """
        from mergeflow.modalities.causal.generation import go_on, rouge_l

        found = {}
        for task, texts in self.texts.items():
            parts = (texts[at : at + batch_size] for at in range(0, len(texts), batch_size))
            told = [one for part in parts for one in go_on(model.module, self.tokenizer, part)]
            if told:
                found[task] = fmean(rouge_l(one.own, one.written)[0] for one in told)
        return found

    def before_and_after(
        self, model: Any, before: Mapping[str, Tensor], after: Mapping[str, Tensor]
    ) -> list[dict[str, Any]]:
        """Return a few of them with what two states of a causal model write behind their beginnings.

        Args:
            model: the causal model, whose weights become these states.
            before: weights.
            after: weights.

        Returns:
            `task`, `text`, `right` (the passage's own next words), `before` and `after` of each.
        """
        from mergeflow.modalities.causal.generation import go_on

        told = []
        for state in (before, after):
            model.load(state)
            told.append(
                [
                    (task, one)
                    for task, texts in self.texts.items()
                    for one in go_on(model.module, self.tokenizer, texts, most=SHOWN)
                ]
            )
        return [
            {"task": task, "text": one.prompt, "right": one.own, "before": one.written, "after": other.written}
            for (task, one), (_, other) in zip(*told, strict=True)
        ]
