"""PostgreSQL started again under a promotion: nobody's event is lost, and what was committed is told as such."""

from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy

from mergeflow.errors import MergeflowError
from registry.gates import GateSettings
from registry.promotion import Force, promote, register, rollback
from registry.store import LockLost, Store, postgres_lock
from registry.versions import current, history

GATES = GateSettings()


def break_connections(address: str) -> None:
    """End every other connection of the server, as its restart does."""
    engine = sqlalchemy.create_engine(address, poolclass=sqlalchemy.pool.NullPool, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(
            sqlalchemy.text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")
        )


class Interrupted:
    """MLflow's client; before (or after) one of its writes something happens, once."""

    def __init__(self, client: Any, write: tuple[str, str], happens: Any, after: bool = False) -> None:
        self._client, self._write, self._happens, self._after = client, write, happens, after

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)

        def call(*args: Any, **options: Any) -> Any:
            meant = name == self._write[0] and any(str(argument).startswith(self._write[1]) for argument in args)
            happens, self._happens = (self._happens, None) if meant and self._happens else (None, self._happens)
            if happens and not self._after:
                happens()
            answer = method(*args, **options)
            if happens and self._after:
                happens()
            return answer

        return call


@pytest.fixture
def locked(store: Store, make_candidate: Any, postgres: str) -> Store:
    """A registry whose writers keep apart by PostgreSQL, with three versions, the first one champion."""
    for seed in (1, 2, 3):
        register(store, "merged", make_candidate(seed, 0.6 + seed / 10))
    promote(store, "merged", 1, GATES)
    return replace(store, lock_uri=postgres)


@pytest.mark.parametrize(
    "write",
    [("set_model_version_tag", "mergeflow.decision"), ("set_registered_model_tag", "mergeflow.event.00000002")],
)
@pytest.mark.parametrize("change", ["promote", "rollback"])
def test_who_loses_the_lock_starts_over(locked: Store, postgres: str, write: tuple[str, str], change: str) -> None:
    def restart() -> None:
        break_connections(postgres)
        promote(locked, "merged", 3, GATES, force=Force("ada", "meanwhile"))

    if change == "rollback":
        promote(locked, "merged", 2, GATES)
        write = ("set_registered_model_tag", "mergeflow.event.00000003")
    slow = replace(locked, client=Interrupted(locked.client, write, restart))  # type: ignore[arg-type]
    if change == "promote":
        assert not promote(slow, "merged", 2, GATES).changed  # the gates see the new champion: 2 is worse
        expected = [("promote", "1", None), ("force", "3", "1")]
    else:
        assert rollback(slow, "merged").version == "2"
        expected = [("promote", "1", None), ("promote", "2", "1"), ("force", "3", "2"), ("rollback", "2", "3")]
    assert [(event.action, event.version, event.before) for event in history(locked, "merged")] == expected


def test_a_lock_that_is_lost_after_the_commit_is_no_error(locked: Store, postgres: str) -> None:
    write = ("set_registered_model_alias", "champion")
    client: Any = Interrupted(locked.client, write, lambda: break_connections(postgres), after=True)
    slow = replace(locked, client=client)
    assert promote(slow, "merged", 2, GATES).changed
    assert current(locked, "merged").champion.version == "2"  # type: ignore[union-attr]


def test_a_lock_knows_whether_it_is_held(postgres: str) -> None:
    with postgres_lock(postgres, "model merged", 5) as check:
        check()
        with postgres_lock(postgres, "model other", 5) as other:
            other()
        check()
        break_connections(postgres)
        with pytest.raises(LockLost, match="the registry's lock 'model merged' was lost"):
            check()


def test_a_database_that_does_not_answer_is_named_without_its_password() -> None:
    address = "postgresql://ada:s3cret@127.0.0.1:9/registry"
    silent = pytest.raises(MergeflowError, match="lock 'model merged' does not answer")
    with silent as raised, postgres_lock(address, "model merged", 1):
        pass
    assert "s3cret" not in str(raised.value)
