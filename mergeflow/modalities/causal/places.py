"""The embedded causal bases; folders and ids of the hub are found as those of encoders are."""

from pathlib import Path

from mergeflow.modalities.text.places import find_place

ASSETS = Path(__file__).with_name("assets")


def causal_place(place: str, root: Path) -> str:
    """Return what transformers is given for a place: the path of a folder, or an id of the hub.

    Args:
        place: a folder relative to `root` or absolute, the name of an embedded base, or an id `owner/name`.
        root: the project folder.

    Raises:
        MergeflowError: it is none of these.
    """
    return find_place(place, root, ASSETS)
