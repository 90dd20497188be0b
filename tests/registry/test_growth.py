"""A registry that has grown is read as often as a small one, and of its files only those of the versions asked for."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.operations.registry_size import copy_rows
from registry import files
from registry.gates import GateSettings
from registry.promotion import promote, register, rollback
from registry.store import Store
from registry.versions import compare, current, history, list_versions, show


class Counting:
    """MLflow's client, which counts its calls."""

    def __init__(self, client: Any) -> None:
        self._client, self.calls = client, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)

        def call(*args: Any, **options: Any) -> Any:
            self.calls[name] += 1
            return method(*args, **options)

        return call


@pytest.mark.parametrize("work", ["list", "show", "compare", "current", "history", "promote", "rollback"])
def test_as_many_calls_as_of_a_small_registry(
    store: Store, make_candidate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: str
) -> None:
    for seed in (1, 2):
        register(store, "merged", make_candidate(seed, 0.6 + seed / 10))
        if seed == 1 or work == "rollback":
            promote(store, "merged", seed, GateSettings())
    copy_rows(tmp_path / "mlflow.db", 300)
    counting, read = Counting(store.client), list[str]()
    whole = files.fetched

    def fetched(store: Store, source: str, part: str, folder: Path | None = None) -> Any:
        read.append(part)
        return whole(store, source, part, folder)

    for module in ("registry.files", "registry.versions"):
        monkeypatch.setattr(f"{module}.fetched", fetched)
    grown: Any = replace(store, client=counting)
    {
        "list": lambda: list_versions(grown, "merged"),
        "show": lambda: show(grown, "merged", 2),
        "compare": lambda: compare(grown, "merged", 1, 2),
        "current": lambda: current(grown, "merged"),
        "history": lambda: history(grown, "merged"),
        "promote": lambda: promote(grown, "merged", 2, GateSettings()),
        "rollback": lambda: rollback(grown, "merged"),
    }[work]()
    searches, parts = counting.calls["search_model_versions"], len(read)
    assert searches <= (0 if work in ("show", "compare") else 1), counting.calls
    assert parts <= {"show": 3, "compare": 6, "promote": 3, "rollback": 2}.get(work, 0), read
    assert sum(counting.calls.values()) <= 20, counting.calls
