"""What the crash tests share: a client that dies at a chosen step, and what must hold after any death."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from registry.artifacts import read_evidence
from registry.gates import GateSettings
from registry.promotion import Force, promote, register, repair, rollback
from registry.store import Store
from registry.versions import all_versions, current, history, list_versions

GATES = GateSettings()
WRITES = ("create_", "set_", "delete_", "finalize_", "log_")


class MortalClient:
    """MLflow's client; kill -9 strikes this process before its writing call number `last`, counted from 0."""

    def __init__(self, client: Any, last: int) -> None:
        self._client, self._left = client, last

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)
        if not name.startswith(WRITES):
            return method

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            self._left -= 1
            return method(*args, **kwargs)

        return call


def mortal(store: Store, last: int) -> Store:
    return replace(store, client=MortalClient(store.client, last))  # type: ignore[arg-type]


def died(status: int) -> bool:
    """Whether the wait status is a death by SIGKILL; anything else but success is a failure of the test."""
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.waitstatus_to_exitcode(status) == 0
    return False


def assert_sound(store: Store, name: str) -> str:
    """One champion, and it is finished: before any repair, as every reader may find it. Returns its number."""
    aliases = store.client.get_registered_model(name).aliases  # before the versions: they only grow
    versions = all_versions(store, name)
    assert {str(number) for number in aliases.values()} <= set(versions)
    read_evidence(store, versions[str(aliases["champion"])])
    assert current(store, name).champion is not None
    return str(aliases["champion"])


def assert_settled(store: Store, name: str, champion: str, actions: list[str], versions: int) -> None:
    """After the next ordinary run nothing tells that there was a crash."""
    assert assert_sound(store, name) == champion
    assert [event.action for event in history(store, name)] == actions
    tags = store.client.get_registered_model(name).tags
    assert sorted(key.partition("-")[0] for key in tags if key.startswith("mergeflow.event")) == [
        f"mergeflow.event.{number:08d}" for number in range(1, len(actions) + 1)
    ]
    assert len(list_versions(store, name)) == versions
    uploads = store.client.search_logged_models(
        [store.experiment_id], filter_string=f"tags.`mergeflow.model` = '{name}'"
    )
    assert len(uploads) == versions
    assert all(str(upload.status) == "READY" for upload in uploads)


def survives_kills_while_promoting(store: Store, forker: Any, make: Callable[..., Any], prefix: str) -> int:
    """Kill register + promote before every write in turn; return how many writes there are."""
    step = 0
    while True:
        name = f"{prefix}-{step}"
        register(store, name, make(f"{name}-1", 0.7))
        promote(store, name, 1, GATES)
        second = make(f"{name}-2", 0.9)

        def work(name: str = name, second: Any = second, step: int = step) -> None:
            doomed = mortal(store, step)
            promote(doomed, name, register(doomed, name, second).version, GATES)

        dead = died(forker.run(store, work))
        before = assert_sound(store, name)
        assert before in (("1", "2") if dead else ("2",))
        promote(store, name, register(store, name, second).version, GATES)
        assert_settled(store, name, "2", ["promote", "promote"], 2)
        assert current(store, name).previous.version == "1"
        if not dead:
            return step
        step += 1


def survives_kills_of_the_first(store: Store, forker: Any, make: Callable[..., Any], prefix: str) -> None:
    """Kill the very first register + promote before every write in turn: no champion, or a finished one."""
    step, dead = 0, True
    while dead:
        name = f"{prefix}-{step}"
        first = make(name, 0.7)

        def work(name: str = name, first: Any = first, step: int = step) -> None:
            doomed = mortal(store, step)
            promote(doomed, name, register(doomed, name, first).version, GATES)

        dead = died(forker.run(store, work))
        if current(store, name).champion is not None:
            assert assert_sound(store, name) == "1"
        promote(store, name, register(store, name, first).version, GATES)
        assert_settled(store, name, "1", ["promote"], 1)
        step += 1


def survives_kills_while_rolling_back(store: Store, forker: Any, make: Callable[..., Any], name: str) -> int:
    """Kill a rollback before every write in turn; return how many writes there are."""
    actions, step = ["promote"] * 3, 0
    for number, accuracy in enumerate((0.6, 0.7, 0.8), start=1):
        register(store, name, make(f"{name}-{number}", accuracy))
        promote(store, name, number, GATES)
    while True:
        dead = died(forker.run(store, lambda step=step: rollback(mortal(store, step), name)))
        if assert_sound(store, name) == "3":  # the commit never came: ask again
            assert dead
            rollback(store, name)
        else:
            repair(store, name)
        actions.append("rollback")
        assert_settled(store, name, "2", actions, 3)
        assert current(store, name).previous.version == "1"
        if not dead:
            return step
        promote(store, name, 3, GATES, force=Force("ada", "for the next round"))
        actions.append("force")
        step += 1


def best_of_two_promoters_wins(
    store: Store, forker: Any, make: Callable[..., Any], name: str, kill_after: float | None
) -> None:
    """Two processes register and promote at once, one of them perhaps killed; the better model must end up champion."""
    register(store, name, make(f"{name}-1", 0.7))
    promote(store, name, 1, GATES)
    rivals = [make(f"{name}-good", 0.8), make(f"{name}-best", 0.9)]

    def work(candidate: Any) -> None:
        promote(store, name, register(store, name, candidate).version, GATES)

    children = [forker.start(store, lambda rival=rival: work(rival)) for rival in rivals]
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(children[1], signal.SIGKILL)
    for child in children:
        died(os.waitpid(child, 0)[1])
        assert_sound(store, name)
    if kill_after is None:
        assert current(store, name).champion.fingerprint == f"{name}-best"
    work(rivals[1])
    work(rivals[0])
    now = current(store, name)
    assert now.champion.fingerprint == f"{name}-best"
    assert len(list_versions(store, name)) == 3
    assert [event.sequence for event in history(store, name)] == list(range(1, len(history(store, name)) + 1))


class HesitantClient:
    """MLflow's client, whose process is slow just before the commit: it has decided and not yet written."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def set_registered_model_alias(self, name: str, alias: str, version: str) -> None:
        if alias == "champion":
            time.sleep(1.0)
        self._client.set_registered_model_alias(name, alias, version)


def a_hesitant_promoter_does_not_win(store: Store, forker: Any, make: Callable[..., Any], name: str) -> None:
    """The better model is promoted while the worse one's promoter stands between decision and commit."""
    for number, accuracy in enumerate((0.7, 0.8, 0.9), start=1):
        register(store, name, make(f"{name}-{number}", accuracy))
    promote(store, name, 1, GATES)
    slow = replace(store, client=HesitantClient(store.client))  # type: ignore[arg-type]
    first = forker.start(store, lambda: promote(slow, name, 2, GATES))
    time.sleep(0.4)
    second = forker.start(store, lambda: promote(store, name, 3, GATES))
    for child in (first, second):
        assert not died(os.waitpid(child, 0)[1])
    assert_settled(store, name, "3", ["promote"] * 3, 3)
