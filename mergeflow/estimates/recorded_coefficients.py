"""AdaMerging's coefficients for models whose base says itself what it is, with heads or without."""

from collections.abc import Callable
from pathlib import Path

from mergeflow.errors import MergeflowError, unknown_name
from mergeflow.estimates.coefficients import AdamergeOrder, write_learned
from mergeflow.estimates.entropy import entropy_gradient
from mergeflow.estimates.headed import open_headed
from mergeflow.merging import Recipe
from mergeflow.merging.device import check_device
from mergeflow.merging.files.inputs import open_inputs
from mergeflow.merging.learned.adamerging import Learned, learn
from mergeflow.modalities.recorded import open_recorded


def learn_recorded(
    recipe: Recipe,
    order: AdamergeOrder,
    out: str | Path,
    *,
    resolve: Callable[[str], str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Learned:
    """Learn AdaMerging's coefficients and write one file per expert, and `recipe.yaml`, the recipe that uses them.

    Args:
        recipe: Of the method `adamerging`.
        order: Its architecture is the file of a base; of tasks without a head no head is named.
        out: The folder to write.
        resolve: Turns references such as models:/name@alias into local paths.
        progress: Called with steps done and in all.

    Raises:
        MergeflowError: another method, a head of an unknown task, inputs that are missing or do not fit, or an entropy
            that is not finite.
    """
    if recipe.method != "adamerging":
        raise MergeflowError(f"only 'adamerging' learns coefficients, the recipe's method is '{recipe.method}'.")
    if other := sorted(order.heads.keys() - order.tasks.keys()):
        raise unknown_name("task of --head", other[0], order.tasks)
    check_device(recipe.device)
    modality, model = open_recorded(order.architecture, recipe.device)
    tasks = {
        task: open_headed(modality, task, folder, order.split, order.heads.get(task), recipe.device)
        for task, folder in order.tasks.items()
    }
    place = Path(out)
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
