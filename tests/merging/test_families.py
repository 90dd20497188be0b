"""Merges are right on every family of transformers that can be built small: numbers, names, files that load."""

import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mergeflow.checkpoints import open_checkpoint
from mergeflow.checkpoints.align_names import fit_inputs
from mergeflow.errors import MergeflowError
from mergeflow.merging import merge
from tests.merging.families import FAMILIES, built
from tests.merging.tiny_models import perturb

peft = pytest.importorskip("peft")
pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("ignore")]
CHUNKS = 20  # of some 30 families each, of which about 19 can be built


def read(folder: Path) -> dict[str, Tensor]:
    """Return a model's tensors; 0 for the infinities of bounds, which count among the elements that do not change."""
    with open_checkpoint(folder) as state:
        return {name: torch.where(state[name].isinf(), 0, state[name]) for name in state}


def averaged(base: Tensor, experts: list[Tensor]) -> Tensor:
    return torch.stack(experts).mean(0)


def on_the_arc(base: Tensor, experts: list[Tensor]) -> Tensor:
    a, b = (values.reshape(-1) for values in experts)
    cosine = float(a @ b / (a.norm() * b.norm())) if a.norm() * b.norm() else 1.0
    angle = math.acos(max(-1.0, min(1.0, cosine)))
    half = math.sin(angle / 2) / math.sin(angle) if abs(cosine) < 0.9995 else 0.5
    return (half * (a + b)).reshape(base.shape)


def trimmed_sums(base: Mapping[str, Tensor], experts: Sequence[Mapping[str, Tensor]], keep: float) -> dict[str, Tensor]:
    """TIES of all tensors at once, in float64: base + the mean of the largest changes that agree in sign."""
    taus = torch.stack([torch.cat([(expert[n] - base[n]).reshape(-1) for n in base]) for expert in experts])
    count = int(keep * taus.shape[1])
    cut = taus.abs().topk(count, dim=1).values[:, -1:]
    taus = torch.where(taus.abs() >= cut, taus, 0)
    sign = taus.sum(0).sign()
    sign = torch.where(sign == 0, 1.0 if sign.sum() >= 0 else -1.0, sign)
    agree = taus * sign > 0
    merged = (taus * agree).sum(0) / agree.sum(0).clamp(min=1)
    pieces = merged.split([value.numel() for value in base.values()])
    return {name: base[name] + piece.reshape(base[name].shape) for name, piece in zip(base, pieces, strict=True)}


def far(merged: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> int:
    """Count entries that are not the expected ones, but for rounding."""
    close = {name: torch.isclose(merged[name].double(), expected[name], rtol=1e-5, atol=1e-5) for name in expected}
    return sum(int((~close_values).sum()) for close_values in close.values())


def faults_of(model: Any, family: str, folder: Path) -> list[str]:
    """List the faults of a family's merges."""
    faults: list[str] = []
    models: list[Any] = [model, *(built(family, seed) for seed in (1, 2))]
    names = ("base", "a", "b")
    for name, published in zip(names, models, strict=True):
        published.save_pretrained(folder / name)
        published.save_pretrained(folder / f"{name}-memory", save_original_format=False)
    recipe = {"base": str(folder / "base"), "experts": {name: str(folder / name) for name in ("a", "b")}}
    floats = [
        {name: value.double() for name, value in read(folder / place).items() if value.is_floating_point()}
        for place in names
    ]
    base, experts = floats[0], [dict(values) for values in floats[1:]]
    # A weight that is tied and stored once takes part once.
    wanted = {
        method: {name: rule(base[name], [expert[name] for expert in experts]) for name in base}
        for method, rule in (("average", averaged), ("slerp", on_the_arc))
    }
    wanted["ties"] = trimmed_sums(base, experts, 0.2)
    for method, expected in wanted.items():
        args = {"args": {"keep": 0.2, "scale": 1.0}} if method == "ties" else {}
        merge({"method": method, **recipe, **args, "out": str(folder / method)})
        wrong = far(read(folder / method), expected)
        if wrong > (3 if method == "ties" else 0):  # float32 may decide otherwise at the threshold
            faults.append(f"{method}: {wrong} of {sum(value.numel() for value in expected.values())}")
    loaded, loading = type(model).from_pretrained(folder / "average", output_loading_info=True)
    again, before = type(model).from_pretrained(folder / "base", output_loading_info=True)
    faults += [key for key in loading if loading[key] != before[key]]
    states = [member.state_dict() for member in models]
    mean = {
        n: (states[1][n].double() + states[2][n].double()) / 2 for n, v in states[0].items() if v.is_floating_point()
    }
    reread = again.state_dict()  # Chinese CLIP's class changes a row of its embedding whenever it reads it
    learned = [name for name, value in model.named_parameters() if torch.equal(reread[name], value)]
    if far(loaded.state_dict(), {name: value for name, value in mean.items() if name in learned}):
        faults.append("not the average in memory")
    return faults


def other_names_fit(folder: Path) -> bool:
    """Whether the file's names and those in memory fit each other, either way round."""
    try:
        for layout, other in (("", "-memory"), ("-memory", "")):
            with open_checkpoint(folder / f"base{layout}") as base, open_checkpoint(folder / f"a{other}") as expert:
                fit_inputs(base, {"a": expert}).check()
    except MergeflowError:
        return False
    return True


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_average_ties_and_slerp_are_right_and_load(tmp_path: Path, chunk: int) -> None:
    count = 0
    wrong: dict[str, list[str]] = {}
    refused = []
    for family in FAMILIES[chunk::CHUNKS]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = built(family)
            if model is None:
                continue
            count += 1
            try:
                faults = faults_of(model, family, tmp_path / family)
            except Exception as error:
                faults = [f"{type(error).__name__}: {error}"]
        refused += [family] if not other_names_fit(tmp_path / family) else []
        wrong |= {family: faults} if faults else {}
    assert not wrong
    assert count >= 12
    assert not refused


def lora_faults(model: Any, folder: Path) -> list[str] | None:
    """Return the tensors that a merge of an adapter of all linear weights makes otherwise than PEFT; None for none."""
    model.save_pretrained(folder / "base")
    base = type(model).from_pretrained(folder / "base")
    try:
        adapted = peft.get_peft_model(base, peft.LoraConfig(r=2, lora_alpha=5, target_modules="all-linear"))
        perturb(adapted, 0.2, 1)
        adapted.save_pretrained(folder / "adapter")
    except (ValueError, RuntimeError):  # no linear weights, or of Mamba's, which PEFT does not take
        return None
    expected = adapted.merge_and_unload().state_dict()
    recipe = {"method": "task_arithmetic", "args": {"scale": 1.0}, "experts": {"a": str(folder / "adapter")}}
    merge({**recipe, "base": str(folder / "base"), "out": str(folder / "out")})
    merged = type(model).from_pretrained(folder / "out").state_dict()
    return [name for name, value in expected.items()
            if value.is_floating_point() and not torch.allclose(merged[name], value, rtol=1e-4, atol=1e-5)]  # fmt: skip


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_lora_of_all_linear_weights_is_what_peft_merges(tmp_path: Path, chunk: int) -> None:
    """Vision-language models with adapters on both towers among them."""
    faults: dict[str, list[str]] = {}
    for family in FAMILIES[chunk::CHUNKS]:
        model = built(family)
        if model is not None:
            faults[family] = lora_faults(model, tmp_path / family) or []
    assert not {family: names for family, names in faults.items() if names}
    assert len(faults) >= 12
