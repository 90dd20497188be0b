"""Weights that a run finds again are judged by what that run found of them, not by what was registered first."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mergeflow import layout
from registry import stage
from registry.gates import Evidence
from registry.promotion import Candidate, promote, register
from registry.store import Store
from registry.versions import current
from tasks.project.sections import GateSettings, RegistrySection

from .conftest import CLASSES, make_evidence

SELECTION = {
    "tasks": list(CLASSES),
    "winner": "ties",
    "methods": {"ties": {"args": {}, "candidates": 1, "validation": {"normalised": 0.9}}},
}


class Files:
    """A stage's view of a folder."""

    params = SimpleNamespace(evaluation=SimpleNamespace(precision="float32"))

    def __init__(self, root: Path) -> None:
        self.root = root

    def section(self, key: str) -> RegistrySection:
        assert key == "registry"
        return RegistrySection(model="merged")

    def dep(self, path: str) -> Path:
        return self.root / path

    def out(self, path: str) -> Path:
        return self.root / Path(path).name


def by_the_stage(store: Store, files: Files) -> bool:
    stage.run(files)  # type: ignore[arg-type]
    return bool(json.loads(files.out("registration.json").read_text())["decision"]["promote"])


def by_a_command(store: Store, files: Files) -> bool:
    origin: dict[str, Any] = {"kind": "add", "parent": {"model": "merged", "version": "1", "task": "signs"}}
    done = stage.register_rebuilt(store, "merged", files, origin, promote_it=True)  # type: ignore[arg-type]
    assert not done.new
    assert done.decision is not None
    return done.decision.promote


def on_new_data(accuracy: float) -> Evidence:
    return replace(make_evidence(accuracy), digests=dict.fromkeys(CLASSES, "new"))


@pytest.mark.parametrize("run", [by_the_stage, by_a_command])
def test_the_same_weights_on_other_data_are_judged_by_them(
    store: Store,
    make_candidate: Callable[..., Candidate],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    run: Callable[[Store, Files], bool],
):
    register(store, "merged", make_candidate(1, 0.7))
    promote(store, "merged", 1, GateSettings())
    register(store, "merged", make_candidate(2, 0.6))
    candidate = replace(make_candidate(2), evidence=on_new_data(0.9))

    class Logged:
        run_id, children = None, dict[tuple[str, str], str]()

    monkeypatch.setattr("registry.stage.read_json", lambda *_: SELECTION)
    (tmp_path / "outputs/results").mkdir(parents=True)
    (tmp_path / layout.SELECTION).write_text(json.dumps(SELECTION))
    monkeypatch.setattr("registry.stage.log_pipeline", lambda *_: Logged)
    monkeypatch.setattr("registry.stage.make_candidate", lambda *_: candidate)
    monkeypatch.setattr("registry.stage.evaluate_version", lambda *_: on_new_data(0.7))
    monkeypatch.setattr("registry.stage.pipeline_record", lambda *_: None)
    monkeypatch.setattr("registry.stage.child_records", lambda *_: [])
    monkeypatch.setattr("registry.stage.describe_origin", lambda *_: {})
    monkeypatch.setattr("registry.stage.lineage", lambda *_: {"aliases": []})
    for name in ("_record", "_children"):
        monkeypatch.setattr(f"registry.stage.{name}", lambda *_: [])
    assert run(store, Files(tmp_path))
    champion = current(store, "merged").champion
    assert champion is not None
    assert champion.version == "2"
