"""Statistics of an expert on its task's examples, as files that a recipe's `data:` takes."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from mergeflow.checkpoints import fingerprint, infos_of, open_checkpoint, write_checkpoint
from mergeflow.data import load_split
from mergeflow.errors import MergeflowError
from mergeflow.estimates.fisher import Labels, diagonal_fisher
from mergeflow.estimates.gram import input_grams
from mergeflow.estimates.headed import open_headed
from mergeflow.estimates.place import check_estimate
from mergeflow.merging.device import check_device
from mergeflow.modalities.classification import Classification
from mergeflow.modalities.heads import Head, load_head
from mergeflow.modalities.recorded import is_recorded, open_recorded
from mergeflow.modalities.subset import Subset
from mergeflow.modalities.vision.models import image_model
from mergeflow.modalities.vision.opening import check_head, open_model
from mergeflow.modality import Model, Predictions

Kind = Literal["fisher", "gram"]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class StatisticOrder:
    """What is measured.

    Attributes:
        kind: `fisher` or `gram`.
        expert: The expert's checkpoint.
        task: Its prepared folder.
        head: Its head's file; a Gram needs none, and neither does a task without a head.
        architecture: Of an image encoder; or the file of a base that says itself what it is, as of texts.
        samples: Examples, drawn without replacement; all where there are fewer.
        split: Whose examples; their labels are not used. Test is refused.
        labels: For `fisher`: one label per example, drawn from the model, or all classes.
        seed: Of the drawn examples and labels.
        batch_size: For `gram`: examples per forward pass.
        device: cpu, cuda ...
    """

    kind: Kind
    expert: str
    task: str
    architecture: str
    head: str | None = None
    samples: int = 256
    split: str = "train"
    labels: Labels = "sampled"
    seed: int = 0
    batch_size: int = 32
    device: str = "cpu"


def write_statistic(
    order: StatisticOrder, out: str | Path, progress: Progress | None = None, *, force: bool = False
) -> tuple[str, int]:
    """Measure a statistic and write it as safetensors, with what made it in the metadata.

    Args:
        order: what to measure, of which expert, on what.
        out: the safetensors file to write.
        progress: called with the examples done and in all.
        force: whether a file that mergeflow did not make may be replaced; an input never is.

    Returns:
        The file's fingerprint and the number of examples used.

    Raises:
        MergeflowError: as `check_order`, inputs that are missing or do not fit, or a result that is not finite.
    """
    check_order(order, Path(out), force)
    model, examples = (_recorded if is_recorded(order.architecture) else _pictured)(order)
    with open_checkpoint(order.expert) as state:
        model.load(state)
        source, infos = fingerprint(state), infos_of(state)
    if order.kind == "gram":
        found = input_grams(model, examples, batch_size=forward_rows(order), progress=progress)
    else:
        found = diagonal_fisher(model, examples, labels=order.labels, seed=order.seed, progress=progress)
        # Floating-point buffers have no gradient: zero, so that they are averaged.
        buffers = {name: info for name, info in infos.items() if info.dtype.is_floating_point and name not in found}
        found |= {name: torch.zeros(info.shape) for name, info in buffers.items()}
    _check_finite(order, found)
    record = {
        "kind": order.kind,
        "expert": source,
        "samples": str(len(examples)),
        "split": order.split,
        "seed": str(order.seed),
        **({"labels": order.labels} if order.kind == "fisher" else {}),
    }
    return write_checkpoint(out, found, record), len(examples)


def forward_rows(order: StatisticOrder) -> int:
    """Return the examples of one forward pass of a Gram: beside longer texts padding would count as tokens."""
    return 1 if is_recorded(order.architecture) else order.batch_size


def _recorded(order: StatisticOrder) -> tuple[Model, Predictions]:
    """Return the model of a base that says itself what it is, and the drawn examples."""
    modality, model = open_recorded(order.architecture, order.device)
    name = Path(order.task).name
    if order.kind == "gram":
        examples = modality.open(name, Path(order.task), order.split, None, torch.device(order.device))
    else:
        examples = open_headed(modality, name, order.task, order.split, order.head, order.device)
    return model, Subset(examples, _drawn(order, len(examples)))


def _pictured(order: StatisticOrder) -> tuple[Model, Predictions]:
    """Return the image tower of an architecture, and the drawn examples."""
    clip = open_model(order.architecture, order.device)
    head = None
    if order.head is not None:
        head = load_head(order.head)
        check_head(order.task, head, load_split(order.task, order.split).class_names, clip)
    return image_model(clip), draw_examples(order, clip.image_size, head)


def _drawn(order: StatisticOrder, count: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(order.seed))[: order.samples]


def check_order(order: StatisticOrder, out: Path, force: bool = False) -> None:
    """Refuse what cannot be measured, before anything is read.

    Args:
        order: what to measure.
        out: the file to write.
        force: whether a file that mergeflow did not make may be replaced.

    Raises:
        MergeflowError: a device that is not there, the test split, a number below 1, or a file that cannot be written,
            is an input, or was made by somebody else.
    """
    check_device(order.device)
    if order.split == "test":
        raise MergeflowError("statistics that shape a merge are never taken from test: use train or validation.")
    if order.samples < 1 or order.batch_size < 1:
        raise MergeflowError(f"samples and batch_size are at least 1, found {order.samples} and {order.batch_size}.")
    if order.kind == "fisher" and order.head is None and not is_recorded(order.architecture):
        raise MergeflowError("the Fisher information needs the task's head: give --head.")
    inputs = {"expert": order.expert, "task": order.task}
    inputs |= {"head": order.head} if order.head is not None else {}
    inputs |= {"architecture": order.architecture} if is_recorded(order.architecture) else {}
    check_estimate(out, inputs, force)


def draw_examples(order: StatisticOrder, image_size: int, head: Head | None) -> Classification:
    """Return examples of a prepared split in an order drawn from the seed.

    Args:
        order: names the task, the split, how many examples, and the seed.
        image_size: the side that the model takes, in pixels.
        head: of the task; None where the estimate needs none.

    Raises:
        MergeflowError: the images have another size than the model takes.
    """
    split = load_split(order.task, order.split)
    if split.images.shape[1] != image_size:
        raise MergeflowError(
            f"'{order.task}' holds images of {split.images.shape[1]} pixels a side, but the model takes {image_size}: "
            "prepare the task again with that size."
        )
    chosen = _drawn(order, len(split)).numpy()
    images, labels = torch.from_numpy(split.images[chosen]), torch.from_numpy(split.labels[chosen])
    head = head if head is None else head.to(order.device)
    return Classification(order.task, images, labels.to(order.device), head)  # batches alone go to the device


def _check_finite(order: StatisticOrder, found: dict[str, Tensor]) -> None:
    for name, value in found.items():
        if not bool(value.isfinite().all()):
            raise MergeflowError(f"the {order.kind} of '{order.expert}' is not finite in '{name}': check the expert.")
