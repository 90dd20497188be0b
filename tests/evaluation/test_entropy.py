"""AdaMerging from images without labels: gradient, determinism, purpose, and that labels play no part."""

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from click.testing import Result
from torch import Tensor, nn

from mergeflow.checkpoints import open_checkpoint, read_state
from mergeflow.commands.statistics import add_commands
from mergeflow.data import load_split
from mergeflow.errors import MergeflowError
from mergeflow.evaluation.adamerging import AdamergeOrder, entropy_gradient, learn_coefficients
from mergeflow.merging import configure, load_recipe, make_recipe, merge
from mergeflow.merging.learned import Learned, learn
from mergeflow.modalities.classification import Classification
from mergeflow.modalities.vision.models import image_model, load_clip
from mergeflow.modality import Network
from mergeflow.training.arithmetic import arithmetic
from tests.command import invoke
from tests.evaluation.small import TASKS, load_head, prepare


def recipe_values(world: Path, **args: Any) -> dict[str, Any]:
    experts = {task: str(world / "experts" / f"{task}.safetensors") for task in TASKS}
    return {"method": "adamerging", "args": args, "base": str(world / "base.safetensors"), "experts": experts}


def order(world: Path, data: Path | None = None, **changes: Any) -> AdamergeOrder:
    folders = {task: str((data or world / "data") / task) for task in TASKS}
    heads = {task: str(world / "heads" / f"{task}.safetensors") for task in TASKS}
    return AdamergeOrder("pocket-clip", folders, heads, **changes)


def unlabelled(world: Path, split: str = "test") -> dict[str, Classification]:
    """Examples whose labels are all out of range: whoever asked for one would fail."""
    tasks = {}
    for task in TASKS:
        images = torch.from_numpy(load_split(world / "data" / task, split).images.copy())
        labels = torch.full((len(images),), 10**9)
        tasks[task] = Classification(task, images, labels, load_head(world / "heads" / f"{task}.safetensors"))
    return tasks


@pytest.mark.slow
def test_reference_loss_and_gradient(world: Path):
    """The loss written out on whole splits, and its slope along a direction by central differences."""
    model, tasks = image_model(load_clip("pocket-clip")), unlabelled(world)
    state = dict(open_checkpoint(world / "base.safetensors"))
    loss, gradient = entropy_gradient(model, tasks, state, batch_size=99)
    with torch.no_grad():
        p = {task: rows.logits(model, torch.arange(len(rows))).double().softmax(1) for task, rows in tasks.items()}
    expected = sum(float(-(q * q.log()).sum(1).mean()) for q in p.values())
    assert abs(loss - expected) < 1e-4 * expected
    expert = dict(open_checkpoint(world / "experts/red.safetensors"))
    tau = {name: expert[name] - state[name] for name in state}
    ahead, behind = (
        entropy_gradient(model, tasks, {name: state[name] + h * tau[name] for name in state}, 99)[0]
        for h in (0.02, -0.02)
    )
    slope = sum(float((gradient[name] * tau[name]).sum()) for name in state)
    assert abs((ahead - behind) / 0.04 - slope) < 0.02 * abs(slope)


def test_batches_depend_on_seed_step_and_task_alone(world: Path):
    model, tasks = image_model(load_clip("pocket-clip")), unlabelled(world)
    state = dict(open_checkpoint(world / "base.safetensors"))

    def loss(seed: int, step: int) -> float:
        return entropy_gradient(model, dict(reversed(tasks.items())), state, 3, seed, step)[0]

    assert loss(0, 1) == loss(0, 1)
    assert len({loss(0, 0), loss(0, 1), loss(1, 0)}) == 3


@pytest.mark.slow
@pytest.mark.parametrize(("granularity", "on"), [("task", "task_vectors"), ("layer", "cart")])
def test_purpose_entropy_falls_and_the_recipe_merges(world: Path, tmp_path: Path, granularity: str, on: str):
    args = {"steps": 12, "lr": 0.02, "granularity": granularity, "on": on}
    learned = learn_coefficients(make_recipe(recipe_values(world, **args)), order(world, batch_size=15), tmp_path)
    assert len(learned.losses) == 12
    assert learned.losses[-1] < learned.losses[0]
    per_expert = {name: len(set(values.values())) for name, values in learned.coefficients.items()}
    assert all((count == 1) == (granularity == "task") for count in per_expert.values())
    recipe = load_recipe(tmp_path / "recipe.yaml")
    written = yaml.safe_load((tmp_path / "recipe.yaml").read_text())
    assert written["data"] == {"coefficients": {task: str(tmp_path / f"{task}.safetensors") for task in TASKS}}
    merged = dict(open_checkpoint(merge(recipe).path))
    loss, _ = entropy_gradient(image_model(load_clip("pocket-clip")), unlabelled(world, "validation"), merged, 15)
    assert loss < learned.losses[0]


def test_property_labels_play_no_part(world: Path, tmp_path: Path):
    """Other labels, the same bytes."""
    shutil.copytree(world / "data", tmp_path / "data")
    for path in (tmp_path / "data").glob("*/*.labels.npy"):
        np.save(path, 2 - np.load(path))
    for name, data in (("true", world / "data"), ("false", tmp_path / "data")):
        recipe = make_recipe(recipe_values(world, steps=3))
        learn_coefficients(recipe, order(world, data, split="test", batch_size=4), tmp_path / name)
    for task in TASKS:
        first, two = ((tmp_path / name / f"{task}.safetensors").read_bytes() for name in ("true", "false"))
        assert first == two


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(6, 6, bias=False)
        self.top = nn.Linear(6, 6, bias=False)
        self.top.weight = self.low.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.top(torch.tanh(self.low(inputs)))


def learned_for(head: nn.Module | None) -> Learned:
    torch.manual_seed(0)
    model, *experts = (Network(Tied()) for _ in range(3))
    states = {name: expert.state() for name, expert in zip("ab", experts, strict=True)}
    base = {name: Tied().low.weight.detach() for name in model.state()}
    base["top.weight"] = base["low.weight"]
    tasks = {"t": Classification("t", 3 * torch.randn(20, 6), torch.zeros(20, dtype=torch.long), head)}
    call = configure("adamerging", {"steps": 20, "lr": 0.02, "granularity": "layer"})
    return learn(call, base, states, lambda state, step: entropy_gradient(model, tasks, state, 20, 0, step))


def test_tied_weights_have_one_coefficient():
    """The first name's went astray, and the model was computed with the second's, which never changed."""
    learned = learned_for(None)
    assert learned.losses[-1] < 0.95 * learned.losses[0]
    assert all(values["low.weight"] == values["top.weight"] != 0.3 for values in learned.coefficients.values())


def test_a_loss_without_a_slope_teaches_nothing():
    with pytest.raises(MergeflowError, match=r"no coefficient changes the loss: .* every task has one class"):
        learned_for(nn.Linear(6, 1))


def test_it_learns_without_tf32_from_python_too(world: Path, tmp_path: Path):
    seen = []

    def progress(done: int, total: int) -> None:
        seen.append(torch.backends.cuda.matmul.fp32_precision)

    with arithmetic(tf32=True):
        learn_coefficients(make_recipe(recipe_values(world, steps=1)), order(world), tmp_path / "o", progress=progress)
    assert seen == ["ieee"]


def test_the_command_prints_and_writes(world: Path, tmp_path: Path):
    recipe = recipe_values(world)
    state = read_state(recipe["experts"]["red"])
    torch.save({"state_dict": state, "ema": {name: v + 1 for name, v in state.items()}}, tmp_path / "red.pt")
    recipe["experts"] |= {"red": str(tmp_path / "red.pt")}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    done = adamerge(world, tmp_path / "recipe.yaml", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert "'ema', not read" in done.output
    assert "red  0.298" in done.output
    assert "entropy" in done.output
    assert load_recipe(tmp_path / "out/recipe.yaml").call().args["steps"] == 2
    done = adamerge(world, tmp_path / "recipe.yaml", tmp_path / "out", "--task", "red=x")
    assert "names 'red' twice" in str(done.exception)


def adamerge(world: Path, recipe: Path, out: Path, *more: str) -> Result:
    places = []
    for task in TASKS:
        places += ["--task", f"{task}={world / 'data' / task}", "--head", f"{task}={world}/heads/{task}.safetensors"]
    fixed = [*places, "--architecture", "pocket-clip", "--out", str(out), "--set", "args.steps=2"]
    return invoke(add_commands, "adamerge", recipe, *fixed, *more)


def test_the_command_overwrites_neither_inputs_nor_files_of_others(world: Path, tmp_path: Path):
    """`--out` with the experts' folder replaced them by coefficients, and `--out .` the recipe itself."""
    shutil.copytree(world, tmp_path / "world")
    world, out = tmp_path / "world", tmp_path / "out"
    out.mkdir()
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(recipe_values(world)))
    shutil.copy(recipe, out)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for place, message in (
        (world / "experts", "would overwrite the input '.*experts/blue.safetensors'"),
        (world / "heads", "would overwrite the input 'heads blue'"),
        (world / "data/red", "would overwrite the input 'tasks red'"),
        (tmp_path, "would overwrite the input 'recipe'"),
        (out, "holds a recipe.yaml that `adamerge` did not write"),
    ):
        done = adamerge(world, recipe, place)
        assert isinstance(done.exception, MergeflowError)
        assert re.search(message, str(done.exception))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    shutil.copy(world / "heads/red.safetensors", out)
    assert "was not made by a merge" in str(adamerge(world, recipe, out).exception)
    assert adamerge(world, recipe, out, "--force").exit_code == 0
    made = {path.name: path.read_bytes() for path in out.iterdir()}
    assert adamerge(world, recipe, out).exit_code == 0, "its own results are replaced"
    assert {path.name: path.read_bytes() for path in out.iterdir()} == made
    (out / "recipe.yaml").write_bytes(made["recipe.yaml"] + b"# mine\n")
    assert "did not write" in str(adamerge(world, recipe, out).exception)


def test_images_of_another_size_are_refused(world: Path, tmp_path: Path):
    for task in TASKS:
        prepare(tmp_path / task, task, 16)
    with pytest.raises(MergeflowError, match="task 'red': its images have 16 pixels a side, but the model takes 32"):
        learn_coefficients(make_recipe(recipe_values(world)), order(world, tmp_path), tmp_path / "out")


def test_bad_orders_are_refused(world: Path, tmp_path: Path):
    with pytest.raises(MergeflowError, match="only 'adamerging'"):
        learn_coefficients(make_recipe({**recipe_values(world), "method": "average"}), order(world), tmp_path)
    part = AdamergeOrder("pocket-clip", {"red": "x", "blue": "y"}, {"blue": "y"})
    with pytest.raises(MergeflowError, match="every task needs a folder and a head"):
        learn_coefficients(make_recipe(recipe_values(world)), part, tmp_path)
    assert not list(tmp_path.iterdir())
