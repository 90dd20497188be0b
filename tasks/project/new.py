"""Makes a new project: a folder of choices beside the installed code. Its files are those of the repository's root."""

import os
import re
import shutil
import subprocess
from pathlib import Path

from mergeflow.application import TEMPLATE
from mergeflow.errors import MergeflowError, unknown_name
from mergeflow.modalities.sections import SECTIONS

AS_THEY_ARE = (
    "dvc.yaml",
    ".gitignore",
    ".dvcignore",
    ".dvc/.gitignore",
    ".dvc/config",
    ".dvc/plots",
    "inputs/README.md",
)
README = Path(__file__).with_name("new_readme.md")
_CHOICES = "params.yaml"  # a modality's own, of a project that runs as it is


def modalities() -> dict[str, Path]:
    """Return the file of first choices of every modality that has one, by the modality's name."""
    folders = SECTIONS.folders()
    return {name: folder / _CHOICES for name, folder in folders.items() if (folder / _CHOICES).exists()}


def worlds() -> dict[str, Path]:
    """Return the folders of projects with real data that their `inputs/make.py` fetches, by name."""
    return {path.parents[1].name: path.parents[1] for path in sorted(TEMPLATE.glob("worlds/*/inputs/make.py"))}


def new_project(folder: Path, modality: str, world: str | None = None) -> Path:
    """Make a project folder, whole or not at all: choices, graph, deployments, DVC's settings, a place for inputs.

    Args:
        folder: the project folder; its last name is the project's and its registered model's.
        modality: what its models are, one of `modalities()`.
        world: one of `worlds()`, whose files it gets instead of a modality's first choices.

    Returns:
        The folder.

    Raises:
        MergeflowError: a name that cannot be used, a folder that holds something, or an unknown modality or world; all
            of them at once.
    """
    name, starts = folder.name, worlds() if world else modalities()
    start = world or modality
    faults = []
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", name):
        faults.append(f"'{name}' cannot name a project: use lower-case letters, digits, '-' and '_'.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        faults.append(f"{folder} exists and is not an empty folder: nothing in it is replaced. Take another name.")
    if start not in starts:
        faults.append(str(unknown_name("world" if world else "modality", start, starts)))
    if faults:
        raise MergeflowError("\n".join(faults))
    folder.parent.mkdir(parents=True, exist_ok=True)
    making = folder.parent / f".{name}.new{os.getpid()}"
    try:
        choices = starts[start]
        if world:
            _copy_texts(choices, making)
            choices = choices / _CHOICES
        if choices.exists():  # a world without choices is no pipeline: it has experts and a sweep file
            _write(making, name, choices.read_text(encoding="utf-8"))
        if folder.exists():  # it may be the shell's own folder, which a rename over it would take from below the shell
            _fill(folder, making)
        else:
            making.rename(folder)
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return folder


def deployments(name: str) -> str:
    """Return prefect.yaml for the project `name`: its own work pool and deployments, so that projects share a server.

    Example:
        >>> print(*re.findall("name: .*", deployments("birds")), sep="; ")
        name: birds; name: birds; name: birds-nightly; name: birds-add-task; name: birds-gate
    """
    return re.sub(r"(?m)^([ -]*name: )mergeflow", rf"\g<1>{name}", (TEMPLATE / "prefect.yaml").read_text("utf-8"))


def _fill(folder: Path, made: Path) -> None:
    """Move what was made into an empty folder, params.yaml last: without it nothing takes the folder for a project."""
    for path in sorted(made.iterdir(), key=lambda path: path.name == _CHOICES):
        shutil.move(path, folder / path.name)


def _copy_texts(world: Path, folder: Path) -> None:
    """Copy a world's own files, and nothing that its `inputs/make.py` may have made there."""
    for path in (*world.glob("*.yaml"), *world.glob("inputs/*.py")):
        target = folder / path.relative_to(world)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)


def _write(folder: Path, name: str, choices: str) -> None:
    for path in AS_THEY_ARE:
        source, target = TEMPLATE / path, folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copyfile)(source, target)
    (folder / "prefect.yaml").write_text(deployments(name), encoding="utf-8")
    (folder / _CHOICES).write_text(choices.replace("$NAME", name), encoding="utf-8")
    (folder / "README.md").write_text(README.read_text("utf-8").replace("$NAME", name), encoding="utf-8")
    _put_under_git(folder)


def _put_under_git(folder: Path) -> None:
    """DVC wants a git repository: the one around the folder, a new one, or, without git, the setting that asks none."""
    if shutil.which("git") is None:
        with (folder / ".dvc/config").open("a", encoding="utf-8") as config:
            config.write("[core]\n    no_scm = true\n")
        return
    inside = subprocess.run(["git", "rev-parse", "--is-inside-work-tree"], cwd=folder, capture_output=True, check=False)
    if inside.returncode:
        subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
