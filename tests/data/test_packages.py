"""Packages: a file counts by its SHA-256, whoever brought it, and all three formats are read."""

import hashlib
import io
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from mergeflow.data import packages
from mergeflow.data.packages import Package, contents, fetch
from mergeflow.errors import MergeflowError

WRITES = (sys.executable, "-c", "open('{name}-{version}.tgz', 'w').write('content')")
DIGEST = hashlib.sha256(b"content").hexdigest()


def test_a_package_is_fetched_once_and_known_by_its_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(packages.COMMANDS, "npm", WRITES)
    package = Package("npm", "words", "1.0", DIGEST)
    path = fetch(package, tmp_path / "packages")
    assert (path.name, path.read_text()) == ("words-1.0.tgz", "content")
    path.rename(path.with_name("renamed"))
    monkeypatch.setitem(packages.COMMANDS, "npm", ("no-such-command",))
    assert fetch(package, tmp_path / "packages").name == "renamed"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (WRITES, "no file has the SHA-256 0000"),
        ((sys.executable, "-c", "import sys; sys.exit('no route to it')"), "no route to it"),
        (("no-such-command",), "no-such-command is missing"),
    ],
)
def test_another_file_or_none_is_refused(
    command: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(packages.COMMANDS, "apt", command)
    with pytest.raises(MergeflowError, match=message) as caught:
        fetch(Package("apt", "words", "1.0", "0" * 64), tmp_path)
    assert "words" in str(caught.value)


def test_the_files_of_a_wheel_of_npms_archive_and_of_a_debian_package(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "words-1.0-py3-none-any.whl", "w") as wheel:
        wheel.mkdir("words")
        wheel.writestr("words/list.txt", "one")
    with tarfile.open(tmp_path / "words-1.0.tgz", "w:gz") as archive:
        member = tarfile.TarInfo("package/list.txt")
        member.size = 3
        archive.addfile(member, io.BytesIO(b"two"))
    made = {path.name: dict(contents(path)) for path in tmp_path.iterdir()}
    assert made == {
        "words-1.0-py3-none-any.whl": {"words/list.txt": b"one"},
        "words-1.0.tgz": {"package/list.txt": b"two"},
    }
    if shutil.which("dpkg-deb"):
        root = tmp_path / "deb"
        (root / "DEBIAN").mkdir(parents=True)
        (root / "list.txt").write_text("three")
        (root / "DEBIAN/control").write_text(
            "Package: words\nVersion: 1\nArchitecture: all\nMaintainer: a\nDescription: b\n"
        )
        subprocess.run(["dpkg-deb", "--build", str(root), str(tmp_path / "w.deb")], check=True, capture_output=True)
        assert dict(contents(tmp_path / "w.deb")) == {"./list.txt": b"three"}
