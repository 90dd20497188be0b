"""Fingerprints: the identity of a state dict, whatever file holds it.

A fingerprint names its scheme, `blake3:9f86…`. Those without a name are of the first scheme, SHA-256: what was recorded
with it (registered versions, task vectors, journals) stays verifiable, because `matches` takes the recorded scheme.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from mergeflow.checkpoints.header import DType
from mergeflow.checkpoints.reader import LazyStateDict
from mergeflow.errors import MergeflowError
from mergeflow.late import torch

if TYPE_CHECKING:
    from torch import Tensor

# Elements hashed as one leaf. The merge engine reads whole leaves, so it can hash what passes through it.
BLOCK = 1 << 17

SCHEME = "blake3"  # of new fingerprints: 7.6 GB/s on a core with AVX-512, where SHA-256 in hardware reaches 1.8
FIRST = "sha256"  # of fingerprints from before schemes had names
_HASHES: dict[str, Callable[..., Any]] = {FIRST: hashlib.sha256, SCHEME: blake3}


def fingerprint(state: Mapping[str, Tensor], scheme: str = SCHEME) -> str:
    """Return the fingerprint of a state dict.

    H over, for each name in order: name, dtype, shape and the digest of the tensor, itself H over the H of each block
    of 2^17 elements, where H is the scheme's hash. The file's metadata, its layout and its sharding do not count.

    Args:
        state: Tensors by name, in memory or lazy.
        scheme: "blake3", or "sha256" to compare with what was recorded before.

    Example:
        >>> fingerprint({"w": torch.zeros(2)})[:19]
        'blake3:9ca46265cbfc'
        >>> fingerprint({"w": torch.zeros(2)}, "sha256")[:12]
        'e2723d745b78'
    """
    infos = state.infos if isinstance(state, LazyStateDict) else state
    digests = (
        (name, infos[name].dtype, tuple(infos[name].shape), tensor_digest_of(state, name, scheme))
        for name in sorted(state)
    )
    return combine(digests, scheme)


def scheme_of(recorded: str) -> str:
    """Return the scheme that a fingerprint names.

    Raises:
        MergeflowError: This version does not know the scheme.

    Example:
        >>> scheme_of("blake3:9ca4"), scheme_of("e272")
        ('blake3', 'sha256')
    """
    named = recorded.rpartition(":")[0] or FIRST
    if named not in _HASHES:
        raise MergeflowError(
            f"the fingerprint '{recorded:.24}…' is of the scheme '{named}', but this version of mergeflow knows "
            f"{' and '.join(_HASHES)}: use the version that recorded it, or a newer one."
        )
    return named


def matches(state: Mapping[str, Tensor], recorded: str, current: str | None = None) -> bool:
    """Return whether a recorded fingerprint, of any scheme, is that of a state dict.

    Args:
        state: Tensors by name; read only where its fingerprint is not known in the recorded scheme.
        current: The state's fingerprint, if it was taken already.
    """
    scheme = scheme_of(recorded)
    return recorded == (current if current and scheme_of(current) == scheme else fingerprint(state, scheme))


def short(recorded: str) -> str:
    """Return the first 12 digits of a fingerprint, for people.

    Example:
        >>> short("blake3:9ca46265cbfc2cf6")
        '9ca46265cbfc'
    """
    return recorded.rpartition(":")[2][:12]


def tensor_digest_of(state: Mapping[str, Tensor], name: str, scheme: str = SCHEME) -> str:
    """Return the digest of one tensor, hexadecimal; of a lazy one only a block is held at a time."""
    if not isinstance(state, LazyStateDict):
        return tensor_digest((block_digest(part, scheme) for part in blocks(state[name])), scheme)
    count = state.infos[name].numel
    parts = (state.read(name, start, min(start + BLOCK, count)) for start in range(0, count, BLOCK))
    return tensor_digest((block_digest(part, scheme) for part in parts), scheme)


def blocks(tensor: Tensor) -> Iterable[Tensor]:
    """Yield a tensor, flattened, in pieces [n] of at most `BLOCK` elements."""
    flat = tensor.detach().reshape(-1)
    return (flat[start : start + BLOCK] for start in range(0, flat.numel(), BLOCK))


def block_digest(part: Tensor | memoryview, scheme: str = SCHEME) -> bytes:
    """Return the digest of the raw bytes of a flat piece [n], or of these bytes."""
    digest: bytes = _HASHES[scheme](part if isinstance(part, memoryview) else raw_bytes(part)).digest()
    return digest


def leaf_digests(data: memoryview, itemsize: int, scheme: str = SCHEME) -> list[bytes]:
    """Return the digest of each leaf of a piece that begins with one."""
    leaf = BLOCK * itemsize
    return [block_digest(data[at : at + leaf], scheme) for at in range(0, len(data), leaf)]


def raw_bytes(part: Tensor) -> memoryview:
    """Return a view of the bytes of a flat piece [n] (of a copy where it is not contiguous or not on the CPU)."""
    flat = part.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def tensor_digest(block_digests: Iterable[bytes], scheme: str = SCHEME) -> str:
    """Return the digest of a tensor, hexadecimal, from those of its blocks in order."""
    digest: str = _HASHES[scheme](b"".join(block_digests)).hexdigest()
    return digest


def combine(tensors: Iterable[tuple[str, DType | torch.dtype, tuple[int, ...], str]], scheme: str = SCHEME) -> str:
    """Return the fingerprint made of (name, dtype, shape, digest), given in order of name."""
    whole = _HASHES[scheme]()
    for name, dtype, shape, digest in tensors:
        whole.update(f"{name}\0{dtype}\0{list(shape)}\0{digest}\0".encode())
    return whole.hexdigest() if scheme == FIRST else f"{scheme}:{whole.hexdigest()}"
