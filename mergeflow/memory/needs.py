"""The device memory that training and judging a model take, by what takes it."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from mergeflow.memory.tally import tallied, without_values
from mergeflow.modality import Examples, Model
from mergeflow.training.loop import Span, fine_tune
from mergeflow.training.settings import FineTuneSettings

Blank = Callable[[int], Examples]
"""Makes so many examples without content, as the modality's `blank` does."""


@dataclass(frozen=True)
class Need:
    """Bytes of a device at the moment of the peak.

    Attributes:
        weights: of the model and of heads, frozen ones too.
        gradients: of the trained weights.
        optimiser: its state.
        sums: over the examples of a statistic; of a run of training its record: the trained weights at its start, and
            sums of gradients.
        activations: everything else: what the backward pass needs of each example, and temporaries.
        merging: base, task vectors and the method's working copies of the tensors that are merged at once.
        rows: examples that are on the device at once; 0 where work has none.
    """

    weights: int
    gradients: int = 0
    optimiser: int = 0
    sums: int = 0
    activations: int = 0
    merging: int = 0
    rows: int = 1

    @property
    def total(self) -> int:
        """The bytes of all of it."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        """Return the bytes of each part, by its name."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name != "rows"}


def blank_model(build: Callable[[], Model]) -> Model:
    """Build a model without values where its code allows that, which saves its memory and the time to draw weights.

    Args:
        build: builds the model.
    """
    try:
        with torch.device("meta"):
            return build()
    except (RuntimeError, NotImplementedError):  # it draws from a generator of the processor, or looks at its numbers
        return build()


def training_needs(
    model: Model, blank: Blank, settings: FineTuneSettings, *, judged: int = 1, tasks: int = 1, cuda: bool = True
) -> tuple[Need, Need]:
    """Return what the steps of `fine_tune` take at their peak, and its validations at theirs.

    Two epochs of two steps run on tensors without values (of `one_epoch` one, of `full_batch_gd` one step each): in the
    last step optimiser and trajectory hold all that they ever hold. Two parts stand for a batch that is split, two
    tasks for those of `joint`, and a batch of one task, the worst case, for one that is drawn from all. A compiled
    model takes about as much, or less.

    Args:
        model: what is trained, as `blank_model` builds it and the regime adapts it; it has no values afterwards.
        blank: makes a task's examples.
        settings: of the run.
        judged: examples per forward pass of the validation.
        tasks: of the run; more than one for `joint` alone.
        cuda: whether the device is a CUDA device.
    """
    plain = settings.regime if settings.regime in ("joint", "full_batch_gd", "one_epoch") else "steps"
    rows, parts = _parts(settings)
    total = 2 if plain in ("full_batch_gd", "one_epoch") else 4
    changes = {"regime": plain, "steps": total, "epochs": 2, "sampling": "sum", "compile": False, "save_every": 5}
    changes |= {} if plain == "full_batch_gd" else {"batch_size": parts * rows, "accumulate": parts}
    peaks = [0, 0]
    with tallied(cuda) as tally:
        without_values(model.module)
        stored_rows = parts * rows * (1 if plain == "full_batch_gd" else 2)
        data = [without_values(blank(stored_rows)) for _ in range(min(tasks, 2) if plain == "joint" else 1)]
        judge = without_values(blank(judged))
        modules = [model.module, *(one.head for one in data)]
        stored = tally.held - _bytes(modules)  # examples, which lie elsewhere, and the judge's copy of a head

        def validate() -> float:
            peaks[0] = max(peaks[0], tally.peak - stored)
            tally.peak = tally.held
            with torch.inference_mode():
                judge.scores(model, torch.arange(judged))
            return 1.0

        def close(epoch: int) -> None:
            peaks[1] = max(peaks[1], tally.peak - stored)
            tally.peak = tally.held

        shortened, span = settings.model_copy(update=changes), Span(0, total, 0, total)
        outcome = fine_tune(model, data, shortened, 0, Path("none"), validate, span=span, each_epoch=close)
    trained = sum(p.nbytes for module in modules if module is not None for p in module.parameters() if p.requires_grad)
    weights, optimiser = _bytes(modules), _bytes(outcome.optimiser)
    # The weights at the start, the sum of an epoch's gradients, and from the second epoch on the first one's mean.
    sums = trained * (2 if plain == "one_epoch" else 3)
    known = weights + optimiser + sums
    step = Need(weights, trained, optimiser, sums, peaks[0] - known - trained, rows=rows)
    return step, Need(weights, 0, optimiser, sums, peaks[1] - known, rows=judged)


def _parts(settings: FineTuneSettings) -> tuple[int, int]:
    """Return how many examples are on the device at once, and whether one or several such parts make a step."""
    if settings.regime == "full_batch_gd":
        return settings.batch_size, 2
    return -(-settings.batch_size // settings.accumulate), min(settings.accumulate, 2)


def judging_need(model: Model, blank: Blank, *, judged: int, cuda: bool = True) -> Need:
    """Return what one forward pass takes, as sweeps, selections and evaluations do.

    Args:
        model: as `blank_model` builds it; it has no values afterwards.
        blank: makes a task's examples.
        judged: examples per forward pass.
        cuda: whether the device is a CUDA device.
    """

    def judge(model: Model, examples: Examples) -> None:
        with torch.inference_mode():
            examples.scores(model, torch.arange(judged))

    return work_need(model, blank, judge, rows=judged, cuda=cuda)


def work_need(
    model: Model, blank: Blank, work: Callable[[Model, Any], Any], *, rows: int, cuda: bool = True, sums: float = 0
) -> Need:
    """Return what any work with a model takes, which runs on tensors without values.

    Args:
        model: as `blank_model` builds it; it has no values afterwards.
        blank: makes a task's examples.
        work: what is done with the model and the examples.
        rows: how many examples it is given, all at once on the device.
        cuda: whether the device is a CUDA device.
        sums: how many bytes of sums the device holds for each byte of tensors that the work returns.
    """
    with tallied(cuda) as tally:
        without_values(model.module)
        examples = without_values(blank(rows))
        weights = _bytes([model.module, examples.head])
        stored = tally.held - weights
        kept = int(sums * _bytes(work(model, examples)))
        return Need(weights, sums=kept, activations=tally.peak - stored - weights - kept, rows=rows)


def _bytes(thing: Any) -> int:
    """Return the bytes of the tensors in modules, or in anything nested; shared ones count once."""
    leaves = tree_flatten(thing)[0]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    modules = [leaf for leaf in leaves if isinstance(leaf, torch.nn.Module)]
    tensors += [value for one in modules for value in (*one.parameters(), *one.buffers())]
    return sum({id(value): value.nbytes for value in tensors}.values())
