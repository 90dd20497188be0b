"""Fingerprints: the identity of a state dict, whatever file holds it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from mergeflow.checkpoints.reader import LazyStateDict
from mergeflow.late import torch

if TYPE_CHECKING:
    from torch import Tensor

# Elements hashed as one leaf. The merge engine reads in the same blocks, so it can hash what passes through it.
BLOCK = 1 << 17


def fingerprint(state: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 fingerprint of a state dict.

    sha256 over, for each name in order: name, dtype, shape and the digest of the tensor, itself the sha256 of the
    sha256 of each block of 2^17 elements. The file's metadata, its layout and its sharding do not count.

    Args:
        state: Tensors by name, in memory or lazy.

    Example:
        >>> fingerprint({"w": torch.zeros(2)})[:12]
        'e2723d745b78'
    """
    infos = state.infos if isinstance(state, LazyStateDict) else state
    return combine(
        (name, infos[name].dtype, tuple(infos[name].shape), tensor_digest_of(state, name)) for name in sorted(state)
    )


def tensor_digest_of(state: Mapping[str, Tensor], name: str) -> str:
    """Return the digest of one tensor, hexadecimal; of a lazy one only a block is held at a time."""
    if not isinstance(state, LazyStateDict):
        return tensor_digest(block_digest(part) for part in blocks(state[name]))
    count = state.infos[name].numel
    parts = (state.read(name, start, min(start + BLOCK, count)) for start in range(0, count, BLOCK))
    return tensor_digest(map(block_digest, parts))


def blocks(tensor: Tensor) -> Iterable[Tensor]:
    """Yield the flat tensor in pieces of at most `BLOCK` elements."""
    flat = tensor.detach().reshape(-1)
    return (flat[start : start + BLOCK] for start in range(0, flat.numel(), BLOCK))


def block_digest(part: Tensor) -> bytes:
    """Return the SHA-256 digest of the raw bytes of a flat piece."""
    return hashlib.sha256(raw_bytes(part)).digest()


def raw_bytes(part: Tensor) -> memoryview:
    """Return a view of the bytes of a flat tensor (copied when it is not contiguous or not on the CPU)."""
    flat = part.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def tensor_digest(block_digests: Iterable[bytes]) -> str:
    """Return the digest of a tensor, hexadecimal, from those of its blocks in order."""
    return hashlib.sha256(b"".join(block_digests)).hexdigest()


def combine(tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...], str]]) -> str:
    """Return the fingerprint made of (name, dtype, shape, digest), given in order of name."""
    whole = hashlib.sha256()
    for name, dtype, shape, digest in tensors:
        whole.update(f"{name}\0{dtype}\0{list(shape)}\0{digest}\0".encode())
    return whole.hexdigest()
