"""The kinds of source that texts come from, by name."""

from collections.abc import Mapping

from mergeflow.data.address import Opener, drawn_by
from mergeflow.modalities.text.sources.files import FILES
from mergeflow.modalities.text.sources.hub import open_hub

SOURCES: Mapping[str, Opener] = {**FILES, "hf": open_hub, "suite": drawn_by("suites.sentences.source")}
