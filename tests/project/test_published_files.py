"""Checkpoints that somebody published count by the bytes of their files in the digest of what takes them."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tasks.project.graph import load_graph
from tasks.project.stage import Stage
from tasks.running.digests import code_digest
from tests.project_folder import change_params
from tests.studies.small_lab import ROOT


@pytest.fixture
def stage() -> Stage:
    """The run `published` of a project."""
    sample = load_graph(ROOT, studies=True)["studies/dvc.yaml:train@mima_4"]
    return replace(
        sample, item="published", params=tuple(name.replace("mima_4", "published") for name in sample.params)
    )


def project(root: Path, pattern: str, **choices: int) -> Path:
    (root / "studies").mkdir(parents=True)
    (root / "params.yaml").write_text(yaml.safe_dump({"tasks": {"a": "folder:a", "b": "folder:b"}, "finetune": {}}))
    runs = {"published": {"checkpoints": pattern, **choices}, "trained": {"regime": "steps"}}
    (root / "studies/params.yaml").write_text(yaml.safe_dump({"seeds": [0, 1], "runs": runs}))
    return root


def test_a_file_that_is_replaced_makes_the_run_stale_and_no_other(stage: Stage, tmp_path: Path) -> None:
    root = project(tmp_path, "experts/{task}_{seed}.safetensors", tasks=1)
    trained = replace(stage, item="trained", params=tuple(n.replace("published", "trained") for n in stage.params))
    before, other = code_digest(root, stage), code_digest(root, trained)
    (root / "experts").mkdir()
    file = root / "experts/a_1.safetensors"
    file.write_bytes(b"one")
    first = code_digest(root, stage)
    file.write_bytes(b"two")
    second = code_digest(root, stage)
    assert len({before, first, second}) == 3
    os.utime(file, ns=(0, 0))
    assert code_digest(root, stage) == second, "a copy of the same bytes is the same file"
    (root / "experts/b_0.safetensors").write_bytes(b"of a task that the run does not take")
    assert code_digest(root, stage) == second
    assert code_digest(root, trained) == other


def test_a_checkpoint_in_a_folder_counts_whole(stage: Stage, tmp_path: Path) -> None:
    root = project(tmp_path, "experts/{task}")
    shard = root / "experts/b/model-00001-of-00002.safetensors"
    shard.parent.mkdir(parents=True)
    shard.write_bytes(b"one")
    before = code_digest(root, stage)
    (shard.parent / "config.json").write_text("{}")
    assert code_digest(root, stage) != before
    for part in ("text", "image"):  # the same name in two folders below
        (shard.parent / part).mkdir()
        (shard.parent / part / "model.safetensors").write_bytes(b"one")
    before = code_digest(root, stage)
    (shard.parent / "image/model.safetensors").write_bytes(b"two")
    assert code_digest(root, stage) != before


def test_a_checkpoint_outside_the_project_counts_too(stage: Stage, tmp_path: Path) -> None:
    root = project(tmp_path / "project", f"{tmp_path}/{{task}}.safetensors")
    before = code_digest(root, stage)
    (tmp_path / "a.safetensors").write_bytes(b"one")
    assert code_digest(root, stage) != before


def test_files_that_a_study_s_own_checkpoints_name_count_for_this_study(tmp_path: Path) -> None:
    stages = load_graph(ROOT, studies=True)
    texts, other = stages["studies/dvc.yaml:linearity_texts"], stages["studies/dvc.yaml:linearity_edits"]
    named = {"base": "t5", "experts": {"a": "a.safetensors"}, "texts": {"a": "text:a.txt"}}
    root = project(tmp_path, "{task}")
    studies = {"linearity_texts": {"checkpoints": named}, "linearity_edits": {}}
    change_params(root, {"studies": studies}, "studies/params.yaml")
    digests, untouched = [code_digest(root, texts)], code_digest(root, other)
    (root / "t5").mkdir()
    for name in ("t5/config.json", "a.safetensors", "a.txt"):
        for content in (b"one", b"two"):
            (root / name).write_bytes(content)
            digests.append(code_digest(root, texts))
    assert len(set(digests)) == len(digests)
    assert code_digest(root, other) == untouched
