"""The differences of two checkpoints, tensor by tensor."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from pathlib import Path

import torch
from torch import Tensor

from mergeflow.checkpoints.fingerprint import BLOCK, block_digest, tensor_digest
from mergeflow.checkpoints.formats import open_checkpoint
from mergeflow.checkpoints.header import DType
from mergeflow.checkpoints.reader import LazyStateDict
from mergeflow.merging.files.output import fingerprint_of


@dataclass(frozen=True)
class TensorDiff:
    """One tensor in two checkpoints a and b: shapes and types, None where it is missing, and digests, "" where it is.

    Norms are ‖a‖, ‖b‖ and ‖a − b‖; the last and the cosine are NaN where shapes differ (or one is zero). It is equal
    where types, shapes and bytes are the same.
    """

    name: str
    shapes: tuple[tuple[int, ...] | None, tuple[int, ...] | None]
    dtypes: tuple[DType | None, DType | None]
    norm_a: float
    norm_b: float
    norm_difference: float
    cosine: float
    equal: bool
    digests: tuple[str, str]

    @property
    def change(self) -> str:
        """How type and shape changed, "float32 → float16, [6, 4] → [4, 6]"; "" where they did not, or it is missing."""
        if None in self.shapes:
            return ""
        types = [dtype.name if dtype else "missing" for dtype in self.dtypes]
        shapes = [str(list(shape or ())) for shape in self.shapes]
        return ", ".join(f"{a} → {b}" for a, b in (types, shapes) if a != b)


@dataclass(frozen=True)
class Diff:
    """The difference of two checkpoints: their fingerprints, every tensor in order of name, what was not read."""

    fingerprints: tuple[str, str]
    tensors: tuple[TensorDiff, ...]
    warnings: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        return self.fingerprints[0] == self.fingerprints[1]


def diff(a: str | Path, b: str | Path) -> Diff:
    """Compare two checkpoints block by block, in float64 whatever the types."""
    with open_checkpoint(a) as left, open_checkpoint(b) as right:
        rows = [_compare(name, left, right) for name in sorted({*left, *right})]
        fingerprints = _fingerprint(left, rows, 0), _fingerprint(right, rows, 1)
        return Diff(fingerprints, tuple(rows), (*left.notes, *right.notes))


def _fingerprint(state: LazyStateDict, rows: list[TensorDiff], side: int) -> str:
    return fingerprint_of(state.infos, {row.name: row.digests[side] for row in rows})


def _compare(name: str, a: LazyStateDict, b: LazyStateDict) -> TensorDiff:
    infos = tuple(state.infos.get(name) for state in (a, b))
    shapes = tuple(info.shape if info else None for info in infos)
    dtypes = tuple(info.dtype if info else None for info in infos)
    comparable = shapes[0] == shapes[1]
    sums = torch.zeros(4, dtype=torch.float64)
    digests: tuple[list[bytes], list[bytes]] = ([], [])
    for start in range(0, max(info.numel for info in infos if info), BLOCK):
        pieces: Mapping[int, Tensor] = {
            side: state.read(name, start, min(start + BLOCK, info.numel))
            for side, (state, info) in enumerate(zip((a, b), infos, strict=True))
            if info and start < info.numel
        }
        for side, piece in pieces.items():
            digests[side].append(block_digest(piece))
            sums[side] += piece.double().square().sum()
        if comparable and len(pieces) == 2:
            first, second = pieces[0].double(), pieces[1].double()
            sums[2] += (first - second).square().sum()
            sums[3] += (first * second).sum()
    tensor_digests = tuple(tensor_digest(blocks) if info else "" for blocks, info in zip(digests, infos, strict=True))
    norms = [sqrt(float(value)) for value in sums[:3]]
    both = norms[0] * norms[1]
    return TensorDiff(
        name,
        (shapes[0], shapes[1]),
        (dtypes[0], dtypes[1]),
        norms[0],
        norms[1],
        norms[2] if comparable else float("nan"),
        float(sums[3]) / both if comparable and both else float("nan"),
        infos[0] == infos[1] and tensor_digests[0] == tensor_digests[1],
        (tensor_digests[0], tensor_digests[1]),
    )
