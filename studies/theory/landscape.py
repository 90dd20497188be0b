"""Error landscapes on a plane of the weights: the plane, a grid on it, and what its valleys measure.

Many models at a glance: distances between state dicts, and their principal components, in one streamed pass.

Everything follows from the Gram matrix of the centred models, G_ij = ⟨θ_i − θ̄, θ_j − θ̄⟩, which is n × n however large
the models are. It is summed tensor by tensor, block by block: float64 copies exist of one block of n models only.

Paths of models on a plane: the plane of principal components, and how much a path turns.
"""

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
    for _, tau, two in _task_vectors(origin, first, second):
        square_one += float(tau.square().sum())
        square_two += float(two.square().sum())
        inner += float((tau * two).sum())
    share = inner / square_one if square_one else 0.0
    rest = math.sqrt(
        sum(float((two - share * tau).square().sum()) for _, tau, two in _task_vectors(origin, first, second))
    )
    if not square_one or rest <= _PARALLEL * math.sqrt(square_two):
        raise MergeflowError("the three models lie on one line, so they span no plane: choose models that differ.")
    u, v = {}, {}
    for name, tau, two in _task_vectors(origin, first, second):
        kind = torch.promote_types(origin[name].dtype, torch.float32)
        u[name] = (tau / math.sqrt(square_one)).to(kind)
        v[name] = ((two - share * tau) / rest).to(kind)
    return Plane(origin, u, v)


def _task_vectors(origin: State, first: State, second: State) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield name, τ_1, τ_2 of every floating-point tensor, in float64."""
    for name, tensor in origin.items():
        if tensor.is_floating_point():
            start = tensor.double()
            yield name, first[name].double() - start, second[name].double() - start


@dataclass(frozen=True)
class Grid:
    """Points of a plane: `xs` are the columns, `ys` the rows, both ascending."""

    xs: np.ndarray
    ys: np.ndarray

    @classmethod
    def around(cls, points: Sequence[Point], size: int, margin: float) -> "Grid":
        """Return a grid of size × size points around given ones.

        Args:
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

    def points(self, values: np.ndarray) -> Iterator[tuple[float, float, float]]:
        """Yield x, y and value of every point, line by line; `values` are [len(ys), len(xs)].

        Example:
            >>> list(Grid(np.array([0.0, 1.0]), np.array([5.0])).points(np.array([[0.2, 0.3]])))
            [(0.0, 5.0, 0.2), (1.0, 5.0, 0.3)]
        """
        for y, line in zip(self.ys.tolist(), values.tolist(), strict=True):
            yield from ((x, y, value) for x, value in zip(self.xs.tolist(), line, strict=True))


def measure_grid(plane: Plane, grid: Grid, evaluate: Callable[[State], Mapping[str, float]]) -> dict[str, np.ndarray]:
    """Measure the model at every point of a grid by a callback.

    Args:
        evaluate: state dict → value by name, for example the error on each task. The tensors are reused for the next
            point; `CandidateScorer.state` and `Network.load` copy what they are given.

    Returns:
        By name float64 [len(ys), len(xs)].

    Example:
        >>> plane = plane_through(*({"w": torch.tensor(w)} for w in ([0.0, 0.0], [1.0, 0.0], [0.0, 1.0])))
        >>> grid = Grid(np.array([0.0, 1.0]), np.array([0.0, 2.0]))
        >>> measure_grid(plane, grid, lambda state: {"sum": float(state["w"].sum())})["sum"].tolist()
        [[0.0, 1.0], [2.0, 3.0]]
    """
    losses: dict[str, np.ndarray] = {}
    state: dict[str, Tensor] | None = None
    for row, y in enumerate(grid.ys.tolist()):
        for column, x in enumerate(grid.xs.tolist()):
            state = plane.at(x, y, state)
            for name, value in evaluate(state).items():
                losses.setdefault(name, np.full((len(grid.ys), len(grid.xs)), np.nan))[row, column] = value
    return losses


def angle_between(first: Point, second: Point) -> float:
    """Return the angle between two vectors of the plane in degrees, 0 … 180; NaN where one has no length.

    Example:
        >>> round(angle_between((2.0, 0.0), (0.0, 3.0)), 6)
        90.0
    """
    lengths = math.hypot(*first) * math.hypot(*second)
    if not lengths:
        return math.nan
    cosine = float(np.dot(first, second)) / lengths
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


_BLOCK = 1 << 18  # elements of one model in float64 at a time
_RELATIVE_ZERO = 1e-12  # a smaller share of the variance is rounding


def centred_gram(points: Mapping[str, State]) -> np.ndarray:
    """Return G_ij = ⟨θ_i − θ̄, θ_j − θ̄⟩ with θ̄ = (1/n) Σ_i θ_i, over all floating-point tensors.

    Args:
        points: n ≥ 1 state dicts with the same names and shapes, in memory or lazy, by their names.

    Returns:
        Symmetric float64 [n, n], in the order of `points`; its rows sum to zero.

    Raises:
        MergeflowError: there is no point, or points differ in names or shapes.

    Example:
        >>> centred_gram({"a": {"w": torch.tensor([1.0, 0.0])}, "b": {"w": torch.tensor([3.0, 0.0])}})
        array([[ 1., -1.],
               [-1.,  1.]])
    """
    _check(points)
    gram = np.zeros((len(points), len(points)))
    for block in _blocks(list(points.values())):
        centred = block - block.mean(dim=0)
        gram += (centred @ centred.T).numpy()
    return gram


def distances(gram: np.ndarray) -> np.ndarray:
    """Return the distances ‖θ_i − θ_j‖₂ = √(G_ii + G_jj − 2 G_ij) of the points of a (centred) Gram matrix, [n, n].

    Example:
        >>> distances(np.array([[1.0, -1.0], [-1.0, 1.0]]))
        array([[0., 2.],
               [2., 0.]])
    """
    squares = np.diag(gram)
    return np.sqrt(np.maximum(squares[:, None] + squares[None, :] - 2 * gram, 0.0))


def cosines_from(gram: np.ndarray, origin: int) -> np.ndarray:
    """Return cos ∠(θ_i − θ_o, θ_j − θ_o) for all pairs of the points of a (centred) Gram matrix.

    Args:
        gram: [n, n].
        origin: the index o of the point that is looked from.

    Returns:
        [n, n], values in [−1, 1]; 0 where a point is the origin itself, but for rounding.

    Example:
        >>> points = {"o": [0.0, 0.0], "a": [2.0, 0.0], "b": [0.0, 5.0], "c": [1.0, 1.0]}
        >>> gram = centred_gram({name: {"w": torch.tensor(value)} for name, value in points.items()})
        >>> cosines_from(gram, 0)[1].round(3)
        array([0.   , 1.   , 0.   , 0.707])
    """
    inner = gram - gram[origin][None, :] - gram[:, origin][:, None] + gram[origin, origin]
    squares = np.diag(inner)
    norms = np.sqrt(np.where(squares > _RELATIVE_ZERO * np.trace(gram), squares, 0.0))
    lengths = np.outer(norms, norms)
    cosines: np.ndarray = np.divide(inner, lengths, out=np.zeros_like(inner), where=lengths > 0)
    return cosines.clip(-1.0, 1.0)


@dataclass(frozen=True)
class Coordinates:
    """Points on the principal components of some of them.

    Attributes:
        places: float64 [n, k].
        off: distance of each point to its place on the components, float64 [n].
        explained: share of the fitted points' variance along each component, falling, float64 [k].
    """

    places: np.ndarray
    off: np.ndarray
    explained: np.ndarray


def principal_coordinates(gram: np.ndarray, fitted: Sequence[int]) -> Coordinates:
    """Return where points lie on the two principal components of some of them, from their Gram matrix alone.

    K_ij = ⟨θ_i − θ̄_S, θ_j − θ̄_S⟩ from G by centring on the fitted points S;  K_SS = U Λ Uᵀ;  places = K_·S U Λ^(−1/2)

    Args:
        gram: of all n points, centred anywhere, for example that of `centred_gram`.
        fitted: indices S of the points that the components are found from.

    Raises:
        MergeflowError: the fitted points lie on a line.

    Example:
        >>> points = np.array([[0.0, 0.0, 0.0], [2.0, 0.0, 0.0], [0.0, 1.0, 0.0], [1.0, 1.0, 5.0]])
        >>> principal_coordinates(points @ points.T, [0, 1, 2]).off.round(5)
        array([0., 0., 0., 5.])
    """
    chosen = list(fitted)
    rows = gram[:, chosen].mean(axis=1)
    inner = gram - rows[:, None] - rows[None, :] + rows[chosen].mean()
    values, vectors, explained = _leading(inner[np.ix_(chosen, chosen)], 2)
    places = inner[:, chosen] @ (vectors / np.sqrt(values))
    off = np.sqrt(np.maximum(np.diag(inner) - np.square(places).sum(axis=1), 0.0))
    return Coordinates(places, off, explained)


def _leading(gram: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the largest eigenvalues of a centred Gram matrix, their vectors, and their shares of the variance."""
    values, vectors = np.linalg.eigh(gram)
    values, vectors = values[::-1][:count], vectors[:, ::-1][:, :count]
    total = float(np.trace(gram))
    spanned = int((values > _RELATIVE_ZERO * total).sum())
    if spanned < count:
        raise MergeflowError(
            f"{len(gram)} models lie in {spanned} dimensions, but {count} components are asked for: give more "
            "models that differ, or ask for fewer components."
        )
    return values, vectors * np.sign(vectors[np.abs(vectors).argmax(axis=0), range(count)]), values / total


@dataclass(frozen=True)
class Projection:
    """Models on their first k principal components.

    The components are kept as mixtures of the points, c_j = Σ_i mixture_ij (θ_i − θ̄), so nothing as large as a model
    is held but the points themselves, which may be lazy.

    Attributes:
        points: the state dicts that the components were found from, by name.
        mixture: float64 [n, k].
        coordinates: by name, ⟨θ_i − θ̄, c_j⟩ for each component, float64 [k].
        explained: share of the points' variance along each component, falling, float64 [k].
    """

    points: Mapping[str, State]
    mixture: np.ndarray
    coordinates: dict[str, np.ndarray]
    explained: np.ndarray

    def project(self, others: Mapping[str, State]) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        """Return where further models lie: their coordinates, and how far off the plane they are.

        Returns:
            By name ⟨θ − θ̄, c_j⟩, float64 [k]; and by name the distance from θ to its place on the plane, which the
            picture does not show.

        Raises:
            MergeflowError: a model's names or shapes are not the points'.
        """
        first = next(iter(self.points))
        _check({first: self.points[first], **others})
        count = len(self.points)
        cross, squares = np.zeros((len(others), count)), np.zeros(len(others))
        for block in _blocks([*self.points.values(), *others.values()]):
            block -= block[:count].mean(dim=0)
            cross += (block[count:] @ block[:count].T).numpy()
            squares += block[count:].square().sum(dim=1).numpy()
        coordinates = cross @ self.mixture
        off = np.sqrt(np.maximum(squares - np.square(coordinates).sum(axis=1), 0.0))
        return dict(zip(others, coordinates, strict=True)), dict(zip(others, off.tolist(), strict=True))

    def centre(self) -> dict[str, Tensor]:
        """Return θ̄ as a state dict in the points' types; integer tensors are the first point's."""
        return self._mixed(np.full(len(self.points), 1 / len(self.points)))

    def component(self, number: int) -> dict[str, Tensor]:
        """Return the unit vector c_j, j from 0, as a state dict of the floating-point tensors."""
        weights = self.mixture[:, number]
        # Σ_i m_i (θ_i − θ̄) = Σ_i (m_i − m̄) θ_i
        mixed = self._mixed(weights - weights.mean())
        return {name: tensor for name, tensor in mixed.items() if tensor.is_floating_point()}

    def _mixed(self, weights: np.ndarray) -> dict[str, Tensor]:
        """Return Σ_i weights_i θ_i, summed in float64 one tensor at a time."""
        states = list(self.points.values())
        mixed = {}
        for name in states[0]:
            first = states[0][name]
            if first.is_floating_point():
                total = torch.zeros(first.shape, dtype=torch.float64)
                for weight, state in zip(weights.tolist(), states, strict=True):
                    total.add_(state[name].double().cpu(), alpha=weight)
                mixed[name] = total.to(first.dtype)
            else:
                mixed[name] = first.clone()
        return mixed


def principal_components(points: Mapping[str, State], count: int = 2) -> Projection:
    """Find the principal components of models seen as long vectors.

    G = U Λ Uᵀ;  c_j = Σ_i U_ij / √λ_j (θ_i − θ̄), ⟨θ_i − θ̄, c_j⟩ = U_ij √λ_j, explained_j = λ_j / Σ λ

    Args:
        points: n state dicts with the same names and shapes, in memory or lazy, by their names; n > count.

    Returns:
        The projection; of the two signs of a component, the one whose largest coordinate is positive.

    Raises:
        MergeflowError: points differ in names or shapes, or lie in fewer than k dimensions.

    Example:
        >>> states = {str(x): {"w": torch.tensor([x, 2 * x, 0.0])} for x in (-1.0, 0.0, 2.0)}
        >>> found = principal_components(states, 1)
        >>> found.explained.round(6), found.coordinates["2.0"].round(3)
        (array([1.]), array([3.727]))

    Source:
        Turk and Pentland, Eigenfaces for recognition (1991): components of few long vectors from their Gram matrix.
        Of models: Zhou et al. 2025, On Task Vectors and Gradients, Figure 4; Li et al. 2018, Visualizing the loss
        landscape of neural nets.
    """
    values, vectors, explained = _leading(centred_gram(points), count)
    roots = np.sqrt(values)
    coordinates = dict(zip(points, vectors * roots, strict=True))
    return Projection(points, vectors / roots, coordinates, explained)


def _check(points: Mapping[str, State]) -> None:
    if not points:
        raise MergeflowError("no model to compare: give at least one state dict.")
    first, *others = points
    check_compatible(points[first], {name: points[name] for name in others})


def _blocks(states: Sequence[State]) -> Iterator[Tensor]:
    """Yield the models side by side, float64 [n, block], block after block of every floating-point tensor."""
    for name in states[0]:
        flat = [state[name].detach().reshape(-1) for state in states]
        if flat[0].is_floating_point():
            for pieces in zip(*(tensor.split(_BLOCK) for tensor in flat), strict=True):
                yield torch.stack([piece.to("cpu", torch.float64) for piece in pieces])


def principal_plane(projection: Projection) -> Plane:
    """Return the plane of the first two principal components, P(x, y) = θ̄ + x c_1 + y c_2.

    Args:
        projection: of at least two components; its coordinates are the plane's.

    Example:
        >>> import torch
        >>> from studies.theory.landscape import principal_components
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
