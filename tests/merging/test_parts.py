"""A merge in parts: what several machines write and one joins is what one machine writes."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from mergeflow.checkpoints.fingerprint import BLOCK
from mergeflow.commands.merging import add_commands
from mergeflow.errors import MergeflowError
from mergeflow.merging import check_recipe, make_recipe, merge
from mergeflow.merging.files.card import push
from mergeflow.merging.files.output import RECORD, OutputFolder
from mergeflow.merging.files.parts import Part
from tests.command import invoke
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


def test_seventy_billion_parameters_are_planned_from_headers(tmp_path):
    width, inner, words = 8192, 28672, 128256
    layer = {f"{part}_proj.weight": [width, width] for part in "qo"} | {
        f"{part}_proj.weight": [1024, width] for part in "kv"
    }
    layer |= {f"{part}_proj.weight": [inner, width] for part in ("gate", "up")} | {"down_proj.weight": [width, inner]}
    shapes = {"embed.weight": [words, width], "head.weight": [words, width]}
    shapes |= {f"layers.{depth}.{name}": shape for depth in range(80) for name, shape in layer.items()}
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * shape[0] * shape[1]
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    serialised = json.dumps(header).encode()
    for name in ("base", "left", "right"):
        with (tmp_path / f"{name}.safetensors").open("wb") as file:
            file.write(len(serialised).to_bytes(8, "little") + serialised)
            file.truncate(8 + len(serialised) + end)  # takes no room on the disk
    paths = {name: str(tmp_path / f"{name}.safetensors") for name in ("base", "left", "right")}
    values = {"method": "ties", "base": paths.pop("base"), "experts": paths, "out": "out", "shard_size": "5GB"}
    plan = check_recipe(make_recipe(values))
    assert 69e9 < plan.parameters < 71e9
    assert plan.peak_memory < 4 * 2**30
    files = {str(number): dict.fromkeys(tensors, None) for number, tensors in enumerate(plan.shards)}
    parts = [Part(number, 4).of(files) for number in (1, 2, 3, 4)]
    assert sorted(file for part in parts for file in part) == sorted(files)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


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


def test_a_machine_with_another_expert_is_named(files):
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
    with pytest.raises(MergeflowError, match=r"joined were the parts 2/2, which hold 2 of the 4 files"):
        merge(values, join=[second])
    with pytest.raises(MergeflowError, match="holds no part of a merge"):
        merge(values, join=[first / "nothing"])
    damaged = next(first.glob("*.safetensors"))
    state = load_file(damaged)
    save_file({name: torch.ones_like(tensor) for name, tensor in state.items()}, damaged)
    with pytest.raises(MergeflowError, match=f"{damaged.name}' is not what its {RECORD} says"):
        merge(values, join=[first, second])
    assert not (files / "out").exists()


def change_the_middle(path: str, name: str) -> None:
    state = load_file(path)
    state[name].flatten()[BLOCK + 1] += 1.0
    save_file(state, path)


@pytest.mark.parametrize(("method", "tensor"), [("average", "b"), ("ties", "b"), ("ties", "d")])
@pytest.mark.parametrize("count", [2, 3])
def test_parts_that_read_different_bytes_are_refused_though_the_tensors_begin_alike(tmp_path, method, tensor, count):
    """A machine has another file of an expert; all that two machines have read is compared."""
    torch.manual_seed(0)
    for name in ("base", "x", "y"):
        save_file({key: torch.randn(2, BLOCK) for key in "abcd"}, tmp_path / f"{name}.safetensors")
    values = {
        "method": method,
        "base": str(tmp_path / "base.safetensors"),
        "experts": {name: str(tmp_path / f"{name}.safetensors") for name in "xy"},
        "out": str(tmp_path / "out"),
        "shard_size": BLOCK * 8,
    }
    parts = [merge(values, part=f"1/{count}").path]
    change_the_middle(values["experts"]["y"], tensor)
    parts += [merge(values, part=f"{number}/{count}").path for number in range(2, count + 1)]
    with pytest.raises(MergeflowError, match=f"read other weights of 'y' than the parts before it, in '{tensor}'"):
        merge(values, join=parts)
    assert not (tmp_path / "out").exists()


def test_the_order_of_experts_is_part_of_the_recipe(files):
    values = whole(files)
    turned = values.model_copy(update={"experts": values.experts[::-1]})
    with pytest.raises(MergeflowError, match="its recipe has experts"):
        merge(values, join=[merge(values, part="1/2").path, merge(turned, part="2/2").path])


def test_a_result_elsewhere_needs_its_own_parts(files):
    """The place stands in the files."""
    parts = merge_parts(whole(files), 2)
    with pytest.raises(MergeflowError, match="its recipe has out"):
        merge(whole(files), out=str(files / "elsewhere"), join=parts)


def test_parts_of_a_device_are_joined_without_it(files):
    values = whole(files)
    parts = merge_parts(values, 2)
    joined = merge(values.model_copy(update={"device": "cuda:99"}), join=parts)
    assert joined.fingerprint == merge(values, out=str(files / "again")).fingerprint


@given(st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_record_that_says_something_else_never_changes_the_result(files, data):
    values = whole(files)
    parts = [files / f"out.part-{number}-of-2" for number in (1, 2)]
    if not parts[1].exists():
        merge_parts(values, 2)
    expected = merge(values, out=str(files / "alone")).fingerprint
    text = (parts[1] / RECORD).read_text()
    record = json.loads(text)
    place, keys = record, ["part", "shards", "inputs", "version"]
    while keys:
        key = data.draw(st.sampled_from(sorted(keys)))
        parent, place = place, place[key]
        keys = [*place] if isinstance(place, dict) and data.draw(st.booleans()) else []
    parent[key] = data.draw(st.sampled_from([None, [], {}, "x", 3, {"x": 1}, "{}"]))
    (parts[1] / RECORD).write_text(json.dumps(record))
    try:
        joined = merge(values, join=parts)
    except MergeflowError as error:
        assert "part" in str(error)  # noqa: PT017 - a record may also say less than it could, and harm nothing
    else:
        assert joined.fingerprint == expected
    finally:
        (parts[1] / RECORD).write_text(text)


@pytest.mark.parametrize("instead", [None, "folder", "link"])
def test_a_file_that_was_not_copied_is_named(files, instead):
    values = whole(files)
    first, second = merge_parts(values, 2)
    file = next(first.glob("*.safetensors"))
    file.unlink()
    if instead == "folder":
        file.mkdir()
    elif instead == "link":
        file.symlink_to(files / "nowhere")
    with pytest.raises(MergeflowError, match=f"{file.name}' is missing, though its {RECORD} lists it: copy it again"):
        merge(values, join=[first, second])


def test_a_folder_that_holds_the_parts_names_them_all(files):
    values = whole(files)
    merge_parts(values, 3)
    merge(values, out=str(files / "other"), part="1/2")
    assert merge(values, join=files).fingerprint == merge(values, out=str(files / "again")).fingerprint


@pytest.mark.parametrize(
    ("changes", "part", "message"),
    [
        ({}, "3/2", "expected a number of how many, such as 2/4"),
        ({}, "half", "expected a number of how many"),
        ({}, "1/999", "Give a smaller `shard_size`, or ask for fewer parts"),
        ({}, "١/٢", "expected a number of how many"),
        ({}, 1, "expected a number of how many"),
        ({"out": "one.safetensors", "shard_size": None}, "1/2", "is one file: parts need a folder"),
        ({"out": "."}, "1/2", "parts get the folder's name, so give one"),
        ({"out": "up/.."}, "1/2", "parts get the folder's name, so give one"),
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


def test_a_shell_s_pattern_of_parts_is_what_it_stands_for(files):
    values = whole(files)
    parts = [str(part) for part in merge_parts(values, 3)]
    place = str(files / "r.json")
    Path(place).write_text(values.record())
    run = partial(invoke, add_commands, "merge")

    for order in ([place, "--join", *parts], ["--join", *parts, place]):
        done = run(*order)
        assert done.exit_code == 0, done.exception
        assert (files / "out").is_dir()
        shutil.rmtree(files / "out")
    assert "`merge` takes one recipe, found" in str(run(place, *parts).exception)
    assert "`merge` takes one recipe, found" in str(run(place, "other.yaml", "--join", *parts).exception)
