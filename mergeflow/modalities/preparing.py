"""Find a modality's data preparation, with the sources that installed packages and the project add."""

from dataclasses import replace

from mergeflow.data.decoding import Preparation, Source
from mergeflow.errors import MergeflowError
from mergeflow.plugins import Parts, Shelf

PREPARATIONS = Parts("modality", Preparation, "mergeflow.modalities", "modalities", "preparation")
SOURCES = Shelf("kind of data source", Source, None, "sources", "`Source(…)` of mergeflow.data.decoding")


def find_preparation(modality: str) -> Preparation:
    """Return a modality's sources, transforms and decoding, with the sources that plug-ins add."""
    preparation = PREPARATIONS.get(modality)
    added = {name: source.open for name, source in SOURCES.all().items() if source.modality == modality}
    if taken := sorted(preparation.sources.keys() & added.keys()):
        names = ", ".join(f"'{name}'" for name in taken)
        raise MergeflowError(f"the modality '{modality}' has kinds of data source named {names} itself: rename yours.")
    return replace(preparation, sources={**preparation.sources, **added})
