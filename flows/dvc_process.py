"""DVC in a process of its own, for which the recorded hashes of outputs in a store stand for the files.

It then neither misses those of their files that are not here, nor wants a copy of the others in its cache.
"""

import contextlib
import sys
from pathlib import Path
from typing import Any

import dvc.rwlock
from dvc.cli import main
from dvc.output import Output
from dvc_data.hashfile.hash_info import HashInfo
from dvc_data.hashfile.meta import Meta
from dvc_data.hashfile.tree import Tree

from tasks.project.recorded import absent_files, is_made, stored_files

_save, _commit, _hash, _misses = Output.save, Output.commit, Output._get_hash_meta, Output.changed_cache


def run() -> None:
    """Run the command in the arguments; after `ask` one that only reads.

    Beside `dvc repro` a question is answered too: its lock of a stage's files, held while the stage runs, guards
    writers.
    """
    arguments = sys.argv[1:]
    if arguments[0] == "ask":
        del arguments[0]
        dvc.rwlock.rwlock = lambda *_: contextlib.nullcontext()
    if {"commit", "status"} & set(arguments):
        Output.exists = property(lambda out: is_made(Path(out.fs_path)))
        Output.changed_cache = lambda out, **of: not _is_stored(out) and _misses(out, **of)
        Output.commit = lambda out, **of: None if _is_stored(out) else _commit(out, **of)
        Output.save, Output._get_hash_meta = _save_hash, _hash_and_size
    sys.exit(main(arguments))


def _is_stored(out: Any) -> bool:
    return bool(stored_files(Path(out.fs_path)))


def _save_hash(out: Any) -> None:
    if absent_files(Path(out.fs_path)):
        out.meta, out.hash_info = _hash_and_size(out)
    else:
        _save(out)


def _hash_and_size(out: Any) -> tuple[Meta, HashInfo]:
    path, tree = Path(out.fs_path), Tree()
    absent = absent_files(path)
    if not absent:
        hashed: tuple[Meta, HashInfo] = _hash(out)
        return hashed
    if path in absent:
        return Meta(size=absent[path].size), HashInfo("md5", absent[path].md5)
    if path.is_dir():
        here = out._build(out.local_cache, out.fs_path, out.fs, "md5", ignore=out.dvcignore, dry_run=True)[2]
        for key, meta, md5 in here:
            tree.add(key, meta, md5)
    for place, file in absent.items():
        tree.add(place.relative_to(path).parts, Meta(size=file.size), HashInfo("md5", file.md5))
    tree.digest()
    return Meta(size=sum(meta.size for _, meta, _ in tree), nfiles=len(tree), isdir=True), tree.hash_info
