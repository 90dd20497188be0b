"""Write one split: Parquet, pixel array and label array, in one pass and bounded memory."""

import errno
import hashlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mergeflow.errors import MergeflowError
from mergeflow.modalities.vision.data.images import DecodedExample
from mergeflow.modalities.vision.data.parquet_format import image_schema
from mergeflow.modalities.vision.data.store import split_files

# A row group is what a reader holds at once: 1000 small images, or 32 MiB of large ones.
ROW_GROUP_ROWS = 1000
ROW_GROUP_BYTES = 32 * 2**20


@contextmanager
def disk_guard(path: Path, needed: Callable[[], str]) -> Iterator[None]:
    """Turn a full disk into one error that names the file and the space that is needed.

    Args:
        path: the file being written.
        needed: returns the needed space in words; called only when the disk is full.

    Raises:
        MergeflowError: no space or quota left. Other operating-system errors pass unchanged.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise MergeflowError(
            f"{path}: no space left on the disk. The task needs {needed()}; "
            f"{shutil.disk_usage(path.parent).free / 2**20:.0f} MiB are free. Free some space or choose another folder."
        ) from error


class SplitWriter:
    """The three files of a split, open for appending; a context manager.

    The pixel array is appended to and its header completed at the end. It is not a memory map: writing to a map on a
    full disk kills the process with SIGBUS, where a write gives an error that can be told.

    Args:
        folder: an existing folder.
        split: train, validation or test.
        class_names: names for the Parquet metadata.
        image_size: S, pixels.
        expected: images that will be written at most, if known; serves the message of a full disk.
    """

    def __init__(
        self, folder: Path, split: str, class_names: Sequence[str], image_size: int, expected: int | None
    ) -> None:
        self.parquet_path, self.images_path, self.labels_path = split_files(folder, split)
        self.labels: list[int] = []
        self.content = hashlib.sha256()
        self._pixels = hashlib.sha256()
        self._image_size = image_size
        self._expected = expected
        self._schema = image_schema(class_names)
        self._encoded: list[dict[str, object]] = []
        self._pending = 0
        self._encoded_bytes = 0

    def __enter__(self) -> "SplitWriter":
        with ExitStack() as opened:
            with disk_guard(self.images_path, self._needed):
                self._images = open(self.images_path, "wb", buffering=2**20)
                opened.callback(_close_quietly, self._images)
                self._write_header(0)
                self._header_bytes = self._images.tell()
            with disk_guard(self.parquet_path, self._needed):
                # Images are compressed already; a dictionary of their bytes would only cost memory.
                options = {"compression": "none", "use_dictionary": False}
                self._parquet = pq.ParquetWriter(self.parquet_path, self._schema, **options)
                opened.callback(_close_quietly, self._parquet)
            self._opened = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._opened:
            if error is None:
                self._finish()

    def add(self, example: DecodedExample) -> None:
        """Append one image."""
        pixels = np.ascontiguousarray(example.pixels).data
        with disk_guard(self.images_path, self._needed):
            self._images.write(pixels)
        self._pixels.update(pixels)
        self.content.update(example.digest + example.label.to_bytes(8, "little"))
        self.labels.append(example.label)
        self._encoded.append({"bytes": example.encoded, "path": example.path})
        self._pending += len(example.encoded)
        self._encoded_bytes += len(example.encoded)
        if len(self._encoded) >= ROW_GROUP_ROWS or self._pending >= ROW_GROUP_BYTES:
            self._flush()

    def digests(self) -> dict[str, str]:
        """Return the SHA-256 of the content (original pixels and labels in order) and of both arrays."""
        return {
            "content_sha256": self.content.hexdigest(),
            "pixels_sha256": self._pixels.hexdigest(),
            "labels_sha256": hashlib.sha256(np.array(self.labels, np.int64).data).hexdigest(),
        }

    def _flush(self) -> None:
        if not self._encoded:
            return
        columns = [pa.array(self._encoded, self._schema.field("image").type)]
        columns.append(pa.array(self.labels[-len(self._encoded) :], pa.int64()))
        with disk_guard(self.parquet_path, self._needed):
            self._parquet.write_table(pa.Table.from_arrays(columns, schema=self._schema), row_group_size=ROW_GROUP_ROWS)
        self._encoded, self._pending = [], 0

    def _finish(self) -> None:
        self._flush()
        with disk_guard(self.parquet_path, self._needed):
            self._parquet.close()
        with disk_guard(self.images_path, self._needed):
            self._images.seek(0)
            self._write_header(len(self.labels))
            assert self._images.tell() == self._header_bytes  # NumPy pads headers so that the length may grow in place
            self._images.close()
        with disk_guard(self.labels_path, self._needed):
            np.save(self.labels_path, np.array(self.labels, np.int64))

    def _write_header(self, count: int) -> None:
        shape = (count, self._image_size, self._image_size, 3)
        np.lib.format.write_array_header_1_0(self._images, {"descr": "|u1", "fortran_order": False, "shape": shape})

    def _needed(self) -> str:
        done = len(self.labels)
        if self._expected is None:
            return f"more than the {self._bytes(done) / 2**20:.0f} MiB of the {done} images that were written"
        return f"about {self._bytes(self._expected) / 2**20:.0f} MiB for this split's {self._expected} images"

    def _bytes(self, images: int) -> float:
        return images * (3 * self._image_size**2 + self._encoded_bytes / max(len(self.labels), 1))


def _close_quietly(file: IO[bytes] | pq.ParquetWriter) -> None:
    """Close a file whose first error, if any, is already being told; on a full disk closing only repeats it."""
    with suppress(OSError):
        file.close()
