"""Error landscapes on a plane of the weights: the plane, a grid on it, and what its valleys measure."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mergeflow.checkpoints.checks import check_compatible
from mergeflow.errors import MergeflowError

State = Mapping[str, Tensor]
Point = tuple[float, float]
_PARALLEL = 1e-6  # a smaller part off the first direction, relative, is rounding


@dataclass(frozen=True)
class Plane:
    """The plane P(x, y) = origin + x · u + y · v with orthonormal u and v.

    Attributes:
        origin: a state dict; for example θ0, or the centre of a projection.
        u: the first direction, of unit length over all tensors; floating-point tensors only.
        v: the second one, orthogonal to u.
    """

    origin: State
    u: State
    v: State

    def at(self, x: float, y: float, out: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return the weights at a point, in the origin's types; integer tensors are the origin's.

        Args:
            x: along u, in units of the weights' 2-norm.
            y: along v.
            out: a result of an earlier call to write into, so that a walk over the plane touches no new memory.
        """
        target = {name: torch.empty_like(tensor) for name, tensor in self.origin.items()} if out is None else out
        for name, tensor in self.origin.items():
            if name not in self.u:
                target[name].copy_(tensor)
            elif tensor.dtype == self.u[name].dtype:
                torch.add(tensor, self.u[name], alpha=x, out=target[name]).add_(self.v[name], alpha=y)
            else:
                wide = tensor.to(self.u[name].dtype)
                target[name].copy_(wide.add(self.u[name], alpha=x).add_(self.v[name], alpha=y))
        return target

    def coordinates(self, state: State) -> tuple[Point, float]:
        """Return the nearest point (x, y) of the plane to a model, and the distance between the two.

        x = ⟨θ − origin, u⟩, y = ⟨θ − origin, v⟩
        """
        check_compatible(self.origin, {"model": state})
        x = sum(float((move * u).sum()) for move, u, _ in self._moves(state))
        y = sum(float((move * v).sum()) for move, _, v in self._moves(state))
        off = sum(float((move - x * u - y * v).square().sum()) for move, u, v in self._moves(state))
        return (x, y), math.sqrt(off)

    def _moves(self, state: State) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield θ − origin in float64, u, v of every floating-point tensor."""
        for name, u in self.u.items():
            yield state[name].double() - self.origin[name].double(), u, self.v[name]


def plane_through(origin: State, first: State, second: State) -> Plane:
    """Return the plane through three models: u points at the first, v along the second's part orthogonal to u.

    u = τ_1/‖τ_1‖, v = (τ_2 − ⟨τ_2, u⟩ u)/‖·‖ with τ_i = θ_i − origin

    Args:
        origin: a state dict, for task vectors the base θ0.
        first: θ_1, same names and shapes.
        second: θ_2, same names and shapes.

    Returns:
        The plane; θ_1 lies at (‖τ_1‖, 0) and θ_2 at y > 0. u and v are float32 (float64 where the origin is).

    Raises:
        MergeflowError: models of different names or shapes, or three models on one line.

    Example:
        >>> weights = lambda *values: {"w": torch.tensor(values)}
        >>> plane = plane_through(weights(1.0, 0.0), weights(3.0, 0.0), weights(2.0, 4.0))
        >>> plane.coordinates(weights(2.0, 4.0)), plane.at(2.0, 0.0)["w"].tolist()
        (((1.0, 4.0), 0.0), [3.0, 0.0])

    Source:
        Izmailov et al. 2018, Averaging weights leads to wider optima, Section 3.1; MIMA, Figure 7.
    """
    check_compatible(origin, {"first": first, "second": second})
    square_one = square_two = inner = 0.0
    for _, one, two in _task_vectors(origin, first, second):
        square_one += float(one.square().sum())
        square_two += float(two.square().sum())
        inner += float((one * two).sum())
    share = inner / square_one if square_one else 0.0
    rest = math.sqrt(
        sum(float((two - share * one).square().sum()) for _, one, two in _task_vectors(origin, first, second))
    )
    if not square_one or rest <= _PARALLEL * math.sqrt(square_two):
        raise MergeflowError("the three models lie on one line, so they span no plane: choose models that differ.")
    u, v = {}, {}
    for name, one, two in _task_vectors(origin, first, second):
        kind = torch.promote_types(origin[name].dtype, torch.float32)
        u[name] = (one / math.sqrt(square_one)).to(kind)
        v[name] = ((two - share * one) / rest).to(kind)
    return Plane(origin, u, v)


def _task_vectors(origin: State, first: State, second: State) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield name, τ_1, τ_2 of every floating-point tensor, in float64."""
    for name, tensor in origin.items():
        if tensor.is_floating_point():
            start = tensor.double()
            yield name, first[name].double() - start, second[name].double() - start


@dataclass(frozen=True)
class Grid:
    """Points of a plane in rows and columns.

    Attributes:
        xs: ascending, the columns.
        ys: ascending, the rows.
    """

    xs: np.ndarray
    ys: np.ndarray

    @classmethod
    def around(cls, points: Sequence[Point], size: int, margin: float) -> "Grid":
        """Return a grid of size × size points around given ones.

        Args:
            points: what must lie inside.
            size: points along each side, ≥ 2.
            margin: room on each side, as a share of the larger side of the points' box, ≥ 0.

        Example:
            >>> Grid.around([(0.0, 0.0), (4.0, 2.0)], 3, 0.25).xs
            array([-1.,  2.,  5.])
        """
        box = np.array(points)
        low, high = box.min(axis=0), box.max(axis=0)
        room = margin * float((high - low).max())
        xs, ys = (np.linspace(low[side] - room, high[side] + room, size) for side in (0, 1))
        return cls(xs, ys)


def measure_grid(
    plane: Plane,
    grid: Grid,
    evaluate: Callable[[State], Mapping[str, float]],
    report: Callable[[int, int], None] | None = None,
) -> dict[str, np.ndarray]:
    """Return what a callback measures of the model at every point of a grid.

    Args:
        plane: where the models lie.
        grid: which of them.
        evaluate: state dict → value by name, for example the error on each task. The tensors are reused for the next
            point; `CandidateScorer.state` and `Network.load` copy what they are given.
        report: called with points done and in all.

    Returns:
        By name float64 [len(ys), len(xs)].

    Example:
        >>> plane = plane_through(*({"w": torch.tensor(w)} for w in ([0.0, 0.0], [1.0, 0.0], [0.0, 1.0])))
        >>> grid = Grid(np.array([0.0, 1.0]), np.array([0.0, 2.0]))
        >>> measure_grid(plane, grid, lambda state: {"sum": float(state["w"].sum())})["sum"].tolist()
        [[0.0, 1.0], [2.0, 3.0]]
    """
    found: dict[str, np.ndarray] = {}
    state: dict[str, Tensor] | None = None
    total = len(grid.xs) * len(grid.ys)
    for row, y in enumerate(grid.ys.tolist()):
        for column, x in enumerate(grid.xs.tolist()):
            state = plane.at(x, y, state)
            for name, value in evaluate(state).items():
                found.setdefault(name, np.full((len(grid.ys), len(grid.xs)), np.nan))[row, column] = value
            if report is not None:
                report(row * len(grid.xs) + column + 1, total)
    return found


def angle_between(first: Point, second: Point) -> float:
    """Return the angle between two vectors of the plane in degrees, 0 … 180.

    Example:
        >>> round(angle_between((2.0, 0.0), (0.0, 3.0)), 6)
        90.0
    """
    cosine = float(np.dot(first, second)) / (math.hypot(*first) * math.hypot(*second))
    return math.degrees(math.acos(min(max(cosine, -1.0), 1.0)))


@dataclass(frozen=True)
class Valley:
    """The part of a grid where a value is low.

    Attributes:
        least: the smallest value on the grid.
        centre: mean place of the valley's points, which is steadier than the place of the smallest value.
        mask: bool [rows, columns], true inside.
    """

    least: float
    centre: Point
    mask: np.ndarray

    def overlap(self, other: "Valley") -> float:
        """Return the share |A ∩ B| / |A ∪ B| that two valleys of one grid have in common, 0 … 1."""
        return float((self.mask & other.mask).sum() / (self.mask | other.mask).sum())


def valley(values: np.ndarray, grid: Grid, height: float) -> Valley:
    """Return the region {P : value(P) ≤ min + height} of a grid.

    Args:
        values: [len(ys), len(xs)], finite.
        grid: where they were measured.
        height: depth of the water, in units of the values, ≥ 0.

    Example:
        >>> grid = Grid(np.array([0.0, 1.0, 2.0]), np.array([0.0, 1.0]))
        >>> found = valley(np.array([[0.9, 0.1, 0.2], [0.9, 0.9, 0.9]]), grid, 0.1)
        >>> found.least, found.centre
        (0.1, (1.5, 0.0))
    """
    assert np.isfinite(values).all()
    mask = values <= values.min() + height + 1e-12  # an error of 0.1 + 0.1 counts as 0.2
    rows, columns = np.nonzero(mask)
    return Valley(float(values.min()), (float(grid.xs[columns].mean()), float(grid.ys[rows].mean())), mask)
