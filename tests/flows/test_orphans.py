"""Tasks and methods taken out of params.yaml leave no outputs behind, and nothing else goes with them."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flows.orphans import remove_orphans
from tasks.project.graph import load_graph, removed_items
from tests.flows.small_project import ROOT

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
        (folder / "dvc.lock").write_text(
            yaml.safe_dump({"schema": "2.0", "stages": {name: {"cmd": "run"} for name in stages}})
        )
    return folder


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
    remove_orphans(project, said.append)
    assert (files(project), said) == (before, [])
    write_params(project, ["red"], ["average"])  # a task that had a method's name
    remove_orphans(project, said.append)
    assert before - files(project) == {
        *(f"outputs/data/{kind}/average/made" for kind in ("train", "validation", "test", "manifests")),
        "outputs/experts/average/made",
        "outputs/sweeps/ties.json",
    }
    assert not (project / "outputs/experts/average").exists()
    assert len(said) == 1
    assert "outputs/experts/average" in said[0]
    remove_orphans(project, said.append)
    assert len(said) == 1


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
