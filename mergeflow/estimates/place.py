"""Where estimates from data go: they replace no input, and nothing that mergeflow did not make."""

from collections.abc import Mapping
from pathlib import Path

from mergeflow.checkpoints.reader import open_safetensors
from mergeflow.errors import MergeflowError
from mergeflow.estimates.coefficients import RECIPE
from mergeflow.merging import Recipe, load_recipe
from mergeflow.merging.files.place import check_file
from mergeflow.merging.files.recipe_text import recipe_text

_KINDS = ("fisher", "gram", "coefficients")


def check_estimate(out: Path, inputs: Mapping[str, str], force: bool = False) -> None:
    """Check that a file of estimates may be written: as `check_file`, and an earlier estimate may be replaced.

    Args:
        out: The file to write.
        inputs: Paths of what is read, by name: never overwritten.
        force: Whether a file that mergeflow did not make may be replaced.

    Raises:
        MergeflowError: As `check_file`.
    """
    check_file(out, {name: str(Path(path).expanduser()) for name, path in inputs.items()}, force or _is_estimate(out))


def check_learned_place(place: Path, recipe: Recipe, inputs: Mapping[str, str], force: bool = False) -> None:
    """Check that a folder may take AdaMerging's coefficients and the recipe that uses them.

    Args:
        place: The folder.
        recipe: What the coefficients are learned for; what it and its steps read are inputs.
        inputs: Paths of what else is read, by name; the recipe's own among them.
        force: Whether files that mergeflow did not make may be replaced.

    Raises:
        MergeflowError: A file to write is an input, or is there and was made by somebody else.
    """
    steps = [path for _, step in recipe.steps or () for path in step.paths()]
    read = {**inputs, **{path: path for path in (*recipe.paths(), *steps)}}
    for name, _ in (*recipe.experts, *recipe.task_vectors):
        check_estimate(place / f"{name.replace('/', '_')}.safetensors", read, force)
    written = place / RECIPE
    for name, path in inputs.items():
        if written.exists() and Path(path).exists() and written.samefile(path):
            raise MergeflowError(f"out '{place}' would overwrite the input '{name}' ({path}): choose another folder.")
    if written.exists() and not force and not _is_learned(written):
        raise MergeflowError(
            f"out '{place}' holds a {RECIPE} that `adamerge` did not write: choose another folder, move that file, or "
            "give --force to replace it."
        )


def _is_estimate(file: Path) -> bool:
    try:
        with open_safetensors(file) as found:
            return found.metadata.get("kind") in _KINDS and {"expert", "split"} <= found.metadata.keys()
    except MergeflowError:
        return False


def _is_learned(file: Path) -> bool:
    """Whether a recipe is as `adamerge` wrote it: it names coefficients, and nobody has edited it since."""
    try:
        recipe = load_recipe(file)
        return "coefficients" in dict(recipe.data) and recipe_text(recipe) == file.read_text(encoding="utf-8")
    except MergeflowError:
        return False
