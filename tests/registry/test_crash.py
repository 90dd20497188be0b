"""Two promoters at once, and kill -9 before every write of the protocol, on SQLite and on PostgreSQL."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from registry.artifacts import ModelFiles
from registry.gates import Evidence
from registry.promotion import Candidate
from registry.store import Store, connect

from . import protocol
from .conftest import make_evidence

pytestmark = pytest.mark.slow


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Candidate]:
    """A function (fingerprint, accuracy) -> Candidate; the protocol only asks whether the model's files are there."""

    def save(folder: Path, *_: Any) -> None:
        (folder / "artifacts/model").mkdir(parents=True)
        (folder / "artifacts/model/model.safetensors").touch()
        (folder / "MLmodel").write_text("none")

    monkeypatch.setattr("registry.promotion.save_pyfunc", save)
    monkeypatch.setattr("registry.promotion.check_pyfunc", lambda folder, served: None)
    weights = tmp_path / "weights.safetensors"
    weights.touch()
    files = ModelFiles(weights, {"digits": weights}, {"modality": "vision"}, {})
    evidence: dict[float, Evidence] = {share: make_evidence(share) for share in (0.6, 0.7, 0.8, 0.9)}
    return lambda fingerprint, accuracy: Candidate(files, evidence[accuracy], fingerprint, {"normalised": accuracy})


def test_kill_at_every_write_of_a_promotion(store, forker, make):
    # three writes of the upload, three of the version, two of the decision, intent, commit, three derived
    assert protocol.survives_kills_while_promoting(store, forker, make, "promote") >= 11


@pytest.mark.nightly
def test_kill_at_every_write_of_the_first_promotion(store, forker, make):
    protocol.survives_kills_of_the_first(store, forker, make, "first")


def test_kill_at_every_write_of_a_rollback(store, forker, make):
    assert protocol.survives_kills_while_rolling_back(store, forker, make, "rollback") >= 4


@pytest.mark.parametrize("kill_after", [None, 0.2, *(pytest.param(s, marks=pytest.mark.nightly) for s in (0.05, 0.4))])
def test_two_promoters_at_once(store, forker, make, kill_after):
    protocol.best_of_two_promoters_wins(store, forker, make, "both", kill_after)


def test_a_hesitant_promoter_does_not_win(store, forker, make):
    protocol.a_hesitant_promoter_does_not_win(store, forker, make, "hesitant")


def test_a_kill_in_the_middle_of_the_upload(store, forker, make, monkeypatch):
    upload = store.client.log_model_artifacts

    def half(model_id: str, folder: str) -> None:
        os.unlink(Path(folder) / "evidence" / "evidence.json")
        os.unlink(Path(folder) / "MLmodel")
        upload(model_id, folder)
        os.kill(os.getpid(), 9)

    def work() -> None:
        monkeypatch.setattr(store.client, "log_model_artifacts", half)
        protocol.register(store, "merged", make("one", 0.8))

    assert protocol.died(forker.run(store, work))
    protocol.promote(store, "merged", protocol.register(store, "merged", make("one", 0.8)).version, protocol.GATES)
    protocol.assert_settled(store, "merged", "1", ["promote"], 1)


@pytest.fixture
def on_postgres(postgres: str, tmp_path: Path) -> Store:
    return connect(postgres, tmp_path)


@pytest.mark.nightly
def test_postgres_kill_at_every_write_of_a_promotion(on_postgres, forker, make):
    assert on_postgres.lock_uri is not None
    assert protocol.survives_kills_while_promoting(on_postgres, forker, make, "promote") >= 11


def test_postgres_kill_at_every_write_of_a_rollback(on_postgres, forker, make):
    assert protocol.survives_kills_while_rolling_back(on_postgres, forker, make, "rollback") >= 4


@pytest.mark.parametrize("number", [0, 3, *(pytest.param(n, marks=pytest.mark.nightly) for n in (1, 2, 4, 5))])
def test_postgres_two_promoters_at_once(on_postgres, forker, make, number):
    kill_after = None if number < 2 else 0.1 * (number - 1)
    protocol.best_of_two_promoters_wins(on_postgres, forker, make, f"both-{number}", kill_after)


def test_postgres_a_hesitant_promoter_does_not_win(on_postgres, forker, make):
    protocol.a_hesitant_promoter_does_not_win(on_postgres, forker, make, "hesitant")
