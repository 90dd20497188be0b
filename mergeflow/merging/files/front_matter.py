"""The front matter of a merged model's card, as the Hub reads it."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from mergeflow.checkpoints.folders import config_of, folder_at, folder_of
from mergeflow.checkpoints.formats import cached_id, read_json
from mergeflow.checkpoints.reader import LazyStateDict
from mergeflow.merging.files.inputs import Inputs
from mergeflow.merging.files.recipe import Recipe
from mergeflow.merging.files.step_fields import PREFIX, step_named
from mergeflow.merging.preflight import front_matter, licence_files, licence_of, licence_paths, merged_licence

_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
# A snapshot in the cache of huggingface_hub: models--OWNER--NAME/snapshots/COMMIT.


def front_matter_of(recipe: Recipe, inputs: Inputs) -> dict[str, Any]:
    """Return the metadata of the card: base_model, relation, library, licence, task, tags.

    Args:
        recipe: The recipe.
        inputs: Its opened inputs; their cards say their licences, their folders which models they are.
    """
    places = owners_of(recipe)
    ids = [hub_id(path, _local(name, path, inputs)) for name, path in places.items() if not step_named(path)]
    known = list(dict.fromkeys(one for one in ids if one is not None))
    card = front_matter(folder_of(inputs.base))
    licence, _ = merged_licence(licences_of(recipe, inputs))
    adapter = recipe.adapter is not None
    library = "peft" if adapter else _library(inputs.base) or card.get("library_name")
    found = {
        "library_name": library,
        "base_model": known,
        "base_model_relation": ("adapter" if adapter else "merge") if known else None,
        **licence,
        "pipeline_tag": card.get("pipeline_tag"),
        "language": card.get("language"),
        "tags": ["merge", "mergeflow", "model-merging", recipe.method],
    }
    return {key: value for key, value in found.items() if value}


def owners_of(recipe: Recipe) -> dict[str, str]:
    """Return the paths of all models that a recipe and its steps read, by what they are."""
    base = {"base": recipe.base} if recipe.base is not None else {}
    given = {**base, **dict(recipe.experts), **dict(recipe.task_vectors)}
    for name, step in recipe.steps or ():
        if isinstance(step, Recipe):
            given |= {f"{PREFIX}{name}/{owner}": path for owner, path in owners_of(step).items()}
        else:
            given |= {f"{PREFIX}{name}/{number + 1}": path for number, path in enumerate(dict.fromkeys(step.paths()))}
    return given


def licences_of(recipe: Recipe, inputs: Inputs) -> dict[str, dict[str, str]]:
    """Return the licence of each model that is read, as its card names it; results of steps have none of their own."""
    paths = {name: path for name, path in owners_of(recipe).items() if not step_named(path)}
    return {name: licence_of(folder_at(_local(name, path, inputs))) for name, path in paths.items()}


def write_licences(recipe: Recipe, inputs: Inputs, folder: Path) -> None:
    """Give a result's folder the licence files of its inputs, that of its own licence under its own name.

    Args:
        recipe: The recipe.
        inputs: Its opened inputs.
        folder: The folder; it may have the base's files.
    """
    licences = licences_of(recipe, inputs)
    own, _ = merged_licence(licences)
    paths = {name: path for name, path in owners_of(recipe).items() if name in licences}
    folders = {name: folder_at(_local(name, path, inputs)) for name, path in paths.items()}
    holder = next((name for name, licence in licences.items() if licence and licence == own), None)
    for path in licence_paths(folder):
        path.unlink()
    for name, content in licence_files(folders, holder).items():
        (folder / name).write_bytes(content)


def _local(name: str, path: str, inputs: Inputs) -> str:
    """Return where a model lies that a recipe names by a path, an id or a reference."""
    return inputs.paths.get(name, inputs.paths.get(path, str(Path(path).expanduser())))


def hub_id(path: str, place: str) -> str | None:
    """Return the Hub's id of an input: it was given by it, lies in the Hub's cache, or says from where it was saved.

    Args:
        path: How the recipe names it.
        place: Where it lies.
    """
    if not Path(path).expanduser().exists() and _ID.fullmatch(path.partition("@")[0]):
        return path.partition("@")[0]
    cached = cached_id(str(Path(place).absolute()))
    if cached is not None:
        return cached
    config = (folder_at(str(Path(place).expanduser())) or Path()) / "config.json"
    named = read_json(config).get("_name_or_path") if config.is_file() else None
    return named if isinstance(named, str) and _ID.fullmatch(named) and not Path(named).exists() else None


def _library(state: LazyStateDict) -> str | None:
    folder = folder_of(state)
    if "model_type" in config_of(state):
        return "transformers"
    return "open_clip" if folder is not None and (folder / "open_clip_config.json").is_file() else None


def as_yaml(values: Mapping[str, Any]) -> str:
    """Return front matter as text."""
    return yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True)
