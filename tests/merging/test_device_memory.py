"""The device memory that merging is foretold to take, against what the card of `tests.card` holds; and its refusal."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import torch
from torch import Tensor

from mergeflow.commands.merging import add_commands
from mergeflow.errors import MergeflowError
from mergeflow.merging import configure, merge, methods, prepare
from mergeflow.merging.execution.engine import BUFFER, device_bytes, held_elements
from mergeflow.merging.execution.reader import Unit, model_of
from mergeflow.merging.files.recipe import recipe_text
from mergeflow.merging.method import SOME_COPIES
from tests.card import card, counted, driver
from tests.command import invoke
from tests.merging.helpers import fitting, recipe, statistics

SIDE = 96
WIDER = {"pcb": 362}  # beside a smaller matrix its counts are no trifle


def states(shape: tuple[int, int], experts: int) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """A base with one large tensor and its tied embedding, and experts near it."""
    draws = torch.Generator().manual_seed(0)

    def state(scale: float) -> dict[str, Tensor]:
        drawn = {"blocks.0.mlp.weight": shape, "embedding": (7, 3)}
        tensors = {name: scale * torch.randn(size, generator=draws) for name, size in drawn.items()}
        return {**tensors, "head": tensors["embedding"]}

    base, experts_ = state(0.1), {}
    for number in range(experts):
        near = {name: base[name] + value for name, value in state(0.01).items()}
        experts_[f"e{number}"] = {**near, "head": near["embedding"]}
    return base, experts_


def peak(name: str, shape: tuple[int, int], count: int, **args: Any) -> tuple[float, int]:
    """The elements that a method holds on the card at its peak, and how many experts it merged."""
    base, experts = states(shape, count)
    experts = fitting(name, experts)
    data = statistics(base, experts)
    data["gram"] = {expert: {"blocks.0.mlp.weight": torch.eye(shape[1])} for expert in experts}
    with card(), counted() as tally:
        prepare(configure(name, args), base, experts, data=data, device="cuda", workers=1)
    return tally.peak / 4, len(experts)


def foretold(name: str, shape: tuple[int, int], experts: int, **args: Any) -> int:
    copies = methods()[name].on_device(configure(name, args).arguments)
    return held_elements(copies, experts, Unit("blocks.0.mlp.weight", 0, shape[0] * shape[1], shape))


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 6])
def test_of_every_method(count: int) -> None:
    shares = {}
    for name in methods():
        shape = (WIDER.get(name, SIDE),) * 2
        held, experts = peak(name, shape, count)
        shares[name] = foretold(name, shape, experts) / held
    assert {name: share for name, share in shares.items() if not 0.97 <= share <= 1.25} == {}
    unsaid = [name for name, method in methods().items() if method.on_device(configure(name).arguments) is SOME_COPIES]
    assert unsaid == []


def choices() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every other value of an argument that has few, for each method."""
    for name, method in methods().items():
        for key, field in method.args.model_fields.items():
            values = (True, False) if field.annotation is bool else get_args(field.annotation)
            reader = {"then": "ties"} if key == "reduce" and "then" in method.args.model_fields else {}
            others = (value for value in values if value != field.default and key != "split_qkv")
            yield from ((name, {key: value, **reader}) for value in others)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 6])
def test_of_every_choice_of_arguments(count: int) -> None:
    """A weighted mean in TIES, the directions of CART and sums that are not divided were foretold too low."""
    wrong = {}
    for name, args in choices():
        if get_origin(methods()[name].args.model_fields[next(iter(args))].annotation) not in (None, Literal):
            continue  # patterns
        held, experts = peak(name, (WIDER.get(name, SIDE),) * 2, count, **args)
        share = foretold(name, (WIDER.get(name, SIDE),) * 2, experts, **args) / held
        if not 0.97 <= share <= 1.25:
            wrong[name, str(args)] = share
    assert wrong == {}


@pytest.mark.parametrize("shape", [(4 * SIDE, SIDE), (SIDE, 4 * SIDE)], ids=["tall", "wide"])
def test_of_long_matrices_it_is_enough(shape: tuple[int, int]) -> None:
    for name in ("cart", "core_space", "iso_c", "iso_cts", "knots", "low_rank", "regmean", "tsv", "wudi"):
        held, experts = peak(name, shape, 4)
        assert foretold(name, shape, experts) >= 0.95 * held, name


def test_workers_hold_several_tensors_as_far_as_the_engine_lets_them() -> None:
    model = model_of(*states((SIDE, SIDE), 2))
    units = [Unit(name, 0, size, (size,)) for name, size in (("a", 100), ("b", 50), ("c", 50))]

    def taken(workers: int, buffer: int) -> int:
        return device_bytes(configure("ties"), model, units, workers, buffer)

    assert (taken(1, BUFFER), taken(2, BUFFER), taken(9, BUFFER)) == (3200, 4800, 6400)
    assert taken(9, 0) == 3200  # nothing flies beside the largest
    assert device_bytes(configure("ties"), model, [], 2, BUFFER) == 0


run = partial(invoke, add_commands)


def written(folder: Path, **changes: Any) -> str:
    place = folder / "recipe.yaml"
    values = {"device": "cuda:0", "out": str(folder / "merged.safetensors"), **changes}
    place.write_text(recipe_text(recipe(folder, **values)))
    return str(place)


def test_a_merge_that_cannot_fit_is_refused_before_it_starts(files: Path) -> None:
    place = written(files)
    with driver(memory=7 * 10**8):
        for command in ("check", "merge"):
            refused = run(command, place).exception
            assert isinstance(refused, MergeflowError)
            assert "where 700.0 MB are free: " in str(refused)
            assert str(refused).endswith("takes the most. Use device: cpu.")
    assert not (files / "merged.safetensors").exists()


def test_the_commands_say_what_a_device_will_take(files: Path) -> None:
    place = written(files)
    with card():
        assert "cuda:0        about " in run("check", place).output
        assert "cuda:1" not in run("check", place, "--device", "cpu").output
        done = run("merge", place)
    assert done.output.startswith("cuda:0        about ")
    assert "of its 85.90 GB free" in done.output
    assert (files / "merged.safetensors").exists()


def test_auto_takes_a_card_where_matrices_are_treated_whole_and_fit(files: Path) -> None:
    lines = {
        ("task_arithmetic", 80 * 2**30): "device: auto is cpu: task_arithmetic treats elements alone and gains nothing",
        ("cart", 80 * 2**30): "device: auto is cuda: cart treats matrices whole",
        ("cart", 7 * 10**8): "device: auto is cpu: cart of 3 experts needs about ",
    }
    for (method, memory), line in lines.items():
        place = written(files, device="auto", method=method)
        with card(memory=memory):
            for command in ("check", "merge"):
                assert line in run(command, place).output, (method, command)
    assert "device: auto is cpu: torch sees no CUDA device" in run("check", place).output
    assert (
        merge(recipe(files, device="auto", out=str(files / "merged.safetensors"))).notes[0].startswith("device: auto")
    )
