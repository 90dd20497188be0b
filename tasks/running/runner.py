"""Run one stage: skip it when nothing changed, else build its outputs aside and put them in place whole.

Both drivers, `dvc repro` and the Prefect flow, come through `run_stage`. What it needs on disk is in `.mergeflow/`:
a lock, a manifest and a record for each stage, and a scratch folder while the stage runs. A killed stage finds its
scratch folder again as long as its fingerprint is the same, and continues from what it had saved there.
"""

import hashlib
import json
import os
import platform
import resource
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mergeflow
import tasks
from mergeflow.checkpoints.writer import sync_folder, write_atomically
from mergeflow.commands.allocation import return_freed_memory
from mergeflow.errors import MergeflowError, first_line, is_full, not_permitted, without_passwords
from tasks.project.files import file_lock
from tasks.project.parameters import Params, StudyParams, load_params, load_study_params
from tasks.project.recorded import (
    check_inputs,
    digest,
    digest_of_times,
    is_made,
    listing_file,
    read_manifest,
    sha256_of,
)
from tasks.project.stage import CHOICES, INPUTS, MAIN, STATE, Progress, Stage, StageIO, file_name, named_inputs
from tasks.project.studies import declared_study, load_module
from tasks.project.study_graph import check_study_graph
from tasks.running.determinism import compute_on_one_thread
from tasks.running.digests import code_digest
from tasks.running.stage_log import log_path, stage_log
from tasks.travel.store import bring, remove_path

HOST = "host"


@cache
def running_code() -> dict[str, str]:
    """Return a digest of the library's and the stages' source as imported here, the versions that matter, the host."""
    whole = hashlib.sha256()
    for folder in (Path(str(package.__file__)).parent for package in (mergeflow, tasks)):
        for path in sorted(folder.rglob("*.py")):
            whole.update(f"{path.relative_to(folder).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    packages = {name: version(name) for name in ("torch", "numpy", "safetensors")}
    code = {"code of mergeflow": whole.hexdigest()[:12], "python": platform.python_version()}
    return {HOST: socket.gethostname(), **code, **packages}


def check_worker(driver: Mapping[str, str], stage: str) -> None:
    """Refuse to run a stage where the code or its packages are not those of the driver, which records its own."""
    code = running_code()
    differences = [
        f"{name} {code.get(name, 'missing')} here and {value} there"
        for name, value in driver.items()
        if name != HOST and code.get(name) != value
    ]
    if differences:
        raise MergeflowError(
            f"{stage} was sent to {code[HOST]}, which would make other results than {driver[HOST]}, where the run was "
            f"started: {', '.join(differences)}. Install the same mergeflow and packages on both."
        )


PROGRESS_SECONDS = 0.2
_LEAST_FREE = 2**20


class DiskFull(MergeflowError):
    """The disk is full while a stage runs: its inputs are not refused, and what it has finished is kept."""


def do_here(io: StageIO) -> None:
    """Do a stage's work in this process, once what it reads is here."""
    bring(io.root, io.stage.deps)
    module = load_module(io.root, io.stage.module)
    work = module if hasattr(module, "run") else declared_study(module, io.stage.name)
    try:
        work.run(io)
    finally:
        return_freed_memory()


def run_stage(root: Path, stage: Stage, force: bool = False, work: Callable[[StageIO], None] = do_here) -> bool:
    """Bring the outputs of `stage` up to date. Return False where nothing had to be done."""
    state = root / STATE
    lock = state / "locks" / f"{stage.folder_name}.lock"
    with file_lock(lock, f"the stage {stage.address}"), _failure_noted(root, stage.address):
        manifest = _manifest(root, stage)
        of_file = cache(sha256_of)
        io, fingerprint = open_stage(root, stage, of_file)
        if not force and is_up_to_date(root, stage, fingerprint):
            manifest.touch()  # so that the progress display counts it
            if work is do_here:  # `dvc repro` takes the outputs into its cache
                bring(root, stage.outs)
            return False
        read = {path: (digest(root / path, of_file), digest_of_times(root / path)) for path in _users_inputs(io)}
        if io.studies is not None:  # report a study's wrong options before its training runs start
            check_study_graph(root, io.studies)
        scratch = io.scratch
        others = {*scratch.parent.glob("*"), *io.journals.parent.glob("*")}  # of other inputs or parameters
        for other in others - {scratch} - (set() if force else {io.journals}):
            shutil.rmtree(other)
        done = scratch / "complete"
        if force or not done.exists():
            log = stage_log(log_path(state, stage.folder_name))
            with progress_file(state, stage.folder_name) as report, io.holds, log:
                _build(replace(io, report=report), done, work)
        _publish(io)
        made = {"fingerprint": fingerprint, "outs": {out: digest(root / out) for out in stage.outs}, "inputs": read}
        write_atomically(manifest, json.dumps(made, indent=1))
        shutil.rmtree(scratch.parent)
    return True


@contextmanager
def _failure_noted(root: Path, address: str) -> Iterator[None]:
    """Leave a note of a stage that fails, for whoever shows the run's progress."""
    started, note = time.time(), failure_note(root, address)
    note.unlink(missing_ok=True)
    try:
        yield
    except Exception as error:
        denied = not_permitted(error)
        message = first_line(denied or error)
        if not isinstance(denied or error, MergeflowError):  # the traceback is in the log
            log = log_path(root / STATE, file_name(address)).relative_to(root)
            message = without_passwords(f"{type(error).__name__}: {message} ({log})")
        with suppress(OSError):  # the disk may be full
            write_atomically(note, json.dumps({"seconds": time.time() - started, "error": message}))
        if denied:
            raise denied from error
        raise


def failure_note(root: Path, address: str) -> Path:
    return root / STATE / "failed" / f"{file_name(address)}.json"


def open_stage(root: Path, stage: Stage, of_file: Callable[[Path], str] | None = None) -> tuple[StageIO, str]:
    """Return a stage's inputs and settings of now, and its fingerprint; nothing is run.

    The scratch folder is the one that a run finds, so parts of a stage's work can be done before it, elsewhere. From
    here on this process computes on one thread, whatever part of the work it does.

    Args:
        of_file: SHA-256 of a file, which the caller keeps; None: this call's own.
    """
    compute_on_one_thread()
    params = load_params(root / "params.yaml")
    studies = load_study_params(root / CHOICES, params) if stage.file != MAIN else None
    of_file = of_file or cache(sha256_of)  # a file is read once for the comparison and the fingerprint
    facts = _facts(root, stage, lambda key: _lookup_json(params, studies, key), of_file)
    fingerprint = _hashed(facts)
    check_inputs(root, stage, of_file)
    scratch = root / STATE / "scratch" / stage.folder_name / fingerprint[:16]
    others = {key: value for key, value in facts["params"].items() if key != f"{stage.name}.{stage.item}"}
    journals = root / STATE / "journals" / stage.folder_name / _hashed(facts | {"params": others})[:16]
    return StageIO(stage, root, scratch, params, studies, journals=journals), fingerprint


@contextmanager
def progress_file(state: Path, name: str) -> Iterator[Progress]:
    """Give a callback that writes the stage's progress to a file while it runs.

    A file, because whoever shows the progress may be another process, whatever runner placed the stage. It is locked
    while the stage runs: what a killed one has left is not.
    """
    path, last = state / "progress" / f"{name}.json", 0.0
    path.parent.mkdir(parents=True, exist_ok=True)

    def report(what: str, done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last > PROGRESS_SECONDS:
            last = time.monotonic()
            temporary = path.with_suffix(f".{os.getpid()}")
            temporary.write_text(json.dumps({"what": what, "done": done, "total": total}))
            temporary.rename(path)

    with file_lock(progress_lock(path), f"the progress of {name}"):
        report("starting", 0, 1)
        try:
            yield report
        finally:
            path.unlink(missing_ok=True)


def progress_lock(path: Path) -> Path:
    """Return the lock of a file of progress, which is held while the stage runs."""
    return path.parents[1] / "locks" / f"progress-{path.stem}.lock"


def remove_outputs(root: Path, stage: Stage) -> list[str]:
    """Remove what a stage has made; return the paths that were there.

    Other stages read the folders above as a whole, so an item that is removed must leave nothing in them.
    """
    made = [out for out in stage.outs if is_made(root / out)]
    for out in made:
        remove_output(root, out)
    return made


def remove_output(root: Path, out: str) -> None:
    """Remove an output, and what is recorded of it in a store."""
    listing_file(root, out).unlink(missing_ok=True)
    remove_path(root / out)


def has_run(root: Path) -> set[str]:
    """Return the addresses of the stages that have run in this folder, by the file names of their manifests."""
    return {path.stem for path in (root / STATE / "manifests").glob("*.json")}


def _lookup_json(params: Params, studies: StudyParams | None, key: str) -> Any:
    file, _, name = key.rpartition(":")
    return (studies if file and studies else params).lookup_json(name)


def _facts(root: Path, stage: Stage, lookup: Callable[[str], Any], of_file: Callable[[Path], str]) -> dict[str, Any]:
    """Return the parameters of a stage and the digests of its inputs and code, which decide its outputs."""
    for dep in stage.deps:
        if not is_made(root / dep):
            raise MergeflowError(
                f"stage {stage.address} needs {dep}, which is missing: run the whole pipeline "
                f"(`mergeflow run`), or fetch it with `dvc pull {dep}`."
            )
    facts: dict[str, Any] = {
        "stage": stage.address,
        "params": {key: lookup(key) for key in stage.params},
        "deps": {dep: digest(root / dep, of_file) for dep in stage.deps if dep != INPUTS},
        "outs": stage.outs,
        "code": code_digest(root, stage),
    }
    if INPUTS in stage.deps:
        facts["inputs"] = {path: digest(root / path, of_file) for path in _inputs(root, stage, lookup)}
    return facts


def _hashed(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _inputs(root: Path, stage: Stage, lookup: Callable[[str], Any]) -> list[str]:
    named = named_inputs({key: lookup(key) for key in stage.params}) if INPUTS in stage.deps else []
    return [path for path in named if (root / path).exists()]


def paths_read(io: StageIO) -> list[str]:
    """Return the files and folders that a stage reads, relative to the project folder."""
    return [*(dep for dep in io.stage.deps if dep != INPUTS), *_users_inputs(io)]


def _users_inputs(io: StageIO) -> list[str]:
    return _inputs(io.root, io.stage, lambda key: _lookup_json(io.params, io.studies, key))


def is_up_to_date(root: Path, stage: Stage, fingerprint: str) -> bool:
    """Whether the outputs are those that the stage made with this fingerprint."""
    manifest = read_manifest(_manifest(root, stage))
    if manifest["fingerprint"] is None or not all(is_made(root / out) for out in stage.outs):
        return False
    return manifest["fingerprint"] == fingerprint and manifest["outs"] == {
        out: digest(root / out) for out in stage.outs
    }


def has_finished(root: Path, stage: Stage, since: float = 0.0) -> bool:
    """Whether the next run finds nothing to do for a stage, whatever DVC has recorded of it.

    Args:
        since: only a stage that was run or found up to date in this folder after this time.
    """
    manifest = _manifest(root, stage)
    try:
        ran = manifest.exists() and manifest.stat().st_mtime > since
        return ran and is_up_to_date(root, stage, open_stage(root, stage)[1])
    except MergeflowError:  # it lacks an input
        return False


def _manifest(root: Path, stage: Stage) -> Path:
    return root / STATE / "manifests" / f"{stage.folder_name}.json"


def _build(io: StageIO, done: Path, work: Callable[[StageIO], None]) -> None:
    done.unlink(missing_ok=True)  # before what it vouches for goes
    shutil.rmtree(io.building, ignore_errors=True)
    io.scratch.mkdir(parents=True, exist_ok=True)
    started, before = time.time(), _spent_before(io.scratch)
    try:
        work(io)
        for out in io.stage.outs:
            built = io.building / out
            assert is_made(built), f"stage {io.stage.address} did not make {out}"
            _sync(built)
        _write_record(io, started, before)
        write_atomically(done, "{}")
    except (OSError, MergeflowError) as error:
        if not is_full(error):
            raise
        if isinstance(error, MergeflowError):  # a writer's error, which names the file and the space that it needs
            raise DiskFull(f"stage {io.stage.address}: {error} Finished work is kept: run again then.") from error
        free = shutil.disk_usage(io.root).free / 2**20
        raise DiskFull(
            f"stage {io.stage.address}: the disk is full ({free:.0f} MiB free where {io.root.name} is). Nothing "
            f"was changed; free some space and run again, finished work is kept."
        ) from error


def check_disk(error: BaseException, *folders: Path) -> None:
    """Tell a full disk as such, where an error that says something else came of it."""
    existing = [folder for folder in folders if folder.exists()]
    free = {folder: shutil.disk_usage(folder).free for folder in existing}
    full = next((folder for folder in existing if free[folder] < _LEAST_FREE), existing[0] if is_full(error) else None)
    if full is not None:
        raise DiskFull(
            f"the disk is full ({free[full] / 2**20:.0f} MiB free where {full} is). Free some space and run again: "
            "finished work is kept."
        ) from error


def _publish(io: StageIO) -> None:
    """Move finished outputs to their places. After a kill in here, `complete` makes the next run finish the move."""
    replaced = io.scratch / "replaced"
    for out in io.stage.outs:
        built, target = io.building / out, io.root / out
        listed, listing = listing_file(io.building, out), listing_file(io.root, out)
        if not built.exists() and not listed.exists():  # moved before the kill
            continue
        listing.unlink(missing_ok=True)  # before the files that it lists go
        if target.exists() or target.is_symlink():
            shutil.rmtree(replaced, ignore_errors=True)
            replaced.mkdir()
            target.rename(replaced / "old")
        made, place = (built, target) if built.exists() else (listed, listing)
        place.parent.mkdir(parents=True, exist_ok=True)
        made.rename(place)
        sync_folder(place.parent)


def _spent_before(scratch: Path) -> float:
    """Return the seconds of earlier runs that were killed and left work; note that another begins now.

    A killed run counts from its start to the last file that it wrote.
    """
    path, before = scratch / "begun.json", 0.0
    if path.exists():
        begun = json.loads(path.read_text())
        last = max(file.lstat().st_mtime for file in scratch.rglob("*"))
        before = begun["before"] + max(last - begun["started"], 0)
    write_atomically(path, json.dumps({"started": time.time(), "before": before}))
    return float(before)


def _write_record(io: StageIO, started: float, before: float) -> None:
    record = {
        "stage": io.stage.address,
        "started": started,
        "seconds": round(before + time.time() - started, 3),
        HOST: socket.gethostname(),
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        **io.costs,
    }
    write_atomically(io.root / STATE / "records" / f"{io.stage.folder_name}.json", json.dumps(record, indent=1))


def _sync(path: Path) -> None:
    for file_path in [path] if path.is_file() else path.rglob("*"):
        if file_path.is_file():
            with file_path.open("rb") as file:
                os.fsync(file.fileno())
