"""What a registered model takes: the values x0, x1, ... of a series."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from mergeflow.modalities.served import Columns, Loaded, Served
from mergeflow.modalities.serving import classify


def inputs(stored: Mapping[str, Any]) -> dict[str, Any]:
    return {f"x{number}": "number" for number in range(stored["length"])}


def answer(loaded: Loaded, columns: Columns) -> dict[str, list[Any]]:
    return classify(loaded, columns, list(inputs(loaded.decoding)), read)


def read(row: Mapping[str, Any]) -> np.ndarray:
    return np.asarray(list(row.values()), np.float32)


SERVED = Served(
    inputs=inputs,
    outputs={"label": "text", "probabilities": "shares"},
    example=lambda stored: dict.fromkeys(inputs(stored), 0.0),
    answer=answer,
)
