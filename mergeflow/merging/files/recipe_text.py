"""A recipe as the text of a file."""

import yaml

from mergeflow.merging.files.recipe import Recipe


def recipe_text(recipe: Recipe) -> str:
    """Return a recipe as YAML."""
    values = {key: value for key, value in recipe.model_dump(mode="json", exclude_none=True).items() if value != {}}
    if recipe.data:
        values["data"] = {kind: dict(paths) for kind, paths in recipe.data}
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
