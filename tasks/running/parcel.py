"""A stage that travels: its inputs go into the store, a worker builds the outputs, the store has them for the driver.

Nothing in a parcel or a result names a path of either machine: files are named relative to the project, and by hash.
"""

import hashlib
import json
import os
import shutil
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from mergeflow.application import HOME
from mergeflow.errors import MergeflowError
from mergeflow.layout import ACCEPTED
from tasks.project.files import file_lock
from tasks.project.graph import load_graph
from tasks.project.recorded import StoredFile, StoredOutput, files_of, write_listing
from tasks.project.stage import INPUTS, MAIN, STATE, Stage, StageIO, file_name, read_record
from tasks.running.digests import MEMORY, code_files
from tasks.running.runner import HOST, check_worker, open_stage, paths_read, run_stage, running_code
from tasks.running.stage_log import log_path
from tasks.travel.lease import forget_state, lease, lease_name, mirrored, restore_state
from tasks.travel.store import Store, StoreError, bring

WORKER_FOLDER = "MERGEFLOW_WORKER_DIR"
_CHOICES = ("params.yaml", MAIN, ACCEPTED)
_OURS = ("mergeflow", "tasks", "registry", "flows", "suites", "studies")
_PLUGINS = ("methods", "modalities", "sources", "compressors")
_KEPT_DAYS = 7
_one_at_a_time = threading.Lock()  # the current folder, in which plug-ins are looked for, is the whole process's


@dataclass(frozen=True)
class Sent:
    """Work to do elsewhere.

    Attributes:
        address: what the work is called in messages; of a stage its address.
        driver: the code and packages that it has to be done by.
        work: digest of all that decides its outputs: the same make the same on any machine.
    """

    store: str
    address: str
    driver: Mapping[str, str]
    work: str

    @property
    def key(self) -> str:
        """What stands for it in the store."""
        return f"{file_name(self.address)}-{self.work}"


def digest_of_work(*facts: Any) -> str:
    """Return a digest of facts and of the code that runs here."""
    code = {name: value for name, value in running_code().items() if name != HOST}
    return hashlib.sha256(json.dumps([*facts, code], sort_keys=True).encode()).hexdigest()[:24]


@dataclass(frozen=True)
class Parcel(Sent):
    """A stage to run elsewhere.

    Attributes:
        fingerprint: the beginning of the stage's, which the worker must find too.
        inputs: the hash of each file and folder that the stage reads, in the store.
    """

    fingerprint: str
    texts: Mapping[str, str]
    inputs: Mapping[str, str]


@dataclass(frozen=True)
class Result:
    """What a worker has made.

    Attributes:
        outs: the hash of each output, in the store.
        files: of each output that is a folder, its files.
    """

    outs: Mapping[str, str]
    files: Mapping[str, Mapping[str, Mapping[str, Any]]]
    record: Mapping[str, Any]
    sent: int = 0
    fetched: int = 0


def pack(io: StageIO, store: Store) -> Parcel:
    """Put what a stage needs into the store, and describe the rest for a worker."""
    root = io.root.resolve()
    paths = [*paths_read(io), *(file.relative_to(root).as_posix() for file in sorted(_own_code(root, io.stage)))]
    texts = {name: (root / name).read_text("utf-8") for name in _CHOICES if (root / name).exists()}
    bring(io.root, paths, unless_in=store.uri)
    inputs = {path: store.send(io.root / path) for path in paths}
    address, fingerprint = io.stage.address, io.scratch.name
    work = digest_of_work(address, fingerprint)
    return Parcel(store.uri, address, running_code(), work, fingerprint, texts, inputs)


def _own_code(root: Path, stage: Stage) -> set[Path]:
    """Return the project's own files of code: the stage's, and all plug-ins, which params.yaml is validated against."""
    packages = [(HOME / name).resolve() for name in _OURS]
    code = {file.resolve() for file in code_files(root, stage)}
    code |= {file for folder in _PLUGINS for _, file in files_of(root / folder) if "__pycache__" not in file.parts}
    return {file for file in code if file.is_relative_to(root) and not any(map(file.is_relative_to, packages))}


def unpack(io: StageIO, store: Store, result: Result) -> None:
    """Put a stage's outputs where it builds them here, and note what the worker did.

    Folders, which are data and weights, are listed and stay in the store; an output that is one file is a table or a
    document, for people too.
    """
    for out, md5 in result.outs.items():
        if files := result.files[out]:
            listed = {name: StoredFile(**file) for name, file in files.items()}
            write_listing(io.building, out, StoredOutput(store.uri, md5, listed))
        else:
            store.fetch(md5, io.out(out))
    io.costs.update({key: value for key, value in result.record.items() if key not in ("stage", "started")})


def read_progress(store: Store, parcel: Sent) -> tuple[str, int, int] | None:
    """Read from a lease which worker does what, and how far it is; None where nobody is at work on it."""
    progress = store.read(lease_name(parcel.key))
    if not progress or not {HOST, "what", "done", "total"} <= set(progress):
        return None
    return f"{progress['what']} on {progress[HOST]}", int(progress["done"]), int(progress["total"])


def read_log(store: Store, parcel: Parcel) -> str:
    return str((store.read(_log_name(parcel)) or {}).get("text", ""))


def carry_out(parcel: dict[str, Any]) -> dict[str, Any] | Exception:
    """Run a stage on this machine, which has nothing of its project.

    Args:
        parcel: the fields of a `Parcel`; in a worker's process this module is imported only now.
    """
    sent = Parcel(**parcel)
    return answered(sent, partial(_carry_out, sent))


def answered(sent: Sent, work: Callable[[Store, Path], Result]) -> dict[str, Any] | Exception:
    """Do work on this machine, as one of all that share the store.

    Args:
        work: takes the store, and a folder for what it needs and makes, which goes when it has ended well.

    Returns:
        The fields of a `Result`, or the error, with its traceback where no bad input caused it.
    """
    try:
        check_worker(sent.driver, sent.address)
        with _one_at_a_time:
            return asdict(_work_alone(sent, work))
    except Exception as error:
        if not isinstance(error, MergeflowError):
            error.add_note("".join(traceback.format_exception(error)))
        return error


def worker_folder() -> Path:
    """Return the folder in which this machine keeps objects and the stages that it is at work on."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get(WORKER_FOLDER) or caches / "mergeflow/worker").resolve()


def _work_alone(sent: Sent, work: Callable[[Store, Path], Result]) -> Result:
    folder = worker_folder()
    store = Store(sent.store, folder / "objects")
    place = folder / "stages" / sent.key
    _forget_old(folder)
    progress = place / STATE / "progress" / f"{file_name(sent.address)}.json"
    with (
        file_lock(place.with_suffix(".lock"), sent.address),
        lease(store, sent.key, lambda: _shown(progress)),
    ):
        result = work(store, place)
    shutil.rmtree(place, ignore_errors=True)
    return result


def _carry_out(parcel: Parcel, store: Store, project: Path) -> Result:
    result = _earlier(store, parcel)
    if result is None:
        stage = _settle(project, parcel, store)
        _run(project, stage, parcel, store)
        outs = {out: store.send(project / out) for out in stage.outs}
        files = {out: _listed(project / out) for out in outs}
        made: dict[str, Any] = {"outs": outs, "files": files, "record": read_record(project, parcel.address)}
        result = Result(**made, sent=store.sent, fetched=store.fetched)
        store.write(_result_name(parcel), made)
        for out, md5 in outs.items():
            store.keep(project / out, md5)
        with suppress(FileNotFoundError):  # this process has parsed all code before
            (project / STATE / MEMORY).replace(worker_folder() / MEMORY)
    forget_state(store, parcel.key)
    return result


def _listed(out: Path) -> dict[str, dict[str, Any]]:
    """Read the files of an output that is a folder; of a file nothing."""
    return {name: asdict(StoredFile.of(file)) for name, file in files_of(out)} if out.is_dir() else {}


def _log_name(parcel: Parcel) -> str:
    return f"logs/{parcel.key}.json"


def _result_name(parcel: Parcel) -> str:
    return f"results/{parcel.key}.json"


def _earlier(store: Store, parcel: Parcel) -> Result | None:
    """Look up a result of the same stage that a worker made before, if the store has all of it."""
    noted = store.read(_result_name(parcel))
    if noted is None or not all(store.has(md5) for md5 in noted["outs"].values()):
        return None
    return Result(**noted)


def _settle(project: Path, parcel: Parcel, store: Store) -> Stage:
    """Make a folder with all that the stage reads, and return the stage."""
    (project / STATE).mkdir(parents=True, exist_ok=True)
    (project / INPUTS).mkdir(exist_ok=True)  # a dependency, whatever is named of it
    for name, text in parcel.texts.items():
        (project / name).write_text(text, encoding="utf-8")
    for path, md5 in parcel.inputs.items():
        store.fetch(md5, project / path)
    with suppress(FileNotFoundError):  # to parse all code takes seconds; the first stage here does it
        shutil.copyfile(worker_folder() / MEMORY, project / STATE / MEMORY)
    return load_graph(project)[parcel.address]


def _run(project: Path, stage: Stage, parcel: Parcel, store: Store) -> None:
    with current_folder(project):
        io, _ = open_stage(project, stage)
        if io.scratch.name != parcel.fingerprint:
            raise MergeflowError(
                f"{stage.address} is another stage on {running_code()[HOST]} than on {parcel.driver[HOST]}, where the "
                "run was started: it reads something that is neither in the project nor in the package."
            )
        if not io.scratch.exists():
            restore_state(store, parcel.key, io.scratch)
        try:
            with mirrored(store, parcel.key, io.scratch):
                run_stage(project, stage)
        finally:
            with suppress(OSError, StoreError):  # what the stage raises counts
                text = log_path(project / STATE, stage.folder_name).read_text("utf-8")
                store.write(_log_name(parcel), {"text": f"on {running_code()[HOST]}:\n{text}"})


@contextmanager
def current_folder(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _shown(progress: Path) -> dict[str, Any]:
    """Describe the stage for its lease: on which machine it is, and how far."""
    with suppress(OSError, ValueError):
        return {HOST: running_code()[HOST], **json.loads(progress.read_text())}
    return {HOST: running_code()[HOST], "what": "getting ready", "done": 0, "total": 1}


@cache
def _forget_old(folder: Path) -> None:
    """Remove what was not used for a week, once in a process."""
    oldest = time.time() - _KEPT_DAYS * 24 * 3600
    for path in (folder / "objects").glob("*/*"):
        if path.stat().st_mtime < oldest:
            path.unlink(missing_ok=True)
    for project in (folder / "stages").glob("*/"):
        if project.stat().st_mtime < oldest:
            shutil.rmtree(project, ignore_errors=True)
