"""Shared by the registry's tests: a migrated empty store to copy, and a vision library small enough to run anywhere."""

import os
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mergeflow.modality import Network
from registry.gates import Evidence
from registry.pyfunc_model import ModelFiles
from registry.store import Store, connect
from registry.versions import Candidate
from tests.postgres import POSTGRES, postgres_server

torch.set_num_threads(1)  # the tests fork; threads of a pool would not survive it
CLASSES = {"digits": ["zero", "one", "two"], "signs": ["stop", "go"]}
SIZE = 8


@dataclass(frozen=True)
class StubHead:
    weight: torch.Tensor
    class_names: list[str]

    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        return 10.0 * features @ self.weight.T


class StubEncoder(torch.nn.Module):
    def __init__(self, clip: str) -> None:
        assert clip == "stub"
        super().__init__()
        self.visual = torch.nn.Module()
        self.visual.weight = torch.nn.Parameter(torch.zeros(SIZE * SIZE * 3, 4))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        pixels = images.float().flatten(1) / 255
        return torch.nn.functional.normalize(pixels @ self.visual.weight + 1e-3, dim=-1)


def _load_head(path: Path) -> StubHead:
    weight = load_file(path)["weight"]
    names = next(names for names in CLASSES.values() if len(names) == len(weight))
    return StubHead(weight, names)


@pytest.fixture
def stub_vision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a linear encoder and heads where the model's code looks for mergeflow.modalities.vision."""
    models, heads = ModuleType("mergeflow.modalities.vision.models"), ModuleType("mergeflow.modalities.heads")
    models.image_model, models.load_clip = lambda clip: Network(StubEncoder(clip)), str  # type: ignore[attr-defined]
    heads.Head, heads.load_head = StubHead, _load_head  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mergeflow.modalities.vision.models", models)
    monkeypatch.setitem(sys.modules, "mergeflow.modalities.heads", heads)


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated, empty SQLite store: the migrations cost seconds, a copy nothing."""
    root = tmp_path_factory.mktemp("template")
    connect(project_root=root, experiment="template")
    return root / "mlflow.db"


@pytest.fixture(autouse=True)
def no_server_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_TRACKING_URI", "MERGEFLOW_LOCK_URI"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def store(tmp_path: Path, template: Path) -> Store:
    shutil.copyfile(template, tmp_path / "mlflow.db")
    return connect(project_root=tmp_path)


@pytest.fixture
def make_candidate(tmp_path: Path, stub_vision: None) -> Callable[..., Candidate]:
    """A function (seed, share of right answers, ...) -> Candidate with files on disk."""

    def make(seed: int, accuracy: float = 0.8, **changes: object) -> Candidate:
        folder = tmp_path / f"files-{seed}"
        folder.mkdir(exist_ok=True)
        generator = torch.Generator().manual_seed(seed)
        save_file(
            {"visual.weight": torch.randn(SIZE * SIZE * 3, 4, generator=generator)}, folder / "encoder.safetensors"
        )
        heads = {}
        for task, names in CLASSES.items():
            heads[task] = folder / f"{task}.safetensors"
            save_file({"weight": torch.randn(len(names), 4, generator=generator)}, heads[task])
        files = ModelFiles(
            folder / "encoder.safetensors", heads, "stub", SIZE, documents={"recipe": {"method": "ties"}}
        )
        return Candidate(
            files,
            make_evidence(accuracy),
            f"fingerprint-{seed}",
            {"normalised": accuracy},
            **changes,  # type: ignore[arg-type]
        )

    return make


def make_evidence(accuracy: float, tasks: tuple[str, ...] = tuple(CLASSES), count: int = 200) -> Evidence:
    """Evidence of a model right on the first `accuracy` of each task's images."""
    scores = {task: (np.arange(count) < round(accuracy * count)).astype(np.float32) for task in tasks}
    shares = {task: float(found.mean(dtype=np.float64)) for task, found in scores.items()}
    return Evidence(shares, dict.fromkeys(tasks, 0.95), scores, dict.fromkeys(tasks, "digest"), True)


class Forker:
    """Runs work in child processes that share nothing with this one but the open registry's address."""

    def start(self, store: Store, work: Callable[[], object]) -> int:
        """Start a child; return its process id."""
        child = os.fork()
        if child:
            return child
        try:
            _forget_connections(store)
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    def run(self, store: Store, work: Callable[[], object]) -> int:
        """Run a child to its end; return its wait status."""
        return os.waitpid(self.start(store, work), 0)[1]


@pytest.fixture(scope="session")
def forker() -> Forker:
    return Forker()


def _forget_connections(store: Store) -> None:
    """What SQLAlchemy asks of a forked child: leave the parent's connections alone and open its own."""
    for half in (store.client._tracking_client, store.client._get_registry_client()):
        half.store.engine.dispose(close=False)


@pytest.fixture
def quiet(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Fail when the test leaves anything on stdout or stderr."""
    yield
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The address of a PostgreSQL of our own."""
    pytest.importorskip("psycopg2", reason="psycopg2, MLflow's driver for PostgreSQL, is not installed")
    if not POSTGRES:
        pytest.skip("Debian's package postgresql is not installed")
    with postgres_server() as address:
        yield address
