"""Paths in recipes that stand for something else: models of a registry, by alias or by version."""

from collections.abc import Callable
from typing import Any

from mergeflow.checkpoints.formats import fixed_id
from mergeflow.errors import MergeflowError
from mergeflow.merging.files.mixture import Mixture
from mergeflow.merging.files.recipe import Recipe
from mergeflow.merging.files.step_fields import Slices, step_named
from mergeflow.merging.vocabulary.companions import read_template

Resolve = Callable[[str], str]
"""Turns a reference into a local path; the project half supplies it.

One that may come to mean another file, such as models:/name@alias, is turned into a fixed one (models:/name/7) first.
"""


def local_path(path: str, resolve: Resolve | None) -> str:
    """Return the local path a recipe's path stands for.

    Raises:
        MergeflowError: It names a step, or a reference to a registry that nothing resolves here.
    """
    if step_named(path):
        raise MergeflowError(
            f"'{path}' is a step, whose result is not a file: name it where a recipe names its inputs."
        )
    fixed = fixed_path(path, resolve)
    found = resolve(fixed) if resolve is not None else path
    if "://" in found or found.startswith("models:/"):
        raise MergeflowError(
            f"'{path}' is not a local path. References to the registry are resolved in a project folder only: "
            "run the command there, or give a file."
        )
    return found


def fixed_path(path: str, resolve: Resolve | None) -> str:
    """Return a path that means the same for ever: a version of a registered model instead of its alias, a commit of a
    Hugging Face model instead of its newest state."""
    if step_named(path):
        return path
    if not path.startswith("models:/"):
        return fixed_id(path)
    if resolve is None or "@" not in path:
        return path
    found = resolve(path)
    return found if found.startswith("models:/") else path


def fix_references(recipe: Recipe, resolve: Resolve | None) -> Recipe:
    """Return the recipe as it is recorded: a replay reads the same models, whatever was promoted since."""
    fixed = with_paths(recipe, lambda path: fixed_path(path, resolve))
    return fixed.model_copy(update={"chat_template": _text(recipe)})


def with_paths(recipe: Recipe, change: Callable[[str], str]) -> Recipe:
    """Return a recipe with every path of an input changed, those of its steps too."""

    def changed(paths: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
        return tuple((name, change(path)) for name, path in paths)

    def place(one: Any) -> Any:
        return one and one.model_copy(update={"model": change(one.model)})

    def of_step(step: Recipe | Slices | Mixture) -> Recipe | Slices | Mixture:
        if isinstance(step, Slices):
            return Slices(map(place, step))
        if isinstance(step, Mixture):
            base, experts = change(step.base), tuple(map(place, step.experts))
            return step.model_copy(update={"base": base, "experts": experts, "shared": place(step.shared)})
        return with_paths(step, change)

    return recipe.model_copy(
        update={
            "steps": recipe.steps and tuple((name, of_step(step)) for name, step in recipe.steps),
            "base": recipe.base and change(recipe.base),
            "experts": changed(recipe.experts),
            "task_vectors": changed(recipe.task_vectors),
            "data": tuple((kind, changed(paths)) for kind, paths in recipe.data),
        }
    )


def _text(recipe: Recipe) -> str | None:
    """Return the chat template's choice with the text instead of a file, which may change."""
    choice = recipe.chat_template
    if choice is None or choice in ("base", "auto", *dict(recipe.experts), *dict(recipe.task_vectors)):
        return choice
    return read_template(choice) or choice
