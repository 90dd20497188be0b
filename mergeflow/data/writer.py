"""Write one split: Parquet and named arrays, in one pass and bounded memory."""

import errno
import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mergeflow.data.arrays import array_file
from mergeflow.data.decoding import Decoded
from mergeflow.errors import MergeflowError

# A row group is what a reader holds at once: 1000 small examples, or 32 MiB of large ones.
ROW_GROUP_ROWS = 1000
ROW_GROUP_BYTES = 32 * 2**20


@contextmanager
def disk_guard(path: Path, needed: Callable[[], str]) -> Iterator[None]:
    """Turn a full disk into one error that names the file and the space that is needed."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise MergeflowError(
            f"{path}: no space left on the disk. The task needs {needed()}; "
            f"{shutil.disk_usage(path.parent).free / 2**20:.0f} MiB are free. Free some space or choose another folder."
        ) from error


class ArrayWriter:
    """One `.npy` file, open for appending rows.

    The header is completed at the end. The file is not a memory map: writing to a map on a full disk kills the process
    with SIGBUS, where a write gives an error that can be reported.
    """

    def __init__(self, path: Path, row: np.ndarray) -> None:
        self.path = path
        self._row = (row.dtype, row.shape)
        self._count = 0
        self._digest = hashlib.sha256()
        self.file = open(path, "wb", buffering=2**20)  # noqa: SIM115 - closed by the split's writer
        self._write_header()
        self._header_bytes = self.file.tell()

    def add(self, row: np.ndarray) -> None:
        """Append one row, of the shape and type of the first one: [...]."""
        assert (row.dtype, row.shape) == self._row, f"{self.path}: {row.dtype} {row.shape} after {self._row}"
        content = np.ascontiguousarray(row).data
        self.file.write(content)
        self._digest.update(content)
        self._count += 1

    def finish(self) -> None:
        """Complete the header and close the file."""
        self.file.seek(0)
        self._write_header()
        assert self.file.tell() == self._header_bytes  # NumPy pads headers so that the length may grow in place
        self.file.close()

    def record(self) -> dict[str, Any]:
        """Return the rows' dtype and shape and the SHA-256 of all of them."""
        dtype, shape = self._row
        return {"dtype": dtype.name, "shape": list(shape), "sha256": self._digest.hexdigest()}

    def _write_header(self) -> None:
        dtype, shape = self._row
        described = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False}
        np.lib.format.write_array_header_1_0(self.file, {**described, "shape": (self._count, *shape)})


class SplitWriter:
    """The files of a split, open for appending; a context manager. Arrays are opened by the first example.

    How many examples are expected at most, if known, serves the message of a full disk.
    """

    def __init__(self, folder: Path, split: str, schema: pa.Schema, expected: int | None) -> None:
        self.count = 0
        self._folder, self._split, self._schema, self._expected = folder, split, schema, expected
        self._parquet_path = folder / f"{split}.parquet"
        self._content = hashlib.sha256()
        self._arrays: dict[str, ArrayWriter] = {}
        self._rows: list[Mapping[str, Any]] = []
        self._pending = 0
        self._bytes = 0

    def __enter__(self) -> "SplitWriter":
        with ExitStack() as opened:
            with disk_guard(self._parquet_path, self._needed):
                # Contents are compressed already; a dictionary of their bytes would only cost memory.
                options = {"compression": "none", "use_dictionary": False}
                self._parquet = pq.ParquetWriter(self._parquet_path, self._schema, **options)
                opened.callback(_close_quietly, self._parquet)
            self._opened = opened.pop_all()
        return self

    def __exit__(self, _kind: object, error: object, _trace: object) -> None:
        with self._opened:
            if error is None:
                self._finish()

    def add(self, example: Decoded, label: int) -> None:
        """Append one example."""
        if not self._arrays:
            self._open_arrays(example)
        assert self._arrays.keys() == example.arrays.keys(), f"arrays {[*example.arrays]} after {[*self._arrays]}"
        for name, row in example.arrays.items():
            writer = self._arrays[name]
            try:
                writer.add(row)
            except OSError:
                with disk_guard(writer.path, self._needed):
                    raise
        self._content.update(example.digest + label.to_bytes(8, "little"))
        self._rows.append(example.row)
        self.count += 1
        self._pending += example.size
        self._bytes += example.size + sum(row.nbytes for row in example.arrays.values())
        if len(self._rows) >= ROW_GROUP_ROWS or self._pending >= ROW_GROUP_BYTES:
            self._flush()

    def digests(self) -> dict[str, Any]:
        """Return the SHA-256 of the content (the source's, and labels, in order) and a record of each array."""
        arrays = {name: writer.record() for name, writer in self._arrays.items()}
        return {"content_sha256": self._content.hexdigest(), "arrays": arrays}

    def _open_arrays(self, example: Decoded) -> None:
        for name, row in example.arrays.items():
            path = array_file(self._folder, self._split, name)
            with disk_guard(path, self._needed):
                self._arrays[name] = ArrayWriter(path, row)
                self._opened.callback(_close_quietly, self._arrays[name].file)

    def _flush(self) -> None:
        if not self._rows:
            return
        columns = [pa.array([row[field.name] for row in self._rows], field.type) for field in self._schema]
        with disk_guard(self._parquet_path, self._needed):
            self._parquet.write_table(pa.Table.from_arrays(columns, schema=self._schema), row_group_size=ROW_GROUP_ROWS)
        self._rows, self._pending = [], 0

    def _finish(self) -> None:
        self._flush()
        with disk_guard(self._parquet_path, self._needed):
            self._parquet.close()
        for writer in self._arrays.values():
            with disk_guard(writer.path, self._needed):
                writer.finish()

    def _needed(self) -> str:
        if self._expected is None:
            return f"more than the {self._bytes / 2**20:.0f} MiB of the {self.count} examples that were written"
        each = self._bytes / max(self.count, 1)
        return f"about {self._expected * each / 2**20:.0f} MiB for this split's {self._expected} examples"


def _close_quietly(file: IO[bytes] | pq.ParquetWriter) -> None:
    """Close a file whose first error, if any, is already being reported; on a full disk closing only repeats it."""
    with suppress(OSError):
        file.close()
