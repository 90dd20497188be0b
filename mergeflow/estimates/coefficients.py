"""AdaMerging's coefficients, learned from files: a recipe's inputs and prepared examples, without labels."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from mergeflow.checkpoints import write_checkpoint, write_text
from mergeflow.data import load_split
from mergeflow.errors import MergeflowError, unknown_name
from mergeflow.estimates.entropy import entropy_gradient
from mergeflow.estimates.headed import open_headed
from mergeflow.merging import Recipe, make_recipe
from mergeflow.merging.device import check_device
from mergeflow.merging.files.opening import open_inputs
from mergeflow.merging.files.recipe_text import recipe_text
from mergeflow.merging.learned.adamerging import Learned, learn
from mergeflow.modalities.classification import Classification
from mergeflow.modalities.heads import load_head
from mergeflow.modalities.recorded import is_recorded, open_recorded
from mergeflow.modalities.vision.models import ClipModel, image_model
from mergeflow.modalities.vision.opening import check_head, open_model
from mergeflow.modality import Model, Predictions

RECIPE = "recipe.yaml"


@dataclass(frozen=True)
class AdamergeOrder:
    """What coefficients are learned from.

    Attributes:
        architecture: Of an image encoder; or the file of a base that says itself what it is, as of texts.
        tasks: Prepared folders by task.
        heads: Heads' files by task; a task of a causal model has none.
        split: Whose examples; the labels are not used, so the paper takes those of test.
        batch_size: Examples per task and step.
        seed: Of the batches.
    """

    architecture: str
    tasks: Mapping[str, str]
    heads: Mapping[str, str]
    split: str = "validation"
    batch_size: int = 16
    seed: int = 0


def learn_coefficients(
    recipe: Recipe,
    order: AdamergeOrder,
    out: str | Path,
    *,
    resolve: Callable[[str], str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Learned:
    """Learn AdaMerging's coefficients and write one file per expert, and `recipe.yaml`, the recipe that uses them.

    Args:
        recipe: Of the method `adamerging`; its arguments decide granularity, directions, steps and learning rate.
        order: Examples, heads and batches.
        out: The folder to write.
        resolve: Turns references such as models:/name@alias into local paths.
        progress: Called with steps done and in all.

    Raises:
        MergeflowError: another method, inputs that are missing or do not fit, or an entropy that is not finite.
    """
    place = Path(out)
    check_order(recipe, order, place)
    recorded = is_recorded(order.architecture)
    model, tasks = (_recorded if recorded else _pictured)(order, recipe.device)
    with open_inputs(recipe, resolve) as inputs:
        model.load(inputs.base)
        place.mkdir(parents=True, exist_ok=True)
        found = learn(
            recipe.call(),
            inputs.base,
            inputs.experts,
            lambda state, step: entropy_gradient(model, tasks, state, order.batch_size, order.seed, step),
            progress,
            recipe.device,
            place,
        )
    write_learned(found, recipe, place, order.split)
    return found


def check_order(recipe: Recipe, order: AdamergeOrder, place: Path) -> None:
    """Refuse what cannot be learned, before anything is read.

    Args:
        recipe: Of the method `adamerging`.
        order: Examples, heads and batches.
        place: The folder to write.

    Raises:
        MergeflowError: Another method, tasks and heads that do not belong together, names of files that collide, or a
            device that is not there.
    """
    if recipe.method != "adamerging":
        raise MergeflowError(f"only 'adamerging' learns coefficients, the recipe's method is '{recipe.method}'.")
    if other := sorted(order.heads.keys() - order.tasks.keys()):
        raise unknown_name("task of --head", other[0], order.tasks)
    if not order.tasks or (not is_recorded(order.architecture) and order.tasks.keys() != order.heads.keys()):
        told = f"tasks {sorted(order.tasks)}, heads {sorted(order.heads)}"
        raise MergeflowError(f"every task needs a folder and a head: found {told}.")
    _files(recipe, place)
    check_device(recipe.device)


def write_learned(found: Learned, recipe: Recipe, place: Path, split: str, called: str | None = None) -> None:
    """Write one file of coefficients per expert, and `recipe.yaml`, the recipe that merges with them.

    Args:
        found: The coefficients.
        recipe: What they were learned for.
        place: The folder to write.
        split: Whose examples were used.
        called: The folder's path in the recipe, where it will be moved.
    """
    known = Path(called or place)
    for name, file in _files(recipe, place).items():
        tensors = {
            tensor: torch.tensor(value, dtype=torch.float64) for tensor, value in found.coefficients[name].items()
        }
        write_checkpoint(file, tensors, {"kind": "coefficients", "expert": name, "split": split})
    plain = recipe.model_dump(mode="json", exclude_none=True)
    data = {"coefficients": {name: str(path) for name, path in _files(recipe, known).items()}}
    written = make_recipe({**plain, "data": data, "out": recipe.out or str(known / "merged.safetensors")})
    write_text(place / RECIPE, recipe_text(written))


def _files(recipe: Recipe, place: Path) -> dict[str, Path]:
    names = [name for name, _ in (*recipe.experts, *recipe.task_vectors)]
    files = {name: place / f"{name.replace('/', '_')}.safetensors" for name in names}
    if len(set(files.values())) < len(files):
        raise MergeflowError(f"experts {names} would share a file name: name them apart.")
    return files


def _recorded(order: AdamergeOrder, device: str) -> tuple[Model, dict[str, Predictions]]:
    modality, model = open_recorded(order.architecture, device)
    tasks: dict[str, Predictions] = {
        task: open_headed(modality, task, folder, order.split, order.heads.get(task), device)
        for task, folder in order.tasks.items()
    }
    return model, tasks


def _pictured(order: AdamergeOrder, device: str) -> tuple[Model, dict[str, Predictions]]:
    clip = open_model(order.architecture, device)
    return image_model(clip), {task: _open_task(order, task, clip, device) for task in order.tasks}


def _open_task(order: AdamergeOrder, task: str, clip: ClipModel, device: str) -> Classification:
    found = load_split(order.tasks[task], order.split)
    head = load_head(order.heads[task])
    check_head(task, head, found.class_names, clip)
    labels = torch.from_numpy(found.labels).to(device)
    return Classification(task, torch.from_numpy(found.images), labels, head.to(device))  # batches alone go there
