"""A running stage's entries in the store: a lease, and the state from which another machine continues.

No two clocks are compared: a holder renews its lease, and whoever waits sees it change. One that does not change for
`EXPIRY` seconds of the waiter's own has lost its holder. Should two run the same stage all the same, each sends the
same bytes under the same names; a lease saves work, the objects' hashes guard results.
"""

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

from mergeflow.errors import MergeflowError
from tasks.project.files import Wait
from tasks.project.recorded import files_of, md5_of
from tasks.travel.store import Store

EXPIRY = float(os.environ.get("MERGEFLOW_LEASE_SECONDS", 20))
RENEWAL, POLL = EXPIRY / 5, EXPIRY / 20  # seconds
MIRROR = 2.0  # seconds between two looks for a newly saved state
_NOT_STATE = ("building", "replaced", "complete")  # of a scratch folder: what a new run makes anew


@contextmanager
def lease(store: Store, key: str, content: Callable[[], dict[str, Any]]) -> Iterator[None]:
    """Hold the lease of a stage while the block runs, once its holder, if there is one, has let go or died."""
    name, holder, numbers = lease_name(key), uuid4().hex, count()

    def document() -> dict[str, Any]:
        return {"holder": holder, "number": next(numbers), **content()}

    def renew() -> None:
        if (store.read(name) or {}).get("holder") == holder:
            store.write(name, document())

    _take(store, key, document())
    try:
        with _repeated(RENEWAL, renew):
            yield
    finally:
        with suppress(MergeflowError):  # it runs out by itself
            if (store.read(name) or {}).get("holder") == holder:
                store.remove(name)


def lease_name(key: str) -> str:
    return f"leases/{key}.json"


def _take(store: Store, key: str, document: dict[str, Any]) -> None:
    name, wait = lease_name(key), Wait(f"the stage {key}")
    seen, since = None, time.monotonic()
    while not (store.create(name, document) and (seen is None or _lasts(store, name, document, wait))):
        current = store.read(name)
        if current != seen:
            seen, since = current, time.monotonic()
        elif time.monotonic() - since > EXPIRY:
            if store.read(name) == seen:  # else somebody else was faster
                store.remove(name)
            since = time.monotonic()
            continue
        wait.pause(POLL)


def _lasts(store: Store, name: str, document: dict[str, Any], wait: Wait) -> bool:
    """Whether a new lease is still there a moment later: another waiter may have taken it for the dead holder's."""
    wait.pause(POLL)
    return store.read(name) == document


@contextmanager
def mirrored(store: Store, key: str, scratch: Path) -> Iterator[None]:
    """Send what a stage saves in its scratch folder, while the block runs."""
    sent: dict[str, str] = {}
    last: list[_Signature] = [{}]

    def send() -> None:
        before = _signature(scratch)
        if before == last[0] or not before:
            return
        files = {name: md5_of(scratch / name) for name in before}
        for md5, name in {md5: name for name, md5 in files.items()}.items():
            if md5 not in sent.values():
                store.put_file(scratch / name, f"{_state(key)}/{md5}")
        if _signature(scratch) == before:  # all files are of one moment
            store.write(f"{_state(key)}.json", files)
            sent.clear()
            sent.update(files)
            last[0] = before
        _forget_others(store, key, set(sent.values()))

    with _repeated(MIRROR, send, share=4):
        yield


def forget_state(store: Store, key: str) -> None:
    store.remove(f"{_state(key)}.json")
    _forget_others(store, key, set())


def restore_state(store: Store, key: str, scratch: Path) -> bool:
    """Bring the state that a stage has saved elsewhere, and return whether there was one; a damaged one is none."""
    files = store.read(f"{_state(key)}.json")
    if files is None:
        return False
    arriving = scratch.with_name(f"{scratch.name}.arriving")
    shutil.rmtree(arriving, ignore_errors=True)
    for name, md5 in files.items():
        (arriving / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            store.get_file(f"{_state(key)}/{md5}", arriving / name)
        except FileNotFoundError:
            return False
        if md5_of(arriving / name) != md5:
            return False
    arriving.rename(scratch)
    return True


_Signature = dict[str, tuple[int, int]]


def _state(key: str) -> str:
    return f"states/{key}"


def _signature(scratch: Path) -> _Signature:
    signature: _Signature = {}
    for name, path in files_of(scratch) if scratch.is_dir() else []:
        if name.partition("/")[0] not in _NOT_STATE and path.suffix != ".tmp":
            with suppress(FileNotFoundError):  # it is renamed just now
                signature[name] = path.stat().st_size, path.stat().st_mtime_ns
    return signature


def _forget_others(store: Store, key: str, current: set[str]) -> None:
    for name in store.names(_state(key)):
        if name not in current:
            store.remove(f"{_state(key)}/{name}")


@contextmanager
def _repeated(seconds: float, action: Callable[[], None], share: int = 0) -> Iterator[None]:
    """Do something every few seconds in a thread of its own while the block runs.

    It fails in silence: a store that does not answer for a minute must not end hours of training.
    """
    end = threading.Event()

    def repeat() -> None:
        pause = seconds
        while not end.wait(pause):
            started = time.monotonic()
            with suppress(MergeflowError, OSError):
                action()
            pause = max(seconds, share * (time.monotonic() - started))

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
