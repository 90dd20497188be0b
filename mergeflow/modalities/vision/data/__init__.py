"""Data of vision tasks: one reader for every source, one prepared form on disk."""

from mergeflow.modalities.vision.data.prepare import prepare_task
from mergeflow.modalities.vision.data.sources import open_source
from mergeflow.modalities.vision.data.store import Split, load_manifest, load_split
from mergeflow.modalities.vision.data.task import DEFAULT_TEMPLATES, SPLITS, Example, Progress, RawTask

__all__ = [
    "DEFAULT_TEMPLATES",
    "Example",
    "Progress",
    "RawTask",
    "SPLITS",
    "Split",
    "load_manifest",
    "load_split",
    "open_source",
    "prepare_task",
]
