"""The catalog of compressors: every one by name, configured as a frozen record."""

from collections.abc import Mapping
from typing import Any

from mergeflow.merging.catalog import Call, arguments_of
from mergeflow.merging.compression.compressor import Compressor
from mergeflow.plugins import Shelf

COMPRESSORS = Shelf(
    "compressor",
    Compressor,
    "mergeflow.merging.compression.compressors",
    "compressors",
    "`@compressor(…)` of mergeflow.merging.compression.compressor",
)
CompressorCall = Call[Compressor]


def compressors() -> dict[str, Compressor]:
    """Return every compressor by name, in alphabetical order: ours, those of installed packages and of the project.

    Raises:
        MergeflowError: Two compressors have one name, or a file of compressors cannot be loaded or declares none.

    Example:
        >>> list(compressors())
        ['cart_indexing', 'emr', 'tall_mask', 'tsv_compress']
    """
    return COMPRESSORS.all()


def configure_compressor(name: str, args: Mapping[str, Any] | None = None) -> CompressorCall:
    """Validate a compressor's arguments and return the frozen call.

    Raises:
        MergeflowError: Unknown compressor or argument (with the nearest right one), or a value out of range; all at
            once.
    """
    found = COMPRESSORS.get(name)
    return Call(found, arguments_of("compressor", name, found.args, args))
