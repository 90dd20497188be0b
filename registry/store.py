"""Open the registry, a local SQLite file or whatever MLFLOW_TRACKING_URI names, and its locks.

Of a lock there is one holder for each name; it is released when its holder dies.
"""

import gc
import hashlib
import os
import re
import sqlite3
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit
from urllib.request import url2pathname
from uuid import uuid4

import sqlalchemy
from filelock import Timeout
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from mergeflow.errors import MergeflowError, first_line, without_passwords
from tasks.project import files

_POLL_SECONDS = 0.05
Check = Callable[[], None]
"""Asks whether a lock is still held; raises LockLost where it is not."""


class LockLost(MergeflowError):
    """The lock was lost. Others may have written since, so values read under it may be out of date."""


@contextmanager
def file_lock(folder: Path, name: str, timeout: float) -> Iterator[Check]:
    """Hold the lock `name` among the processes of this machine."""
    path = folder / f"{re.sub(r'[^A-Za-z0-9._-]', '_', name)}-{_number(name):016x}.lock"
    with ExitStack() as held:
        try:
            held.enter_context(files.file_lock(path, f"the registry's lock '{name}'", timeout))
        except Timeout:
            raise _busy(name, timeout, str(path)) from None
        yield lambda: None  # the operating system keeps it as long as the process lives


@contextmanager
def postgres_lock(uri: str, name: str, timeout: float) -> Iterator[Check]:
    """Hold the advisory lock `name` of the PostgreSQL database `uri`, among all machines that use it.

    The lock belongs to one connection: a killed holder's connection closes and the lock is free. So it is too when the
    server is started again under a living holder, who has to ask before a write that others may not undo.
    """
    engine = sqlalchemy.create_engine(uri, poolclass=sqlalchemy.pool.NullPool, isolation_level="AUTOCOMMIT")
    key = _number(name) - 2**63
    connection = _acquired(engine, key, name, timeout)

    def ask(question: str) -> object:
        return connection.execute(sqlalchemy.text(question), {"key": key}).scalar()

    def check() -> None:
        try:
            held = ask(_HELD)
        except sqlalchemy.exc.SQLAlchemyError:
            held = None
        if not held:
            raise LockLost(
                f"the registry's lock '{name}' was lost: the PostgreSQL server that keeps it was started again, or the "
                "connection broke. Nothing was changed; try again."
            )

    try:
        yield check
    finally:
        with suppress(sqlalchemy.exc.SQLAlchemyError):  # a lost connection has released it
            ask("SELECT pg_advisory_unlock(:key)")
        with suppress(sqlalchemy.exc.SQLAlchemyError):
            connection.close()


# An advisory lock's key is kept in two halves.
_HELD = """
SELECT count(*) FROM pg_locks
WHERE locktype = 'advisory' AND granted AND pid = pg_backend_pid() AND objsubid = 1
AND (classid::bigint << 32 | objid::bigint) = CAST(:key AS bigint)
"""


def _acquired(engine: sqlalchemy.Engine, key: int, name: str, timeout: float) -> sqlalchemy.Connection:
    wait = files.Wait(f"the registry's lock '{name}'")
    try:
        connection = engine.connect()
        while not connection.execute(sqlalchemy.text("SELECT pg_try_advisory_lock(:key)"), {"key": key}).scalar():
            if wait.seconds > timeout:
                connection.close()
                raise _busy(name, timeout, "a PostgreSQL advisory lock")
            wait.pause(_POLL_SECONDS)
    except sqlalchemy.exc.SQLAlchemyError as error:
        raise MergeflowError(
            f"the PostgreSQL database that keeps the registry's lock '{name}' does not answer: {first_line(error)}. "
            "Nothing was changed; start that server, or correct MERGEFLOW_LOCK_URI, and try again."
        ) from error
    return connection


def _number(name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"mergeflow {name}".encode()).digest()[:8], "big")


def _busy(name: str, timeout: float, where: str) -> MergeflowError:
    return MergeflowError(
        f"the registry's lock '{name}' was held by another process for {timeout:g} s ({where}): "
        "wait for that run to end, or end it, and try again."
    )


# Where MLflow's database keeps addresses of files.
_COLUMNS = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
)


def follow_files(database: Path, experiment_id: str, folder: Path) -> None:
    """Replace the former path of the project's files by the present one, everywhere and in one transaction.

    Nothing is done when the database alone was copied and its files are still at the former place.
    """
    with closing(sqlite3.connect(database, timeout=60)) as connection, connection:
        question = "SELECT artifact_location FROM experiments WHERE experiment_id = ?"
        former = str(connection.execute(question, (int(experiment_id),)).fetchone()[0])
        now = folder.as_uri()
        if former == now or not former.startswith("file:"):
            return
        if Path(url2pathname(urlsplit(former).path)).is_dir() and not folder.is_dir():
            return
        for table, column in _COLUMNS:
            connection.execute(
                f"UPDATE {table} SET {column} = ? || substr({column}, ?) "
                f"WHERE {column} = ? OR substr({column}, 1, ?) = ?",
                (now, len(former) + 1, former, len(former) + 1, f"{former}/"),
            )


with warnings.catch_warnings():  # one that MLflow's own type hints raise
    warnings.simplefilter("ignore", UserWarning)
    import mlflow as mlflow
    import mlflow.pyfunc

EXPERIMENT = "mergeflow"
LOCK_SECONDS = 1800.0  # a holder may be uploading a large model
_VARIABLE = "MLFLOW_TRACKING_URI"


class _MlflowClient(MlflowClient):
    """MLflow's client, which does not read the whole model before each write to see whether it is a prompt."""

    def _raise_if_prompt(self, name: str) -> None:
        """Do nothing: every write here follows a read, which finds no prompt under a model's name."""


class _Client:
    """MLflow's client, which says what it waits for where an answer takes long."""

    def __init__(self, client: MlflowClient, uri: str) -> None:
        self._client, self._uri = client, without_passwords(uri)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._client, name)
        if not callable(value):
            return value

        def call(*args: Any, **options: Any) -> Any:
            reading = _no_garbage_collection() if name.startswith(("get_", "search_")) else nullcontext()
            with files.awaited(f"the registry at {self._uri} ({name})"), reading:
                return value(*args, **options)

        return call


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Collect no garbage inside the block.

    The rows of 2,000 versions start several collections, each of which walks through all that torch and MLflow loaded.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True)
class Store:
    """An open registry: its address, MLflow's client for it, and the locks of its writers."""

    uri: str
    client: MlflowClient
    experiment_id: str
    artifact_folder: Path | None
    lock_folder: Path
    lock_uri: str | None
    scratch: Path  # on the project's disk; of this registry alone, since its locks guard it

    def lock(self, name: str, timeout: float = LOCK_SECONDS) -> AbstractContextManager[Check]:
        """Choose the lock `name`: an advisory lock where a PostgreSQL address is given, else a file lock."""
        if self.lock_uri is not None:
            return postgres_lock(self.lock_uri, name, timeout)
        return file_lock(self.lock_folder, name, timeout)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make this store MLflow's current one inside the block, for its functions that take no address."""
        before, variable = mlflow.get_tracking_uri(), os.environ.get(_VARIABLE)
        was_set = mlflow.is_tracking_uri_set()
        set_uri: Any = mlflow.set_tracking_uri  # takes None, whatever its annotation says
        set_uri(self.uri)
        try:
            yield
        finally:
            set_uri(before if was_set else None)
            if variable is None:  # MLflow writes the variable too, and `connect` would take it for the user's
                os.environ.pop(_VARIABLE, None)
            else:
                os.environ[_VARIABLE] = variable


def connect(
    tracking_uri: str | None = None,
    project_root: Path | str = ".",
    *,
    experiment: str = EXPERIMENT,
    lock_uri: str | None = None,
) -> Store:
    """Open the registry; a local one that is missing is made.

    Args:
        tracking_uri: MLflow's address; the environment's MLFLOW_TRACKING_URI wins over it; None for both means
            `mlflow.db` in the project folder, with the files in `mlartifacts/`.
        lock_uri: PostgreSQL database whose advisory locks keep promoters apart; the environment's
            MERGEFLOW_LOCK_URI wins. None: the tracking database when that is PostgreSQL, else file locks, which hold
            among the projects of one machine that use the registry: under `.mergeflow/locks` beside a SQLite file; for
            a server in a folder of this user, below the system's one for temporary files.
    """
    root = Path(project_root).resolve()
    local_uri = f"sqlite:///{root / 'mlflow.db'}"
    uri = _without_login(os.environ.get(_VARIABLE) or tracking_uri or local_uri)
    _check_kind(uri)
    lock_folder = _lock_folder(uri)
    served = uri.startswith(("http://", "https://"))
    folder = None if served else root / "mlartifacts"
    try:
        if uri.startswith("sqlite:///"):
            _ensure_sqlite(_sqlite_file(uri), lock_folder)
        client: Any = _Client(_MlflowClient(tracking_uri=uri, registry_uri=uri), uri)
        experiment_id = _experiment_id(client, experiment, folder)
        if uri == local_uri and folder is not None:
            follow_files(root / "mlflow.db", experiment_id, folder)
    except (MlflowException, sqlalchemy.exc.SQLAlchemyError, sqlite3.Error) as error:
        raise _cannot_open(uri, error) from error
    lock = os.environ.get("MERGEFLOW_LOCK_URI") or lock_uri or (uri if uri.startswith("postgresql") else None)
    return Store(uri, client, experiment_id, folder, lock_folder, lock, _scratch(root, lock_folder))


def every_page(search: Callable[..., Any]) -> list[Any]:
    entries: list[Any] = []
    token: str | None = None
    while True:
        page = search(max_results=1000, page_token=token)
        entries += page
        token = page.token
        if not token:
            return entries


def _lock_folder(uri: str) -> Path:
    """Return where the registry's file locks are: the same for every project of this user and machine."""
    if uri.startswith("sqlite:///"):
        return _sqlite_file(uri).resolve().parent / ".mergeflow" / "locks"
    place = urlsplit(uri)
    server = place.netloc.rpartition("@")[2].lower() + place.path.rstrip("/")  # whoever asks there
    return Path(tempfile.gettempdir()) / f"mergeflow-registry-{os.getuid()}" / _digest(server)


def _scratch(root: Path, lock_folder: Path) -> Path:
    state = root / ".mergeflow"
    return state / ("registry" if lock_folder == state / "locks" else f"registry-{_digest(str(lock_folder))}")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _sqlite_file(uri: str) -> Path:
    return Path(uri.removeprefix("sqlite:///").partition("?")[0])


def _cannot_open(uri: str, error: Exception) -> MergeflowError:
    reason = first_line(error)
    if not uri.startswith("sqlite:///"):
        way_out = "Start that server, or correct MLFLOW_TRACKING_URI; unset, it means mlflow.db in the project folder."
        if "error code 401" in reason or "error code 403" in reason:
            way_out = "Set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD to a login that may use it."
        return MergeflowError(f"the registry at {uri} cannot be opened: {reason}. {way_out}")
    return MergeflowError(
        f"the registry's file {_sqlite_file(uri)} cannot be opened: {reason}. It is not a database of this version of "
        "MLflow, or it is damaged. Put a backup in its place; or move it away, and `mergeflow run` makes a new one and "
        "registers the winner again."
    )


def _check_kind(uri: str) -> None:
    if not uri.startswith(("sqlite:///", "postgresql://", "postgresql+", "http://", "https://")):
        raise MergeflowError(
            f"MLFLOW_TRACKING_URI is {uri!r}, expected sqlite:///FILE, postgresql://... or http(s)://...: "
            "MLflow keeps its registry in a database; a plain folder cannot hold one."
        )


def _ensure_sqlite(path: Path, lock_folder: Path) -> None:
    """Make the database whole or not at all: MLflow's migrations, killed half-way, leave a file nobody can open."""
    if path.exists():
        return
    with file_lock(lock_folder, f"create {path.resolve()}", LOCK_SECONDS):
        if path.exists():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        for left_over in path.parent.glob(f"{path.name}.new-*"):
            left_over.unlink()
        scratch = path.with_name(f"{path.name}.new-{uuid4().hex[:8]}")
        MlflowClient(tracking_uri=f"sqlite:///{scratch}").search_experiments(max_results=1)
        os.replace(scratch, path)


def _experiment_id(client: MlflowClient, name: str, folder: Path | None) -> str:
    existing = client.get_experiment_by_name(name)
    if existing is None:
        try:
            return str(client.create_experiment(name, artifact_location=folder.as_uri() if folder else None))
        except MlflowException as error:
            existing = client.get_experiment_by_name(name)  # another process made it in between
            if existing is None:
                raise error
    if existing.lifecycle_stage == "deleted":
        client.restore_experiment(existing.experiment_id)
    return str(existing.experiment_id)


def _without_login(uri: str) -> str:
    """Return a server's address without name and password, which go where MLflow looks for them.

    MLflow repeats the address in its errors and links.
    """
    place = urlsplit(uri)
    if place.scheme not in ("http", "https") or "@" not in place.netloc:
        return uri
    login, _, host = place.netloc.rpartition("@")
    name, _, password = login.partition(":")
    os.environ |= {"MLFLOW_TRACKING_USERNAME": unquote(name), "MLFLOW_TRACKING_PASSWORD": unquote(password)}
    plain = place._replace(netloc=host).geturl()
    if os.environ.get(_VARIABLE) == uri:
        os.environ[_VARIABLE] = plain
    return plain
