"""What a merge leaves on disk beside the tensors: digests, companions of the weights, the record of what is its own."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from torch import Tensor

from mergeflow.checkpoints.fingerprint import BLOCK, block_digest, combine, tensor_digest
from mergeflow.checkpoints.header import TensorInfo
from mergeflow.errors import MergeflowError

RECORD = "mergeflow.json"
_COPIED = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")


@dataclass
class Digests:
    """Collects the digests of everything that passes: per owner and tensor, from those of its blocks."""

    lock: Lock = field(default_factory=Lock)
    blocks: dict[tuple[str, str], dict[int, bytes]] = field(default_factory=dict)
    tensors: dict[str, dict[str, str]] = field(default_factory=dict)

    def watch(self, owner: str, name: str, start: int, values: Tensor) -> None:
        """See a flat piece of an owner's tensor, from element `start` on."""
        found = {start + at: block_digest(values[at : at + BLOCK]) for at in range(0, values.numel(), BLOCK)}
        with self.lock:
            self.blocks.setdefault((owner, name), {}).update(found)

    def settle(self) -> None:
        """Turn the blocks seen so far into digests of tensors."""
        for (owner, name), found in self.blocks.items():
            self.tensors.setdefault(owner, {})[name] = tensor_digest(found[at] for at in sorted(found))
        self.blocks.clear()

    def fingerprint(self, owner: str, infos: Mapping[str, TensorInfo]) -> str:
        """Return the fingerprint of an owner whose tensors have all passed."""
        digests = self.tensors.get(owner, {})
        return combine((name, info.dtype, info.shape, digests[name]) for name, info in sorted(infos.items()))


def identity_of(paths: Mapping[str, str]) -> dict[str, list[Any]]:
    """Return path, size and time of every input file: enough to see that a stopped merge's inputs are unchanged."""
    found: dict[str, list[Any]] = {}
    for owner, path in paths.items():
        place = Path(path)
        files = sorted(place.iterdir()) if place.is_dir() else [place]
        stats = [(file.name, file.stat()) for file in files if file.is_file()]
        found[owner] = [str(place.resolve()), *([name, stat.st_size, stat.st_mtime_ns] for name, stat in stats)]
    return found


def copy_companions(base: Path, folder: Path) -> None:
    """Copy configuration and tokenizer files of a model folder; never weights, their index, or an adapter's notes."""
    if not base.is_dir():
        return
    for pattern in _COPIED:
        for file in sorted(base.glob(pattern)):
            taken = file.name.endswith(".index.json") or file.name == RECORD
            if file.is_file() and not taken:
                shutil.copyfile(file, folder / file.name)


def partial_folder(target: Path) -> Path:
    """Return where a folder is made before it gets its name."""
    return target.parent / f".{target.name}.partial"


def check_replaceable(folder: Path) -> None:
    """Check that a merge may replace a folder: all it holds was put there by a merge, as its record says.

    Raises:
        MergeflowError: It holds something else; the first names are listed.
    """
    held = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if not held:
        return
    try:
        record = json.loads((folder / RECORD).read_bytes())
        own = {RECORD, *record.get("files", [])}
    except (FileNotFoundError, ValueError, TypeError, AttributeError, RecursionError):
        raise MergeflowError(
            f"out '{folder}' exists and was not made by a merge: choose another place or remove it."
        ) from None
    strange = sorted(held - own)
    if strange:
        more = f" … and {len(strange) - 5} more" if len(strange) > 5 else ""
        raise MergeflowError(
            f"out '{folder}' would be replaced, but holds what its {RECORD} does not list as the merge's own: "
            f"{', '.join(strange[:5])}{more}. Move that, remove the folder, or choose another place."
        )
