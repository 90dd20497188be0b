"""The kinds of source that texts and questions come from, by name."""

from collections.abc import Mapping

from mergeflow.data.address import Opener, drawn_by
from mergeflow.modalities.causal.sources.folder import open_folder
from mergeflow.modalities.causal.sources.rows import ROWS

SOURCES: Mapping[str, Opener] = {"folder": open_folder, "suite": drawn_by("suites.books.source"), **ROWS}
