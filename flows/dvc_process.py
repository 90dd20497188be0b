"""DVC in a process of its own, for which the recorded hashes of outputs in a store stand for the files.

It then neither misses those of their files that are not here, nor wants a copy of the others in its cache.
"""

import contextlib
import sys
from pathlib import Path
from typing import Any

import dvc.rwlock
from dvc.cli import main

from tasks.project.recorded import absent_files, is_made, stored_files, stored_outputs


def run() -> None:
    """Run the command in the arguments; after `ask` one that only reads.

    Beside `dvc repro` a question is answered too: its lock of a stage's files, held while the stage runs, guards
    writers.
    """
    arguments = sys.argv[1:]
    if arguments[0] == "ask":
        del arguments[0]
        dvc.rwlock.rwlock = lambda *_: contextlib.nullcontext()
    if {"commit", "status"} & set(arguments) and stored_outputs(Path.cwd()):
        _take_recorded_hashes()
    sys.exit(main(arguments))


def _take_recorded_hashes() -> None:
    """Answer from listings what DVC asks of outputs; its internals matter only to projects that have a store."""
    from dvc.output import Output

    save, commit, hash_of, misses = Output.save, Output.commit, Output._get_hash_meta, Output.changed_cache

    def save_hash(out: Any) -> None:
        if absent_files(Path(out.fs_path)):
            out.meta, out.hash_info = _recorded_hash(out)
        else:
            save(out)

    Output.exists = property(lambda out: is_made(Path(out.fs_path)))
    Output.changed_cache = lambda out, **of: not _is_stored(out) and misses(out, **of)
    Output.commit = lambda out, **of: None if _is_stored(out) else commit(out, **of)
    Output._get_hash_meta = lambda out: _recorded_hash(out) if absent_files(Path(out.fs_path)) else hash_of(out)
    Output.save = save_hash


def _is_stored(out: Any) -> bool:
    return bool(stored_files(Path(out.fs_path)))


def _recorded_hash(out: Any) -> tuple[Any, Any]:
    """Return DVC's size and hash of an output, of whose files some are not here."""
    from dvc_data.hashfile.hash_info import HashInfo
    from dvc_data.hashfile.meta import Meta
    from dvc_data.hashfile.tree import Tree

    path, tree = Path(out.fs_path), Tree()
    absent = absent_files(path)
    if path in absent:
        return Meta(size=absent[path].size), HashInfo("md5", absent[path].md5)
    if path.is_dir():
        built = out._build(out.local_cache, out.fs_path, out.fs, "md5", ignore=out.dvcignore, dry_run=True)[2]
        for key, meta, md5 in built:
            tree.add(key, meta, md5)
    for place, file in absent.items():
        tree.add(place.relative_to(path).parts, Meta(size=file.size), HashInfo("md5", file.md5))
    tree.digest()
    return Meta(size=sum(meta.size for _, meta, _ in tree), nfiles=len(tree), isdir=True), tree.hash_info
