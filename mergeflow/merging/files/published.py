"""A recipe as it goes with its result: names instead of this machine's paths."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mergeflow.merging.code import Code
from mergeflow.merging.files.recipe import Recipe
from mergeflow.merging.files.references import with_paths


def published(recipe: Recipe) -> Recipe:
    """Return a recipe without absolute paths, for what is stored with the result.

    A path below the current folder is relative to it, any other absolute one its shortest end that no other input has;
    ids, references and relative paths stay as they are. The recipe makes the result again in a folder that has its
    inputs by these names; their fingerprints tell whether they are the same.
    """
    return _here(with_paths(recipe, _shortened(list(_all_paths(recipe))).__getitem__))


def _all_paths(recipe: Recipe) -> Iterator[str]:
    yield from recipe.paths()
    for _, step in recipe.steps or ():
        yield from _all_paths(step) if isinstance(step, Recipe) else step.paths()


def _here(recipe: Recipe) -> Recipe:
    """Return a recipe, and its steps, without the places of its result and of methods' files."""
    steps = tuple((name, _here(step) if isinstance(step, Recipe) else step) for name, step in recipe.steps or ())
    code = tuple((name, Code(place=public_name(one.place), sha256=one.sha256)) for name, one in recipe.code or ())
    return recipe.model_copy(
        update={"steps": steps or None, "out": recipe.out and public_name(recipe.out), "code": code or None}
    )


def public_name(path: str) -> str:
    """Return a path without this machine's folders: relative to the current folder where it is below, else its name."""
    return _shortened([path])[path]


def _shortened(paths: Sequence[str]) -> Mapping[str, str]:
    found = {path: _below(path) for path in paths}
    outside = {path: Path(path).expanduser().parts[1:] for path, short in found.items() if short is None}
    taken = {short for short in found.values() if short is not None}
    for path, parts in outside.items():
        others = [other for other in outside.values() if other != parts]
        depth = 1
        while depth < len(parts) and (
            any(other[-depth:] == parts[-depth:] for other in others) or "/".join(parts[-depth:]) in taken
        ):
            depth += 1
        found[path] = "/".join(parts[-depth:])
    return {path: short or path for path, short in found.items()}


def _below(path: str) -> str | None:
    """Return a path that names nothing of this machine; None where an absolute one must be shortened."""
    whole = Path(path).expanduser()
    if not whole.is_absolute():
        return path
    here = Path.cwd()
    inside = os.path.commonpath([here, whole]) == str(here) and here != Path(here.root) and whole != here
    return str(whole.relative_to(here)) if inside else None
