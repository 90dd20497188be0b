"""The kinds of source that texts and questions come from, by name."""

from collections.abc import Mapping

from mergeflow.data.address import Opener
from mergeflow.modalities.causal.sources.folder import open_folder
from mergeflow.modalities.causal.sources.rows import ROWS
from mergeflow.modalities.causal.sources.suite import open_suite

SOURCES: Mapping[str, Opener] = {"folder": open_folder, "suite": open_suite, **ROWS}
