"""The stage `code`: one digest of code for each stage; a digest may count as that of older code.

A release has shown both to make the same bits, or a person has accepted the older outputs.
"""

import getpass
import hashlib
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from mergeflow.checkpoints.writer import write_atomically
from mergeflow.errors import MergeflowError
from mergeflow.layout import ACCEPTED, CODE
from mergeflow.training.settings import IterativeSettings
from tasks.project.code_digest import LENGTH, code_of
from tasks.project.files import read_yaml
from tasks.project.graph import load_graph, training_settings
from tasks.project.stage import CHOICES, Stage
from tasks.project.study_graph import read_study_file

RELEASES = Path(__file__).with_name("equivalent.yaml")
_ACCEPTED_HEAD = "# By `mergeflow accept`: whose outputs of older code count. Without its entry a stage runs again.\n"
_RELEASES_HEAD = "# By `mergeflow release check`: digests of code that was shown to make the same bits as older code.\n"


def of_older_code(root: Path, key: str, digest: str) -> str:
    """Return the digest of older code that a stage's digest counts as; itself where nobody accepted anything."""
    for entry in reversed(read_accepted(root)):
        if (entry["stage"], entry["code"]) == (key, digest):
            return str(entry["outputs_of"])
    return digest


def read_accepted(root: Path) -> list[dict[str, str]]:
    """Read the acceptances of a project, the oldest first."""
    path = root / ACCEPTED
    entries = read_yaml(path) if path.exists() else []
    fields = {"stage", "code", "outputs_of", "who", "because", "date"}
    if not isinstance(entries, list) or not all(isinstance(entry, dict) and fields <= set(entry) for entry in entries):
        raise MergeflowError(f"{path} is not what `mergeflow accept` writes: a list of entries with {sorted(fields)}.")
    return entries


def accept(root: Path, codes: Mapping[str, tuple[str, str]], because: str, who: str = "") -> None:
    """Let outputs of older code count as they are, until the code of their stages changes again.

    Args:
        codes: by a stage's key, the digest of its code today and that of the code that made its outputs.
        because: why they need not be made again.
        who: who decided; by default the user of this machine.
    """
    if not because.strip():
        raise MergeflowError("say why outputs of older code count: --because 'only a reader of Parquet changed'.")
    who = who or f"{getpass.getuser()}@{socket.gethostname()}"
    date = datetime.now(UTC).isoformat(timespec="seconds")
    entries = [entry for entry in read_accepted(root) if entry["stage"] not in codes]
    entries += [
        {"stage": key, "code": today, "outputs_of": older, "who": who, "because": because, "date": date}
        for key, (today, older) in codes.items()
    ]
    write_atomically(root / ACCEPTED, _ACCEPTED_HEAD + yaml.safe_dump(entries, sort_keys=False, allow_unicode=True))


@cache
def equivalents() -> dict[str, str]:
    """Return the digests of code that releases have shown to make the same bits as older code, with the oldest such."""
    table: dict[str, Any] = (read_yaml(RELEASES) if RELEASES.exists() else None) or {}
    return {str(new): str(old) for new, old in table.items()}


def write_equivalents(pairs: Mapping[str, str]) -> None:
    """Add what a release check has shown, by the new digest the older one, to the table that releases carry."""
    before = equivalents()
    table = before | {new: before.get(old, old) for new, old in pairs.items() if new != old}
    write_atomically(RELEASES, _RELEASES_HEAD + yaml.safe_dump(table))
    equivalents.cache_clear()


CODE_STAGE = "code"
_ROUNDS = ("tasks.rounds", "studies.lab.rounds")  # imported by the regime `iterative` alone, where it begins
_SWEEP = "tasks.sweep"
_MERGE = IterativeSettings.model_fields["merge"].default
_HEAD = "# By `mergeflow stage digests`: what the code means that each stage depends on.\n"


def code_digest(root: Path, stage: Stage, read: Callable[[Path], Any] = read_yaml) -> str:
    """Return the digest that decides whether a stage is stale: of its code, or of older code that counts the same."""
    return of_older_code(root, digest_key(stage), strict_digest(root, stage, read))


def digest_key(stage: Stage) -> str:
    """Return the key of a stage's digest of code, as dvc.yaml names it: `finetune`, `sweep.ties`."""
    return f"{stage.name}.{stage.item}" if stage.digest_by_item else stage.name


def strict_digest(root: Path, stage: Stage, read: Callable[[Path], Any] = read_yaml) -> str:
    """Return the digest of the code that a stage depends on with the project's choices.

    Code that a release has shown to make the same bits as older code has the digest of the older one.

    Only training in rounds merges, by one method. In every other regime a new merge method, or a change of one, trains
    nothing again; in this one, as in the sweep of a method, only a change of that method counts. Where a run takes
    experts that somebody published, or a study names checkpoints of its own, their files count by their bytes: one
    that is replaced is taken anew.
    """
    code = code_of(root, _methods(root, stage, read)).digest(stage.module, stage.outs, _unused(stage))
    code = equivalents().get(code, code)
    files = _published(root, stage, read)
    lines = [f"{name} {_bytes_of(path)}" for name, path in files.items()]
    return hashlib.sha256("\n".join([code, *lines]).encode()).hexdigest()[:LENGTH] if files else code


def code_files(root: Path, stage: Stage) -> set[Path]:
    """Return the files of code that the digest of a stage is made of, and those beside them that are not Python."""
    code = code_of(root, _methods(root, stage, read_yaml))
    modules = code.closure(stage.module, _unused(stage))
    return {*modules.values(), *(file for name, path in modules.items() for file in code.data_files(name, path))}


def _unused(stage: Stage) -> tuple[str, ...]:
    return () if stage.regime == "iterative" else _ROUNDS


def _published(root: Path, stage: Stage, read: Callable[[Path], Any]) -> dict[str, Path]:
    """Return the files of checkpoints that a stage's choices name, by their names; a checkpoint may be a folder."""
    checkpoints = {name: [root / name, *sorted((root / name).rglob("*"))] for name in _checkpoints(root, stage, read)}
    return {
        f"{name} {path.relative_to(root / name)}": path
        for name, paths in checkpoints.items()
        for path in paths
        if path.is_file()
    }


def _checkpoints(root: Path, stage: Stage, read: Callable[[Path], Any]) -> Iterable[str]:
    """Return the checkpoints that a run takes instead of training, or those that a study names itself."""
    choices = (root / stage.file).with_name("params.yaml")
    if not choices.exists():
        return ()
    if stage.is_study:
        section = (read(choices).get("studies") or {}).get(stage.name) or {}
        return [name.removeprefix("text:") for name in _strings([section.get("checkpoints")])]
    if not stage.digest_by_item:
        return ()
    common = read(root / "params.yaml")
    run = training_settings(stage, read(choices), common) or {}
    if not (pattern := run.get("checkpoints")):
        return ()
    tasks, seeds = list(common["tasks"])[: run.get("tasks")], read(choices)["seeds"][: run.get("seeds")]
    return dict.fromkeys(pattern.format(task=task, seed=seed) for seed in seeds for task in tasks)


def _bytes_of(path: Path) -> str:
    status = path.stat()
    return _hashed(path, status.st_size, status.st_mtime_ns)


@cache
def _hashed(path: Path, *status: int) -> str:
    """Return the SHA-256 of a file, which is read once in a process while its size and time stay as they are."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _methods(root: Path, stage: Stage, read: Callable[[Path], Any]) -> frozenset[str] | None:
    """Return the merge methods that a stage may use, among the strings of its settings; None: any."""
    common = root / "params.yaml"
    if stage.regime == "iterative":
        settings = training_settings(stage, read((root / stage.file).with_name("params.yaml")), read(common)) or {}
        rounds = settings.get("iterative") or {}
        return frozenset({rounds.get("merge", _MERGE), *_strings((rounds.get("args") or {}).values())})
    if stage.module == _SWEEP and stage.digest_by_item:
        return frozenset({str(stage.item), *_strings((read(common)["sweep"].get(stage.item) or {}).values())})
    return None


def _strings(values: Iterable[Any]) -> Iterator[str]:
    for value in values:
        if isinstance(value, dict | list):
            yield from _strings(value.values() if isinstance(value, dict) else value)
        elif isinstance(value, str):
            yield value


def stage_digests(root: Path) -> dict[str, str | dict[str, str]]:
    """Return the digest of the code behind each stage of the project, by the stage's name.

    Where the items of a stage have regimes of their own, which are the studies' training runs, each has its digest.
    """
    if (root / CHOICES).exists():
        read_study_file(root / CHOICES)
    digests: dict[str, str | dict[str, str]] = {}
    read = cache(read_yaml)
    homes: dict[str, str] = {}
    for stage in load_graph(root, studies=True).values():
        if homes.setdefault(stage.name, stage.file) != stage.file:
            raise MergeflowError(
                f"two stages are named '{stage.name}', in {homes[stage.name]} and {stage.file}: rename one."
            )
        if stage.digest_by_item:
            items = digests.setdefault(stage.name, {})
            assert isinstance(items, dict)
            items[str(stage.item)] = code_digest(root, stage, read)
        elif stage.name not in digests:
            digests[stage.name] = code_digest(root, stage, read)
    return dict(sorted(digests.items()))


def write_digests(root: Path) -> None:
    """Write `outputs/code.yaml`; a file that says the same already is not touched."""
    text = _HEAD + yaml.safe_dump(stage_digests(root))
    path = root / CODE
    if not path.exists() or path.read_text("utf-8") != text:
        write_atomically(path, text)
