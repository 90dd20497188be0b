"""A store that all machines of a fleet reach: objects named by their MD5, where DVC's remotes have them, and documents.

An object is there whole or not at all, so what is there is not sent again; `dvc pull` can fetch it. Every byte that is
fetched is hashed before anything reads it. Documents (leases, results, saved states) lie beside, in `mergeflow/`.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import fsspec
from fsspec.utils import get_protocol

from mergeflow.checkpoints.writer import link_or_copy
from mergeflow.errors import MergeflowError, first_line
from tasks.project.files import file_lock
from tasks.project.recorded import (
    absent_files,
    digest_as_dvc,
    files_of,
    hash_once,
    listing_as_dvc,
    listing_file,
    md5_of,
    stored_outputs,
)
from tasks.project.stage import STATE

OBJECTS, DOCUMENTS = "files/md5", "mergeflow"
LISTING = ".dir"  # how DVC ends the name of an object that lists a folder's files
_WHOLE_AT_ONCE = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "memory"}  # put a file whole or not at all
_AT_ONCE = 16  # questions
_LARGE = 100 * 2**20  # bytes from which files are sent one after the other: s3fs holds half a gigabyte of each
# s3fs asks five times, and by default each time botocore does too, for a minute each: a lost store took half an hour.
_S3 = {"config_kwargs": {"connect_timeout": 5, "read_timeout": 20, "retries": {"max_attempts": 1}}}
_LOCAL = {"auto_mkdir": True}
_OPTIONS: dict[str, dict[str, Any]] = {"file": _LOCAL, "local": _LOCAL, "s3": _S3, "s3a": _S3}


class StoreError(MergeflowError):
    """The store does not answer, refuses, is full, or has other bytes than it should."""


class Store:
    """A folder of any file system that fsspec opens."""

    brought = 0  # bytes of outputs that this process has fetched, because something read them

    def __init__(self, uri: str, cache_folder: Path | None = None) -> None:
        """Open the store.

        Args:
            cache_folder: keeps what is fetched, to be linked from there; None: every object is fetched each time.
        """
        self.uri, self.sent, self.fetched = uri, 0, 0
        self._cache = cache_folder
        protocol = get_protocol(uri)
        options = _OPTIONS.get(protocol, {})
        with self._explained("cannot be opened"):
            self._fs, self._root = fsspec.url_to_fs(uri, use_listings_cache=False, **options)
        self._is_local, self._is_whole_at_once = options is _LOCAL, protocol in _WHOLE_AT_ONCE

    def send(self, path: Path) -> str:
        """Put a file or folder there, unless it is there; return its hash as DVC's lock has it.

        A folder's listing is sent last, so where it is, the folder's files are too.
        """
        md5 = digest_as_dvc(path, hash_once)
        if not md5.endswith(LISTING):
            self.send_files({md5: path})
        elif not self.has(md5):
            files = listing_as_dvc(path, hash_once)
            self.send_files({file["md5"]: path / file["relpath"] for file in files})
            self._write(self._object(md5), json.dumps(files, sort_keys=True).encode())
        return md5

    def send_files(self, files: Mapping[str, Path]) -> None:
        """Put files there by their hashes, unless they are there."""
        with ThreadPoolExecutor(_AT_ONCE) as questions:
            stored = dict(zip(files, questions.map(self.has, files), strict=True))
        missing = {md5: path for md5, path in files.items() if not stored[md5]}
        if lost := [md5 for md5, path in missing.items() if not path.exists()]:
            raise self._damaged(lost[0], "missing")
        self._put({self._object(md5): path for md5, path in missing.items()})
        for md5, path in missing.items():
            if hash_once(path) != md5:
                with self._explained("cannot be written to"):
                    self._fs.rm_file(self._object(md5))
                raise MergeflowError(f"{path.name} has changed while it was sent to {self.uri}: run again.")

    def fetch(self, md5: str, target: Path) -> None:
        """Bring a file or folder; what was at the target is replaced."""
        remove_path(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        if not md5.endswith(LISTING):
            self._fetch_files({target: md5})
            return
        target.mkdir()
        listing = self._read(self._object(md5))
        if listing is None or hashlib.md5(listing).hexdigest() + LISTING != md5:
            raise self._damaged(md5, "missing" if listing is None else "damaged")
        files = {target / entry["relpath"]: entry["md5"] for entry in json.loads(listing)}
        self._fetch_files(files, f" and {md5}")

    def has(self, md5: str) -> bool:
        with self._explained("does not answer"):
            return bool(self._fs.exists(self._object(md5)))

    def keep(self, path: Path, md5: str) -> None:
        """Link a file, or the files of a folder, into the cache, because the next stage here may read them."""
        hashes = [(path, md5)] if path.is_file() else [(file, hash_once(file)) for _, file in files_of(path)]
        for file, file_md5 in hashes:
            place = self._place(file_md5)
            if place is not None and not place.exists():
                place.parent.mkdir(parents=True, exist_ok=True)
                link_or_copy(file, place)
                place.chmod(0o444)

    def read(self, name: str) -> dict[str, Any] | None:
        """Return a document; None where there is none, or only a part of one."""
        text = self._read(self._document(name))
        with suppress(ValueError):
            document = json.loads(text or b"")
            return document if isinstance(document, dict) else None
        return None

    def write(self, name: str, document: Mapping[str, Any]) -> None:
        """Write a document, or write it anew."""
        self._write(self._document(name), json.dumps(document).encode())

    def create(self, name: str, document: Mapping[str, Any]) -> bool:
        """Write a document that is not there yet; return False where it is, also when somebody is a moment faster."""
        target, content = self._document(name), json.dumps(document).encode()
        with self._explained("cannot be written to"), suppress(FileExistsError):
            if self._is_local:  # fsspec's `mode="create"` looks first and writes then there
                with self._fs.open(target, "xb") as file:
                    file.write(content)
            else:
                self._fs.pipe_file(target, content, mode="create")
            return True
        return False

    def put_file(self, path: Path, name: str) -> None:
        self._put({self._document(name): path})

    def get_file(self, name: str, path: Path) -> None:
        """Bring a file from beside the documents."""
        with self._explained("cannot be read", FileNotFoundError):
            self._fs.get_file(self._document(name), str(path))
        self.fetched += path.stat().st_size

    def names(self, folder: str) -> list[str]:
        """Return the names of what lies beside the documents in a folder."""
        with self._explained("cannot be read", FileNotFoundError):
            return [path.rpartition("/")[2] for path in self._fs.find(self._document(folder))]

    def remove(self, name: str) -> None:
        """Remove a document, or a file beside them; none is fine too."""
        with self._explained("cannot be written to"), suppress(FileNotFoundError):
            self._fs.rm_file(self._document(name))

    def _object(self, md5: str) -> str:
        return f"{self._root}/{OBJECTS}/{md5[:2]}/{md5[2:]}"

    def _document(self, name: str) -> str:
        return f"{self._root}/{DOCUMENTS}/{name}"

    def _place(self, md5: str) -> Path | None:
        return None if self._cache is None else self._cache / md5[:2] / md5[2:]

    def _put(self, files: Mapping[str, Path]) -> None:
        if not files:
            return
        with self._explained("cannot be written to"):
            small = {to: str(path) for to, path in files.items() if path.stat().st_size < _LARGE}
            if self._is_whole_at_once and small:
                self._fs.put(list(small.values()), list(small))
            for target, path in files.items():
                if not self._is_whole_at_once:
                    with self._aside(target) as part:
                        self._fs.put_file(str(path), part)
                elif target not in small:
                    self._fs.put_file(str(path), target)
        self.sent += sum(path.stat().st_size for path in files.values())

    def _fetch_files(self, files: Mapping[Path, str], listed_in: str = "") -> None:
        """Bring files, through the cache where there is one, and hash each."""
        places = {target: self._place(md5) or target for target, md5 in files.items()}
        cached = {place for target, place in places.items() if place != target and _is(place, files[target])}
        wanted = {place: files[target] for target, place in places.items() if place not in cached}
        for path in {*files, *wanted}:
            path.parent.mkdir(parents=True, exist_ok=True)
        parts = {place: place.with_name(f"{place.name}.{uuid4().hex[:8]}") for place in wanted}
        try:
            self._get({parts[place]: md5 for place, md5 in wanted.items()}, listed_in)
            for place, part in parts.items():
                part.chmod(0o644 if self._cache is None else 0o444)
                part.replace(place)
        finally:
            for part in parts.values():
                part.unlink(missing_ok=True)
        for target, place in places.items():
            if place != target:
                target.unlink(missing_ok=True)
                os.utime(place)  # what is not used for long is removed
                link_or_copy(place, target)

    def _get(self, files: Mapping[Path, str], listed_in: str) -> None:
        if not files:
            return
        with self._explained("cannot be read", FileNotFoundError):
            try:
                self._fs.get([self._object(md5) for md5 in files.values()], [str(path) for path in files])
            except FileNotFoundError:
                missing = next((md5 for md5 in files.values() if not self.has(md5)), None)
                if missing is None:
                    raise
                raise self._damaged(missing, "missing", listed_in) from None
        self.fetched += sum(path.stat().st_size for path in files)
        for path, md5 in files.items():
            if md5_of(path) != md5:
                raise self._damaged(md5, "damaged", listed_in)

    def _damaged(self, md5: str, how: str, listed_in: str = "") -> StoreError:
        place = f"{OBJECTS}/{md5[:2]}/{md5[2:]}"
        return StoreError(
            f"the store {self.uri} has not the bytes that were put there: {place} is {how}. Remove {md5}{listed_in} "
            f"from {OBJECTS} there and run again: it is then sent or made anew."
        )

    def _write(self, target: str, content: bytes) -> None:
        with self._explained("cannot be written to"):
            if self._is_whole_at_once:
                self._fs.pipe_file(target, content)
            else:
                with self._aside(target) as part:
                    self._fs.pipe_file(part, content)
        self.sent += len(content)

    def _read(self, path: str) -> bytes | None:
        with self._explained("cannot be read", FileNotFoundError), suppress(FileNotFoundError):
            content: bytes = self._fs.cat_file(path, start=0)  # else s3fs asks for the size first, and for a folder
            self.fetched += len(content)
            return content
        return None

    @contextmanager
    def _aside(self, target: str) -> Iterator[str]:
        """Give a name to write under; afterwards the file gets its own."""
        part = f"{target}.{uuid4().hex[:8]}"
        try:
            yield part
            self._fs.mv(part, target)
        except BaseException:
            with suppress(Exception):
                self._fs.rm_file(part)
            raise

    @contextmanager
    def _explained(self, what: str, *passed: type[Exception]) -> Iterator[None]:
        """Say in a sentence what an error of the file system means; errors of the kinds `passed` stay as they are."""
        try:
            yield
        except Exception as error:  # each file system has its own
            if isinstance(error, (MergeflowError, *passed)):
                raise
            raise StoreError(
                f"the store {self.uri} {what} ({type(error).__name__}: {first_line(error)}). Nothing half-written is "
                "left, and finished work counts: run again when that is mended."
            ) from error


def remove_path(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def bring(root: Path, paths: Iterable[str], unless_in: str | None = None) -> list[str]:
    """Fetch what only a store has of some paths, whole outputs at once; return these.

    Args:
        unless_in: the address of a store whose outputs stay there.
    """
    stored = {out: of for path in paths for out, of in stored_outputs(root, path).items() if of.store != unless_in}
    for out, of in stored.items():
        with file_lock(root / STATE / "locks" / f"{listing_file(root, out).stem}.lock", f"the output {out}"):
            if absent_files(root / out):
                store = Store(of.store)
                store.fetch(of.md5, root / out)
                Store.brought += store.fetched
    return list(stored)


def forget_lost(root: Path) -> list[str]:
    """Forget outputs that a store has no longer and this machine has not, so that they are made again; return them."""
    lost = []
    for out, stored in stored_outputs(root).items():
        with suppress(StoreError):  # whoever reads the output is told
            if absent_files(root / out) and not Store(stored.store).has(stored.md5):
                listing_file(root, out).unlink(missing_ok=True)
                lost.append(out)
    return lost


def hashes_of(files: Iterable[Path]) -> dict[Path, str]:
    files = list(files)
    with ThreadPoolExecutor() as pool:
        return dict(zip(files, pool.map(hash_once, files), strict=True))


def _is(path: Path, md5: str) -> bool:
    return path.exists() and md5_of(path) == md5
