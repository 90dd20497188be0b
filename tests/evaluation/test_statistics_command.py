"""`mergeflow statistics` from the command line to a merged file."""

import shutil
from pathlib import Path

import pytest
import yaml
from click.testing import Result

from mergeflow.checkpoints import open_checkpoint
from mergeflow.commands.statistics import add_commands
from mergeflow.errors import MergeflowError
from mergeflow.evaluation.statistics import StatisticOrder, open_drawn, write_statistic
from mergeflow.merging import load_recipe, merge
from tests.command import invoke

TASKS = ("red", "blue", "grey")


def call(world: Path, kind: str, task: str, out: Path, *more: str) -> Result:
    places = ["--task", str(world / "data" / task), "--head", str(world / "heads" / f"{task}.safetensors")]
    fixed = [str(world / "experts" / f"{task}.safetensors"), *places, "--architecture", "pocket-clip"]
    return invoke(add_commands, "statistics", kind, *fixed, "--out", out, *more)


@pytest.mark.parametrize(("kind", "method"), [("fisher", "fisher"), ("gram", "regmean")])
def test_from_commands_to_a_merge(world: Path, tmp_path: Path, kind: str, method: str):
    files = {task: tmp_path / f"{task}.safetensors" for task in TASKS}
    for task, path in files.items():
        done = call(world, kind, task, path, "--samples", "6")
        assert done.exit_code == 0, done.output
        assert "6 examples of train" in done.output
    recipe = {
        "method": method,
        "base": str(world / "base.safetensors"),
        "experts": {task: str(world / "experts" / f"{task}.safetensors") for task in TASKS},
        "data": {kind: {task: str(path) for task, path in files.items()}},
        "out": str(tmp_path / "merged.safetensors"),
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    made = merge(load_recipe(tmp_path / "recipe.yaml"))
    assert open_checkpoint(made.path).infos == open_checkpoint(recipe["base"]).infos


def test_deterministic_and_the_seed_draws_the_images(world: Path, tmp_path: Path):
    outs = [tmp_path / f"{name}.safetensors" for name in "abc"]
    for out, seed in zip(outs, "001", strict=True):
        assert call(world, "fisher", "red", out, "--samples", "4", "--seed", seed).exit_code == 0
    assert outs[0].read_bytes() == outs[1].read_bytes() != outs[2].read_bytes()


def test_images_are_drawn_once_each_and_all_where_there_are_fewer(world: Path):
    order = StatisticOrder("gram", "", str(world / "data/red"), "pocket-clip", samples=99, seed=5)
    chosen = open_drawn(order)[1].chosen.tolist()
    assert sorted(chosen) == list(range(24))
    assert chosen != sorted(chosen)


def test_errors_name_the_way_out(world: Path, tmp_path: Path):
    done = call(world, "fisher", "red", tmp_path / "f.safetensors", "--labels", "samplet")
    assert isinstance(done.exception, MergeflowError)
    assert "did you mean 'sampled'" in str(done.exception)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", ["experts/red", "heads/red", "base", "data/red/new"])
def test_no_input_is_overwritten(world: Path, tmp_path: Path, place: str):
    """Only the expert was looked at: a head and the base that `--architecture` names were replaced by statistics."""
    shutil.copytree(world, tmp_path / "world")
    world, out = tmp_path / "world", tmp_path / f"world/{place}.safetensors"
    before = out.read_bytes() if out.exists() else None
    wanted = StatisticOrder("fisher", *(str(world / name) for name in ("experts/red.safetensors", "data/red")),
                            str(world / "base.safetensors"), str(world / "heads/red.safetensors"))  # fmt: skip
    for force in (False, True):
        with pytest.raises(MergeflowError, match="would overwrite the input"):
            write_statistic(wanted, out, force=force)
    assert (out.read_bytes() if out.exists() else None) == before


def test_a_file_of_others_is_replaced_by_force_alone(world: Path, tmp_path: Path):
    out = tmp_path / "blue.safetensors"
    shutil.copy(world / "experts/blue.safetensors", out)
    before = out.read_bytes()
    done = call(world, "gram", "red", out, "--samples", "2")
    assert "was not made by a merge" in str(done.exception)
    assert out.read_bytes() == before
    assert call(world, "gram", "red", out, "--samples", "2", "--force").exit_code == 0
    made = out.read_bytes()
    assert call(world, "gram", "red", out, "--samples", "2").exit_code == 0, "its own result is replaced"
    assert out.read_bytes() == made != before
