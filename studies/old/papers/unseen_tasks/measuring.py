"""What the study `unseen_tasks` measures of one seed: tasks between the experts', from a few labelled samples."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from mergeflow.errors import MergeflowError
from mergeflow.modalities.classification import Classification
from mergeflow.modality import Model, State
from studies.lab.coloured import Adapting, ColouredWorld, Digits, Pretrained, accuracy, coloured, pretrained
from studies.lab.digit_tasks import Look, shown, ten_digits
from studies.lab.scales import combined, task_vector
from studies.lab.tuning import trained
from studies.old.papers.unseen_tasks.combining import Answered, by_ridge, by_search, by_theory
from studies.old.rows import Row

COLOURS, ANGLES = "colourings", "rotations"
EXPERTS = {COLOURS: (0.95, 0.75, 0.5, 0.05), ANGLES: (0.0, 30.0, 60.0, 90.0)}
_PARTS = 3  # of the samples, each left out once
TARGETS = {COLOURS: (0.9, 0.6, 0.2), ANGLES: (15.0, 45.0, 75.0)}


def task_of(group: str, digits: Digits, value: float) -> Classification:
    """Return a task of a group.

    Args:
        group: `colourings` or `rotations`.
        digits: in black and white.
        value: r_o, or the angle in degrees.
    """
    name = f"{value:g}"
    return coloured(digits, value, name) if group == COLOURS else shown(digits, Look(angle=value), name)


@dataclass(frozen=True)
class Group:
    """The experts of one group and seed.

    Attributes:
        base: The net and where they began.
        vectors: Task vectors by value.
        adapting: How a task is tuned on.
    """

    base: Pretrained
    vectors: Mapping[str, Mapping[str, Tensor]]
    adapting: Adapting

    def merged(self, scales: Sequence[float] | np.ndarray) -> dict[str, Tensor]:
        """Return the base plus Σ λ_i Δ_i.

        Args:
            scales: λ, [K].
        """
        return combined(self.base.start, self.vectors, dict(zip(self.vectors, map(float, scales), strict=True)))


def open_group(world: ColouredWorld, splits: Mapping[str, Digits], group: str, steps: int, seed: int) -> Group:
    """Train a group's base and experts.

    Args:
        world: net and training.
        splits: the digits.
        group: its name.
        steps: of tuning.
        seed: of weights and orders.
    """
    base = (pretrained if group == COLOURS else ten_digits)(world, splits, seed)
    adapting = world.tune.model_copy(update={"steps": steps})
    vectors = {}
    for value in EXPERTS[group]:
        task = task_of(group, splits["train"], value)
        vectors[task.task] = task_vector(trained(base.model, base.start, task, adapting, seed), base.start)
    return Group(base, vectors, adapting)


def few(examples: Classification, count: int, seed: int) -> Classification:
    """Return some labelled samples of a task, drawn without repetition.

    Args:
        examples: all that there are.
        count: how many.
        seed: of the draw.
    """
    return _only(examples, torch.randperm(len(examples), generator=torch.Generator().manual_seed(seed))[:count])


def _only(examples: Classification, rows: Tensor) -> Classification:
    assert isinstance(examples.inputs, Tensor)
    return replace(examples, inputs=examples.inputs[rows], labels=examples.labels[rows])


def group_rows(
    group: Group, name: str, splits: Mapping[str, Digits], counts: Sequence[int], ways: Sequence[Adapting], seed: int
) -> Iterator[Row]:
    """Yield test accuracy of each way of reaching each unseen task from so many labelled samples.

    Args:
        group: base and experts.
        name: of the group.
        splits: the digits; samples are training digits, and validation is not read.
        counts: of labelled samples.
        ways: of tuning on them alone; the best on samples left out is taken.
        seed: of the samples.
    """
    start, model = group.base.start, group.base.model
    for value in TARGETS[name]:
        train, test = (task_of(name, splits[split], value) for split in ("train", "test"))

        def told(way: str, count: int, state: State, target: str = train.task, test: Classification = test) -> Row:
            found = accuracy(model, state, {target: test})[target]
            return {"group": name, "target": target, "samples": count, "way": way, "test": found}

        yield told("base", 0, start)
        yield told("trained on all", len(train), trained(model, start, train, group.adapting, seed))
        yield told("mean of the experts", 0, group.merged([1 / len(group.vectors)] * len(group.vectors)))
        for count in counts:
            samples = few(train, count, 1000 * seed + count)
            for way, scales in _coefficients(group, samples).items():
                yield told(way, count, group.merged(scales)) | _lambdas(scales)
            best = min(ways, key=lambda way, few=samples: left_out_loss(group, few, way, seed))  # type: ignore[misc]
            chosen = {"steps": best.steps, "rate": best.learning_rate}
            yield told("tuned on the samples", count, trained(model, start, samples, best, seed)) | chosen


def _lambdas(scales: np.ndarray) -> Row:
    return {f"scale_{number}": float(scale) for number, scale in enumerate(scales, start=1)}


def _coefficients(group: Group, samples: Classification) -> dict[str, np.ndarray]:
    """Return λ by each way, [K] each, from the samples alone; where the theory has none, the nearest expert's."""
    model, count = group.base.model, len(group.vectors)
    units = np.eye(count)
    experts = [logits_of(model, group.merged(unit), samples) for unit in units]
    answered = Answered(logits_of(model, group.base.start, samples), experts, samples.labels)
    losses = [float(cross_entropy(one, samples.labels)) for one in experts]
    nearest = units[int(np.argmin(losses))]
    theory = by_theory(answered)
    return {
        "nearest expert": nearest,
        "theory": nearest if theory is None else theory,
        "ridge": by_ridge(answered),
        "search": by_search(count, loss_of(group, samples)),
    }


def left_out_loss(group: Group, samples: Classification, adapting: Adapting, seed: int) -> float:
    """Return the loss on samples that were not tuned on, each third left out once; infinite where tuning diverges.

    Args:
        group: whose base is tuned.
        samples: with labels.
        adapting: how it is tuned.
        seed: of the order.
    """
    model, total = group.base.model, 0.0
    for third in range(_PARTS):
        out = torch.arange(len(samples)) % _PARTS == third
        try:
            state = trained(model, group.base.start, _only(samples, ~out), adapting, seed)
        except MergeflowError:
            return inf
        held = _only(samples, out)
        total += float(cross_entropy(logits_of(model, state, held), held.labels, reduction="sum"))
    return total / len(samples)


def loss_of(group: Group, samples: Classification) -> Callable[[Sequence[float]], float]:
    """Return the mean loss on some samples as a function of λ.

    Args:
        group: base and experts.
        samples: with labels.
    """
    return lambda scales: float(
        cross_entropy(logits_of(group.base.model, group.merged(scales), samples), samples.labels)
    )


@torch.inference_mode()
def logits_of(model: Model, state: State, samples: Classification) -> Tensor:
    """Return what a model answers to some samples, [n, C].

    Args:
        model: the network, whose weights are overwritten.
        state: the weights.
        samples: a few.
    """
    model.load(state)
    return samples.logits(model, torch.arange(len(samples)))
