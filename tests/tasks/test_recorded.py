"""Bits that changed since a stage recorded its outputs: who would read them refuses, and names the file."""

import os
import shutil
from pathlib import Path

import pytest
import yaml

from flows.dvc_commands import record_outputs
from mergeflow.errors import MergeflowError
from tasks.project.graph import load_graph, upstream
from tasks.project.recorded import check_inputs, digest_as_dvc, md5_of
from tasks.project.stage import STUDIES, Stage, covers, read_record
from tasks.running.runner import run_stage
from tests.flows.kill_driver import make_toy_repository
from tests.text.small_project import make_text_project
from tests.toy_project import make_toy_project, run_pipeline

READERS = ["base", "multitask", "finetune@left", "vectors", "sweep@ties", "select", "evaluate", "figures", "register"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_pipeline(make_toy_project(tmp_path_factory.mktemp("finished") / "project"))


@pytest.fixture
def project(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "project", symlinks=True)
    return tmp_path / "project"


def flip_a_bit(path: Path) -> None:
    """Change one bit and nothing that a file system tells of the file."""
    content, times = bytearray(path.read_bytes()), path.stat()
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def files_read_by(project: Path, address: str) -> list[Path]:
    graph = load_graph(project)
    deps = graph[address].deps
    outs = [
        out
        for above in upstream(graph[address], graph)
        for out in graph[above].outs
        if any(covers(dep, out) or covers(out, dep) for dep in deps)
    ]
    files = [next(iter(sorted(p for p in (project / out).rglob("*") if p.is_file())), project / out) for out in outs]
    return [path for path in files if path.is_file() and path.stat().st_size]


@pytest.mark.parametrize("address", READERS)
def test_a_flipped_bit_in_any_input_is_named(project: Path, address: str) -> None:
    graph = load_graph(project)
    files = files_read_by(project, address)
    assert files
    for path in files:
        before = path.read_bytes()
        flip_a_bit(path)
        with pytest.raises(MergeflowError, match=f"(?s){address} would read.*{path.relative_to(project).parts[1]}"):
            run_stage(project, graph[address], force=True)
        path.write_bytes(before)


@pytest.mark.parametrize(("address", "file"), [("prepare@near", "near.jsonl"), ("base", "base/model.safetensors")])
def test_a_flipped_bit_in_a_file_of_the_user_s_own_is_named(tmp_path: Path, address: str, file: str) -> None:
    project = run_pipeline(make_text_project(tmp_path / "project"), ("prepare", "base")[: 1 + (address == "base")])
    stage, path = load_graph(project)[address], project / "inputs" / file
    flip_a_bit(path)
    for force in (True, False):
        with pytest.raises(MergeflowError, match=f"(?s){address} would read other.*inputs/{file.split('/')[0]}: SHA"):
            run_stage(project, stage, force=force)
    flip_a_bit(path)
    os.utime(path)
    assert not run_stage(project, stage)  # an edit's time, and the same bytes
    if address != "base":
        path.write_bytes(path.read_bytes().partition(b"\n")[2])
        assert run_stage(project, stage)


def test_removed_they_are_made_again(project: Path) -> None:
    graph = load_graph(project)
    weights = project / "outputs/experts/left/model.safetensors"
    before = weights.read_bytes()
    flip_a_bit(weights)
    with pytest.raises(MergeflowError, match="outputs/experts/left"):
        run_stage(project, graph["vectors"], force=True)
    shutil.rmtree(weights.parent)
    assert run_stage(project, graph["finetune@left"])
    assert weights.read_bytes() == before
    assert run_stage(project, graph["vectors"], force=True)


@pytest.mark.parametrize("where", [".mergeflow/manifests/finetune@left.json", ".mergeflow/records/finetune@left.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"outs": 3}', b"\xff"])
def test_a_damaged_note_of_a_stage_is_as_none(project: Path, where: str, content: bytes) -> None:
    (project / where).write_bytes(content)
    graph = load_graph(project)
    assert run_stage(project, graph["vectors"], force=True)
    assert run_stage(project, graph["finetune@left"]) is ("manifests" in where)
    read_record(project, "finetune@left")


def test_a_study_compares_what_it_shares_with_the_pipeline_and_its_runs(tmp_path: Path) -> None:
    runs = tmp_path / "outputs/studies/runs/joint/weights.bin"
    runs.parent.mkdir(parents=True)
    runs.write_bytes(b"weights")
    outs = [{"path": "outputs/studies/runs/joint", "hash": "md5", "md5": digest_as_dvc(runs.parent)}]
    (tmp_path / "studies").mkdir()
    lock = {"schema": "2.0", "stages": {"runs@joint": {"cmd": "train", "outs": outs}}}
    (tmp_path / "studies/dvc.lock").write_text(yaml.safe_dump(lock))
    study = Stage("mima", None, "studies.mima", (), ("outputs/studies/runs",), (), file=STUDIES)
    check_inputs(tmp_path, study)
    flip_a_bit(runs)
    with pytest.raises(MergeflowError, match="outputs/studies/runs/joint"):
        check_inputs(tmp_path, study)


@pytest.mark.slow
def test_a_clone_compares_with_what_dvc_has_recorded(tmp_path: Path) -> None:
    project = run_pipeline(make_toy_repository(tmp_path / "project"), ("prepare", "base", "multitask", "finetune"))
    graph = load_graph(project)
    record_outputs(project, [address for address in graph if (project / graph[address].outs[0]).exists()])
    shutil.rmtree(project / ".mergeflow")  # a clone has DVC's lock alone
    assert run_stage(project, graph["vectors"], force=True)
    weights = project / "outputs/experts/left/model.safetensors"
    md5 = md5_of(weights)
    flip_a_bit(weights)
    message = refusal(project, graph["vectors"])
    assert f"outputs/experts/left/model.safetensors: MD5 {md5_of(weights)[:12]}, recorded {md5[:12]}\n" in message
    copy = project / ".dvc/cache/files/md5" / md5[:2] / md5[2:]
    copy.chmod(0o644)
    shutil.copyfile(weights, copy)  # as `dvc pull` does from a remote that was damaged
    assert f"{copy}, is damaged too: remove both" in refusal(project, graph["vectors"])


def refusal(project: Path, stage: Stage) -> str:
    with pytest.raises(MergeflowError) as raised:
        run_stage(project, stage, force=True)
    return str(raised.value)
