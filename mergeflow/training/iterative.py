"""Iterative merge-and-tune: rounds of {tune every task from a common start, merge, restart from the merge}."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mergeflow.checkpoints import open_checkpoint, read_state, write_checkpoint, write_text
from mergeflow.errors import MergeflowError
from mergeflow.merging import MethodCall, prepare
from mergeflow.merging.catalog import check_inputs
from mergeflow.modality import Examples, Model
from mergeflow.training.batches import plan_batches
from mergeflow.training.between import merge_between
from mergeflow.training.loop import Report, Span, fine_tune, is_trained
from mergeflow.training.saved import load_state, save_state
from mergeflow.training.settings import FineTuneSettings


@dataclass(frozen=True)
class IterativeRun:
    """One iterative run on disk: θ̄(0) = θ0; θ_t(i) = FineTune(θ̄(i−1), D_t, K); θ̄(i) = merge of {θ_t(i)} on θ̄(i−1).

    With `average` this is MIMA; with `task_arithmetic` of scale α, θ̄(i) = θ̄(i−1) + α Σ_t δ_t(i), it is ATM. Every
    piece of work, one task of one round or one merge, is a method that leaves its result whole or not at all and does
    nothing where the result is there; so a killed run goes on where it was, whoever runs the pieces and how many at
    once. The tasks of a round do not depend on each other.

    Attributes:
        folder: where the rounds are kept; of this run alone.
        base: checkpoint of θ0.
        seed: of the batch order, which goes on from round to round.

    Source: MIMA, Section 4, equations 4, 5, 8; Task Vectors and Gradients, Section 5 (ATM).
    """

    folder: Path
    base: Path
    tasks: tuple[str, ...]
    settings: FineTuneSettings
    seed: int

    def __post_init__(self) -> None:
        check_inputs(self.merge_call, dict.fromkeys(self.tasks), None)

    @property
    def rounds(self) -> int:
        return self.settings.iterative.rounds

    @property
    def merge_call(self) -> MethodCall:
        """The catalog method between the rounds, validated."""
        return merge_between(self.settings.iterative)

    def start(self, number: int) -> Path:
        """Return the checkpoint from which round `number` (from 1) starts: θ0, or the merge of the round before."""
        return self.base if number == 1 else self.merged(number - 1)

    def merged(self, number: int) -> Path:
        return self._round(number) / "merged.safetensors"

    def expert(self, number: int, task: str) -> Path:
        return self._round(number) / task / "model.safetensors"

    def head(self, number: int, task: str) -> Path:
        """Return the file of a task's trained head after a round."""
        return self._round(number) / task / "head.safetensors"

    def load_head(self, number: int, data: Examples) -> None:
        """Load a task's trained head as it was after a round; a frozen head never changes."""
        if number and is_trained(data.head):
            assert data.head is not None
            data.head.load_state_dict(read_state(self.head(number, data.task)))

    def record(self, number: int, task: str) -> dict[str, Any]:
        """Return a task's record of one round: the rows of its epochs, and its cost."""
        record: dict[str, Any] = json.loads((self._round(number) / task / "training.json").read_text())
        return record

    def waiting(self, number: int) -> list[str]:
        """Return the tasks that still have to be tuned in a round."""
        if self.merged(number).exists():
            return []
        return [task for task in self.tasks if not self.expert(number, task).exists()]

    def tune(
        self,
        number: int,
        model: Model,
        data: Examples,
        validate: Callable[[], float],
        report: Report = lambda done, total: None,
    ) -> None:
        """Tune one task in one round, from 1; `validate` and `report` as `fine_tune` takes them."""
        self._claim_folder()
        if data.task not in self.waiting(number):
            return
        folder = self._round(number) / data.task
        folder.mkdir(parents=True, exist_ok=True)
        with open_checkpoint(self.start(number)) as state:
            model.load(state)
        self.load_head(number - 1, data)
        before = self._round(number - 1) / data.task / "optimiser.pt"
        optimiser = load_state(before) if self._keeps_optimiser and number > 1 else None
        try:
            outcome = fine_tune(
                model,
                [data],
                self.settings,
                self.seed,
                folder / "state.pt",
                validate,
                report,
                span=self.span(number, len(data)),
                optimiser_state=optimiser,
            )
        except MergeflowError as error:
            raise MergeflowError(f"round {number} of {self.rounds}: {error}") from None
        if self._keeps_optimiser:
            save_state(folder / "optimiser.pt", outcome.optimiser)
        record = {"round": number, "epochs": outcome.trajectory.as_json(), "cost": outcome.cost.as_json()}
        write_text(folder / "training.json", json.dumps(record))
        if is_trained(data.head):
            assert data.head is not None
            write_checkpoint(self.head(number, data.task), data.head.state_dict())
        write_checkpoint(self.expert(number, data.task), model.state())  # written last: it marks the round as complete
        (folder / "state.pt").unlink(missing_ok=True)

    def span(self, number: int, examples: int) -> Span:
        per_epoch = plan_batches([examples], self.settings, self.seed).steps_per_epoch
        steps = self.settings.steps_per_round(per_epoch)
        first, last = (number - 1) * steps, number * steps
        if self.settings.iterative.schedule == "whole":
            return Span(first, last, 0, self.rounds * steps)
        return Span(first, last, first, steps)

    def merge(self, number: int) -> None:
        """Merge a round's experts on its start, and drop the experts of the round before."""
        if not self.merged(number).exists():
            missing = self.waiting(number)
            assert not missing, f"round {number}: {missing} not tuned"
            start = read_state(self.start(number))
            experts = {task: read_state(self.expert(number, task)) for task in self.tasks}
            call = self.merge_call
            write_checkpoint(self.merged(number), prepare(call, start, experts).at(call.scale))
        for task in self.tasks if number > 1 else ():
            self.expert(number - 1, task).unlink(missing_ok=True)
            (self._round(number - 1) / task / "optimiser.pt").unlink(missing_ok=True)

    def _claim_folder(self) -> None:
        path = self.folder / "run.json"
        identity = {"settings": self.settings.model_dump(mode="json"), "seed": self.seed, "tasks": list(self.tasks)}
        if not path.exists():
            write_text(path, json.dumps(identity))
        elif json.loads(path.read_text()) != identity:
            raise MergeflowError(
                f"the rounds in {self.folder} are those of another run, with other settings, seed or tasks. Choose "
                "another folder, or delete this one to start again."
            )

    @property
    def _keeps_optimiser(self) -> bool:
        return self.settings.iterative.optimiser == "kept"

    def _round(self, number: int) -> Path:
        return self.folder / f"round_{number:03}"
