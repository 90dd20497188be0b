"""Rows of a data set of the hub, or of a local folder in its layout, as Arrow tables."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from mergeflow.data.address import rooted
from mergeflow.modalities.hub import load_splits


@dataclass(frozen=True)
class HubPlace:
    """A data set by its address.

    Attributes:
        name: id of the hub, or the path of a local folder.
        config: of a data set with several; None for the only one.
        revision: commit, tag or branch; None for the newest.
    """

    name: str
    config: str | None = None
    revision: str | None = None


def parse_place(place: str, root: Path) -> HubPlace:
    """Cut `OWNER/NAME[#CONFIG][@REVISION]`; a local folder is a name alone, whatever signs are in it.

    Args:
        place: what stands behind `hf:`.
        root: what a relative path of a local folder starts from.

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
        place: the data set.
        renamed: the hub's name of a split to ours, where these differ beyond val, valid and dev.

    Raises:
        MergeflowError: `datasets` is not installed, nothing can be loaded, or there is no split train.
    """
    parts, ignored = load_splits(place.name, place.config, place.revision, renamed)
    tables = {
        split: part.with_format("arrow")[:].replace_schema_metadata(part.features.arrow_schema.metadata)
        for split, part in parts.items()
    }
    return tables, ignored
