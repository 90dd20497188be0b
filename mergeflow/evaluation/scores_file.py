"""Scores example by example, in a file of NumPy's format `.npz`."""

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np


def write_scores(path: Path, scores: Mapping[str, np.ndarray]) -> None:
    """Write the scores of each task; the same scores are the same bytes whatever Python and NumPy write them.

    `numpy.savez` leaves the version of the format in the file's headers to Python, and releases of one Python differ.

    Args:
        path: the file.
        scores: task → float32 [n] in [0, 1], in the split's order.
    """
    with zipfile.ZipFile(path, "w") as archive:
        for task, values in scores.items():
            content = io.BytesIO()
            np.save(content, values, allow_pickle=False)
            archive.writestr(zipfile.ZipInfo(f"{task}.npy"), content.getvalue())


def read_scores(path: Path) -> dict[str, np.ndarray]:
    """Return what `write_scores` or `numpy.savez` wrote."""
    with np.load(path, allow_pickle=False) as archive:
        return dict(archive)
