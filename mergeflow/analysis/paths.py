"""Paths of models on a plane: the plane of principal components, and how much a path turns."""

from collections.abc import Sequence

import numpy as np

from mergeflow.analysis.landscape import Plane, Point
from mergeflow.analysis.projection import Projection


def principal_plane(projection: Projection) -> Plane:
    """Return the plane of the first two principal components, P(x, y) = θ̄ + x c_1 + y c_2.

    Args:
        projection: of at least two components; its coordinates are the plane's.

    Example:
        >>> import torch
        >>> from mergeflow.analysis.projection import principal_components
        >>> points = {str(x): {"w": torch.tensor([x, x * x, 0.0])} for x in (0.0, 1.0, 2.0)}
        >>> plane = principal_plane(principal_components(points))
        >>> round(plane.coordinates(points["2.0"])[1], 5)
        0.0
    """
    return Plane(projection.centre(), projection.component(0), projection.component(1))


def roundness(path: Sequence[Point]) -> float:
    """Return 4π A / L² of a closed path of area A and length L: 1 for a circle, 0 for a line out and back.

    Args:
        path: corners in order, at least three places that differ; the last is joined to the first.

    Returns:
        A value in [0, 1]; parts that are walked the other way round take area away. 0 for a path of no length.

    Example:
        >>> round(roundness([(0.0, 0.0), (1.0, 0.0), (1.0, 1.0), (0.0, 1.0)]), 3)
        0.785
        >>> roundness([(0.0, 0.0), (1.0, 2.0), (2.0, 4.0)])
        0.0

    Source:
        The isoperimetric quotient.
    """
    corners = np.array(path, dtype=float)
    corners -= corners.mean(axis=0)  # far from the origin the area would be rounding
    steps = np.roll(corners, -1, axis=0) - corners
    length = float(np.hypot(*steps.T).sum())
    area = abs(float((corners[:, 0] * steps[:, 1] - corners[:, 1] * steps[:, 0]).sum())) / 2
    return 4 * np.pi * area / length**2 if length**2 else 0.0
