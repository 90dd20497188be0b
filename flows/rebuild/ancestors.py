"""The files that a registered version was made from: found again in the project, in DVC's cache or on its remote."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mergeflow import layout
from mergeflow.checkpoints import matches, open_checkpoint
from mergeflow.data import digest_of_split, load_manifest, load_split
from mergeflow.errors import MergeflowError
from tasks.project.beside import link

# The weights of a base or an expert: as the stages write them, and as they did before there were other modalities.
MODEL_FILES = (layout.MODEL_FILE, "image_encoder.safetensors")


@dataclass(frozen=True)
class Ancestor:
    """A tracked folder, or some files of it, and how to know it when it is found.

    Attributes:
        what: in words, for people.
        path: of the folder, relative to the project.
        dvc: DVC's hash of the folder; None where it was not recorded.
        files: names of the files needed, as far as they are there; none means all.
        is_it: whether a folder holds the very content.
    """

    what: str
    path: str
    dvc: str | None
    files: tuple[str, ...]
    is_it: Callable[[Path], bool]


def base_of(origin: dict[str, Any]) -> Ancestor:
    """Return the base of a version's origin, with the heads of its tasks."""
    known, heads = origin["base"], [layout.head(task).removeprefix(f"{layout.BASE}/") for task in origin["experts"]]
    return Ancestor("the base", known["path"], known["dvc"], (*MODEL_FILES, *heads), _weights(known["fingerprint"]))


def expert_of(origin: dict[str, Any], task: str) -> Ancestor:
    """Return one expert of a version's origin."""
    known = origin["experts"][task]
    return Ancestor(f"the expert '{task}'", known["path"], known["dvc"], MODEL_FILES, _weights(known["fingerprint"]))


def split_of(origin: dict[str, Any], task: str, split: str) -> Ancestor:
    """Return one split of one task's data of a version's origin.

    Args:
        origin: a version's origin, as `provenance.json` holds it.
        task: the task's name.
        split: train, validation or test.
    """
    known = origin["experts"][task]["splits"][split]

    def is_it(folder: Path) -> bool:
        load_split(folder, split, verify=True)
        return digest_of_split(load_manifest(folder)["splits"][split]) == known["sha256"]

    return Ancestor(f"the {split} split of '{task}'", known["path"], known["dvc"], (), is_it)


def model_file(folder: Path) -> Path:
    """Return the file of the weights in the folder of a base or an expert, by its name of today or of former days."""
    return next((folder / name for name in MODEL_FILES if (folder / name).exists()), folder / layout.MODEL_FILE)


def name_as_recipe(recipe: Mapping[str, Any], scratch: Path) -> None:
    """Give the weights that a recipe of former days names the names that it has for them."""
    for path in (scratch / name for name in (recipe["base"], *recipe["experts"].values())):
        found = model_file(path.parent)
        if found.exists() and not path.exists():
            link(found, path)


def _name_model(folder: Path) -> None:
    """Give weights of former days the name of today too: recipes have the one, stages read the other."""
    found = model_file(folder)
    if found.exists() and found.name != layout.MODEL_FILE:
        link(found, folder / layout.MODEL_FILE)


def gather(root: Path, wanted: Iterable[Ancestor], target: Path) -> dict[str, str]:
    """Link the ancestors below `target` at their paths, each proven by its digest.

    Args:
        root: the project folder; what lies there is looked at first.
        wanted: the ancestors.
        target: a scratch project.

    Returns:
        Path to where it was found: "the project", "DVC's cache" or "DVC's remote".

    Raises:
        MergeflowError: naming every ancestor that is nowhere.
    """
    found: dict[str, str] = {}
    absent: list[Ancestor] = []
    for one in wanted:
        if _proven(one, root / one.path):
            there = _all_files(root / one.path)
            names = [name for name in one.files if name in there] or there
            link_files(root / one.path, target / one.path, {name: name for name in names})
            _name_model(target / one.path)
            found[one.path] = "the project"
        else:
            absent.append(one)
    tracked = [one for one in absent if one.dvc is not None]
    if tracked:
        found |= _from_dvc(root, tracked, target)
    lost = [one for one in absent if one.path not in found]
    if lost:
        lines = [f"  {one.what} ({one.path}, DVC {one.dvc or 'unknown'})" for one in lost]
        raise MergeflowError(
            "\n".join(
                [
                    "these ancestors are neither in the project nor in DVC's cache or remote, or their content is not "
                    "what was recorded:",
                    *lines,
                    "Bring them back (`dvc remote add -d`, `dvc pull`), or make them again from data.",
                ]
            )
        )
    return found


def _weights(expected: str) -> Callable[[Path], bool]:
    def is_it(folder: Path) -> bool:
        with open_checkpoint(model_file(folder)) as state:
            return matches(state, expected)

    return is_it


def _proven(one: Ancestor, folder: Path) -> bool:
    try:
        return one.is_it(folder)
    except (MergeflowError, OSError):  # missing or damaged is as good as another content
        return False


def link_files(source: Path, target: Path, files: Mapping[str, str]) -> None:
    """Link files of one folder into another.

    Args:
        source: the folder that holds the files.
        target: the folder that gets them.
        files: name there to name here.
    """
    for name, own in files.items():
        link(source / name, target / own)


def _all_files(folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


def _from_dvc(root: Path, wanted: list[Ancestor], target: Path) -> dict[str, str]:
    """Link what DVC's cache holds, after fetching what only its remote holds; older versions' files included.

    DVC's commands fetch what dvc.lock or a commit names. A version's own hashes may stand in neither, so this asks
    DVC's cache and remote for objects by hash.
    """
    from dvc.repo import Repo

    found: dict[str, str] = {}
    with Repo(str(root)) as repo:
        cache = repo.cache.local
        for one in wanted:
            assert one.dvc is not None
            fetched = _fetch(repo, [one.dvc])
            folder = Path(cache.oid_to_path(one.dvc))
            entries = json.loads(folder.read_text()) if folder.exists() else []
            chosen = {row["relpath"]: row["md5"] for row in entries if not one.files or row["relpath"] in one.files}
            fetched |= _fetch(repo, list(chosen.values()))
            for name, md5 in chosen.items():
                if (path := Path(cache.oid_to_path(md5))).exists():
                    link(path, target / one.path / name)
            _name_model(target / one.path)
            if _proven(one, target / one.path):
                found[one.path] = "DVC's remote" if fetched else "DVC's cache"
    return found


def _fetch(repo: Any, hashes: list[str]) -> bool:
    """Fetch objects that the cache lacks from the default remote; return whether there was anything to fetch."""
    from dvc.exceptions import DvcException
    from dvc_data.hashfile.hash_info import HashInfo

    lacking = [one for one in hashes if not Path(repo.cache.local.oid_to_path(one)).exists()]
    if not lacking:
        return False
    try:
        repo.cloud.pull([HashInfo("md5", one) for one in lacking])
    except DvcException:  # no remote, or none that answers: the caller names what is missing
        return False
    return True
