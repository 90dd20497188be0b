"""The ancestors of a version, from what is kept with it; what is missing is named."""

import json
import shutil
import subprocess
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from mergeflow.errors import MergeflowError
from mergeflow.modalities.served import SERVED
from registry.commands import lineage_svg
from registry.lineage import environment, environment_changes, git_commit, lineage, lineage_nodes, tree_lines
from registry.logging import ChildRecord, log_pipeline
from registry.promotion import register
from registry.versions import find_stored, read_documents

from .test_logging import a_record

RECIPE = {"method": "ties", "args": {"scale": 0.3}, "base_fingerprint": "ba5e", "fingerprints": {"digits": "abc"}}


def an_origin(run):
    split = {"path": "outputs/data/train/digits", "sha256": "a" * 64, "examples": 300, "dvc": "3c4d"}
    expert = {
        "path": "outputs/experts/digits",
        "dvc": "1a2b",
        "fingerprint": "abc",
        "settings": {"regime": "one_epoch", "learning_rate": 0.001},
        "seed": 7,
        "run": run,
        "source": "suite:pocket8",
        "manifest": {"path": "outputs/data/manifests/digits", "sha256": "f" * 64, "dvc": None},
        "splits": {"train": split},
    }
    base = {"path": "outputs/base", "dvc": "5e6f", "fingerprint": "ba5e"}
    origin = {"kind": "pipeline", "base": base, "experts": {"digits": expert}, "params": {}}
    return {**origin, "git_commit": "c0ffee", "environment": environment()}


@pytest.fixture
def version(store, make_candidate, tmp_path):
    expert = ChildRecord(kind="expert", name="digits", params={"fingerprint": "abc"})
    logged = log_pipeline(store, a_record(tmp_path), [expert])
    origin = an_origin(logged.children["expert", "digits"])
    candidate = make_candidate(1, run_id=logged.run_id)
    documents = {"recipe": RECIPE, "provenance": origin}
    register(store, "merged", replace(candidate, files=replace(candidate.files, documents=documents)))
    return logged


def test_from_version_to_data(store, version):
    tree = lineage(store, "merged", "candidate")
    assert json.loads(json.dumps(tree)) == tree
    assert tree["recipe"] == RECIPE
    assert tree["missing"] == []
    assert tree["run"]["id"] == version.run_id
    assert any(line.startswith("torch==") for line in tree["requirements"])
    expert = tree["experts"][0]
    assert (expert["task"], expert["regime"], expert["seed"], expert["dvc"]) == ("digits", "one_epoch", 7, "1a2b")
    assert expert["run"] == version.children["expert", "digits"]
    assert [(data["split"], data["sha256"]) for data in expert["data"]] == [("train", "a" * 64)]
    lines = list(tree_lines(tree))
    assert lines[0] == "merged version 1 @candidate, weights fingerprint-"
    order = [
        "recipe ties: scale 0.3",
        "base, weights ba5e, DVC 5e6f",
        "expert digits, one_epoch, seed 7",
        "data suite:",
    ]
    order += ["train, 300 examples, sha256 aaaaaaaaaaaa, DVC 3c4d", "git commit c0ffee", "environment code"]
    places = [next(i for i, line in enumerate(lines) if words in line) for words in order]
    assert places == sorted(places)
    depths = [lines[place].index("─") for place in places[:5]]
    assert depths == sorted(depths)


def test_the_picture_holds_every_ancestor(store, version):
    tree = lineage(store, "merged", 1)
    svg = ET.fromstring(lineage_svg(lineage_nodes(tree)))
    texts = " ".join("".join(element.itertext()) for element in svg.iter("{http://www.w3.org/2000/svg}text"))
    for line in tree_lines(tree):
        for part in line.lstrip("├└│─ ").split(", "):
            assert part in texts
    boxes = [part for part in svg.iter("{http://www.w3.org/2000/svg}g") if part.get("id", "").startswith("box-")]
    assert len(boxes) == len([*tree_lines(tree)])


def test_a_version_without_documents_says_so(store, make_candidate):
    register(store, "merged", make_candidate(1))
    tree = lineage(store, "merged", 1)
    assert len(tree["missing"]) == 2
    assert "registered without one" in " ".join(tree["missing"])
    with pytest.raises(MergeflowError, match=r"version 1 of 'merged' holds no provenance\.json"):
        read_documents(store, find_stored(store, "merged", 1))


def test_lost_files_and_runs_are_named_and_the_rest_is_told(store, version):
    store.client.delete_run(version.children["expert", "digits"])
    assert "of the expert 'digits'" in lineage(store, "merged", 1)["missing"][0]
    shutil.rmtree(store.client.get_model_version("merged", "1").source.removeprefix("file://"))
    tree = lineage(store, "merged", 1)
    assert len(tree["missing"]) == 2
    assert tree["run"]["id"] == version.run_id
    assert "missing: " in "\n".join(tree_lines(tree))


def test_the_experts_keep_their_order(store, make_candidate):
    candidate = make_candidate(1)
    recipe = {"experts": {"signs": "s", "digits": "d"}}  # slerp goes from the first to the second
    documents = {"recipe": recipe, "provenance": {}}
    register(store, "merged", replace(candidate, files=replace(candidate.files, documents=documents)))
    assert list(read_documents(store, find_stored(store, "merged", 1))[0]["experts"]) == ["signs", "digits"]


@pytest.mark.parametrize("modality", ["vision", "text", "causal"])
def test_the_packages_that_a_modality_computes_with_are_recorded(modality):
    assert set(SERVED.get(modality).packages) <= set(environment()["packages"])


def test_environments_are_compared_in_words():
    now = environment()
    assert environment_changes(now, now) == []
    then = {**now, "processor": "another", "packages": {**now["packages"], "torch": "1.0"}}
    changes = environment_changes(then, now)
    assert [text.partition(":")[0] for text in changes] == ["processor", "torch"]


def test_the_commit_is_named_or_why_there_is_none(tmp_path):
    def git(*arguments):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], cwd=tmp_path, check=True)

    assert git_commit(tmp_path) == "none (in no git repository)"
    git("init", "-q")
    (tmp_path / "params.yaml").write_text("seed: 0\n")
    assert git_commit(tmp_path) == "none (made before the first commit)"
    git("add", "params.yaml")
    git("commit", "-qm", "first")
    commit = git_commit(tmp_path)
    assert len(commit) == 40
    (tmp_path / "params.yaml").write_text("seed: 1\n")
    assert git_commit(tmp_path) == f"{commit} with local changes"
