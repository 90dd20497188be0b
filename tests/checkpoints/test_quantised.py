"""Quantised weights: refused by every way into a merge, and made plain as the formats' own libraries do.

The codes in `quantised/` were written by bitsandbytes, compressed-tensors and auto-round, whose are those of GPTQ and
AWQ (their versions are in the files), and the `_plain` files are what these libraries make of them.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mergeflow.checkpoints import fingerprint, open_checkpoint
from mergeflow.errors import MergeflowError
from mergeflow.merging import check_recipe, configure, merge, prepare
from mergeflow.merging.compression.suite_file import compress, configure_compressor
from mergeflow.merging.files import vectors
from mergeflow.merging.files.convert import convert

FILES = Path(__file__).parent / "quantised"
BLOCKS = {"quant_method": "compressed-tensors", "weight_block_size": [16, 16]}


def _model(folder: Path, tensors: dict[str, Tensor], **config: object) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    return folder


@pytest.mark.parametrize("form", ["bitsandbytes", "compressed_tensors", "packed"])
def test_codes_become_what_their_own_library_makes_of_them(tmp_path, form):
    codes, plain = load_file(FILES / f"{form}.safetensors"), load_file(FILES / f"{form}_plain.safetensors")
    others = {"layers.0.norm.weight": torch.ones(7, dtype=torch.bfloat16), "steps": torch.arange(3)}
    source = _model(tmp_path / "in", {**codes, **others}, torch_dtype="float32", quantization_config=BLOCKS)
    made = convert(source, tmp_path / "out", shard_size=4000)
    assert made.dequantised == len(plain) > 4
    with open_checkpoint(tmp_path / "out") as checkpoint:
        assert checkpoint.keys() == plain.keys() | others.keys()
        assert made.fingerprint == fingerprint(checkpoint)
        for name, value in plain.items():
            torch.testing.assert_close(checkpoint[name], value.float(), rtol=1e-6, atol=1e-7)
        assert torch.equal(checkpoint["layers.0.norm.weight"], others["layers.0.norm.weight"])
        assert torch.equal(checkpoint["steps"], others["steps"])
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    merge({"method": "average", "experts": [str(tmp_path / "out")], "out": f"{tmp_path}/m"})


def test_the_type_of_the_result_is_the_configs_or_the_one_asked_for(tmp_path):
    codes = {"a.weight": torch.ones(4, 4).to(torch.float8_e4m3fn), "a.weight_scale_inv": torch.tensor([[2.0]])}
    source = _model(tmp_path / "in", {**codes, "b.weight": torch.ones(3)}, torch_dtype="bfloat16")
    for dtype, types in ((None, (torch.bfloat16, torch.float32)), ("float16", (torch.float16, torch.float16))):
        convert(source, tmp_path / "out", dtype)
        with open_checkpoint(tmp_path / "out") as checkpoint:
            assert (checkpoint["a.weight"].dtype, checkpoint["b.weight"].dtype) == types
            assert checkpoint["a.weight"].eq(2).all()
        assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == (dtype or "bfloat16")
    convert(source, tmp_path / "one.safetensors", "bfloat16")
    convert(source, tmp_path / "one.safetensors", "float32")  # its own file is replaced
    assert load_file(tmp_path / "one.safetensors")["b.weight"].dtype == torch.float32


def test_deepseeks_blocks_with_a_shorter_last_one(tmp_path):
    """192 rows in two blocks of 128: their size is told by config.json alone."""
    codes, scales = torch.randn(192, 130).to(torch.float8_e4m3fn), torch.rand(2, 2) + 0.5
    tensors = {"a.weight": codes, "a.weight_scale_inv": scales}
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    source = _model(tmp_path / "in", tensors, quantization_config=blocks)
    convert(source, tmp_path / "out")
    wide = scales.repeat_interleave(128, 0)[:192].repeat_interleave(128, 1)[:, :130]
    torch.testing.assert_close(load_file(tmp_path / "out" / "model.safetensors")["a.weight"], codes.float() * wide)
    (tmp_path / "in" / "config.json").write_text("{}")
    with pytest.raises(MergeflowError, match=r"scales of 'a\.weight' \[192, 130\] have shape \[2, 2\].*config"):
        convert(source, tmp_path / "other")
    assert not (tmp_path / "other").exists()


ONES, TWO = torch.ones(4, 4), torch.tensor(2.0)
FP8 = ONES.to(torch.float8_e4m3fn)
UNREADABLE = ("gemv", "nvfp4", "mxfp4", "quanto", "amax")
AWQ = {
    "a.qweight": torch.zeros(16, 1, dtype=torch.int32),
    "a.qzeros": torch.zeros(1, 1, dtype=torch.int32),
    "a.scales": torch.ones(1, 8),
}
QUANTISED: dict[str, tuple[dict[str, Tensor], dict[str, object], str]] = {
    "declared": ({"a.weight": ONES}, {"quantization_config": {"quant_method": "awq"}}, "quantization_config.*awq"),
    "int8": ({"a.weight": ONES.to(torch.int8), "a.weight_scale": torch.ones(4, 1)}, {}, "scales of 1 weights"),
    "fp8": ({"a.weight": ONES.to(torch.float8_e4m3fn), "a.weight_scale_inv": torch.ones(1, 1)}, {}, r"'a\.weight'"),
    "LLM.int8": ({"a.weight": ONES.to(torch.int8), "a.SCB": torch.ones(4)}, {}, r"such as 'a\.weight'"),
    "nf4": ({"a.weight": ONES.to(torch.uint8), "a.weight.absmax": torch.ones(1)}, {}, r"'a\.weight'"),
    "awq": (AWQ, {}, r"'a\.weight'"),
    "gemv": ({**AWQ, "a.qweight": ONES.to(torch.int32)}, {}, r"GPTQ or AWQ layout that is not known.*cannot be"),
    "nvfp4": ({"a.weight_packed": ONES.to(torch.uint8)}, {}, r"not integers \('a\.weight_packed'\)"),
    "comfy": ({"a.weight": FP8, "a.scale_weight": TWO, "scaled_fp8": torch.zeros(0)}, {}, "scales of 1 weights"),
    "mistral": ({"a.weight": FP8, "a.qscale_weight": TWO, "a.qscale_act": torch.ones(())}, {}, "scales of 1 weights"),
    "deepseek": ({"a.weight": FP8, "a.scale": TWO.reshape(1, 1)}, {}, "scales of 1 weights"),
    "fnuz": ({"a.weight": ONES.to(torch.float8_e4m3fnuz), "a.weight_scale": TWO}, {}, "scales of 1 weights"),
    "quanto": ({"a.weight._data": FP8, "a.weight._scale": torch.ones(4, 1)}, {}, "scales of an unknown kind.*_data"),
    "amax": ({"a.weight": FP8, "a.weight_amax": TWO}, {}, r"scales of an unknown kind \('a\.weight'\)"),
    "mxfp4": ({"e.down_blocks": ONES.to(torch.uint8), "e.down_scales": ONES}, {}, "not MXFP4 of stacked"),
}


@pytest.mark.parametrize("kind", QUANTISED)
def test_quantised_inputs_are_refused(tmp_path, kind):
    tensors, config, scheme = QUANTISED[kind]
    base, expert = (_model(tmp_path / name, tensors, **config) for name in ("base", "expert"))
    wanted = rf"(?s)2 inputs are quantised.*'base' \(.*base\).*{scheme}"
    recipe = {"method": "average", "base": str(base), "experts": [str(expert)], "out": str(tmp_path / "out")}
    for run in (lambda: check_recipe(recipe), lambda: merge(recipe)):
        with pytest.raises(MergeflowError, match=wanted) as raised:
            run()
    assert ("mergeflow convert IN" in str(raised.value)) == (kind not in UNREADABLE)
    with pytest.raises(MergeflowError, match="quantised"):
        vectors.extract(base, expert, tmp_path / "tau.safetensors")
    with open_checkpoint(base) as quantised, open_checkpoint(expert) as other:
        with pytest.raises(MergeflowError, match="quantised"):
            compress(configure_compressor("tall_mask"), quantised, {"a": other})
        if kind != "declared":
            with pytest.raises(MergeflowError, match="quantised"):
                prepare(configure("average"), dict(quantised), {"a": dict(other)})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "expert"]
    if kind in UNREADABLE:
        with pytest.raises(MergeflowError, match="packed weights that cannot be made plain"):
            convert(base, tmp_path / "plain")
    elif kind in ("comfy", "mistral", "deepseek", "fnuz"):
        plain = load_file(convert(base, tmp_path / "plain.safetensors").path)
        assert plain.keys() == {"a.weight"}
        assert plain["a.weight"].eq(2).all()


def test_gpt_oss_in_mxfp4_becomes_what_transformers_makes_of_it(tmp_path):
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    generator = torch.Generator().manual_seed(4)
    blocks = torch.randint(0, 256, (3, 5, 2, 16), generator=generator).to(torch.uint8)
    scales = torch.randint(110, 130, (3, 5, 2), generator=generator).to(torch.uint8)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    source = _model(tmp_path / "in", {f"{name}_blocks": blocks, f"{name}_scales": scales, f"{name}_bias": ONES})
    made = convert(source, tmp_path / "out.safetensors", "float32")
    written = load_file(made.path)
    assert written.keys() == {name, f"{name}_bias"}
    wanted = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert written[name].shape == (3, 64, 5)
    assert torch.equal(written[name], wanted)


def test_packed_parts_that_do_not_fit_are_said(tmp_path):
    codes = load_file(FILES / "packed.safetensors")
    codes["ct4s.up_proj.weight_shape"] = torch.tensor([16, 99])
    with pytest.raises(MergeflowError, match=r"'ct4s\.up_proj\.weight' do not fit.*8 integers hold 99 codes"):
        convert(_model(tmp_path / "in", codes), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_tables_of_integers_that_differ_are_refused(tmp_path):
    """int8 state dicts without scales: 23 of 30 tensors were the base's, and the experts lost."""
    base = {"a.weight": torch.ones(4, 4, dtype=torch.int8), "steps": torch.tensor([1])}
    expert = {"a.weight": torch.full((4, 4), 2, dtype=torch.int8), "steps": torch.tensor([9])}
    with pytest.raises(MergeflowError, match=r"'a\.weight' \[4, 4\] holds integers that differ .* the base and 'x'"):
        prepare(configure("average"), base, {"x": expert})
    for name, state in (("base", base), ("x", expert)):
        save_file(state, tmp_path / f"{name}.safetensors")
    recipe = {"method": "average", "base": f"{tmp_path}/base.safetensors", "experts": [f"{tmp_path}/x.safetensors"]}
    with pytest.raises(MergeflowError, match="holds integers that differ"):
        merge(recipe, tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()
    merged = prepare(configure("average"), base, {"x": {**base, "steps": torch.tensor([9])}}).at(1.0)
    assert merged["steps"].item() == 1  # counters are the base's


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_plain_names_that_look_like_scales_are_merged(dtype):
    state = {"logit_scale": torch.ones(()), "a.weight": torch.ones(2, 2, dtype=dtype)}
    state |= {"a.weight_scale": torch.ones(2)} if dtype == torch.float32 else {"a.scale": torch.ones(2, dtype=dtype)}
    merged = prepare(configure("average"), state, {"x": state}).at(1.0)
    assert merged.keys() == state.keys()
    assert all(torch.equal(merged[name], tensor) for name, tensor in state.items())


def test_bounds_of_infinity_are_converted_and_nan_is_not(tmp_path):
    mask = torch.full((3, 3), -torch.inf).triu(1)
    convert(_model(tmp_path / "in", {"mask": mask}), tmp_path / "out.safetensors", "float16")
    assert torch.equal(load_file(tmp_path / "out.safetensors")["mask"], mask.half())
    with pytest.raises(MergeflowError, match="holds NaN or infinity in tensor 'mask'"):
        convert(_model(tmp_path / "nan", {"mask": mask * 0}), tmp_path / "other.safetensors", "float16")


def test_what_cannot_be_converted_is_said(tmp_path):
    source = _model(tmp_path / "in", {"a.weight": torch.full((2, 2), 1e30)})
    with pytest.raises(MergeflowError, match=r"'a\.weight' overflows torch.float16.*bfloat16"):
        convert(source, tmp_path / "out", "float16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"], "no unfinished folder stays"
    with pytest.raises(MergeflowError, match="would overwrite the input"):
        convert(source, source / "x.safetensors", "float32")
    (tmp_path / "mine.safetensors").write_bytes(b"precious")
    with pytest.raises(MergeflowError, match="was not made by a merge"):
        convert(source, tmp_path / "mine.safetensors")
    with pytest.raises(MergeflowError, match="dtype 'int8': expected one of float64"):
        convert(source, tmp_path / "out", "int8")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_killed_conversion_leaves_nothing_under_the_name(tmp_path):
    tensors = {f"layers.{index}.weight": torch.randn(512, 512) for index in range(24)}
    source = _model(tmp_path / "in", tensors)
    arguments = ("convert", str(source), "--out", str(tmp_path / "out"), "--dtype", "bfloat16")
    run = [sys.executable, "-m", "mergeflow.cli", *arguments]
    process = subprocess.Popen(run, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])})
    end = time.monotonic() + 60
    while not (tmp_path / ".out.partial").exists() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "out").exists()
    convert(source, tmp_path / "out", "bfloat16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]
    with open_checkpoint(tmp_path / "out") as checkpoint:
        assert all(torch.equal(checkpoint[name], value.bfloat16()) for name, value in tensors.items())
