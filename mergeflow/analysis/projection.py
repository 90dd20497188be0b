"""Many models at a glance: distances between state dicts, and their principal components, in one streamed pass.

Everything follows from the Gram matrix of the centred models, G_ij = ⟨θ_i − θ̄, θ_j − θ̄⟩, which is n × n however large
the models are. It is summed tensor by tensor, block by block: float64 copies exist of one block of n models only.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mergeflow.checkpoints.checks import check_compatible
from mergeflow.errors import MergeflowError

State = Mapping[str, Tensor]
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
        [n, n], values in [−1, 1]; 0 where a point is the origin itself.

    Example:
        >>> points = {"o": [0.0, 0.0], "a": [2.0, 0.0], "b": [0.0, 5.0], "c": [1.0, 1.0]}
        >>> gram = centred_gram({name: {"w": torch.tensor(value)} for name, value in points.items()})
        >>> cosines_from(gram, 0)[1].round(3)
        array([0.   , 1.   , 0.   , 0.707])
    """
    inner = gram - gram[origin][None, :] - gram[:, origin][:, None] + gram[origin, origin]
    norms = np.sqrt(np.maximum(np.diag(inner), 0.0))
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


def principal_coordinates(gram: np.ndarray, fitted: Sequence[int], count: int = 2) -> Coordinates:
    """Return where points lie on the principal components of some of them, from their Gram matrix alone.

    K_ij = ⟨θ_i − θ̄_S, θ_j − θ̄_S⟩ from G by centring on the fitted points S;  K_SS = U Λ Uᵀ;  places = K_·S U Λ^(−1/2)

    Args:
        gram: of all n points, centred anywhere, for example that of `centred_gram`.
        fitted: indices S of the points that the components are found from.
        count: number k of components.

    Raises:
        MergeflowError: the fitted points lie in fewer than k dimensions.

    Example:
        >>> points = np.array([[0.0, 0.0], [2.0, 0.0], [1.0, 5.0]])
        >>> found = principal_coordinates(points @ points.T, [0, 1], 1)
        >>> np.abs(found.places[:, 0]).round(6), found.off.round(6)
        (array([1., 1., 0.]), array([0., 0., 5.]))
    """
    chosen = list(fitted)
    rows = gram[:, chosen].mean(axis=1)
    inner = gram - rows[:, None] - rows[None, :] + rows[chosen].mean()
    values, vectors, explained = _leading(inner[np.ix_(chosen, chosen)], count)
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

        Args:
            others: state dicts of the points' names and shapes, by name.

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


def principal_components(points: Mapping[str, State], count: int = 2, gram: np.ndarray | None = None) -> Projection:
    """Find the principal components of models seen as long vectors.

    G = U Λ Uᵀ;  c_j = Σ_i U_ij / √λ_j (θ_i − θ̄), ⟨θ_i − θ̄, c_j⟩ = U_ij √λ_j, explained_j = λ_j / Σ λ

    Args:
        points: n state dicts with the same names and shapes, in memory or lazy, by their names; n > count.
        count: number k of components.
        gram: what `centred_gram(points)` gave, if it is known already.

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
    gram = centred_gram(points) if gram is None else gram
    values, vectors, explained = _leading(gram, count)
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
