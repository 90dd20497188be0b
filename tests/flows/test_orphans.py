"""Tasks and methods taken out of params.yaml leave no outputs behind, and nothing else goes with them."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flows.dvc_commands import record_outputs, remove_stale_outputs
from tasks.project.graph import load_graph, removed_items
from tests.flows.kill_driver import make_toy_repository
from tests.flows.small_project import ROOT, run_in

METHODS = {"average": {"scale": [1.0]}, "ties": {"scale": [1.0]}}


def make(folder: Path, tasks: list[str], methods: list[str], evidence: str) -> Path:
    """A project whose stages have run: every output a file in a folder, or a file; known to DVC or to this folder."""
    folder.mkdir(parents=True)
    (folder / "dvc.yaml").write_text((ROOT / "dvc.yaml").read_text())
    write_params(folder, tasks, methods)
    stages = load_graph(folder)
    for stage in stages.values():
        for out in stage.outs:
            path = folder / out if "." in Path(out).name else folder / out / "made"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(stage.address)
        if evidence == "manifests":
            (folder / ".mergeflow/manifests").mkdir(parents=True, exist_ok=True)
            (folder / f".mergeflow/manifests/{stage.folder_name}.json").write_text("{}")
    if evidence == "lock":
        write_lock(folder, *stages)
    return folder


def write_lock(folder: Path, *addresses: str) -> None:
    stages = load_graph(folder)
    locked = {
        name: {"cmd": "run", "outs": [{"path": out, "md5": recorded(folder / out, name)} for out in stages[name].outs]}
        for name in addresses
    }
    (folder / "dvc.lock").write_text(yaml.safe_dump({"schema": "2.0", "stages": locked}))


def recorded(path: Path, text: str) -> str:
    """What DVC's lock says of a file with that text, or of a folder with one file `made`."""
    digest = hashlib.md5(text.encode()).hexdigest()
    if path.is_file():
        return digest
    return hashlib.md5(json.dumps([{"md5": digest, "relpath": "made"}]).encode()).hexdigest() + ".dir"


def write_params(folder: Path, tasks: list[str], methods: list[str]) -> None:
    values: dict[str, Any] = yaml.safe_load((ROOT / "params.yaml").read_text())
    values |= {"tasks": dict.fromkeys(tasks, "suite:pocket8"), "sweep": {name: METHODS[name] for name in methods}}
    (folder / "params.yaml").write_text(yaml.safe_dump(values))


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("evidence", ["lock", "manifests"])
def test_outputs_of_a_task_and_a_method_go_and_nothing_else(evidence: str, tmp_path: Path) -> None:
    project = make(tmp_path / "project", ["red", "average"], ["average", "ties"], evidence)
    foreign = project / "outputs/experts/mine/notes.txt"
    foreign.parent.mkdir()
    foreign.write_text("no stage made this")
    before, said = files(project), list[str]()
    remove_stale_outputs(project, said.append)
    assert (files(project), said) == (before, [])
    write_params(project, ["red"], ["average"])  # a task that had a method's name
    remove_stale_outputs(project, said.append)
    gone = {
        *(f"outputs/data/{kind}/average/made" for kind in ("train", "validation", "test", "manifests")),
        "outputs/experts/average/made",
        "outputs/sweeps/ties.json",
    }
    assert before - files(project) == gone
    aside = {f".mergeflow/removed/1/{name}" for name in gone}  # what DVC never had is kept here
    assert files(project) - before == (set() if evidence == "lock" else aside)
    assert not (project / "outputs/experts/average").exists()
    assert len(said) == 1
    assert "outputs/experts/average" in said[0]
    assert ("DVC's cache keeps them" in said[0]) is (evidence == "lock")
    assert ("moved to .mergeflow/removed/1" in said[0]) is (evidence == "manifests")
    remove_stale_outputs(project, said.append)
    assert len(said) == 1


def test_what_dvc_has_is_removed_and_anything_else_moved_beside_what_was_moved_before(tmp_path: Path) -> None:
    project = make(tmp_path / "project", ["red", "blue"], ["average"], "manifests")
    write_lock(project, "prepare@blue")
    (project / "outputs/data/test/blue/made").write_text("of a later run, which was killed before DVC recorded it")
    earlier = project / ".mergeflow/removed/1/outputs/experts/blue/made"
    earlier.parent.mkdir(parents=True)
    earlier.write_text("of an earlier blue")
    write_params(project, ["red"], ["average"])
    said = list[str]()
    remove_stale_outputs(project, said.append)
    assert earlier.read_text() == "of an earlier blue"
    aside = project / ".mergeflow/removed/2"
    assert files(aside) == {"outputs/data/test/blue/made", "outputs/experts/blue/made"}
    assert (aside / "outputs/experts/blue/made").read_text() == "finetune@blue"
    assert not [path for path in (project / "outputs").rglob("blue") if path.is_dir()]
    removed, moved = said[0].split("\n")
    for name in ("data/train", "data/validation", "data/manifests"):
        assert f"outputs/{name}/blue" in removed
        assert f"outputs/{name}/blue" not in moved
    for name in ("data/test", "experts"):
        assert f"outputs/{name}/blue" in moved
        assert f"outputs/{name}/blue" not in removed


@pytest.mark.slow
def test_dvc_brings_back_what_was_removed(tmp_path: Path) -> None:
    """The digests that are compared are DVC's own, of folders in folders too."""
    project = make_toy_repository(tmp_path / "project")
    stage = load_graph(project)["prepare@left"]
    for out in stage.outs:
        for name in ("made", "b/made", "b.c/made", 'é "/made'):
            path = project / out / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{out} {name}")
    record_outputs(project, [stage.address])
    before = {name for name in files(project / "outputs") if "/left/" in name}
    text = (project / "params.yaml").read_text()
    values = yaml.safe_load(text)
    del values["tasks"]["left"]
    (project / "params.yaml").write_text(yaml.safe_dump(values))
    said = list[str]()
    remove_stale_outputs(project, said.append)
    assert [line.split(":")[0] for line in said] == ["Removed outputs of what params.yaml no longer has"]
    assert not {name for name in files(project / "outputs") if "/left/" in name}
    (project / "params.yaml").write_text(text)
    assert run_in(project, "dvc", "checkout", "--quiet", stage.address).returncode == 0
    assert {name for name in files(project / "outputs") if "/left/" in name} == before


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    addresses=st.lists(
        st.sampled_from(["finetune", "sweep", "select", "none", ""]).flatmap(
            lambda name: st.text("abc./@-_", max_size=6).map(lambda item: f"{name}@{item}")
        )
    )
)
def test_whatever_stands_in_the_lock_only_items_of_stages_are_meant(addresses: list[str]) -> None:
    for stage in removed_items(ROOT, addresses):
        assert stage.name in ("finetune", "sweep")
        folder = "outputs/experts" if stage.name == "finetune" else "outputs/sweeps"
        for out in stage.outs:
            assert (ROOT / out).resolve().parent == (ROOT / folder).resolve()
