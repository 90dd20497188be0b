"""Data sets of the Hugging Face hub, split by split, through the package `datasets`; of texts as Arrow tables."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from mergeflow.data.address import rooted
from mergeflow.data.locations import split_of
from mergeflow.errors import MergeflowError


def load_splits(
    hub_id: str, config: str | None, revision: str | None, renamed: Mapping[str, str]
) -> tuple[dict[str, Any], list[str]]:
    """Return the data sets of train, validation and test, and the names of the splits that are none of these.

    Args:
        renamed: the hub's name of a split to ours, where these differ beyond val, valid and dev.
    """
    try:
        import datasets
    except ImportError as error:
        raise MergeflowError(
            f"hf:{hub_id} needs the package 'datasets', which is not installed. "
            "Install it with: pip install 'mergeflow[hub]'"
        ) from error
    parts: dict[str, Any] = {}
    ignored = []
    try:
        for name in datasets.get_dataset_split_names(hub_id, config, revision=revision):
            split = renamed.get(str(name)) or split_of(str(name))
            if split is None or split in parts:
                ignored.append(str(name))
            else:
                parts[split] = datasets.load_dataset(hub_id, config, split=name, revision=revision)
    # The hub's client raises its own, the HTTP library's and the parsers' errors; all mean "no data from there".
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        raise MergeflowError(
            f"hf:{hub_id} cannot be loaded ({type(error).__name__}: {first}). Check the name and the network; with "
            "HF_HUB_OFFLINE set only data sets in the local cache can be read. A snapshot on disk can be read "
            "with parquet:FOLDER."
        ) from error
    if "train" not in parts:
        names = ", ".join([*parts, *ignored]) or "none"
        raise MergeflowError(f"hf:{hub_id}: splits found: {names}; expected at least train.")
    return parts, ignored


@dataclass(frozen=True)
class HubPlace:
    """A data set by its address."""

    name: str
    config: str | None = None
    revision: str | None = None


def parse_place(place: str, root: Path) -> HubPlace:
    """Cut `OWNER/NAME[#CONFIG][@REVISION]`; a local folder is a name alone, whatever signs are in it.

    Example:
        >>> parse_place("nyu-mll/glue#rte@main", Path())
        HubPlace(name='nyu-mll/glue', config='rte', revision='main')
    """
    if Path(rooted(place, root)).is_dir():
        return HubPlace(rooted(place, root))
    rest, _, revision = place.partition("@")
    name, _, config = rest.partition("#")
    return HubPlace(name, config or None, revision or None)


def load_tables(place: HubPlace, renamed: Mapping[str, str]) -> tuple[dict[str, pa.Table], list[str]]:
    """Return the table of each split, with the metadata that name classes, and the splits that are not used.

    Args:
        renamed: the hub's name of a split to ours, where these differ beyond val, valid and dev.
    """
    parts, ignored = load_splits(place.name, place.config, place.revision, renamed)
    tables = {
        split: part.with_format("arrow")[:].replace_schema_metadata(part.features.arrow_schema.metadata)
        for split, part in parts.items()
    }
    return tables, ignored
