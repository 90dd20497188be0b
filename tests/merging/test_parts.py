"""A merge in parts: what several machines write and one joins is what one machine writes."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mergeflow.errors import MergeflowError
from mergeflow.merging import merge
from mergeflow.merging.files.card import push
from mergeflow.merging.files.output import RECORD, OutputFolder
from tests.merging.helpers import recipe

METHODS = {
    "task_arithmetic": {"scale": 0.4},
    "ties": {"keep": 0.5},
    "slerp": {"t": 0.3},
    "dare": {"keep": 0.5, "seed": 3},
}


def whole(files: Path, **changes):
    return recipe(files, **{"out": str(files / "out"), "shard_size": 600, **changes})


def merge_parts(values, count: int) -> list[Path]:
    return [merge(values, part=f"{number}/{count}").path for number in range(1, count + 1)]


def weights(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".md"}


@pytest.mark.parametrize("method", ["task_arithmetic", "ties", "average", "dare", "model_stock", "cart"])
def test_joined_parts_are_the_whole_to_the_byte(files, method):
    values = whole(files, method=method, args={})
    alone = merge(values)
    at_once = weights(alone.path)
    shutil.rmtree(alone.path)
    parts = merge_parts(values, 3)
    assert [path.name for path in parts] == [f"out.part-{number}-of-3" for number in (1, 2, 3)]
    joined = merge(values, join=parts[::-1])
    assert weights(joined.path) == at_once
    assert (joined.fingerprint, joined.inputs) == (alone.fingerprint, alone.inputs)


def test_a_part_reads_the_experts_of_its_files_alone(files):
    read: list[int] = []
    merge(whole(files), part="1/4", progress=lambda done, total: read.append(done))
    assert max(read[:-1]) < 0.5 * read[-1]


def test_another_machine_with_other_paths_of_the_same_files_can_join(files, tmp_path, monkeypatch):
    """Recipes name files relative to where they are run; times and places of the files may differ."""
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(files, elsewhere, copy_function=shutil.copyfile)
    values = whole(Path())
    monkeypatch.chdir(elsewhere)
    first = merge(values, part="1/2").path.resolve()
    monkeypatch.chdir(files)
    second = merge(values, part="2/2").path.resolve()
    joined = merge(values, join=[first, second])
    assert joined.fingerprint == merge(values, out="again").fingerprint


def test_a_machine_with_another_expert_is_named(files, tmp_path):
    values = whole(files)
    parts = merge_parts(values, 2)
    name, path = values.experts[0]
    save_file({key: tensor + tensor.is_floating_point() for key, tensor in load_file(path).items()}, path)
    with pytest.raises(MergeflowError, match=rf"is a part of another merge: .* other weights for '{name}'"):
        merge(values, join=parts)


@pytest.mark.parametrize("resume", [False, True])
def test_a_killed_part_and_a_killed_join_go_on(files, monkeypatch, resume):
    class Killed(BaseException):
        """Stands for SIGKILL."""

    def kill(self, file, *rest):
        finish(self, file, *rest)
        raise Killed

    values, finish = whole(files), OutputFolder.finish
    expected = merge(values, out=str(files / "alone"))
    with monkeypatch.context() as patch:
        patch.setattr(OutputFolder, "finish", kill)
        with pytest.raises(Killed):
            merge(values, part="1/2")
    parts = [merge(values, part="1/2", resume=resume).path, merge(values, part="2/2").path]
    with monkeypatch.context() as patch:
        patch.setattr(OutputFolder, "finish", kill)
        with pytest.raises(Killed):
            merge(values, join=parts)
    assert not (files / "out").exists()
    joined = merge(values, join=parts, resume=resume)
    assert (joined.fingerprint, joined.inputs) == (expected.fingerprint, expected.inputs)


def test_parts_of_another_recipe_missing_and_damaged_ones_are_refused(files):
    values = whole(files)
    first, second = merge_parts(values, 2)
    with pytest.raises(MergeflowError, match=r"its recipe has args: .*, here it is"):
        merge(whole(files, args={"scale": 9.0}), join=[first, second])
    with pytest.raises(MergeflowError, match=r"joined were the parts 2 of 2, and .* are in none of them"):
        merge(values, join=[second])
    with pytest.raises(MergeflowError, match="holds no part of a merge"):
        merge(values, join=[files])
    damaged = next(first.glob("*.safetensors"))
    state = load_file(damaged)
    save_file({name: torch.ones_like(tensor) for name, tensor in state.items()}, damaged)
    with pytest.raises(MergeflowError, match=f"{damaged.name}' is not what its {RECORD} says"):
        merge(values, join=[first, second])
    assert not (files / "out").exists()


def test_parts_that_read_different_bytes_are_refused_though_the_tensors_begin_alike(files):
    values = whole(files)
    parts = merge_parts(values, 2)
    record = json.loads((parts[1] / RECORD).read_text())
    others = json.loads((parts[0] / RECORD).read_text())["inputs"]
    record["inputs"]["base"] |= dict.fromkeys(others["base"], "0" * 64)
    (parts[1] / RECORD).write_text(json.dumps(record))
    with pytest.raises(MergeflowError, match="read other weights of 'base' than the parts before it"):
        merge(values, join=parts)


@pytest.mark.parametrize(
    ("changes", "part", "message"),
    [
        ({}, "3/2", "expected a number of how many, such as 2/4"),
        ({}, "half", "expected a number of how many"),
        ({}, "1/999", "Give a smaller `shard_size`, or ask for fewer parts"),
        ({"out": "one.safetensors", "shard_size": None}, "1/2", "is one file: parts need a folder"),
    ],
)
def test_what_has_no_parts_is_refused(files, changes, part, message):
    with pytest.raises(MergeflowError, match=message):
        merge(whole(files, **changes), part=part)


def test_a_part_is_not_merged_and_joined_at_once(files):
    with pytest.raises(MergeflowError, match="give one of them"):
        merge(whole(files), part="1/2", join=[files])


def test_a_part_is_not_sent_to_the_hub(files):
    (folder,) = merge_parts(whole(files), 1)
    with pytest.raises(MergeflowError, match="join the parts first"):
        push(folder, "owner/name", dry_run=True)
