"""The formulas as one would write them in a notebook: everything in memory, torch and safetensors alone."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import local

import torch
from blake3 import blake3
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

State = dict[str, Tensor]


_PIECE = 8 * 2**20  # bytes of a file that are read at a time


def floor(base: Path, experts: list[Path], out: Path, threads: int = 2, hashed: bool = False) -> None:
    """Read every file into reused memory, sum in float32, write one file to the disk: what no merge can be faster than.

    No header is checked, no value is looked at, and files must have one type and layout.

    Args:
        out: the sum, without a header.
        hashed: whether all that is read and written is hashed too, as provenance asks it of a merge.
    """
    torch.set_num_threads(1)
    files = [os.open(path, os.O_RDONLY) for path in (base, *experts)]
    starts = [8 + int.from_bytes(os.pread(file, 8, 0), "little") for file in files]
    size = os.fstat(files[0]).st_size - starts[0]
    with safe_open(base, "pt") as header:
        dtype = header.get_tensor(next(iter(header.keys()))).dtype
    target, buffers = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), local()

    def work(at: int) -> None:
        if not hasattr(buffers, "stored"):
            buffers.stored = torch.empty(len(files), _PIECE, dtype=torch.uint8)
            buffers.total, buffers.one = torch.empty(2, _PIECE // dtype.itemsize)
            buffers.result = torch.empty(_PIECE // dtype.itemsize, dtype=dtype)
        count = min(_PIECE, size - at)
        for file, start, into in zip(files, starts, buffers.stored, strict=True):
            os.preadv(file, [into.numpy().data[:count]], start + at)
        values = buffers.stored.view(dtype)[:, : count // dtype.itemsize]
        total, converted, result = (room[: values.shape[1]] for room in (buffers.total, buffers.one, buffers.result))
        total.copy_(values[0]).mul_(1 - 0.3 * len(experts))
        for row in values[1:]:
            total.add_(converted.copy_(row), alpha=0.3)
        os.pwrite(target, result.copy_(total).view(torch.uint8).numpy().data, at)
        for written in (*buffers.stored[:, :count], result.view(torch.uint8)) if hashed else ():
            blake3(written.numpy().data).digest()

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(0, size, _PIECE)))
    os.fsync(target)
    for file in (*files, target):
        os.close(file)


def load(base: Path, experts: list[Path]) -> tuple[State, list[State]]:
    """Return the base and the task vectors."""
    start = load_file(base)
    taus = []
    for path in experts:
        state = load_file(path)
        taus.append({name: state[name] - start[name] for name in start})
    return start, taus


def task_arithmetic(start: State, taus: list[State]) -> State:
    """θ0 + .3 Σ τ."""
    return {name: value + 0.3 * torch.stack([tau[name] for tau in taus]).sum(0) for name, value in start.items()}


def ties(start: State, taus: list[State], keep: float = 0.2) -> State:
    """Global trim by k-th value of the flattened vector, then a disjoint mean.

    Args:
        keep: share of each task vector's entries that is kept, (0, 1].

    Source:
        Yadav et al., TIES-Merging (NeurIPS 2023), algorithm 1; λ = 1.
    """
    cuts = []
    for tau in taus:
        flat = torch.cat([value.reshape(-1) for value in tau.values()]).abs()
        cuts.append(flat.kthvalue(flat.numel() - int(keep * flat.numel()) + 1).values)
    merged = {}
    for name, value in start.items():
        stack = torch.stack([tau[name] for tau in taus])
        trimmed = torch.stack([torch.where(row.abs() >= cut, row, 0) for row, cut in zip(stack, cuts, strict=True)])
        sign = trimmed.sum(0).sign()
        agreeing = torch.where(trimmed * sign > 0, trimmed, 0)
        merged[name] = value + agreeing.sum(0) / (agreeing != 0).sum(0).clamp(min=1)
    return merged


def dare(start: State, taus: list[State], drop: float = 0.9) -> State:
    """Bernoulli masks, rescaled, summed, times 0.3.

    Args:
        drop: probability of dropping an entry, [0, 1).

    Source:
        Yu et al., Language models are Super Mario (ICML 2024), section 3.
    """
    merged = {}
    for name, value in start.items():
        sparse = [tau[name] * (torch.rand_like(tau[name]) >= drop) / (1 - drop) for tau in taus]
        merged[name] = value + 0.3 * torch.stack(sparse).sum(0)
    return merged


def slerp(start: State, taus: list[State], t: float = 0.5) -> State:
    """Spherical interpolation of two experts.

    Args:
        taus: task vectors, of which the first two count.
        t: 0 gives the first expert, 1 the second.

    Source:
        Shoemake, Animating rotation with quaternion curves (SIGGRAPH 1985); of each tensor by itself.
    """
    merged = {}
    for name, value in start.items():
        a, b = (value + tau[name] for tau in taus[:2])
        angle = torch.arccos((a * b).sum() / (a.norm() * b.norm()))
        merged[name] = (torch.sin((1 - t) * angle) * a + torch.sin(t * angle) * b) / torch.sin(angle)
    return merged


def _treated(name: str, value: Tensor, everything: bool) -> bool:
    return value.ndim == 2 and (everything or "attn" in name or "mlp" in name)


def iso_c(start: State, taus: list[State]) -> State:
    """SVD of the sum with a flat spectrum."""
    merged = {}
    for name, value in start.items():
        total = torch.stack([tau[name] for tau in taus]).sum(0)
        if _treated(name, value, True):
            left, sigma, right = torch.linalg.svd(total, full_matrices=False)
            merged[name] = value + sigma.mean() * left @ right
        else:
            merged[name] = value + total / len(taus)
    return merged


def cart(start: State, taus: list[State], ratio: float = 0.08) -> State:
    """Σ SVD_k of the centred task vectors on the mean.

    Args:
        ratio: rank as a share of the smaller side, (0, 1].

    Source:
        Choi et al., Revisiting weight averaging for model merging (CART), algorithm 1; scale 1.
    """
    merged = {}
    for name, value in start.items():
        stack = torch.stack([tau[name] for tau in taus])
        mean = stack.mean(0)
        merged[name] = value + mean
        if _treated(name, value, False):
            k = -int(-ratio * min(value.shape) // 1)
            for row in stack - mean:
                left, sigma, right = torch.linalg.svd(row, full_matrices=False)
                merged[name] += (left[:, :k] * sigma[:k]) @ right[:k]
    return merged


def tsv(start: State, taus: list[State]) -> State:
    """TSV-M."""
    merged = {}
    for name, value in start.items():
        stack = torch.stack([tau[name] for tau in taus])
        if not _treated(name, value, True):
            merged[name] = value + stack.mean(0)
            continue
        k = max(1, min(value.shape) // len(taus))
        factors = [torch.linalg.svd(row, full_matrices=False) for row in stack]
        left, right = torch.cat([u[:, :k] for u, _, _ in factors], 1), torch.cat([v[:k] for _, _, v in factors], 0)
        sigma = torch.cat([s[:k] for _, s, _ in factors])
        polars = [u @ v for u, _, v in (torch.linalg.svd(side, full_matrices=False) for side in (left, right))]
        merged[name] = value + (polars[0] * sigma) @ polars[1]
    return merged


SPECTRAL = ("iso_c", "cart", "tsv")


def first_blocks(state: State, count: int) -> State:
    """The tensors of the first blocks, from which the cost of all is extrapolated."""
    return {name: value for name, value in state.items() if any(f"resblocks.{i}." in name for i in range(count))}
