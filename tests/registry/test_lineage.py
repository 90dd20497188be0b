"""The ancestors of a version, from what was logged; what is missing is named."""

import json
import shutil

from registry.lineage import lineage, tree_lines
from registry.logging import log_pipeline
from registry.promotion import register
from registry.records import ChildRecord

from .test_logging import a_record

EXPERTS = [
    ChildRecord(kind="expert", name="digits", params={"fingerprint": "abc", "learning_rate": 0.001, "seed": 0}),
    ChildRecord(kind="method", name="ties", params={"scale": 0.3}),
]


def test_from_version_to_data(store, make_candidate, tmp_path):
    record = a_record(tmp_path, dvc={"outputs/experts/digits": "1a2b"}, tags={"git_commit": "c0ffee"})
    logged = log_pipeline(store, record, EXPERTS)
    register(store, "merged", make_candidate(1, run_id=logged.run_id))
    tree = lineage(store, "merged", "candidate")
    json.dumps(tree)
    assert tree["recipe"] == {"method": "ties"}
    assert tree["run"]["git_commit"] == "c0ffee"
    assert tree["missing"] == []
    assert any(line.startswith("torch==") for line in tree["environment"])
    expert = tree["experts"][0]
    assert (expert["task"], expert["fingerprint"], expert["settings"]["seed"]) == ("digits", "abc", "0")
    assert expert["dvc"] == {"outputs/experts/digits": "1a2b"}
    assert {(one["split"], one["digest"]) for one in expert["data"]} == {("train", "a" * 64), ("test", "b" * 64)}
    text = "\n".join(tree_lines(tree))
    for word in ("@candidate", "recipe ties", "expert digits", "git commit c0ffee", "data train aaaaaaaaaaaa"):
        assert word in text


def test_what_is_missing_is_named(store, make_candidate):
    register(store, "merged", make_candidate(1))
    tree = lineage(store, "merged", 1)
    assert tree["missing"] == ["the pipeline's run: the version was registered without one"]
    assert "missing" in "\n".join(tree_lines(tree))


def test_lost_files_are_named_and_the_rest_is_told(store, make_candidate, tmp_path):
    logged = log_pipeline(store, a_record(tmp_path), EXPERTS)
    register(store, "merged", make_candidate(1, run_id=logged.run_id))
    shutil.rmtree(store.client.get_model_version("merged", "1").source.removeprefix("file://"))
    tree = lineage(store, "merged", 1)
    assert [text.rpartition("/")[2] for text in tree["missing"]] == ["requirements.txt", "recipe.json"]
    assert tree["experts"][0]["task"] == "digits"
