"""Outputs of older code that count as those of today's: shown to be equal by a release, or accepted by a person."""

import getpass
import socket
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from mergeflow.errors import MergeflowError
from mergeflow.layout import ACCEPTED
from tasks.project.files import read_yaml
from tasks.project.writing import write_atomically

RELEASES = Path(__file__).with_name("equivalent.yaml")
_HEAD = "# By `mergeflow accept`: whose outputs of older code count. Without its entry a stage runs again.\n"
_RELEASES_HEAD = "# By `mergeflow release check`: digests of code that was shown to make the same bits as older code.\n"


def of_older_code(root: Path, key: str, digest: str) -> str:
    """Return the digest of older code that a stage's digest counts as; itself where nobody accepted anything."""
    for entry in reversed(read_accepted(root)):
        if (entry["stage"], entry["code"]) == (key, digest):
            return str(entry["outputs_of"])
    return digest


def read_accepted(root: Path) -> list[dict[str, str]]:
    """Return what was accepted in a project, the oldest first.

    Raises:
        MergeflowError: the file is not what `mergeflow accept` writes.
    """
    path = root / ACCEPTED
    entries = read_yaml(path) if path.exists() else []
    fields = {"stage", "code", "outputs_of", "who", "because", "date"}
    if not isinstance(entries, list) or not all(isinstance(one, dict) and fields <= set(one) for one in entries):
        raise MergeflowError(f"{path} is not what `mergeflow accept` writes: a list of entries with {sorted(fields)}.")
    return entries


def accept(root: Path, codes: Mapping[str, tuple[str, str]], because: str, who: str = "") -> None:
    """Let outputs of older code count as they are, until the code of their stages changes again.

    Args:
        root: the project folder.
        codes: by a stage's key, the digest of its code today and that of the code that made its outputs.
        because: why they need not be made again.
        who: who decided; by default the user of this machine.

    Raises:
        MergeflowError: there is no reason.
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
    write_atomically(root / ACCEPTED, _HEAD + yaml.safe_dump(entries, sort_keys=False, allow_unicode=True))


@cache
def equivalents() -> dict[str, str]:
    """Return the digests of code that releases have shown to make the same bits as older code, with the oldest such."""
    table: dict[str, Any] = (read_yaml(RELEASES) if RELEASES.exists() else None) or {}
    return {str(new): str(old) for new, old in table.items()}


def write_equivalents(found: Mapping[str, str]) -> None:
    """Add what a release check has shown, by the new digest the older one, to the table that releases carry."""
    known = equivalents()
    table = known | {new: known.get(old, old) for new, old in found.items() if new != old}
    write_atomically(RELEASES, _RELEASES_HEAD + yaml.safe_dump(table))
    equivalents.cache_clear()
