"""Serve a registered small net: inputs x0, x1, ... in, a label and probabilities out."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from mergeflow.errors import MergeflowError
from mergeflow.modalities.served import Columns, Kind, Loaded, Served
from mergeflow.modalities.serving import classify


def _inputs(decoding: Mapping[str, Any]) -> dict[str, Kind]:
    return {f"x{number}": "number" for number in range(decoding["inputs"])}


def _answer(loaded: Loaded, columns: Columns) -> dict[str, list[Any]]:
    return classify(loaded, columns, list(_inputs(loaded.decoding)), _read)


def _read(row: Mapping[str, Any]) -> np.ndarray:
    for name, value in row.items():
        if isinstance(value, str | bytes) or value is None or not math.isfinite(value):
            raise MergeflowError(f"{name} is not a finite number.")
    return np.asarray(list(row.values()), np.float64)


SERVED = Served(
    inputs=_inputs,
    outputs={"label": "text", "probabilities": "shares"},
    example=lambda decoding: dict.fromkeys(_inputs(decoding), 0.0),
    answer=_answer,
)
