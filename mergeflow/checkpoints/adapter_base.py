"""The base that a PEFT adapter was made for, as its adapter_config.json names it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mergeflow.checkpoints.formats import read_json
from mergeflow.checkpoints.hub import is_id, local_folder
from mergeflow.checkpoints.lora import ADAPTER_CONFIG
from mergeflow.errors import MergeflowError


@dataclass(frozen=True)
class NamedBase:
    """A base by its name.

    Attributes:
        name: A path of the machine that made the adapter, or a Hugging Face id.
        revision: Of an id, where the adapter has one.
    """

    name: str
    revision: str | None

    @property
    def path(self) -> str:
        """What a recipe calls it: the path, `owner/name` or `owner/name@revision`."""
        return f"{self.name}@{self.revision}" if self.revision and is_id(self.name) else self.name

    def folder(self) -> Path | None:
        """Return where it lies on this machine, or None; the network is not asked."""
        return local_folder(self.path)


def named_base(adapter: str | Path) -> NamedBase | None:
    """Return the base that an adapter names; None for anything else, and for an adapter that names none.

    Args:
        adapter: A folder, or an id in the local cache.
    """
    folder = local_folder(str(adapter))
    if folder is None or not (folder / ADAPTER_CONFIG).is_file():
        return None
    config = read_json(folder / ADAPTER_CONFIG)
    name, revision = config.get("base_model_name_or_path"), config.get("revision")
    if not isinstance(name, str) or not name:
        return None
    return NamedBase(name, revision if isinstance(revision, str) and revision else None)


def common_base(experts: Mapping[str, str]) -> str | None:
    """Return the path or id of the base that all adapters among the experts name; None where none of them does.

    Args:
        experts: Paths by name.

    Raises:
        MergeflowError: They name different bases, or a folder that is not on this machine.
    """
    named = _named_bases(experts)
    places = {base.folder() or base.path for base in named.values()}
    listed = "; ".join(f"'{name}' for '{base.path}'" for name, base in named.items())
    if len(places) > 1:
        raise MergeflowError(f"base: is missing, and the adapters were made for different ones: {listed}")
    absent = [base for base in named.values() if base.folder() is None and not is_id(base.path)]
    if absent:
        raise MergeflowError(f"base: is missing, and what the adapters were made for is not there: {listed}")
    return next((base.path for base in named.values()), None)


def adapters_of(base: str, experts: Mapping[str, str]) -> str:
    """Return the adapters among the experts that name a base, for a message; "" where none does.

    Args:
        base: Its path or id, as a recipe has it.
        experts: Paths by name.
    """
    return ", ".join(f"'{name}'" for name, named in _named_bases(experts).items() if named.path == base)


def _named_bases(experts: Mapping[str, str]) -> dict[str, NamedBase]:
    return {name: named for name, path in experts.items() if (named := named_base(path)) is not None}
