"""A published CLIP as an expert: the script of docs/extending.md takes its image tower, and a run takes the file."""

import runpy
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mergeflow.checkpoints import read_state, write_checkpoint
from mergeflow.errors import MergeflowError
from mergeflow.modalities.vision.models import ImageEncoder, load_clip
from studies.lab.runs import take_experts
from tests.studies.small_lab import ROOT

SCRIPT = ROOT / "examples/studies/image_tower.py"


def take_tower(folder: Path, monkeypatch: pytest.MonkeyPatch, whole: str, out: str) -> None:
    names = (folder / name for name in (whole, "base.safetensors", out))
    monkeypatch.setattr("sys.argv", ["image_tower.py", *map(str, names)])
    runpy.run_path(str(SCRIPT), run_name="__main__")


def test_the_script_takes_what_the_base_has_out_of_a_whole_clip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clip = load_clip("pocket-clip", seed=1)
    tower, whole = ImageEncoder(clip).state_dict(), clip.model.state_dict()
    write_checkpoint(tmp_path / "base.safetensors", tower)
    save_file({name: tensor.clone() for name, tensor in whole.items()}, tmp_path / "red.safetensors")
    torch.save(
        {"state_dict": {f"module.model.{name}": value.half() for name, value in whole.items()}}, tmp_path / "blue.pt"
    )
    assert len(tower) < len(whole)
    with pytest.raises(MergeflowError, match="that the base lacks"):
        take_experts(tmp_path, "{task}.safetensors", ["red"], 0, tmp_path / "base.safetensors", tmp_path / "refused")
    (tmp_path / "experts").mkdir()
    for name in ("red.safetensors", "blue.pt"):
        take_tower(tmp_path, monkeypatch, name, f"experts/{Path(name).stem}.safetensors")
    pattern, tasks = "experts/{task}.safetensors", ["red", "blue"]
    take_experts(tmp_path, pattern, tasks, 0, tmp_path / "base.safetensors", tmp_path / "made")
    for task in tasks:
        made = read_state(tmp_path / f"made/experts/{task}/model.safetensors")
        wanted = tower if task == "red" else {name: value.half().float() for name, value in tower.items()}
        assert made.keys() == tower.keys()
        assert all(torch.equal(made[name], wanted[name]) for name in tower)


def test_what_is_no_clip_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / "base.safetensors", {"visual.proj": torch.zeros(2)})
    save_file({"vision_model.post_layernorm.weight": torch.zeros(2)}, tmp_path / "red.safetensors")
    with pytest.raises(SystemExit, match=r"lacks 1 tensors of .*, among them visual\.proj"):
        take_tower(tmp_path, monkeypatch, "red.safetensors", "out.safetensors")
