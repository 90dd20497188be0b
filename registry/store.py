"""Where the registry is kept: a local SQLite file by default, or whatever MLFLOW_TRACKING_URI names."""

import hashlib
import os
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit
from uuid import uuid4

import sqlalchemy
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from mergeflow.errors import MergeflowError, first_line
from registry.locks import Check, file_lock, postgres_lock
from registry.quiet import mlflow
from registry.relocation import follow_files

EXPERIMENT = "mergeflow"
LOCK_SECONDS = 1800.0  # a holder may be uploading a large model
_VARIABLE = "MLFLOW_TRACKING_URI"


@dataclass(frozen=True)
class Store:
    """An open registry: the address, MLflow's client for it, and how its writers keep out of each other's way."""

    uri: str
    client: MlflowClient
    experiment_id: str
    artifact_folder: Path | None
    lock_folder: Path
    lock_uri: str | None
    scratch: Path  # on the project's disk; of this registry alone, since its locks guard it

    def lock(self, name: str, timeout: float = LOCK_SECONDS) -> AbstractContextManager[Check]:
        """Return the lock `name`: an advisory lock where PostgreSQL is known, else a file lock."""
        if self.lock_uri is not None:
            return postgres_lock(self.lock_uri, name, timeout)
        return file_lock(self.lock_folder, name, timeout)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make this store MLflow's current one inside the block, for its functions that take no address."""
        before, variable = mlflow.get_tracking_uri(), os.environ.get(_VARIABLE)
        known = mlflow.is_tracking_uri_set()
        set_uri: Any = mlflow.set_tracking_uri  # takes None, whatever its annotation says
        set_uri(self.uri)
        try:
            yield
        finally:
            set_uri(before if known else None)
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
    """Open the registry, and make it first when it is the local one and missing.

    Args:
        tracking_uri: MLflow's address; the environment's MLFLOW_TRACKING_URI wins over it; None for both means
            `mlflow.db` in the project folder, with the files in `mlartifacts/`.
        project_root: the project folder.
        experiment: the MLflow experiment that holds the runs; made when missing.
        lock_uri: PostgreSQL database whose advisory locks keep promoters apart; the environment's
            MERGEFLOW_LOCK_URI wins. None: the tracking database when that is PostgreSQL, else file locks, which hold
            among the projects of one machine that use the registry: under `.mergeflow/locks` beside a SQLite file; for
            a server in a folder of this user, below the system's one for temporary files.

    Raises:
        MergeflowError: the address is of no known kind, or nobody answers there.
    """
    root = Path(project_root).resolve()
    own = f"sqlite:///{root / 'mlflow.db'}"
    uri = _without_login(os.environ.get(_VARIABLE) or tracking_uri or own)
    _check_kind(uri)
    lock_folder = _lock_folder(uri)
    served = uri.startswith(("http://", "https://"))
    folder = None if served else root / "mlartifacts"
    try:
        if uri.startswith("sqlite:///"):
            _ensure_sqlite(_sqlite_file(uri), lock_folder)
        client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        experiment_id = _experiment_id(client, experiment, folder)
        if uri == own and folder is not None:
            follow_files(root / "mlflow.db", experiment_id, folder)
    except (MlflowException, sqlalchemy.exc.SQLAlchemyError, sqlite3.Error) as error:
        raise _cannot_open(uri, error) from error
    lock = os.environ.get("MERGEFLOW_LOCK_URI") or lock_uri or (uri if uri.startswith("postgresql") else None)
    return Store(uri, client, experiment_id, folder, lock_folder, lock, _scratch(root, lock_folder))


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
    found = first_line(error)
    if not uri.startswith("sqlite:///"):
        return MergeflowError(
            f"the registry at {uri} cannot be opened: {found}. "
            "Start that server, or correct MLFLOW_TRACKING_URI; unset, it means mlflow.db in the project folder."
        )
    return MergeflowError(
        f"the registry's file {_sqlite_file(uri)} cannot be opened: {found}. It is not a database of this version of "
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
    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return str(client.create_experiment(name, artifact_location=folder.as_uri() if folder else None))
        except MlflowException as error:
            found = client.get_experiment_by_name(name)  # another process made it in between
            if found is None:
                raise error
    if found.lifecycle_stage == "deleted":
        client.restore_experiment(found.experiment_id)
    return str(found.experiment_id)


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
