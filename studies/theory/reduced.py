"""Task vectors with less in them: of low rank, without small rows of MLPs, trimmed, thinned; and what they take."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mergeflow.errors import MergeflowError
from mergeflow.merging.linalg.spectra import truncate as closest

Vector = Mapping[str, Tensor]
_NUMBER = 4  # bytes of a float32, and of an index


@dataclass(frozen=True)
class Reduced:
    """A task vector and what it takes to store it.

    Attributes:
        vector: All tensors of the model.
        bytes: In float32, with the indices or bits that say where the numbers belong.
    """

    vector: dict[str, Tensor]
    bytes: int


def is_mlp_matrix(name: str, value: Tensor) -> bool:
    """Whether a tensor is a weight matrix of an MLP, by its name.

    Args:
        name: as open_clip, timm, torchvision and transformers call it.
        value: [...].

    Example:
        >>> is_mlp_matrix("transformer.resblocks.0.mlp.c_fc.weight", torch.zeros(8, 4))
        True
        >>> is_mlp_matrix("encoder.layers.encoder_layer_0.mlp.0.bias", torch.zeros(8))
        False
    """
    return value.ndim == 2 and any(part in ("mlp", "intermediate", "ffn") for part in name.split("."))


def low_rank(vector: Vector, rank: int) -> Reduced:
    """Return a task vector whose matrices are the best approximations of a rank; what is not a matrix stays whole.

    Args:
        rank: ≥ 1.

    Raises:
        MergeflowError: a rank below 1.

    Example:
        >>> found = low_rank({"w": torch.diag(torch.tensor([3.0, 2.0, 1.0])), "b": torch.ones(2)}, 1)
        >>> found.vector["w"].diagonal().tolist(), found.bytes
        ([3.0, 0.0, 0.0], 32)

    Source:
        Li et al. 2025, Corollary 1; Eckart and Young 1936.
    """
    if rank < 1:
        raise MergeflowError(f"rank is {rank}; expected at least 1.")

    def truncate(value: Tensor) -> tuple[Tensor, int]:
        if value.ndim != 2 or rank * sum(value.shape) >= value.numel():
            return value, _NUMBER * value.numel()  # factors would take no less than the matrix
        return closest(value.double(), rank).to(value.dtype), _NUMBER * rank * sum(value.shape)

    return _each(vector, lambda name, value: truncate(value))


def row_pruned(vector: Vector, keep: float, smallest: bool = False) -> Reduced:
    """Return a task vector with a share of the rows of each MLP matrix, the largest in 2-norm; the others are 0.

    Args:
        keep: share of the rows kept, in [0, 1].
        smallest: keep the smallest rows instead, as a control.

    Raises:
        MergeflowError: `keep` outside [0, 1].

    Source:
        Li et al. 2025, Corollary 2, whose ΔV = ΔW_O W_V is the MLP's one matrix.
    """

    def prune(value: Tensor) -> tuple[Tensor, int]:
        order = value.norm(dim=1).argsort(descending=not smallest, stable=True)
        rows = order[: round(keep * len(order))]
        pruned = torch.zeros_like(value)
        pruned[rows] = value[rows]
        return pruned, _NUMBER * len(rows) * (value.shape[1] + 1)

    return _of_mlps(vector, keep, prune)


def trimmed(vector: Vector, keep: float) -> Reduced:
    """Return a task vector with a share of the entries of each MLP matrix, the largest; the others are 0.

    Args:
        keep: share of the entries kept, in [0, 1].

    Raises:
        MergeflowError: `keep` outside [0, 1].

    Source:
        Yadav et al. 2023, TIES-Merging, the trimming, matrix by matrix.
    """

    def trim(value: Tensor) -> tuple[Tensor, int]:
        count = round(keep * value.numel())
        largest = value.abs().flatten().argsort(descending=True, stable=True)[:count]
        trimmed_value = torch.zeros_like(value).flatten()
        trimmed_value[largest] = value.flatten()[largest]
        return trimmed_value.reshape(value.shape), _NUMBER * count + -(-value.numel() // 8)

    return _of_mlps(vector, keep, trim)


def thinned(vector: Vector, keep: float, seed: int) -> Reduced:
    """Return a task vector whose MLP matrices keep each entry with a probability, divided by it; the others are 0.

    Args:
        keep: the probability, in (0, 1].
        seed: of the entries, which are then stored without their places.

    Raises:
        MergeflowError: `keep` outside [0, 1], or 0.

    Source:
        Yu et al. 2024, DARE.
    """
    if not keep:
        raise MergeflowError("keep is 0: entries are divided by the share that is kept, which must be above 0.")
    generator = torch.Generator().manual_seed(seed)

    def thin(value: Tensor) -> tuple[Tensor, int]:
        mask = torch.rand(value.shape, generator=generator) < keep
        return value * mask / keep, _NUMBER * int(mask.sum())

    return _of_mlps(vector, keep, thin)


def bimodality(vector: Vector) -> float:
    """Return Sarle's coefficient of the row norms of the MLP matrices, the mean over matrices.

    (g² + 1) / (k + 3 (n − 1)² / ((n − 2)(n − 3))),  g skewness, k excess kurtosis

    Args:
        vector: tensors by name, matrices with at least four rows.

    Returns:
        In (0, 1]: 5/9 for a uniform distribution, 1/3 for a normal one, 1 for two points.

    Source:
        Pfister et al. 2013, Good things peak in pairs.
    """
    from scipy.stats import kurtosis, skew

    values = []
    for name, value in vector.items():
        if is_mlp_matrix(name, value):
            norms, n = value.double().norm(dim=1).numpy(), len(value)
            correction = 3 * (n - 1) ** 2 / ((n - 2) * (n - 3))
            values.append((skew(norms, bias=False) ** 2 + 1) / (kurtosis(norms, bias=False) + correction))
    return float(sum(values) / len(values))


def _of_mlps(vector: Vector, keep: float, change: Callable[[Tensor], tuple[Tensor, int]]) -> Reduced:
    if not 0 <= keep <= 1:
        raise MergeflowError(f"keep is {keep:g}; expected a share in [0, 1].")
    if not any(is_mlp_matrix(name, value) for name, value in vector.items()):
        raise MergeflowError("no tensor of the task vector is a matrix of an MLP by its name: nothing can be pruned.")

    def changed(name: str, value: Tensor) -> tuple[Tensor, int]:
        return change(value) if is_mlp_matrix(name, value) else (value, _NUMBER * value.numel())

    return _each(vector, changed)


def _each(vector: Vector, change: Callable[[str, Tensor], tuple[Tensor, int]]) -> Reduced:
    changed = {name: change(name, value) for name, value in vector.items()}
    return Reduced({name: value for name, (value, _) in changed.items()}, sum(size for _, size in changed.values()))
