"""Compare the bytes that a stage reads with what its makers and DVC recorded.

A flipped bit on a disk or in a remote changes neither size nor time, so DVC does not see it, and a merge of it passes
every gate. The bytes are read for the stage's fingerprint anyway; here they are compared.

An output that a worker has sent into a store has a listing with its files' hashes. They stand for those of its files
that are not here, so that no stage runs again for their absence.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from mergeflow.checkpoints.writer import write_atomically
from mergeflow.errors import MergeflowError
from tasks.project.files import parse_yaml
from tasks.project.stage import MAIN, STATE, STUDIES, Stage, covers


def locked_stages(root: Path, file: str = MAIN) -> dict[str, Any]:
    """Read the records of DVC's lock by stage; nothing where it is missing or cut off."""
    path = root / file.replace(".yaml", ".lock")
    return (whole_stages(path.read_text(encoding="utf-8")) if path.exists() else None) or {}


def whole_stages(text: str) -> dict[str, Any] | None:
    """Return the entries of a whole lock file by stage; None of one that is cut off."""
    try:
        content = parse_yaml(text, "dvc.lock")
    except MergeflowError:
        return None
    stages = content.get("stages") if isinstance(content, dict) and content.get("schema") else None
    return stages if isinstance(stages, dict) and all(map(_is_entry, stages.values())) else None


def md5_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()


def digest_as_dvc(path: Path, of_file: Callable[[Path], str] = md5_of) -> str:
    """Return the digest that DVC writes into its lock: of a folder the MD5 of the list of its files with theirs."""
    if path.is_file():
        return of_file(path)
    if path in (absent := absent_files(path)):
        return absent[path].md5
    return f"{hashlib.md5(json.dumps(listing_as_dvc(path, of_file), sort_keys=True).encode()).hexdigest()}.dir"


def listing_as_dvc(folder: Path, of_file: Callable[[Path], str] = md5_of) -> list[dict[str, str]]:
    """Return DVC's list of a folder's files with their MD5."""
    absent = absent_files(folder)
    return [
        {"md5": absent[file].md5 if file in absent else of_file(file), "relpath": name}
        for name, file in files_of(folder)
    ]


def files_of(folder: Path) -> list[tuple[str, Path]]:
    """Return the files below a folder in DVC's order, with their relative names; links are followed."""
    return sorted((file.relative_to(folder).as_posix(), file) for file in {*_below(folder), *absent_files(folder)})


@dataclass(frozen=True)
class StoredFile:
    """What is recorded of a file in a store."""

    sha256: str
    md5: str
    size: int

    @classmethod
    def of(cls, path: Path) -> "StoredFile":
        return cls(sha256_of(path), md5_of(path), path.stat().st_size)


@dataclass(frozen=True)
class StoredOutput:
    """A folder that a stage has made on a worker.

    Attributes:
        md5: its hash there, as DVC's lock has it.
    """

    store: str
    md5: str
    files: Mapping[str, StoredFile]


def listing_file(root: Path, out: str) -> Path:
    return root / STATE / "stored" / f"{quote(out, safe='')}.json"


def write_listing(root: Path, out: str, stored: StoredOutput) -> None:
    path = listing_file(root, out)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(asdict(stored)))


def stored_outputs(root: Path, path: str | None = None) -> dict[str, StoredOutput]:
    """Return the outputs of a project that stores have, whether their files are here too or not.

    Args:
        path: only those that it lies in, or that lie below it; relative to the project folder.
    """
    stored: dict[str, StoredOutput] = {}
    for listing in sorted((root / STATE / "stored").glob("*.json")):
        out = unquote(listing.stem)
        if path is None or covers(path, out) or covers(out, path):
            with suppress(OSError, ValueError, LookupError, TypeError):  # damaged: the output is made again
                status = listing.stat()
                stored[out] = _read_listing(listing, status.st_mtime_ns, status.st_ino)
    return stored


@cache
def _read_listing(path: Path, *_status: int) -> StoredOutput:
    noted = json.loads(path.read_text())
    return StoredOutput(noted["store"], noted["md5"], {name: StoredFile(**of) for name, of in noted["files"].items()})


def stored_files(path: Path) -> dict[Path, StoredFile]:
    """Return the files at or below a path that a store has, by their places here."""
    root = next((folder for folder in path.parents if (folder / STATE / "stored").is_dir()), None)
    outputs = {} if root is None else stored_outputs(root, path.relative_to(root).as_posix())
    listed = ((Path(root or "", out, name), file) for out, of in outputs.items() for name, file in of.files.items())
    return {place: file for place, file in listed if path in (place, *place.parents)}


def absent_files(path: Path) -> dict[Path, StoredFile]:
    """Return the files at or below a path that only a store has."""
    return {place: file for place, file in stored_files(path).items() if not place.exists()}


def is_made(path: Path) -> bool:
    """Whether an output, or a part of one, is here or in a store."""
    return path.exists() or bool(absent_files(path))


def _is_entry(stage: Any) -> bool:
    if not isinstance(stage, dict) or not isinstance(stage.get("cmd"), str):
        return False
    params = stage.get("params", {})
    files = [stage.get("deps", []), stage.get("outs", [])]
    return (
        isinstance(params, dict)
        and all(isinstance(values, dict) for values in params.values())
        and all(isinstance(listed, list) and all(_is_file(file) for file in listed) for listed in files)
    )


def _is_file(file: Any) -> bool:
    """Whether every value is whole: the beginning of a digest may read as a number, or as another digest."""
    if not isinstance(file, dict) or not isinstance(file.get("path"), str) or None in file.values():
        return False
    return "md5" not in file or bool(re.fullmatch(r"[0-9a-f]{32}(\.dir)?", str(file["md5"])))


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_once(path: Path, of_file: Callable[[Path], str] = md5_of) -> str:
    """Return the hash of a file, which is read once in a process while its size and time stay as they are."""
    status = path.stat()
    return _hashed(path, of_file, status.st_size, status.st_mtime_ns)


@cache
def _hashed(path: Path, of_file: Callable[[Path], str], *_status: int) -> str:
    return of_file(path)


def digest(path: Path, of_file: Callable[[Path], str] = sha256_of) -> str:
    """Return the SHA-256 of a file, or of a folder's sorted relative paths and contents; links are followed."""
    if path.is_file():
        return of_file(path)
    if path in (absent := absent_files(path)):
        return absent[path].sha256
    whole = hashlib.sha256()
    for file_path in sorted({*(p for p in _below(path) if "__pycache__" not in p.parts), *absent}):
        sha = absent[file_path].sha256 if file_path in absent else of_file(file_path)
        whole.update(os.fsencode(f"{file_path.relative_to(path).as_posix()}\0{sha}\n"))
    return whole.hexdigest()


def _below(path: Path) -> Iterator[Path]:
    """Yield the files below a folder; a link to a folder that holds it is not followed."""
    for folder, names, files in os.walk(path, followlinks=True):
        parent = Path(folder)
        real = parent.resolve()
        names[:] = [name for name in names if not real.is_relative_to((parent / name).resolve())]
        yield from (path for name in files if (path := parent / name).is_file())


def check_inputs(root: Path, stage: Stage, of_file: Callable[[Path], str] = sha256_of) -> None:
    """Compare what a stage reads with what its makers recorded.

    Files of the user's own are compared with what the stage read when it ran last, where a file system tells of no
    change since.
    """
    check_outputs(root, stage.address, stage.deps, of_file)
    rotten = _changed_unseen(root, read_manifest(root / STATE / "manifests" / f"{stage.folder_name}.json"), of_file)
    if rotten:
        raise MergeflowError(
            f"{stage.address} would read other bytes than when it ran last, although size and time of every file are "
            "the same: a disk has changed them.\n"
            + "\n".join(rotten)
            + "\nBring these files back from where they came "
            "from. If you changed them on purpose, `touch` them."
        )


def check_outputs(root: Path, reader: str, paths: Iterable[str], of_file: Callable[[Path], str] = sha256_of) -> None:
    """Compare outputs with what their makers recorded: in their manifests here, or in DVC's lock files.

    Outputs that nobody has recorded, as in a scratch project, are not compared.
    """
    made, locked = _made_here(root), _recorded_by_dvc(root)
    changed = []
    for out in sorted({*made, *locked}):
        if not any(covers(path, out) or covers(out, path) for path in paths) or not is_made(root / out):
            continue
        sha = digest(root / out, of_file)
        if made.get(out) != sha and out in locked and _digest_as_dvc(root / out, sha) != locked[out]:
            changed.append(_damage(root, out, locked[out]))
        elif made.get(out) != sha and out not in locked:
            changed.append(f"  {out}: SHA-256 {sha[:12]}, recorded {made[out][:12]}")
    if changed:
        raise MergeflowError(_refusal(reader, changed))


def _changed_unseen(root: Path, manifest: dict[str, Any], of_file: Callable[[Path], str]) -> list[str]:
    """Return in words which of the user's files have other bytes than recorded, with the same sizes and times."""
    lines = []
    for path, (sha, times) in manifest["inputs"].items():
        if (root / path).exists() and digest_of_times(root / path) == times:
            now = digest(root / path, of_file)
            lines += [] if now == sha else [f"  {path}: SHA-256 {now[:12]}, recorded {sha[:12]}"]
    return lines


def digest_of_times(path: Path) -> str:
    """Return a digest of the size and time of a file, or of every file of a folder: it tells an edit from rot."""

    def of_file(file: Path) -> str:
        stat = file.stat()
        return f"{stat.st_size} {stat.st_mtime_ns}"

    return digest(path, of_file)


def _refusal(reader: str, changed: list[str]) -> str:
    lines = [
        f"{reader} would read what no stage has made: bytes have changed since they were recorded, on this disk "
        "or where they came from.",
        *changed,
        "Remove these files, and `mergeflow run` makes them again; or bring them back with `dvc pull` where the remote "
        "is whole. If you changed them on purpose, record that with `dvc commit`.",
    ]
    return "\n".join(lines)


def read_manifest(path: Path) -> dict[str, Any]:
    """Read a stage's manifest of its last run: `fingerprint`, `outs`, `inputs`; nothing of a damaged file."""
    try:
        noted = json.loads(path.read_text())
        return {
            "fingerprint": str(noted["fingerprint"]),
            "outs": {str(out): str(noted["outs"][out]) for out in noted["outs"]},
            "inputs": {str(path): (str(sha), str(times)) for path, (sha, times) in noted.get("inputs", {}).items()},
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {"fingerprint": None, "outs": {}, "inputs": {}}


def _made_here(root: Path) -> dict[str, str]:
    digests: dict[str, str] = {}
    for path in (root / STATE / "manifests").glob("*.json"):
        digests |= _outs_of(path, path.stat().st_mtime_ns)
    return digests


@cache
def _outs_of(manifest: Path, _changed: int) -> dict[str, str]:
    return read_manifest(manifest)["outs"]


def _recorded_by_dvc(root: Path) -> dict[str, str]:
    """Return the MD5 of each output that DVC's lock files have, relative to the project folder."""
    locks = [(file, root / file.replace(".yaml", ".lock")) for file in (MAIN, STUDIES)]
    hashes: dict[str, str] = {}
    for file, path in locks:
        if path.exists():
            hashes |= _locked_outs(root, file, path.stat().st_mtime_ns)
    return hashes


@cache
def _locked_outs(root: Path, file: str, _changed: int) -> dict[str, str]:
    return {
        out["path"]: out["md5"]  # from the project folder, where the studies' stages run too
        for stage in locked_stages(root, file).values()
        for out in stage.get("outs", [])
        if out.get("hash") == "md5"  # before DVC 3 it was of a text with other ends of lines
    }


@cache
def _digest_as_dvc(path: Path, _sha: str) -> str:
    return digest_as_dvc(path)


def _damage(root: Path, out: str, recorded: str) -> str:
    """Return in words which files of an output are others, and which of DVC's own copies are damaged too."""
    cache_folder = next(
        (folder / ".dvc/cache/files/md5" for folder in (root, *root.parents) if (folder / ".dvc").is_dir()), root
    )

    def copy_of(md5: str) -> Path:
        return cache_folder / md5[:2] / md5[2:]

    files = {"": recorded}
    if recorded.endswith(".dir") and copy_of(recorded).exists():
        files = {f"/{entry['relpath']}": entry["md5"] for entry in json.loads(copy_of(recorded).read_text())}
    lines = []
    for name, md5 in files.items():
        path, copy = root / f"{out}{name}", copy_of(md5)
        if path.exists() and (digest := digest_as_dvc(path)) != md5:
            damaged = copy.is_file() and not md5.endswith(".dir") and md5_of(copy) != md5
            too = f"; DVC's copy of it, {copy}, is damaged too: remove both" if damaged else ""
            lines.append(f"  {out}{name}: MD5 {digest[:12]}, recorded {md5[:12]}{too}")
    return "\n".join(lines) or f"  {out}: recorded {recorded[:12]}, of which files are missing or new"
