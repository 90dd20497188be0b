"""`models:/NAME/VERSION` in a recipe: fetched whole and once, and never written over under a reader."""

import shutil
import threading
from pathlib import Path

import pytest

import registry.versions
from flows.references import resolve_reference
from mergeflow.errors import MergeflowError
from registry.promotion import register
from registry.store import connect
from registry.versions import download_model
from tests.tasks.test_recorded import flip_a_bit


def test_a_version_is_fetched_once_and_its_file_stays_as_it_is(store, make_candidate, tmp_path):
    candidate = make_candidate(1)
    register(store, "merged", candidate)
    first = Path(resolve_reference(tmp_path, "models:/merged/1"))
    assert first.read_bytes() == candidate.files.weights.read_bytes()
    before = first.stat()
    again = Path(resolve_reference(tmp_path, "models:/merged/1"))
    assert again == first
    assert (again.stat().st_ino, again.stat().st_ctime_ns) == (before.st_ino, before.st_ctime_ns)
    assert resolve_reference(tmp_path, "models:/merged@candidate") == "models:/merged/1"


def test_fetched_files_that_were_damaged_since_are_fetched_again(store, make_candidate, tmp_path):
    candidate = make_candidate(1)
    register(store, "merged", candidate)
    path = Path(resolve_reference(tmp_path, "models:/merged/1"))
    path.chmod(0o644)
    flip_a_bit(path)
    assert Path(resolve_reference(tmp_path, "models:/merged/1")).read_bytes() == candidate.files.weights.read_bytes()


def test_a_fetch_that_was_cut_short_is_not_taken_for_the_version(store, make_candidate, tmp_path, monkeypatch):
    candidate = make_candidate(1)
    register(store, "merged", candidate)

    def cut(*asked: object) -> Path:
        folder = download_model(*asked)
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(registry.versions, "download_model", cut)
        with pytest.raises(KeyboardInterrupt):
            resolve_reference(tmp_path, "models:/merged/1")
    got = Path(resolve_reference(tmp_path, "models:/merged/1"))
    assert got.read_bytes() == candidate.files.weights.read_bytes()
    got.unlink()
    assert Path(resolve_reference(tmp_path, "models:/merged/1")) == got
    assert got.exists()
    assert [path.name for path in (tmp_path / ".mergeflow/models").iterdir()] == ["merged-1"]


def test_a_version_of_another_registry_takes_the_place_of_its_number(
    store, make_candidate, tmp_path, template, monkeypatch
):
    register(store, "merged", make_candidate(1))
    first = Path(resolve_reference(tmp_path, "models:/merged/1"))
    with first.open("rb") as reader:
        shutil.copyfile(template, tmp_path / "other.db")
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'other.db'}")
        register(connect(project_root=tmp_path), "merged", make_candidate(2))
        before = first.stat().st_ino
        assert Path(resolve_reference(tmp_path, "models:/merged/1")) == first
        assert first.stat().st_ino != before
        assert reader.read() == first.read_bytes()


def test_two_at_once_fetch_it_once(store, make_candidate, tmp_path, monkeypatch):
    register(store, "merged", make_candidate(1))
    fetched = []

    def counted(*asked: object) -> Path:
        fetched.append(asked)
        return download_model(*asked)

    monkeypatch.setattr(registry.versions, "download_model", counted)
    asking = [threading.Thread(target=resolve_reference, args=(tmp_path, "models:/merged/1")) for _ in range(2)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert len(fetched) == 1


def test_lost_files_are_named_and_leave_nothing_behind(store, make_candidate, tmp_path):
    register(store, "merged", make_candidate(1))
    shutil.rmtree(store.client.get_model_version("merged", "1").source.removeprefix("file://"))
    with pytest.raises(MergeflowError, match="files of version 1 of 'merged' cannot be read"):
        resolve_reference(tmp_path, "models:/merged/1")
    assert list((tmp_path / ".mergeflow/models").iterdir()) == []
