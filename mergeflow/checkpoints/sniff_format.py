"""Recognise files that are not checkpoints, whatever their names say, by their first bytes."""

import os
from pathlib import Path, PurePosixPath
from zipfile import BadZipFile, ZipFile

GGUF = b"GGUF"  # how such a file begins
_PICKLED, _DIRECTORY = b"PK\x03\x04", b"PK\x05\x06"
# The end of an archive's directory has 22 bytes and a comment of 65,535 at most.
_TAIL = 22 + 65_535
# A pickle of protocol 2 or later begins so; older ones with a "(" or a letter, which says nothing.
_PICKLE = tuple(bytes((0x80, protocol)) for protocol in range(2, 6))
# Files that an archive of torch.save never has, and what an archive with them is.
_ARCHIVES = {
    "constants.pkl": "a TorchScript archive, a program with its weights, which is never run: "
    "torch.save(torch.jit.load(FILE).state_dict(), 'weights.pt') takes the weights out of it",
    "archive_format": "a program of torch.export with its weights, which is never run: "
    "torch.save(torch.export.load(FILE).state_dict, 'weights.pt') takes the weights out of it",
}


def mistaken(start: bytes, wanted: str) -> str | None:
    """Name the kind of a file that is no checkpoint, with the way out; None where its first 256 bytes do not tell.

    It was opened as `wanted`: "safetensors", "pickle" or "JSON".
    """
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n")
    if text.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer, not the weights: run `git lfs pull` in its folder, or download the file itself"
    if text[:64].lower().startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        return (
            "is a web page, not weights (a download that needed a login or another address): "
            "download the file itself, after logging in"
        )
    if start.startswith(GGUF):
        return (
            "is a GGUF file, whose quantised weights cannot be merged: merge the original safetensors model, "
            "or make plain weights of this file with `mergeflow convert`"
        )
    if start.startswith(b"\x89HDF"):
        return "is an HDF5 file, as Keras and TensorFlow write it: save the model as safetensors there first"
    if start.startswith(b"\x1f\x8b"):
        return "is compressed by gzip: unpack it first"
    if wanted == "safetensors" and start.startswith(_PICKLED):
        return "is a zip archive, as torch.save writes it, not safetensors: rename it so that it ends in .pt"
    if wanted == "pickle" and start[8:10] in (b'{"', b"{ ", b"{}") and start[4:8] == bytes(4):
        return "is a safetensors file: rename it so that it ends in .safetensors"
    return None


def is_pickled(start: bytes) -> bool:
    """Whether a file begins as torch.save's files do: an archive, or in the older format a pickle."""
    return start.startswith((_PICKLED, *_PICKLE))


def other_archive(path: Path) -> str | None:
    """Name the kind of a zip archive that is no state dict of torch.save, with the way out."""
    try:
        with ZipFile(path) as archive:
            files = {PurePosixPath(name).name for name in archive.namelist()}
    except (OSError, BadZipFile, ValueError, NotImplementedError):
        return None
    other = next((what for file, what in _ARCHIVES.items() if file in files), None)
    return other or (None if "data.pkl" in files else "a zip archive without the `data.pkl` of torch.save")


def cut_short(path: Path, start: bytes, reason: str) -> bool:
    """Whether a pickled file, read with an error, ends too early: an archive without its directory, or data cut off."""
    if start.startswith(_PICKLED):
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            tail = file.read()
        at = tail.rfind(_DIRECTORY)
        return at < 0 or len(tail) - at < 22
    return len(start) < 4 or "EOF" in reason


def first_bytes(path: Path) -> bytes:
    """Return the first 256 bytes of a file, fewer where it is shorter."""
    with path.open("rb") as file:
        return file.read(256)
