"""Weights of Tesseract's networks: read out of a .traineddata file, and written into one of the same network.

    python inputs/traineddata.py eng.traineddata eng.safetensors
    python inputs/traineddata.py eng.safetensors merged.traineddata like.traineddata

A file that was rounded to 8 bits is read as integers times the scale of their row. It cannot be written into: `like` is
a file with weights of 64 bits.
"""

import struct
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

NETWORK = 17  # which of a file's parts is the network
FIXED = {"Input": 20, "Convolve": 8, "Maxpool": 8, "Reconfig": 8}  # layers without weights, and the bytes that follow
HOLDING = {"Series", "Parallel", "Replicated", "ParBidiLSTM", "RTLReversed", "TTBReversed", "XYTranspose"}
GATES = ("cell", "input", "forget", "output")
INT8, DOUBLE = 1, 128  # bits of a matrix's first byte
RATES = 64  # the bit of a layer's flags that says that learning rates follow its layers


class Matrix(NamedTuple):
    """Where a matrix's numbers lie in the file, how many they are, and whether they are of 8 bits, then scales."""

    offset: int
    rows: int
    columns: int
    rounded: bool


class Reader:
    """Goes through a file and yields the matrices that it passes, by name."""

    def __init__(self, data: bytes) -> None:
        (parts,) = struct.unpack_from("<i", data)
        self.data, self.at = data, struct.unpack_from(f"<{parts}q", data, 4)[NETWORK]
        if self.at < 0:
            raise ValueError("the file has no LSTM network")

    def take(self, form: str) -> tuple[Any, ...]:
        """Return the next numbers."""
        values = struct.unpack_from(f"<{form}", self.data, self.at)
        self.at += struct.calcsize(f"<{form}")
        return values

    def text(self) -> str:
        """Return the next text."""
        (size,) = self.take("I")
        return self.take(f"{size}s")[0].decode()

    def layer(self, name: str) -> Iterator[tuple[str, Matrix]]:
        """Go through a layer and what it holds."""
        self.take("b")
        kind = self.text()
        training, _, flags, *_ = self.take("bbIiii")
        self.text()
        if kind in HOLDING:
            for place in range(self.take("I")[0]):
                yield from self.layer(f"{name}.{place}")
            if flags & RATES:
                self.take(f"{self.take('I')[0]}f")
        elif kind in FIXED:
            self.at += FIXED[kind]
        elif training == 1:
            raise ValueError(f"layer {name}, {kind}: the file is one to go on training from; read a finished one")
        elif kind in ("LSTM", "SummLSTM"):
            self.take("i")
            yield from ((f"{name}.{gate}.weight", self.matrix()) for gate in GATES)
        elif kind in ("Softmax", "Tanh", "Relu", "Linear", "Logistic"):
            yield f"{name}.weight", self.matrix()
        else:
            raise ValueError(f"layer {name} is of the kind {kind!r}, which is not read here")

    def matrix(self) -> Matrix:
        """Go over a matrix."""
        (mode, rows, columns) = self.take("Bii")
        if not mode & DOUBLE:
            raise ValueError("a matrix is in the format of Tesseract before 4.0")
        rounded, size = bool(mode & INT8), 1 if mode & INT8 else 8
        place = Matrix(self.at + size, rows, columns, rounded)  # one number that says nothing stands before the others
        self.at = place.offset + rows * columns * size + (4 + 8 * rows if rounded else 0)
        return place


def matrices(data: bytes) -> dict[str, Matrix]:
    """Return where a .traineddata file has its matrices, by name."""
    return dict(Reader(data).layer("layers"))


def read(data: bytes) -> dict[str, Tensor]:
    """Return a network's weights, by name; the last column of a matrix is the bias."""
    state = {}
    for name, (offset, rows, columns, rounded) in matrices(data).items():
        kind, size = (torch.int8, 1) if rounded else (torch.float64, 8)
        buffer = bytearray(data[offset : offset + rows * columns * size])
        state[name] = torch.frombuffer(buffer, dtype=kind).reshape(rows, columns).double()
        if rounded:
            scales = data[offset + rows * columns + 4 : offset + rows * columns + 4 + 8 * rows]
            state[name] *= torch.frombuffer(bytearray(scales), dtype=torch.float64)[:, None]
    return state


def write(state: Mapping[str, Tensor], like: bytes) -> bytes:
    """Return the bytes of a file like the one given, with these weights in it."""
    data = bytearray(like)
    places = matrices(like)
    if set(places) != set(state):
        raise ValueError(f"the weights are of another network: {sorted(set(places) ^ set(state))}")
    for name, (offset, rows, columns, rounded) in places.items():
        if rounded or state[name].shape != (rows, columns):
            raise ValueError(f"{name}: {tuple(state[name].shape)} does not fit {rows} x {columns} of 64 bits")
        numbers = state[name].double().contiguous().numpy().tobytes()
        data[offset : offset + len(numbers)] = numbers
    return bytes(data)


if __name__ == "__main__":
    source, target, *like = sys.argv[1:]
    if like:
        Path(target).write_bytes(write(load_file(source), Path(like[0]).read_bytes()))
    else:
        save_file(read(Path(source).read_bytes()), target)
