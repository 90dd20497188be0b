"""Sweep files: everything wrong is found before a weight is read; docs/sweep.md and the examples are valid."""

import re
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from mergeflow.errors import MergeflowError
from mergeflow.merging import configure, make_recipe
from mergeflow.search.candidates import at_edge, grid_of
from mergeflow.search.sweep_file import (
    CommandScore,
    FunctionScore,
    LmEvalScore,
    ModelPart,
    SearchPart,
    Sweep,
    TaskPart,
    load_sweep,
    make_sweep,
)
from tests.evaluation.small import sweep_values

NOWHERE = Path("nowhere")  # validation touches no file of the sweep


def refused(match: str, **changes: Any) -> None:
    with pytest.raises(MergeflowError, match=match):
        make_sweep(sweep_values(NOWHERE, **changes))


def test_the_small_sweep_is_valid_and_ordered_for_sharing():
    sweep = make_sweep(sweep_values(NOWHERE))
    assert len(sweep.grid()) == 1 + 3 + 6
    calls = [configure(method, args).without_scale() for method, args in sweep.grid()]
    changes = sum(call != other for call, other in pairwise(calls))
    assert changes + 1 == len(set(calls)) == 4


def test_unknown_keys_get_the_nearest_right_one():
    refused("unknown key 'metods': did you mean 'methods'", metods={})
    refused("unknown key of model 'arch.*': did you mean 'architecture'", model={"architecture": "a", "architectur": 1})
    refused("unknown key of tasks.red 'heed': did you mean 'head'", tasks={"red": {"data": "d", "heed": "h"}})
    refused("unknown key of search 'trails': did you mean 'trials'", search={"trials": 3, "trails": 4})
    refused("unknown method 'tiez': did you mean 'ties'", methods={"tiez": {}})
    refused("unknown argument of ties 'kep': did you mean 'keep'", methods={"ties": {"kep": [0.1]}})
    refused("did you mean 'low'", search={"trials": 1}, methods={"ties": {"keep": {"lov": 0, "high": 1}}})


def test_the_base_of_a_project_is_no_image_encoder():
    base = "outputs/base/model.safetensors"
    refused("expected a name of open_clip.*'outputs/base.*project's own `sweep`", model={"architecture": base})


def test_values_out_of_range_are_named():
    refused("keep", methods={"ties": {"keep": [0.2, 1.5]}})
    refused("batch_size.*found 0", batch_size=0)
    refused("empty", methods={"ties": {"keep": []}})
    refused("ranges need `search", methods={"ties": {"scale": {"low": 0, "high": 1}}})
    refused("low 2 must be below high 1", search={"trials": 1}, methods={"ties": {"scale": {"low": 2, "high": 1}}})
    refused("keep", search={"trials": 1}, methods={"ties": {"keep": {"low": 0.5, "high": 1.5}}})
    log = {"low": 0, "high": 1, "log": True}
    refused("starts above 0", search={"trials": 1}, methods={"ties": {"scale": log}})
    refused("whole number", search={"trials": 1}, methods={"dare": {"seed": {"low": 0, "high": 1.5}}})
    refused("finite number, found 'x'", search={"trials": 1}, methods={"ties": {"scale": {"low": "x", "high": 1.5}}})
    refused("must", device="gpu")
    refused("base is missing|must be a text", base=None)


def test_all_faults_stand_in_one_message():
    with pytest.raises(MergeflowError, match=r"2 faults:\n(.|\n)*batch_size(.|\n)*unknown key 'metods'"):
        make_sweep(sweep_values(NOWHERE, batch_size=-1, metods={}))


def test_test_is_refused_for_choosing():
    refused("hyper-parameters are never chosen on test", split="test")
    refused("'validation'", split="train")


def test_tasks_need_a_head_and_for_normalised_accuracy_an_expert():
    refused("no head", tasks={"red": {"data": "d"}})
    refused("either `data`.*or `source`", tasks={"red": {"head": "h"}})
    refused("either `data`.*or `source`", tasks={"red": {"data": "d", "source": "suite:pocket8", "head": "h"}})
    refused("no expert to be normalised by", tasks={"green": {"data": "d", "head": "h"}})
    refused("expert of task 'green' 'rad': did you mean 'red'", tasks={"green": {"data": "d", "expert": "rad"}})
    refused("must not hold '/'", tasks={"../red": {"data": "d", "head": "h", "expert": "red"}})
    assert make_sweep(sweep_values(NOWHERE, tasks={"green": {"data": "d", "head": "h"}}, objective="mean"))


def test_methods_that_need_statistics_get_only_theirs():
    refused("needs the statistic 'fisher' of experts", methods={"fisher": {}})
    data = {"fisher": {task: f"{task}.safetensors" for task in ("red", "blue", "grey")}}
    sweep = make_sweep(sweep_values(NOWHERE, methods={"fisher": {}, "ties": {}}, data=data))
    assert dict(sweep.recipe("fisher", {}).data).keys() == {"fisher"}
    assert sweep.recipe("ties", {}).data == ()


def test_files_that_are_no_sweep_are_refused(tmp_path: Path):
    place = tmp_path / "s.yaml"
    with pytest.raises(MergeflowError, match="cannot read sweep"):
        load_sweep(place)
    for text, match in (
        ("a: [", "not valid YAML"),
        ("- a", "holds a list"),
        ("", "holds a NoneType"),
        ("a: 1\na: 2", "twice"),
    ):
        place.write_text(text)
        with pytest.raises(MergeflowError, match=match):
            load_sweep(place)
    place.write_text(yaml.safe_dump(sweep_values(NOWHERE), sort_keys=False))
    assert load_sweep(place) == make_sweep(sweep_values(NOWHERE))


scales = st.lists(st.floats(-3, 3), min_size=1, max_size=4)


@given(keep=st.lists(st.floats(0, 1), min_size=1, max_size=3), scale=scales)
def test_a_grid_is_every_combination_once(keep: list[float], scale: list[float]):
    calls = grid_of("ties", {"scale": scale, "keep": keep})
    pairs = [(args["keep"], args["scale"]) for args in calls]
    assert set(pairs) == {(k, s) for k in keep for s in scale}
    assert len({repr(configure("ties", args).args) for args in calls}) == len(calls)
    # Candidates of one direction follow each other.
    assert [k for k, _ in pairs] == sorted((k for k, _ in pairs), key=[*dict.fromkeys(keep)].index)


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(max_size=8), lambda x: st.lists(x, max_size=3)))
def test_whatever_stands_in_a_key_the_error_is_for_people(value: Any):
    for key in Sweep.model_fields:
        with suppress(MergeflowError):  # any other kind of error is the failure
            make_sweep(sweep_values(NOWHERE, **{key: value}))


@given(low=st.floats(-5, 5), width=st.floats(0.01, 5), place=st.floats(0, 1))
def test_edges_of_a_range(low: float, width: float, place: float):
    value = low + place * width
    edges = at_edge({"scale": {"low": low, "high": low + width}}, {"scale": value})
    if place in (0, 1):
        assert edges == ["scale"]
    if 0.03 < place < 0.97:
        assert edges == []


ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/sweep.md").read_text()
EXAMPLES = sorted((ROOT / "examples/sweeps").glob("*.yaml"))


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", PAGE, flags=re.S)


def test_every_key_is_on_the_page():
    for model in (Sweep, ModelPart, TaskPart, SearchPart):
        for name in model.model_fields:
            assert re.search(rf"\b{name}:", PAGE), name
    for part in (FunctionScore, CommandScore, LmEvalScore):
        for name in part.model_fields:
            assert re.search(rf"\b{name}:|`{name}`", PAGE), name


def test_the_pages_yaml_is_valid():
    examples = [yaml.safe_load(text) for text in blocks("yaml")]
    assert len(examples) == 3
    assert set(examples[0]) == set(Sweep.model_fields) - {"search", "score", "tokenizer", "chat_template", "allow"}
    for values in examples:
        assert make_recipe(values) if "method" in values else make_sweep(values)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_valid(path: Path):
    sweep = load_sweep(path)
    assert path.read_text().count("# ") >= 3
    assert sweep.search is not None or len(sweep.grid()) > 3


def test_the_pages_python_runs(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    values = sweep_values(world, methods={"average": {}})
    Path("sweep.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    names: dict[str, object] = {}
    for text in blocks("python"):
        exec(text, names)
    assert isinstance(names["rows"], list)
    assert set(names["rows"][0]) == {"trial", "method", "args", "accuracy", "mean", "normalised", "objective"}
