"""AdaMerging from files: the entropy of a merged model's predictions, and the coefficients that minimise it."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mergeflow.checkpoints import write_checkpoint, write_text
from mergeflow.errors import MergeflowError, unknown_name
from mergeflow.merging import Recipe, make_recipe
from mergeflow.merging.execution.device import check_device
from mergeflow.merging.files.plan import open_inputs
from mergeflow.merging.files.recipe import recipe_text
from mergeflow.merging.learned import Learned, learn
from mergeflow.merging.preflight import Remark
from mergeflow.modalities.catalog import is_recorded, open_recorded
from mergeflow.modalities.classification import Labelled
from mergeflow.modalities.heads import load_head, read_head
from mergeflow.modalities.vision.models import image_model, load_clip, open_prepared
from mergeflow.modality import Examples, Model, Predictions
from mergeflow.schema import check_seed
from mergeflow.training.arithmetic import arithmetic

Opener = Callable[[str, str, str, str | None], Examples]
"""Task, its prepared folder, the split and the file of its head, or None, to examples."""


def open_judged(architecture: str, device: str, headed: bool = True) -> tuple[Model, Opener]:
    """Return a model, and what opens prepared splits whose predictions can be asked of it.

    Args:
        architecture: Of an image encoder, with any weights; or the file of a base that says itself what it is.
        headed: Whether predictions are those of the task's head, which is then refused where it is missing.
    """
    place = torch.device(device)
    if not is_recorded(architecture):
        clip = load_clip(architecture, device=device)

        def open_images(task: str, folder: str, split: str, file: str | None) -> Examples:
            return open_prepared(task, Path(folder), split, clip, None if file is None else load_head(file), device)

        return image_model(clip), open_images
    modality, model = open_recorded(architecture, device)

    def open_recorded_task(task: str, folder: str, split: str, file: str | None) -> Examples:
        head = read_head(file) if headed and file is not None else None
        examples = modality.open(task, Path(folder), split, None if head is None else head.to(place), place)
        if headed and file is None and isinstance(examples, Labelled):
            raise MergeflowError(f"the predictions of task '{task}' need its head: give --head.")
        return examples

    return model, open_recorded_task


# AdaMerging's loss: the entropy of a merged model's predictions, without labels.


def entropy_gradient(
    model: Model,
    tasks: Mapping[str, Predictions],
    state: Mapping[str, Tensor],
    batch_size: int = 16,
    seed: int = 0,
    step: int = 0,
) -> tuple[float, dict[str, Tensor]]:
    r"""Return the entropy of a model on one batch of each task, and its gradient by tensor name.

    L = Σ_t 1/m Σ_i H(p_i) over the m predictions of a batch, H(p) = -Σ_c p_c log p_c

    Args:
        model: Its weights become those of the state.
        tasks: Examples by task; labels play no part.
        batch_size: Examples per task, drawn without replacement.
        seed: With `step` and the task's name, decides the batch.

    Source: Yang et al., AdaMerging (ICLR 2024), section 3.2.2.
    """
    check_seed(seed)
    _check_examples(tasks, batch_size)
    model.module.eval()
    model.load(state)
    parameters = {name: value for name, value in model.module.named_parameters() if value.is_floating_point()}
    totals = {name: torch.zeros_like(value) for name, value in parameters.items()}
    loss = 0.0
    model.module.requires_grad_(True)
    for task in sorted(tasks):  # one task at a time: the graph of one batch is all that is held
        examples = tasks[task]
        of_batch = int.from_bytes(hashlib.sha256(f"{seed}/{step}/{task}".encode()).digest()[:7])
        generator = torch.Generator().manual_seed(of_batch)
        chosen = torch.randperm(len(examples), generator=generator)[:batch_size]
        with torch.enable_grad():
            log_p = examples.log_p(model, chosen)
            entropy = -(log_p.exp() * log_p).sum(dim=1).mean()
            gradients = torch.autograd.grad(entropy, list(parameters.values()), allow_unused=True)
        loss += float(entropy.detach())
        for total, gradient in zip(totals.values(), gradients, strict=True):
            if gradient is not None:
                total += gradient
    return loss, totals


@torch.inference_mode()
def entropies(model: Model, tasks: Mapping[str, Predictions], state: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the mean entropy of predictions on all examples of each task, in nats; the model takes the state."""
    _check_examples(tasks, 256)
    model.load(state)
    values = {}
    for task, examples in tasks.items():
        batches = torch.arange(len(examples)).split(256)
        log_p = torch.cat([examples.log_p(model, rows) for rows in batches]).double()
        values[task] = float(-(log_p.exp() * log_p).sum(dim=1).mean())
    return values


def _check_examples(tasks: Mapping[str, Predictions], batch_size: int) -> None:
    empty = sorted(task for task, examples in tasks.items() if not len(examples))
    if not tasks or empty or batch_size < 1:
        what = f"task '{empty[0]}' has none" if empty else f"found {len(tasks)} tasks, {batch_size} examples a batch"
        raise MergeflowError(f"adaptation needs examples of every task: {what}. Give some, or merge without adapting.")


# AdaMerging's coefficients, learned from files: a recipe's inputs and prepared examples, without labels.

RECIPE = "recipe.yaml"


@dataclass(frozen=True)
class AdamergeOrder:
    """What coefficients are learned from.

    Attributes:
        architecture: Of an image encoder; or the file of a base that says itself what it is, as of texts.
        tasks: Prepared folders by task.
        heads: Heads' files by task; a task of a causal model has none.
        split: Whose examples; the labels are not used, so the paper takes those of test.
    """

    architecture: str
    tasks: Mapping[str, str]
    heads: Mapping[str, str]
    split: str = "validation"
    batch_size: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)


@arithmetic()
def learn_coefficients(
    recipe: Recipe,
    order: AdamergeOrder,
    out: str | Path,
    *,
    resolve: Callable[[str], str] | None = None,
    progress: Callable[[int, int], None] | None = None,
    remark: Remark = lambda _notes, _warnings: None,
) -> Learned:
    """Learn AdaMerging's coefficients and write one file per expert, and `recipe.yaml`, the recipe that uses them.

    Args:
        recipe: Of the method `adamerging`; its arguments decide granularity, directions, steps and learning rate.
        resolve: Turns references such as models:/name@alias into local paths.
    """
    place, recipe = Path(out), with_device(recipe)
    check_order(recipe, order, place)
    model, opened = open_judged(order.architecture, recipe.device)
    tasks = {task: opened(task, folder, order.split, order.heads.get(task)) for task, folder in order.tasks.items()}
    with open_inputs(recipe, resolve) as inputs:
        remark(inputs.notes, inputs.warnings)
        model.load(inputs.base)
        place.mkdir(parents=True, exist_ok=True)
        learned = learn(
            recipe.call(),
            inputs.base,
            inputs.experts,
            lambda state, step: entropy_gradient(model, tasks, state, order.batch_size, order.seed, step),
            progress,
            recipe.device,
            place,
        )
    write_learned(learned, recipe, place, order.split)
    return learned


def with_device(recipe: Recipe) -> Recipe:
    """Return the recipe with the device that `auto` means for learning: a CUDA device where there is one."""
    auto = "cuda" if torch.cuda.is_available() else "cpu"
    return recipe.model_copy(update={"device": auto}) if recipe.device == "auto" else recipe


def check_order(recipe: Recipe, order: AdamergeOrder, place: Path) -> None:
    """Refuse what cannot be learned, before anything is read."""
    if recipe.method != "adamerging":
        raise MergeflowError(f"only 'adamerging' learns coefficients, the recipe's method is '{recipe.method}'.")
    if other := sorted(order.heads.keys() - order.tasks.keys()):
        raise unknown_name("task of --head", other[0], order.tasks)
    if not order.tasks or (not is_recorded(order.architecture) and order.tasks.keys() != order.heads.keys()):
        tasks, heads = (", ".join(sorted(names)) or "none" for names in (order.tasks, order.heads))
        raise MergeflowError(f"every task needs a folder and a head: found the tasks {tasks}; the heads {heads}.")
    _files(recipe, place)
    check_device(recipe.device)


def write_learned(learned: Learned, recipe: Recipe, place: Path, split: str, called: str | None = None) -> None:
    """Write one file of coefficients per expert, and `recipe.yaml`, the recipe that merges with them.

    Args:
        split: Whose examples were used.
        called: The folder's path in the recipe, where it will be moved.
    """
    shown_place = Path(called or place)
    for name, file in _files(recipe, place).items():
        tensors = {
            tensor: torch.tensor(value, dtype=torch.float64) for tensor, value in learned.coefficients[name].items()
        }
        write_checkpoint(file, tensors, {"kind": "coefficients", "expert": name, "split": split})
    plain = recipe.model_dump(mode="json", exclude_none=True)
    data = {"coefficients": {name: str(path) for name, path in _files(recipe, shown_place).items()}}
    written = make_recipe({**plain, "data": data, "out": recipe.out or str(shown_place / "merged.safetensors")})
    write_text(place / RECIPE, recipe_text(written))


def _files(recipe: Recipe, place: Path) -> dict[str, Path]:
    names = [name for name, _ in (*recipe.experts, *recipe.task_vectors)]
    files = {name: place / f"{name.replace('/', '_')}.safetensors" for name in names}
    if len(set(files.values())) < len(files):
        raise MergeflowError(f"experts {names} would share a file name: name them apart.")
    return files
