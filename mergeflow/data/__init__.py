"""Data of any modality: what a source gives, the standard splits, and the prepared form on disk.

Readers of sources, the decoding of examples and the writer are imported by the stage that prepares data, never here:
code that reads a prepared split does not depend on them.
"""

from mergeflow.data.arrays import SPLITS, Split, digest_of_split, load_manifest, load_split

__all__ = ["SPLITS", "Split", "load_manifest", "load_split", "digest_of_split"]
