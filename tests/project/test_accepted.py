"""Outputs of older code: which upgrades make them stale, and how a person lets them count."""

import shutil
from pathlib import Path

import pytest
import yaml

from flows.dvc_commands import accept_outputs
from mergeflow.errors import MergeflowError
from registry.lineage import accepted, lineage_nodes
from tasks.project.graph import load_graph
from tasks.running import digests as table
from tasks.running.digests import code_digest, strict_digest, write_digests
from tests.project_folder import remember_code
from tests.toy_project import make_toy_project

OLDER = "0123456789abcdef"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A toy project whose finetune and vectors were made by older code."""
    root = make_toy_project(tmp_path / "project")
    stages = {
        address: {"cmd": "x", "params": {"outputs/code.yaml": {stage.name: OLDER}}, "outs": []}
        for address, stage in load_graph(root).items()
        if stage.name in ("finetune", "vectors")
    }
    (root / "dvc.lock").write_text(yaml.safe_dump({"schema": "2.0", "stages": stages}))
    return root


def digest_of(root: Path, address: str) -> str:
    return code_digest(root, load_graph(root)[address])


def test_accepted_outputs_count_and_the_lineage_says_who_and_why(project: Path) -> None:
    accept_outputs(project, ["finetune"], because="a reader that we do not use", who="ada")
    assert {digest_of(project, f"finetune@{task}") for task in ("left", "right")} == {OLDER}
    assert digest_of(project, "vectors") != OLDER
    write_digests(project)
    (entry,) = accepted(project)
    assert (entry["stage"], entry["who"], entry["because"]) == ("finetune", "ada", "a reader that we do not use")
    empty = dict.fromkeys(("recipe", "parent", "base", "run", "git_commit", "environment"))
    tree = {"model": "m", "version": "1", "aliases": [], "fingerprint": "ab", "missing": [], "accepted": [entry]}
    (node,) = lineage_nodes({**empty, **tree}).children
    assert node.text == "finetune is of older code, accepted by ada: a reader that we do not use"


def test_it_lasts_until_the_code_changes_again(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accept_outputs(project, ["vectors"], because="checked by hand")
    monkeypatch.setattr("tasks.running.digests.strict_digest", lambda *_: "fedcba9876543210")
    assert digest_of(project, "vectors") == "fedcba9876543210"
    write_digests(project)
    assert accepted(project) == []  # the lineage of what is made next does not speak of it


def test_what_cannot_be_accepted_is_told(project: Path) -> None:
    with pytest.raises(MergeflowError, match="unknown stage 'finetun': did you mean 'finetune'"):
        accept_outputs(project, ["finetun"], because="x")
    with pytest.raises(MergeflowError, match="select has no recorded outputs"):
        accept_outputs(project, ["select"], because="x")
    with pytest.raises(MergeflowError, match="say why"):
        accept_outputs(project, ["vectors"], because=" ")
    lock = yaml.safe_load((project / "dvc.lock").read_text())
    lock["stages"]["finetune@left"]["params"]["outputs/code.yaml"]["finetune"] = "0" * 16
    (project / "dvc.lock").write_text(yaml.safe_dump(lock))
    with pytest.raises(MergeflowError, match="items of 'finetune' were made by different code"):
        accept_outputs(project, ["finetune"], because="x")
    assert not (project / "accepted.yaml").exists()
    (project / "accepted.yaml").write_text("[{stage: x}]")
    with pytest.raises(MergeflowError, match="is not what `mergeflow accept` writes"):
        digest_of(project, "vectors")


def test_a_release_carries_what_it_has_shown_to_be_equal(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = load_graph(project)["vectors"]
    today = strict_digest(project, stage)
    monkeypatch.setattr(table, "RELEASES", tmp_path / "equivalent.yaml")
    table.equivalents.cache_clear()
    table.write_equivalents({"b" * 16: "a" * 16})
    table.write_equivalents({today: "b" * 16})  # the release after it: both count as the oldest
    assert strict_digest(project, stage) == "a" * 16
    monkeypatch.undo()
    table.equivalents.cache_clear()


@pytest.mark.slow
def test_a_corrected_message_makes_nothing_stale_and_another_loss_what_trains(tmp_path: Path) -> None:
    """Three installations: the second says something else, the third trains by another loss."""
    from tests.project.test_code import digests

    root = Path(__file__).parents[2]
    folder = tmp_path / "copy"
    for name in ("mergeflow", "tasks", "registry", "flows", "suites", "studies"):
        shutil.copytree(root / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("dvc.yaml", "params.yaml"):
        shutil.copy(root / name, folder)
    remember_code(folder)
    first = digests(folder)
    reader = folder / "mergeflow/data/arrays.py"
    text = reader.read_text()
    assert "raise MergeflowError(" in text
    reader.write_text(text.replace("raise MergeflowError(", "raise MergeflowError('Sorry: ' + "))
    assert digests(folder) == first
    reader.write_text(text)
    loop = folder / "mergeflow/training/loop.py"
    loop.write_text(loop.read_text() + "\nLOSS = 2.0\n")
    stale = {name for name, digest in digests(folder).items() if digest != first[name]}
    assert {"finetune", "multitask"} <= stale
    assert not {"prepare", "base", "vectors", "evaluate"} & stale
