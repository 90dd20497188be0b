"""Malformed recipes: whatever YAML stands in whatever field, it is a valid recipe or one MergeflowError."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergeflow.errors import MergeflowError
from mergeflow.merging import Recipe, load_recipe, make_recipe, methods
from mergeflow.merging.files.recipe import LIFTED

WORDS = st.sampled_from(["", "a.safetensors", "b.pt", "cuda", "5GB", "9" * 400 + "GB", "a\0b", "all", "ties", "0.5"])
NUMBERS = st.one_of(st.booleans(), st.integers(-3, 3), st.just(10**400), st.floats())
SCALARS = st.one_of(st.none(), NUMBERS, st.dates(), st.binary(max_size=2), WORDS)
KEYS = st.one_of(WORDS, st.integers(-1, 1), st.none(), st.sampled_from(["scale", "keep", "of_args", "fisher", "base"]))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)),
    max_leaves=6,
)
FIELDS = [*Recipe.model_fields, *LIFTED]
METHODS = st.sampled_from(sorted(methods()))


def valid_or_refused(values: dict) -> None:
    try:
        recipe = make_recipe(values)
    except MergeflowError:
        return
    again = make_recipe(json.loads(recipe.record()))
    assert again == recipe
    assert hash(again) == hash(recipe)


def sound(method: str) -> dict:
    return {"method": method, "base": "base.safetensors", "experts": {"a": "a", "b": "b"}, "out": "out.safetensors"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"experts": [None]}, r"experts: a path is text, found nothing \(null\)"),
        ({"experts": {"a": 3}}, "experts: a path is text, found 3"),
        ({"experts": "a.safetensors"}, "experts: expected a list of paths, or a mapping"),
        ({"experts": [["a", "b"]]}, "a path is text, found"),
        ({"base": 3}, "base: a path is text, found 3"),
        ({"out": "a\0b"}, "out: a path must hold some character, and no NUL"),
        ({"args": [1]}, "args: expected a mapping of names to values"),
        ({"data": [None]}, "data: expected a mapping"),
        (
            {"weights": {"a": None}},
            r"^recipe: weights: weight of 'a': expected a finite number, found",
        ),
        (
            {"weights": [None]},
            r"^recipe: weights: weight 1 of the list: expected a finite number, found",
        ),
        ({"weights": "1, 2"}, "weights: expected numbers, one per expert, in a list or by name, found '1, 2'"),
        ({"data": {"fisher": 3}}, "data: of 'fisher': expected a list of paths, or a mapping .* found 3"),
        (
            {"method": "cart", "matrices": 3},
            "matrices: expected attn_mlp, mlp, all, or a list of patterns",
        ),
        ({"shard_size": True}, "shard_size: expected a size"),
        ({"tokenizer": {"pad_to_multiple_of": True}}, "pad_to_multiple_of: must be a whole number, found 'true'"),
        ({"steps": {"x": [{"model": "a", "layers": [True, 2]}]}}, "layers.0: must be a whole number, found 'true'"),
        ({"method": "task_arithmetic", "args": {"scale": b"0"}}, r"scale: must be a number, found \"b'0'\""),
        ({"method": "task_arithmetic", "args": {"scale": [b"0"]}}, r"scale: must be a number, found \"b'0'\""),
        ({"shard_size": "9" * 400 + "GB"}, "shard_size: expected a size"),
    ],
)
def test_one_error_names_the_field(change, message):
    with pytest.raises(MergeflowError, match=message):
        make_recipe({**sound("task_arithmetic"), **change})


def test_nothing_is_told_twice():
    for change in ({"experts": [None]}, {"base": 3}, {"weights": [None]}, {"data": 3}, {"shard_size": True}):
        with pytest.raises(MergeflowError) as caught:
            make_recipe({**sound("task_arithmetic"), **change})
        assert str(caught.value).count("found") == 1


def test_all_faults_are_told_at_once():
    wrong = {"metod": 1, "exprts": 2, "dtype": "int8", "args": {"kep": 1, "tirm": 2, "keep": 7}, "experts": [None]}
    with pytest.raises(MergeflowError) as caught:
        make_recipe({**sound("ties"), **wrong}, "r.yaml")
    text = str(caught.value)
    assert text.startswith("r.yaml has 5 faults:")
    assert len(text.splitlines()) == 6
    for words in ("'metod'", "'exprts'", "dtype: ", "'kep'", "'tirm'", "keep: must be", "experts: a path is text"):
        assert words in text
    with pytest.raises(MergeflowError) as caught:
        make_recipe({**sound("ties"), "args": {"keep": 7}, "experts": {"base": "x"}})
    assert "keep: must be" in str(caught.value)
    assert "cannot be named 'base'" in str(caught.value)
    with pytest.raises(MergeflowError) as caught:
        make_recipe({**sound("fisher"), "weights": [1, 2, 3]})
    assert "needs the statistic 'fisher'" in str(caught.value)
    assert "3 weights for 2 experts" in str(caught.value)


def test_a_value_that_holds_itself(tmp_path):
    (tmp_path / "recipe.yaml").write_text("method: ties\nbase: a\nexperts: [b]\nargs: &x {keep: *x}\n")
    with pytest.raises(MergeflowError, match="holds itself"):
        load_recipe(tmp_path / "recipe.yaml")


@pytest.mark.slow
@settings(max_examples=600)
@given(method=METHODS, changes=st.dictionaries(st.sampled_from(FIELDS), VALUES, min_size=1, max_size=2))
def test_any_value_in_any_field(method, changes):
    valid_or_refused({**sound(method), **changes})


@pytest.mark.slow
@settings(max_examples=400)
@given(method=METHODS, data=st.data())
def test_any_value_in_any_argument(method, data):
    names = st.sampled_from([*methods()[method].args.model_fields])
    args = data.draw(st.dictionaries(names, VALUES, min_size=1, max_size=2))
    valid_or_refused({**sound(method), "args": args})


@settings(max_examples=300)
@given(text=st.text(alphabet="ab:-[]{}&*!|>'\"\n\t #%@`0123456789xe.,?<~\x00\x85\ud7ff", max_size=40))
def test_any_text_as_a_file(text, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(MergeflowError):
        load_recipe(path)
