"""Inputs and outputs of registered models, by modality; declared without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from mergeflow.plugins import Parts

if TYPE_CHECKING:
    import torch

    from mergeflow.modalities.heads import Head
    from mergeflow.modality import Modality, Model

WEIGHTS = "model.safetensors"  # of a registered model, in the folder of its version

# optional text: a column that may be missing. shares: numbers by name that sum to 1, or no numbers.
Kind = Literal["bytes", "text", "optional text", "number", "shares"]
Columns = Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class Loaded:
    """A registered model ready to answer.

    Attributes:
        heads: Task to head, on the CPU; None where the model itself gives the task's logits.
        class_names: Task to its classes in label order.
        decoding: How its examples are stored, as the manifests record it.
        record: The metadata of the weights of its base.
        section: `model` of params.yaml, which decides the module.
    """

    modality: Modality
    model: Model
    heads: Mapping[str, Head | None]
    class_names: Mapping[str, Sequence[str]]
    decoding: Mapping[str, Any]
    record: Mapping[str, str]
    device: torch.device
    section: Any = None


@dataclass(frozen=True)
class Served:
    """Inputs and outputs of a modality's registered models.

    Attributes:
        inputs: Decoding to the columns of a row, beside `task`, in order.
        example: Decoding to one row that any model of that decoding takes, without `task`.
        answer: Model and columns to the answer's columns, all of the rows' number. It raises one MergeflowError that
            names all rows that cannot be answered.
        packages: Distributions that a model needs besides mergeflow's own few.
        rows: How many rows are computed at once.
    """

    inputs: Callable[[Mapping[str, Any]], dict[str, Kind]]
    outputs: Mapping[str, Kind]
    example: Callable[[Mapping[str, Any]], dict[str, Any]]
    answer: Callable[[Loaded, Columns], dict[str, list[Any]]]
    packages: tuple[str, ...] = ()
    rows: int = 256


SERVED = Parts("modality", Served, "mergeflow.modalities", "modalities", "serving")
