"""A registry that has grown is read as often as a small one, and of its files only those of the versions asked for."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlflow.store.model_registry.sqlalchemy_store import SqlAlchemyStore

from benchmarks.operations.registry_size import copy_rows
from registry import artifacts
from registry.gates import GateSettings
from registry.promotion import promote, register, rollback
from registry.store import Store
from registry.versions import compare, current, history, list_versions, show


class Counting:
    def __init__(self, client: Any) -> None:
        self._client, self.calls = client, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)

        def call(*args: Any, **options: Any) -> Any:
            self.calls[name] += 1
            return method(*args, **options)

        return call


# Calls of MLflow's client, searches of all versions, files read, and readings of the whole model that MLflow makes.
LIMITS = {
    "list": (2, 1, 0, 1),
    "show": (3, 0, 3, 1),
    "compare": (6, 0, 6, 2),
    "current": (2, 1, 0, 1),
    "history": (2, 1, 0, 1),
    "register": (8, 1, 0, 1),
    "promote": (12, 1, 3, 4),
    "rollback": (12, 1, 2, 5),
}


@pytest.mark.parametrize("work", LIMITS)
def test_as_many_calls_as_of_a_small_registry(
    store: Store, make_candidate: Any, monkeypatch: pytest.MonkeyPatch, work: str
) -> None:
    for seed in (1, 2):
        register(store, "merged", make_candidate(seed, 0.6 + seed / 10))
        if seed == 1 or work == "rollback":
            promote(store, "merged", seed, GateSettings())
    copy_rows(store.uri, 300)
    counting, read, whole_models = Counting(store.client), list[str](), list[str]()
    fetch, get_model = artifacts.fetched, SqlAlchemyStore.get_registered_model

    def fetched(store: Store, source: str, part: str, folder: Path | None = None) -> Any:
        read.append(part)
        return fetch(store, source, part, folder)

    def get_registered_model(model_store: SqlAlchemyStore, name: str) -> Any:
        whole_models.append(name)
        return get_model(model_store, name)

    for module in ("registry.artifacts", "registry.versions"):
        monkeypatch.setattr(f"{module}.fetched", fetched)
    monkeypatch.setattr(SqlAlchemyStore, "get_registered_model", get_registered_model)
    grown: Any = replace(store, client=counting)
    {
        "list": lambda: list_versions(grown, "merged"),
        "show": lambda: show(grown, "merged", 2),
        "compare": lambda: compare(grown, "merged", 1, 2),
        "current": lambda: current(grown, "merged"),
        "history": lambda: history(grown, "merged"),
        "register": lambda: register(grown, "merged", make_candidate(3, 0.9)),
        "promote": lambda: promote(grown, "merged", 2, GateSettings()),
        "rollback": lambda: rollback(grown, "merged"),
    }[work]()
    searches = counting.calls["search_model_versions"]
    counts = (sum(counting.calls.values()), searches, len(read), len(whole_models))
    assert all(count <= limit for count, limit in zip(counts, LIMITS[work], strict=True)), (counts, counting.calls)
