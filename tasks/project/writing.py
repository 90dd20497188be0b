"""Small files that are written whole."""

import os
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Write a text file that is there whole or not at all, and on the disk, whenever the process is killed.

    Errors of the disk are passed on as they are: the pipeline tries a stage again after one that may pass by itself.

    Args:
        path: the file; folders above it are made.
        text: its content, written in UTF-8.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
