"""Per-task compression: formulas, exact cases, stored bits, and reading one task alone."""

import os

import pytest
import torch

from mergeflow.checkpoints import fingerprint, open_checkpoint, write_checkpoint
from mergeflow.errors import MergeflowError
from mergeflow.merging import configure, prepare
from mergeflow.merging.compression.compressor import compressors, configure_compressor
from mergeflow.merging.compression.suite_file import compress, extract_task
from tests.merging.helpers import awkward, draw, single_tensor, svd_k

NAME = "blocks.0.attn.weight"
EXACT_ALONE = {
    "cart_indexing": {"non_matrices": "own"},
    "emr": {},
    "tall_mask": {},
    "tsv_compress": {"non_matrices": "own"},
}


def decoded(tmp_path, name, taus, args=None):
    base, experts = single_tensor(taus, draw(*taus.shape[1:], seed=9))
    write_checkpoint(tmp_path / "base.safetensors", base)
    compress(configure_compressor(name, args), base, experts).write(tmp_path / "all.safetensors")
    states = [extract_task(tmp_path / "all.safetensors", task, tmp_path / "base.safetensors") for task in experts]
    return base[NAME], [state[NAME] for state in states]


def test_tall_mask_formula(tmp_path):
    taus = draw(3, 20, 10)
    base, thetas = decoded(tmp_path, "tall_mask", taus)
    for tau, theta in zip(taus, thetas, strict=True):
        mask = tau.abs() > 0.4 * (taus.sum(0) - tau).abs()
        torch.testing.assert_close(theta, base + mask * taus.sum(0))


def test_tall_mask_of_ties(tmp_path):
    taus = draw(3, 20, 10)
    merged = prepare(configure("ties", {"reduce": "sum"}), *single_tensor(taus)).direction[NAME]
    base, thetas = decoded(tmp_path, "tall_mask", taus, {"of": "ties"})
    mask = taus[1].abs() > 0.4 * (merged - taus[1]).abs()
    torch.testing.assert_close(thetas[1], base + mask * merged)


def test_emr_formula(tmp_path):
    taus = draw(3, 20, 10)
    sign = taus.sum(0).sign()
    elected = sign * torch.stack([torch.where(tau * sign > 0, tau.abs(), 0) for tau in taus]).amax(0)
    base, thetas = decoded(tmp_path, "emr", taus)
    for tau, theta in zip(taus, thetas, strict=True):
        elected_part = torch.where(tau * elected > 0, elected, 0)
        rescale = tau.abs().sum() / elected_part.abs().sum()
        torch.testing.assert_close(theta, base + rescale * elected_part, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(20, 10), (10, 20)])
def test_cart_indexing_and_tsv_formulas(tmp_path, shape):
    taus = draw(3, *shape)
    base, thetas = decoded(tmp_path, "cart_indexing", taus, {"rank_ratio": 0.25})
    for tau, theta in zip(taus, thetas, strict=True):
        torch.testing.assert_close(theta, base + taus.mean(0) + svd_k(tau - taus.mean(0), 3))
    for args in ({}, {"rank_ratio": 0.39}):
        base, thetas = decoded(tmp_path, "tsv_compress", taus, args)
        for tau, theta in zip(taus, thetas, strict=True):
            torch.testing.assert_close(theta, base + svd_k(tau, 3))


@pytest.mark.parametrize("name", compressors())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_awkward_tensors_and_one_task_alone(name, dtype, tmp_path):
    base, experts = awkward(dtype)
    write_checkpoint(tmp_path / "base.safetensors", base)
    before = fingerprint(base)
    compressed = compress(configure_compressor(name, EXACT_ALONE[name]), base, experts)
    compressed.write(tmp_path / "all.safetensors")
    state = extract_task(tmp_path / "all.safetensors", "expert1", tmp_path / "base.safetensors")
    assert {key: (value.shape, value.dtype) for key, value in state.items()} == {
        key: (value.shape, value.dtype) for key, value in base.items()
    }
    assert torch.equal(state["steps"], base["steps"])
    assert fingerprint(base) == before
    again = compress(configure_compressor(name, EXACT_ALONE[name]), base, dict(reversed(experts.items())), workers=3)
    assert fingerprint(again.tensors) == fingerprint(compressed.tensors)
    alone = {"only": experts["expert0"]}
    compress(configure_compressor(name, EXACT_ALONE[name]), base, alone).write(tmp_path / "one.safetensors")
    state = extract_task(tmp_path / "one.safetensors", "only", tmp_path / "base.safetensors")
    for key, value in experts["expert0"].items():
        if value.is_floating_point():
            torch.testing.assert_close(state[key], value, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-2)


@pytest.mark.parametrize("name", ["emr", "tall_mask"])
def test_masks_keep_each_tasks_statistics_of_batchnorm(name, tmp_path):
    """Sums of their changes give variances below zero, and the model NaN."""
    base = {"conv.weight": draw(4, 3, 3, 3).float(), "bn.running_mean": torch.zeros(4), "bn.running_var": torch.ones(4)}
    experts = {
        f"e{seed}": {key: value * 0.4 + 0.01 * seed for key, value in base.items()} | {"conv.weight": draw(4, 3, 3, 3)}
        for seed in range(3)
    }
    write_checkpoint(tmp_path / "base.safetensors", base)
    compressed = compress(configure_compressor(name), base, experts)
    without = [{"conv.weight": state["conv.weight"]} for state in (base, *experts.values())]
    alone = compress(configure_compressor(name), without[0], dict(zip(experts, without[1:], strict=True)))
    assert fingerprint(
        {key: value for key, value in compressed.tensors.items() if "running" not in key}
    ) == fingerprint(alone.tensors)
    compressed.write(tmp_path / "all.safetensors")
    for task, expert in experts.items():
        state = extract_task(tmp_path / "all.safetensors", task, tmp_path / "base.safetensors")
        for key in ("bn.running_mean", "bn.running_var"):
            torch.testing.assert_close(state[key], expert[key])


@pytest.mark.parametrize("name", compressors())
def test_bounds_of_infinity_come_back(name, tmp_path):
    mask = torch.full((4,), -torch.inf)
    base, experts = single_tensor(draw(2, 8, 8))
    base, experts = {**base, "mask": mask}, {task: {**state, "mask": mask} for task, state in experts.items()}
    write_checkpoint(tmp_path / "base.safetensors", base)
    compress(configure_compressor(name), base, experts).write(tmp_path / "all.safetensors")
    assert torch.equal(extract_task(tmp_path / "all.safetensors", "e1", tmp_path / "base.safetensors")["mask"], mask)


@pytest.mark.parametrize("name", ["tall_mask", "emr"])
def test_no_task_overflows_the_bases_type(name, tmp_path):
    base, experts = single_tensor(torch.stack([torch.full((8, 8), 4e4), torch.eye(8) * 6e4]).half())
    experts["e1"][NAME] += 6e4 * (1 - torch.eye(8)).half() * torch.tensor([1, -1]).half().repeat(4)
    write_checkpoint(tmp_path / "base.safetensors", base)

    def store_and_extract():
        compress(configure_compressor(name), base, experts).write(tmp_path / "all.safetensors")
        extract_task(tmp_path / "all.safetensors", "e0", tmp_path / "base.safetensors")

    with pytest.raises(MergeflowError, match=rf"'{NAME}' overflows torch.float16, the base's type.*--dtype float32"):
        store_and_extract()


def test_stored_bits_are_those_of_the_file(tmp_path):
    taus = draw(4, 64, 64).float()
    base, experts = single_tensor(taus)
    compressed = compress(configure_compressor("tall_mask"), base, experts)
    assert compressed.stored_bits == 64 * 64 * 32 + 4 * 64 * 64
    compressed.write(tmp_path / "all.safetensors")
    with open_checkpoint(tmp_path / "all.safetensors") as state:
        assert 8 * sum(info.nbytes for info in state.infos.values()) == compressed.stored_bits
        assert state.metadata["mergeflow.stored_bits"] == str(compressed.stored_bits)


def test_one_task_reads_only_its_part(tmp_path, monkeypatch):
    taus = draw(4, 8, 8)
    base, experts = single_tensor(taus)
    compress(configure_compressor("cart_indexing"), base, experts).write(tmp_path / "all.safetensors")
    read = []
    from mergeflow.checkpoints.reader import LazyStateDict

    real = LazyStateDict.__getitem__
    monkeypatch.setattr(LazyStateDict, "__getitem__", lambda self, name: read.append(name) or real(self, name))
    extract_task(tmp_path / "all.safetensors", "e2")
    assert read
    assert all(name.startswith(("shared/", "task/e2/")) for name in read)


@pytest.mark.parametrize("name", compressors())
def test_one_task_costs_the_bytes_of_its_part_alone(name, tmp_path, monkeypatch):
    """Bytes that the system reads from the file: the header, the shared part and one task's part, each once."""
    base, experts = single_tensor(draw(6, 96, 64).float(), draw(96, 64).float())
    write_checkpoint(tmp_path / "base.safetensors", base)
    path = tmp_path / "all.safetensors"
    compressed = compress(configure_compressor(name), base, experts)
    compressed.write(path)
    read, real = [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, buffers, at: read.append(real(file, buffers, at)) or read[-1])
    extract_task(path, "e2", tmp_path / "base.safetensors")
    from_base = 2 * base[NAME].nbytes if compressed.call.method.needs_base else 0  # for its fingerprint, and to add to
    own_bytes = sum(t.nbytes for n, t in compressed.tensors.items() if n.startswith(("shared/", "task/e2/")))
    others = sum(t.nbytes for n, t in compressed.tensors.items() if n.startswith("task/")) * 5 // 6
    assert sum(read) - from_base == own_bytes
    assert own_bytes < path.stat().st_size - 0.9 * others


@pytest.mark.parametrize("note", ["", "x", "[]", "null", "3", '{"name": "emr"}', '["a"]', '{"w": "F32"}', None])
@pytest.mark.parametrize("key", ["compressor", "tasks", "base", "dtypes"])
def test_damaged_notes_are_said(tmp_path, key, note):
    base, experts = single_tensor(draw(2, 8, 8))
    write_checkpoint(tmp_path / "base.safetensors", base)
    compress(configure_compressor("emr"), base, experts).write(tmp_path / "all.safetensors")
    with open_checkpoint(tmp_path / "all.safetensors") as state:
        notes = {**state.metadata, f"mergeflow.{key}": note}
        parts = {name: state[name].clone() for name in state}
    notes = {name: text for name, text in notes.items() if text is not None}
    write_checkpoint(tmp_path / "all.safetensors", parts, notes)
    with pytest.raises(MergeflowError, match=r"safetensors' is damaged \(|unknown task 'e0'|of another scheme"):
        extract_task(tmp_path / "all.safetensors", "e0", tmp_path / "base.safetensors")


def test_names_that_would_share_a_place_are_refused():
    base = {"x/w": torch.zeros(4), "w": torch.zeros(4)}
    experts = {task: {name: torch.ones(4) for name in base} for task in ("a", "a/x")}
    with pytest.raises(MergeflowError, match=r"'task/a/x/w/mask' would be stored twice.*without a slash"):
        compress(configure_compressor("emr"), base, experts)


def test_errors(tmp_path):
    base, experts = single_tensor(draw(2, 8, 8))
    write_checkpoint(tmp_path / "base.safetensors", base)
    write_checkpoint(tmp_path / "other.safetensors", experts["e0"])
    compress(configure_compressor("emr"), base, experts).write(tmp_path / "all.safetensors")
    with pytest.raises(MergeflowError, match="did you mean 'emr'"):
        configure_compressor("emrr")
    with pytest.raises(MergeflowError, match="unknown argument of tall_mask 'treshold'"):
        configure_compressor("tall_mask", {"treshold": 1})
    for name, ratio in (("cart_indexing", 0), ("cart_indexing", 1.01), ("tsv_compress", 0), ("tsv_compress", 2)):
        with pytest.raises(MergeflowError, match="rank_ratio"):
            configure_compressor(name, {"rank_ratio": ratio})
    with pytest.raises(MergeflowError, match="rank_ratio"):
        configure("adamerging", {"on": "cart", "rank_ratio": 0})
    with pytest.raises(MergeflowError, match="unknown task 'e7'"):
        extract_task(tmp_path / "all.safetensors", "e7", tmp_path / "base.safetensors")
    with pytest.raises(MergeflowError, match="give the base's path"):
        extract_task(tmp_path / "all.safetensors", "e0")
    with pytest.raises(MergeflowError, match="is not the base"):
        extract_task(tmp_path / "all.safetensors", "e0", tmp_path / "other.safetensors")
    with pytest.raises(MergeflowError, match="not a compressed suite"):
        extract_task(tmp_path / "base.safetensors", "e0")
