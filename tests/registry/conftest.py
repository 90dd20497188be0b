"""Shared by the registry's tests: a migrated empty store to copy, and a small model to register."""

import os
import shutil
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from mergeflow.checkpoints import write_checkpoint
from mergeflow.modalities.heads import Head, save_head
from mergeflow.modalities.vision.models import image_model, load_clip
from registry.artifacts import ModelFiles
from registry.gates import Evidence
from registry.promotion import Candidate
from registry.store import Store, connect
from tests.flows.small_project import registry_template
from tests.postgres import POSTGRES, postgres_server

torch.set_num_threads(1)  # the tests fork; threads of a pool would not survive it
CLASSES = {"digits": ["zero", "one", "two"], "signs": ["stop", "go"]}


@pytest.fixture(scope="session")
def template() -> Path:
    """A migrated, empty SQLite store: the migrations cost seconds, a copy nothing."""
    return registry_template()


@pytest.fixture(autouse=True)
def no_server_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_TRACKING_URI", "MERGEFLOW_LOCK_URI"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def store(tmp_path: Path, template: Path) -> Store:
    shutil.copyfile(template, tmp_path / "mlflow.db")
    return connect(project_root=tmp_path)


@pytest.fixture(scope="session")
def model_files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """A merged model of the pocket architecture with random weights, and a head for each task of `CLASSES`."""
    folder = tmp_path_factory.mktemp("files")
    weights = folder / "merged.safetensors"
    write_checkpoint(weights, image_model(load_clip("pocket-clip", seed=3)).state())
    heads = {}
    for task, names in CLASSES.items():
        weight = torch.nn.functional.normalize(torch.randn(len(names), 128, generator=torch.Generator().manual_seed(1)))
        heads[task] = folder / f"{task}.safetensors"
        save_head(Head(weight, 20.0, names), heads[task])
    model = {"modality": "vision", "architecture": "pocket-clip", "pretrained": "none"}
    return ModelFiles(weights, heads, model, {"image_size": 32}, documents={"recipe": {"method": "ties"}})


@pytest.fixture
def make_candidate(model_files: ModelFiles) -> Callable[..., Candidate]:
    """A function (seed, share of right answers, ...) -> Candidate with files on disk, the same for every seed."""

    def make(seed: int, accuracy: float = 0.8, **changes: object) -> Candidate:
        return Candidate(
            model_files,
            make_evidence(accuracy),
            f"fingerprint-{seed}",
            {"normalised": accuracy},
            **changes,  # type: ignore[arg-type]
        )

    return make


def make_evidence(accuracy: float, tasks: tuple[str, ...] = tuple(CLASSES), count: int = 200) -> Evidence:
    """Evidence of a model right on the first `accuracy` of each task's images."""
    scores = {task: (np.arange(count) < round(accuracy * count)).astype(np.float32) for task in tasks}
    shares = {task: float(task_scores.mean(dtype=np.float64)) for task, task_scores in scores.items()}
    return Evidence(shares, dict.fromkeys(tasks, 0.95), scores, dict.fromkeys(tasks, "digest"), True)


class Forker:
    """Runs work in child processes that share nothing with this one but the open registry's address."""

    def start(self, store: Store, work: Callable[[], object]) -> int:
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
    pytest.importorskip("psycopg2", reason="psycopg2, MLflow's driver for PostgreSQL, is not installed")
    if not POSTGRES:
        pytest.skip("Debian's package postgresql is not installed")
    with postgres_server() as address:
        yield address
