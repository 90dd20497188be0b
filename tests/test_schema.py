"""One voice for what is wrong in a file: place, what was found, what was expected, the nearest right key."""

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from importlib import import_module
from pkgutil import walk_packages
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

import mergeflow
import tasks
from mergeflow.errors import MergeflowError, unknown_name
from mergeflow.evaluation.adamerging import AdamergeOrder
from mergeflow.evaluation.statistics import StatisticOrder
from mergeflow.merging import configure
from mergeflow.modalities.nets import mlp, resnet18
from mergeflow.schema import Frozen, Seed, validated


class Task(Frozen):
    folder: str
    share: float = Field(1.0, gt=0)


class Plan(Frozen):
    tasks: dict[str, Task] = Field({})
    steps: list[Annotated[Task, Field()]] = Field([])
    single: Task | None = None
    mixed: list[bool | int] | Task = Field([])


def refusal(values: Any) -> str:
    with pytest.raises(MergeflowError) as caught:
        validated(Plan, values, "plan.yaml")
    return str(caught.value)


@pytest.mark.parametrize(
    ("values", "place"),
    [
        ({"tasks": {"a": {"folder": "x", "shaer": 1}}}, "key of tasks.a"),
        ({"steps": [{"folder": "x", "shaer": 1}]}, "key of steps.0"),
        ({"single": {"folder": "x", "shaer": 1}}, "key of single"),
    ],
)
def test_a_wrong_key_gets_the_nearest_right_one_wherever_it_stands(values: Any, place: str):
    assert refusal(values) == f"plan.yaml: unknown {place} 'shaer': did you mean 'share'? Known: folder, share."


def test_all_faults_are_told_at_once():
    values = {"task": {}, "tasks": {"a": {"share": -1}, "b": {"folder": "x", "share": float("nan")}}}
    assert refusal(values).splitlines() == [
        "plan.yaml has 4 faults:",
        "  - tasks.a.folder is missing",
        "  - tasks.a.share: must be greater than 0, found -1",
        "  - tasks.b.share: must be a finite number, found nan",
        "  - unknown key 'task': did you mean 'tasks'? Known: mixed, single, steps, tasks",
    ]


class Numbers(Frozen):
    count: int = Field(1, ge=1, le=9)
    rate: float = 0.5
    names: list[str] = Field(["a"], min_length=1)
    whole: bool = True
    task: Task | None = None


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"count": "one"}, "count: must be a whole number, found 'one'"),
        ({"count": 1.5}, "count: must be a whole number, found 1.5"),
        ({"count": 0}, "count: must be at least 1, found 0"),
        ({"count": 10}, "count: must be at most 9, found 10"),
        ({"rate": "fast"}, "rate: must be a number, found 'fast'"),
        ({"names": "a"}, "names: must be a list, found 'a'"),
        ({"names": []}, "names: must have 1 or more items, found []"),
        ({"names": [3]}, "names.0: must be a text, found 3"),
        ({"whole": "perhaps"}, "whole: must be true or false, found 'perhaps'"),
        ({"task": 3}, "task: must be keys with values, found 3"),
    ],
)
def test_the_words_are_those_of_people_who_write_yaml(values: Any, words: str):
    with pytest.raises(MergeflowError) as caught:
        validated(Numbers, values, "plan.yaml")
    assert str(caught.value) == f"plan.yaml: {words}."


json = st.recursive(st.none() | st.booleans() | st.floats() | st.text(max_size=4), lambda x: st.lists(x, max_size=2))


@given(st.dictionaries(st.sampled_from([*Plan.model_fields, "x"]), json | st.dictionaries(st.text(max_size=4), json)))
def test_whatever_stands_in_a_file_the_error_is_for_people(values: dict[str, Any]):
    with suppress(MergeflowError):  # any other kind of error is the failure
        validated(Plan, values, "plan.yaml")


def test_of_many_names_those_most_alike_are_listed() -> None:
    message = str(unknown_name("architecture", "ViT-B-33", [*(f"net{number}" for number in range(200)), "ViT-B-32"]))
    assert message.startswith("unknown architecture 'ViT-B-33': did you mean 'ViT-B-32'? 201 names exist, most alike: ")
    assert len(message) < 300


def every_class(parent: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for child in parent.__subclasses__():
        yield child
        yield from every_class(child)


@pytest.mark.slow
def test_every_seed_of_a_file_is_a_whole_number_that_all_generators_take() -> None:
    for package in (mergeflow, tasks):
        for module in walk_packages(package.__path__, f"{package.__name__}."):
            with suppress(ImportError):
                import_module(module.name)
    records = [record for record in every_class(Frozen) if record.__module__.startswith(("mergeflow.", "tasks."))]
    seeded = [record for record in records if "seed" in record.model_fields]
    assert len(seeded) > 8
    for record in seeded:
        for value in (-1, 2**63, 10**30, 1.5, "x", float("inf"), True):
            with pytest.raises(MergeflowError, match="seed: must be"):
                validated(record, {"seed": value}, record.__name__)


class Drawn(Frozen):
    seed: Seed = 0


@pytest.mark.parametrize("seed", [1.0, "3", True, -1, 2**63, None])
def test_a_seed_is_a_whole_number_that_every_generator_takes(seed: Any):
    with pytest.raises(MergeflowError, match=r"seed: must be (a whole number|at most 9223372036854775807|at least 0)"):
        validated(Drawn, {"seed": seed}, "plan.yaml")
    with pytest.raises(MergeflowError, match="seed: must be"):
        configure("dare", {"seed": seed})
    for make in (resnet18, mlp, partial(StatisticOrder, "fisher", "a", "b"), partial(AdamergeOrder, "a", {})):
        with pytest.raises(MergeflowError, match=r"seed must be a whole number from 0 to 9223372036854775807, found"):
            make({}, seed=seed)  # type: ignore[operator]
