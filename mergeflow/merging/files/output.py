"""What a merge leaves on disk beside the tensors: digests, companions of the weights, the record of what is its own."""

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from torch import Tensor

from mergeflow.checkpoints.fingerprint import BLOCK, block_digest, combine, tensor_digest
from mergeflow.checkpoints.header import TensorInfo
from mergeflow.checkpoints.pickles import PICKLES
from mergeflow.checkpoints.writer import write_text
from mergeflow.errors import MergeflowError

RECORD = "mergeflow.json"
_COPIED = ("*.json", "*.txt", "*.model", "*.model.*", "*.bpe", "*.jinja", "*.tiktoken", "LICENSE*")
_WEIGHTS = (*PICKLES, ".safetensors")


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


def copy_companions(base: Path, folder: Path, dtype: str | None = None) -> None:
    """Copy configuration, tokenizer and licence of a model folder, and the code that its configuration names.

    Never weights, their index, or an adapter's notes. Where the result has a type of its own, config.json says so.
    """
    if not base.is_dir():
        return
    for pattern in (*_COPIED, *_custom_code(base)):
        for file in sorted(base.glob(pattern)):
            taken = file.name.endswith(".index.json") or file.name == RECORD or file.suffix in _WEIGHTS
            if file.is_file() and not taken:
                shutil.copyfile(file, folder / file.name)
    config = _config(folder / "config.json")
    key = next((key for key in ("dtype", "torch_dtype") if key in config), None)
    if dtype is not None and key is not None and config[key] != dtype:
        write_text(folder / "config.json", json.dumps({**config, key: dtype}, indent=2, ensure_ascii=False) + "\n")


def _custom_code(base: Path) -> list[str]:
    """Return the Python files of a folder that its `auto_map` names, as "modeling_x.XModel" or a list of such."""
    found = []
    for name in ("config.json", "tokenizer_config.json"):
        entries = _config(base / name).get("auto_map")
        for entry in entries.values() if isinstance(entries, dict) else ():
            for one in entry if isinstance(entry, list) else [entry]:
                if isinstance(one, str) and re.fullmatch(r"\w+\.\w+", one):  # not "other/repository--module.Class"
                    found.append(f"{one.partition('.')[0]}.py")
    return found


def _config(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


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
