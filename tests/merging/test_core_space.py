"""Core space: the method's formula written out, what it keeps, and the factors that it takes from PEFT's files."""

import json

import pytest
import torch

from mergeflow.checkpoints import open_checkpoint, write_checkpoint
from mergeflow.merging import configure, merge, prepare
from mergeflow.merging.methods.core_space import CoreSpaceArgs, merged_in_core
from tests.merging.helpers import agreeing_mean, orthogonal, single_tensor

ROWS, COLUMNS, RANKS = 14, 10, (2, 3, 2)


def adapters(rows=ROWS, columns=COLUMNS):
    generator = torch.Generator().manual_seed(5)
    draw = {"generator": generator, "dtype": torch.float64}
    return [(torch.randn(rank, columns, **draw), torch.randn(rows, rank, **draw)) for rank in RANKS]


def written_out(pairs, then, keep=0.2):
    """Algorithm 1 of the paper with full SVDs: align each task's own factors, merge the cores, go back."""
    right = torch.linalg.svd(torch.cat([a for a, _ in pairs]), full_matrices=False)[2]
    left = torch.linalg.svd(torch.cat([b for _, b in pairs], 1), full_matrices=False)[0]
    cores = []
    for a, b in pairs:
        ua, sa, va = torch.linalg.svd(a, full_matrices=False)
        ub, sb, vb = torch.linalg.svd(b, full_matrices=False)
        core = torch.diag(sb) @ vb @ ua @ torch.diag(sa)
        cores.append((left.T @ ub) @ core @ (va @ right.T))
    stack = torch.stack(cores)
    if then == "task_arithmetic":
        merged = stack.sum(0)
    elif then == "iso_c":
        u, s, v = torch.linalg.svd(stack.sum(0), full_matrices=False)
        merged = s.mean() * u @ v
    elif then == "tsv":
        rank = len(stack[0]) // len(stack)
        parts = [torch.linalg.svd(core, full_matrices=False) for core in stack]
        u = torch.cat([part[0][:, :rank] for part in parts], 1)
        s = torch.cat([part[1][:rank] for part in parts])
        v = torch.cat([part[2][:rank] for part in parts])
        merged = orthogonal(u) @ torch.diag(s) @ orthogonal(v)
    else:
        merged = agreeing_mean(stack, keep)
    return left @ merged @ right


@pytest.mark.parametrize("then", ["task_arithmetic", "ties", "tsv", "iso_c"])
@pytest.mark.parametrize("shape", [(14, 10), (5, 30)])
def test_the_formula_of_the_paper(then, shape):
    pairs = adapters(*shape)
    merged = merged_in_core(pairs, (1.0, 1.0, 1.0), CoreSpaceArgs(then=then))
    torch.testing.assert_close(merged, written_out(pairs, then), rtol=1e-6, atol=1e-6)
    assert int(torch.linalg.matrix_rank(merged, rtol=1e-6)) <= sum(RANKS)


def test_nothing_is_lost_in_the_cores():
    pairs = adapters()
    weights = (1.0, -0.5, 2.0)
    wanted = sum(weight * b @ a for weight, (a, b) in zip(weights, pairs, strict=True))
    merged = merged_in_core([*pairs, None], (*weights, 1.0), CoreSpaceArgs(then="task_arithmetic"))
    torch.testing.assert_close(merged, wanted)


def test_task_vectors_without_factors_take_those_of_their_svd():
    taus = torch.stack([b @ a for a, b in adapters()])
    base, experts = single_tensor(taus)
    merged = prepare(configure("core_space"), base, experts).direction["blocks.0.attn.weight"]
    pairs = []
    for tau in taus:
        u, s, v = torch.linalg.svd(tau, full_matrices=False)
        real = s > 1e-9
        root = s[real].sqrt()
        pairs.append((root[:, None] * v[real], u[:, real] * root))
    torch.testing.assert_close(merged, written_out(pairs, "ties"), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj.weight", "transformer.h.0.mlp.c_fc.weight"])
def test_adapters_bring_their_own_factors(tmp_path, name):
    """Another choice of B and A for the same product gives another core space: the file's counts."""
    conv = "c_fc" in name
    shape = (COLUMNS, ROWS) if conv else (ROWS, COLUMNS)
    write_checkpoint(tmp_path / "base/model.safetensors", {name: torch.zeros(shape)})
    (tmp_path / "base/config.json").write_text(json.dumps({"model_type": "gpt2" if conv else "llama"}))
    pairs = adapters()
    for index, (a, b) in enumerate(pairs):
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        tensors = {f"{stem}.lora_A.weight": a.float(), f"{stem}.lora_B.weight": b.float()}
        write_checkpoint(tmp_path / f"{index}/adapter_model.safetensors", tensors)
        config = {"peft_type": "LORA", "r": len(a), "lora_alpha": 2 * len(a), "fan_in_fan_out": conv}
        (tmp_path / f"{index}/adapter_config.json").write_text(json.dumps(config))
    recipe = {"method": "core_space", "base": str(tmp_path / "base"), "experts": [str(tmp_path / c) for c in "012"]}
    merge({**recipe, "out": str(tmp_path / "out.safetensors")})
    wanted = written_out([(a, 2 * b) for a, b in pairs], "ties").float()
    with open_checkpoint(tmp_path / "out.safetensors") as checkpoint:
        torch.testing.assert_close(checkpoint[name].T if conv else checkpoint[name], wanted, rtol=1e-4, atol=1e-4)
    merge({**recipe, "adapter": 7, "out": str(tmp_path / "adapter")})
    with open_checkpoint(tmp_path / "adapter") as checkpoint:
        torch.testing.assert_close(checkpoint[name].T if conv else checkpoint[name], wanted, rtol=1e-4, atol=1e-4)
