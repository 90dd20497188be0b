"""Fetch packages with pip, apt-get or npm by name, version and SHA-256, and read files in them."""

import argparse
import hashlib
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from mergeflow.errors import MergeflowError

COMMANDS = {
    "pip": (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "{name}=={version}"),
    "apt": ("apt-get", "download", "--quiet", "{name}={version}"),
    "npm": ("npm", "pack", "--silent", "{name}@{version}"),
}


class Package(NamedTuple):
    """What is fetched: by which manager, under which name and version, and the SHA-256 of its file."""

    manager: str
    name: str
    version: str
    sha256: str


def fetch(package: Package, folder: Path) -> Path:
    """Return the file of a package, downloaded into the folder if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    if path := _held(package, folder):
        return path
    command = [part.format(**package._asdict()) for part in COMMANDS[package.manager]]
    print(f"fetching {package.name} {package.version}", flush=True)
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise MergeflowError(f"{package.name} is a package of {package.manager}: {command[0]} is missing.") from None
    if path := _held(package, folder):
        return path
    hint = "\napt's are of Debian 12; `apt-get update` reads its lists." if package.manager == "apt" else ""
    raise MergeflowError(
        f"{package.name} {package.version} is not in {folder} after `{' '.join(command)}`: no file has the SHA-256 "
        f"{package.sha256}. {done.stderr.strip()[-300:]}{hint}"
    )


def _held(package: Package, folder: Path) -> Path | None:
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return next((path for path in files if hashlib.sha256(path.read_bytes()).hexdigest() == package.sha256), None)


def run_make(fill: Callable[[Path], None], folder: Path, description: str) -> None:
    """Run a program `make.py` that fills a folder, by default this one or that of its option --out."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, default=folder, help="folder to fill, by default this one")
    try:
        fill(parser.parse_args().out)
    except MergeflowError as error:
        sys.exit(str(error))


def contents(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the files in a package, a wheel, a Debian package or npm's archive, by their paths in it."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            yield from ((name, wheel.read(name)) for name in wheel.namelist() if not name.endswith("/"))
        return
    if path.suffix != ".deb":
        with tarfile.open(path, "r|gz") as archive:
            yield from _members(archive)
        return
    with (
        subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(path)], stdout=subprocess.PIPE) as unpacking,
        tarfile.open(fileobj=unpacking.stdout, mode="r|") as archive,
    ):
        yield from _members(archive)


def _members(archive: tarfile.TarFile) -> Iterator[tuple[str, bytes]]:
    for member in archive:
        if member.isfile() and (file := archive.extractfile(member)):
            yield member.name, file.read()
