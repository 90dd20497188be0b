"""Arithmetic of task vectors in files, and the difference of checkpoints."""

import math
import os

import pytest
import torch

from mergeflow.checkpoints import fingerprint, open_checkpoint, write_checkpoint
from mergeflow.checkpoints import read_state as load
from mergeflow.errors import MergeflowError
from mergeflow.merging import check_recipe, configure, make_recipe, merge
from mergeflow.merging.compression.compressor import configure_compressor
from mergeflow.merging.compression.suite_file import compress
from mergeflow.merging.execution.reader import common_ties
from mergeflow.merging.files.diff import diff
from mergeflow.merging.files.vectors import add, analogy, extract, negate, scale
from mergeflow.merging.learned import learn
from tests.merging.helpers import awkward


@pytest.fixture
def files(files):
    for name in ("expert0", "expert1", "expert2"):
        extract(files / "base.safetensors", files / f"{name}.safetensors", files / f"{name}-tau.safetensors")
    return files


def tau(folder, index):
    return load(folder / f"expert{index}-tau.safetensors")


def test_extract(files):
    base, experts = awkward(torch.float32)
    change = tau(files, 0)
    assert set(change) == {name for name, value in base.items() if value.is_floating_point()}
    for name, value in change.items():
        assert torch.equal(value, experts["expert0"][name] - base[name])
    with open_checkpoint(files / "expert0-tau.safetensors") as state:
        assert state.is_task_vector
        assert state.metadata["mergeflow.base"] == fingerprint(base)


def test_arithmetic(files):
    paths = [files / f"expert{index}-tau.safetensors" for index in range(3)]
    taus = [tau(files, index) for index in range(3)]
    add(paths, files / "sum.safetensors", [1, 2, -0.5])
    negate(paths[0], files / "negative.safetensors")
    scale(paths[0], 0.25, files / "quarter.safetensors")
    analogy(*paths, files / "analogy.safetensors")
    for name in taus[0]:
        a, b, c = (each[name] for each in taus)
        torch.testing.assert_close(load(files / "sum.safetensors")[name], a + 2 * b - 0.5 * c)
        assert torch.equal(load(files / "negative.safetensors")[name], -a)
        assert torch.equal(load(files / "quarter.safetensors")[name], a * 0.25)
        torch.testing.assert_close(load(files / "analogy.safetensors")[name], c + (b - a))


@pytest.mark.parametrize("method", ["task_arithmetic", "ties", "cart"])
def test_task_vectors_stand_where_experts_stand(files, method):
    values = {"method": method, "base": str(files / "base.safetensors")}
    experts = {f"e{index}": str(files / f"expert{index}.safetensors") for index in range(3)}
    vectors = {f"e{index}": str(files / f"expert{index}-tau.safetensors") for index in range(3)}
    mixed = {"experts": {"e0": experts["e0"]}, "task_vectors": {"e1": vectors["e1"], "e2": vectors["e2"]}}
    fingerprints = [
        merge(make_recipe({**values, **inputs}), out=files / f"{index}.safetensors").fingerprint
        for index, inputs in enumerate(({"experts": experts}, {"task_vectors": vectors}, mixed))
    ]
    assert len(set(fingerprints)) == 1


def test_a_vector_of_another_base_is_refused(files):
    other, _ = awkward(torch.float32, seed=8)
    write_checkpoint(files / "other.safetensors", other)
    values = {"method": "average", "task_vectors": [str(files / "expert0-tau.safetensors")]}
    with pytest.raises(MergeflowError, match="was taken from the base"):
        merge(make_recipe({**values, "base": str(files / "other.safetensors")}), out=files / "out.safetensors")
    assert not (files / "out.safetensors").exists()
    with open_checkpoint(files / "expert0-tau.safetensors") as vector:
        with pytest.raises(MergeflowError, match="'e0' was taken from the base"):
            compress(configure_compressor("emr"), other, {"e0": vector})
        with pytest.raises(MergeflowError, match="'e0' was taken from the base"):
            learn(configure("adamerging"), other, {"e0": vector}, lambda state, step: (0.0, {}))
    extract(files / "other.safetensors", files / "expert0.safetensors", files / "odd.safetensors")
    with pytest.raises(MergeflowError, match="of different bases"):
        add([files / "odd.safetensors", files / "expert0-tau.safetensors"], files / "sum.safetensors")


def test_errors(files):
    with pytest.raises(MergeflowError, match="is not a task vector"):
        negate(files / "expert0.safetensors", files / "x.safetensors")
    with pytest.raises(MergeflowError, match="1 weights for 2 task vectors"):
        add([files / "a", files / "b"], files / "x.safetensors", [1])


def test_an_adapter_with_retrained_modules(files):
    """The weights it retrained whole are a difference too; those it adapts are one already; no others are there."""
    base = {name: torch.rand(3, 4) for name in ("adapted", "retrained", "still")}
    base = {f"{name}.weight": value for name, value in base.items()}
    stored = {
        "adapted.lora_A.weight": torch.rand(1, 4),
        "adapted.lora_B.weight": torch.rand(3, 1),
        "retrained.weight": torch.rand(3, 4),
    }
    write_checkpoint(files / "model.safetensors", base)
    (files / "adapter").mkdir()
    tensors = {f"base_model.model.{name}": value for name, value in stored.items()}
    write_checkpoint(files / "adapter" / "adapter_model.safetensors", tensors)
    (files / "adapter" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 1, "lora_alpha": 2}')
    with pytest.raises(MergeflowError, match=r"holds whole weights \('retrained\.weight'\) and differences"):
        negate(files / "adapter", files / "x.safetensors")
    extract(files / "model.safetensors", files / "adapter", files / "x.safetensors")
    loaded = load(files / "x.safetensors")
    assert set(loaded) == {"adapted.weight", "retrained.weight"}
    torch.testing.assert_close(
        loaded["adapted.weight"], 2 * stored["adapted.lora_B.weight"] @ stored["adapted.lora_A.weight"]
    )
    assert torch.equal(loaded["retrained.weight"], stored["retrained.weight"] - base["retrained.weight"])


def test_a_task_vector_is_not_relabelled(files):
    base, _ = awkward(torch.float32)
    write_checkpoint(files / "other.safetensors", awkward(torch.float32, seed=8)[0])
    write_checkpoint(files / "narrow.safetensors", {**base, "bias": torch.zeros(4)})
    with pytest.raises(MergeflowError, match="was taken from the base"):
        extract(files / "other.safetensors", files / "expert0-tau.safetensors", files / "x.safetensors")
    with pytest.raises(MergeflowError, match=r"tensor 'bias' of shape \[5\], base has \[4\]"):
        extract(files / "narrow.safetensors", files / "expert0-tau.safetensors", files / "x.safetensors")
    assert not (files / "x.safetensors").exists()
    copied = extract(files / "base.safetensors", files / "expert0-tau.safetensors", files / "x.safetensors")
    assert copied == fingerprint(tau(files, 0))


@pytest.mark.parametrize("factor", [math.nan, math.inf, -math.inf])
def test_factors_are_finite(files, factor):
    a, b = (files / f"expert{index}-tau.safetensors" for index in range(2))
    for run in (
        lambda: scale(a, factor, files / "x.safetensors"),
        lambda: add([a, b], files / "x.safetensors", [1, factor]),
    ):
        with pytest.raises(MergeflowError, match=r"must be finite numbers, found \[.*(nan|inf)\]"):
            run()
    assert not (files / "x.safetensors").exists()


def test_bounds_of_infinity_do_not_change(files):
    """A merge keeps infinities that all models share; a vector leaves them out, so that its expert comes back."""
    base, experts = awkward(torch.float32)
    mask = torch.full((4, 4), -torch.inf).triu(1)
    write_checkpoint(files / "base.safetensors", {**base, "mask": mask.half()})
    write_checkpoint(files / "expert.safetensors", {**experts["expert0"], "mask": mask})
    extract(files / "base.safetensors", files / "expert.safetensors", files / "x.safetensors")
    assert set(load(files / "x.safetensors")) == {name for name, value in base.items() if value.is_floating_point()}
    sources = {"base": str(files / "base.safetensors"), "experts": [str(files / "x.safetensors")]}
    merge(make_recipe({"method": "average", **sources, "out": str(files / "back.safetensors")}))
    assert torch.equal(load(files / "back.safetensors")["mask"], mask.half())
    write_checkpoint(files / "expert.safetensors", {**experts["expert0"], "mask": mask.T.contiguous()})
    with pytest.raises(MergeflowError, match=r"holds NaN or infinity in tensor 'mask'"):
        extract(files / "base.safetensors", files / "expert.safetensors", files / "x.safetensors", force=True)


def test_a_result_that_overflows_names_its_tensor(files):
    write_checkpoint(files / "low.safetensors", {"still": torch.ones(2), "w": torch.tensor([1.0, -3e38])})
    write_checkpoint(files / "high.safetensors", {"still": torch.ones(2), "w": torch.tensor([1.0, 3e38])})
    write_checkpoint(files / "zero.safetensors", {"still": torch.ones(2), "w": torch.zeros(2)})
    extract(files / "zero.safetensors", files / "high.safetensors", files / "tau.safetensors")
    before = sorted(files.iterdir())
    for run in (
        lambda out: scale(files / "tau.safetensors", 2.0, out),
        lambda out: add([files / "tau.safetensors"] * 2, out),
        lambda out: extract(files / "low.safetensors", files / "high.safetensors", out),
    ):
        with pytest.raises(MergeflowError, match=r"tensor 'w' of the result overflows torch\.float32"):
            run(files / "x.safetensors")
    assert sorted(files.iterdir()) == before
    scale(files / "tau.safetensors", -1.1, files / "x.safetensors")
    assert load(files / "x.safetensors")["w"][1] == torch.tensor(3e38) * -1.1


def test_diff(files):
    difference = diff(files / "base.safetensors", files / "expert0.safetensors")
    base, expert = load(files / "base.safetensors"), load(files / "expert0.safetensors")
    assert difference.fingerprints == (fingerprint(base), fingerprint(expert))
    assert not difference.equal
    rows = {row.name: row for row in difference.tensors}
    a, b = base["conv"].double().reshape(-1), expert["conv"].double().reshape(-1)
    assert rows["conv"].norm_difference == pytest.approx(float((a - b).norm()))
    assert rows["conv"].cosine == pytest.approx(float(a @ b / a.norm() / b.norm()))
    assert rows["still.attn"].equal
    assert rows["still.attn"].cosine == pytest.approx(1)
    assert math.isnan(rows["empty"].cosine)
    assert diff(files / "base.safetensors", files / "base.safetensors").equal
    assert {row.change for row in difference.tensors} == {""}
    missing = diff(files / "base.safetensors", files / "expert0-tau.safetensors")
    assert {row.name for row in missing.tensors if row.shapes[1] is None} == {"steps", "flag"}
    assert {row.change for row in missing.tensors} == {""}


class Vector(dict):
    """A task vector in memory."""

    is_task_vector = True


def test_tied_names_stay_tied_only_where_every_expert_keeps_them_equal():
    weight = torch.ones(2, 2)
    base = {"embedding": weight, "head": weight}
    same, untied, none = Vector(embedding=weight.clone(), head=weight.clone()), Vector(head=weight.clone()), Vector()
    assert common_ties(base, {"a": same, "b": none}) == {"head": "embedding"}
    assert common_ties(base, {"a": same, "b": untied}) == {}
    assert common_ties(base, {"a": Vector(embedding=weight, head=-weight)}) == {}


@pytest.mark.parametrize("kind", ["itself", "symlink", "hard link"])
@pytest.mark.parametrize("victim", ["base", "expert0", "expert0-tau", "expert1-tau"])
def test_no_command_overwrites_an_input(files, victim, kind):
    source = files / f"{victim}.safetensors"
    out = source if kind == "itself" else files / "link.safetensors"
    if kind == "symlink":
        out.symlink_to(source)
    elif kind == "hard link":
        os.link(source, out)
    before = source.read_bytes()
    base, expert, a, b = (files / f"{name}.safetensors" for name in ("base", "expert0", "expert0-tau", "expert1-tau"))
    runs = {
        "base": [lambda: extract(base, expert, out), lambda: extract(base, a, out)],
        "expert0": [lambda: extract(base, expert, out)],
        "expert0-tau": [
            lambda: extract(base, a, out),
            lambda: add([b, a], out),
            lambda: scale(a, 2.0, out),
            lambda: negate(a, out),
            lambda: analogy(b, b, a, out),
        ],
        "expert1-tau": [lambda: add([a, b], out), lambda: analogy(b, a, a, out)],
    }
    for run in runs[victim]:
        with pytest.raises(MergeflowError, match="would overwrite the input"):
            run()
    assert source.read_bytes() == before


def test_a_task_vector_is_no_base_of_another(files):
    a, b = (files / f"expert{index}-tau.safetensors" for index in range(2))
    with pytest.raises(MergeflowError, match=r"the base '.*expert0-tau\.safetensors' is a task vector or an adapter"):
        extract(a, b, files / "x.safetensors")
    assert not (files / "x.safetensors").exists()


def test_diff_tells_other_types_and_shapes(tmp_path):
    value = torch.arange(24.0).reshape(4, 6)
    first = {"both": value, "scalar": torch.ones(()), "shape": value, "type": value}
    write_checkpoint(tmp_path / "a.safetensors", first)
    other = {"both": value.half().T.contiguous(), "scalar": torch.ones(1), "shape": value.T.contiguous()}
    write_checkpoint(tmp_path / "b.safetensors", {**other, "type": value.half()})
    difference = diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert {row.name: row.change for row in difference.tensors} == {
        "both": "float32 → float16, [4, 6] → [6, 4]",
        "scalar": "[] → [1]",
        "shape": "[4, 6] → [6, 4]",
        "type": "float32 → float16",
    }
    assert not any(row.equal for row in difference.tensors)


def test_whole_models_are_no_task_vectors(files):
    values = {"method": "task_arithmetic", "base": str(files / "base.safetensors"), "out": str(files / "a.safetensors")}
    made = merge(make_recipe({**values, "experts": [str(files / "expert0.safetensors")]})).path
    vectors = [str(made), str(files / "expert1.safetensors")]
    for run in (check_recipe, merge):
        with pytest.raises(MergeflowError) as caught:
            run(make_recipe({**values, "task_vectors": vectors, "out": str(files / "b.safetensors")}))
        for path in vectors:
            assert f"'{path}' is not a task vector: whole models go under `experts`" in str(caught.value)
