"""The kinds of source that texts come from, by name."""

from collections.abc import Mapping

from mergeflow.data.address import Opener
from mergeflow.modalities.text.sources.files import FILES
from mergeflow.modalities.text.sources.hub import open_hub
from mergeflow.modalities.text.sources.suite import open_suite

SOURCES: Mapping[str, Opener] = {**FILES, "hf": open_hub, "suite": open_suite}
