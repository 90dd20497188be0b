"""YAML is read as the safe loader reads it, equal keys and endless nesting are refused."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from mergeflow.errors import MergeflowError
from mergeflow.yaml_text import parse_yaml

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.dates()
values = st.recursive(scalars, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(), x, max_size=3))


@given(values, st.booleans())
def test_what_was_written_is_read(value: object, flow: bool) -> None:
    assert parse_yaml(yaml.safe_dump(value, default_flow_style=flow), "text") == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("rate: 1e-4", {"rate": "1e-4"}),  # YAML 1.1: a number has a point
        ("a: &x {b: 1}\nc: {<<: *x, d: 2}", {"a": {"b": 1}, "c": {"b": 1, "d": 2}}),
        ("", None),
    ],
)
def test_corners_are_those_of_the_safe_loader(text: str, value: object) -> None:
    assert parse_yaml(text, "text") == yaml.safe_load(text) == value


@pytest.mark.parametrize("key", ["no", "on", "007", "1.10", "1:30", "null", "2024-01-01", "1e3"])
def test_keys_are_texts_as_they_are_written(key: str) -> None:
    assert parse_yaml(f"experts: {{{key!s}: a}}", "text") == {"experts": {key: "a"}}


@pytest.mark.parametrize("number", ["010", "-017", "1:30", "190:20:30.15"])
@pytest.mark.parametrize("text", ["a: {}", "a: {{b: {}}}", "- {}", "a: [1, {}]"])
def test_numbers_in_old_notations_are_refused(number: str, text: str) -> None:
    with pytest.raises(MergeflowError, match=rf"in line 1, {number} is a number to base 8 or 60"):
        parse_yaml(text.format(number), "text")
    assert str(parse_yaml(text.format(f"'{number}'"), "text")).count(number) == 1


@pytest.mark.parametrize("text", ["*.mlp.*", "ignore: [*.bias]", "only:\n- *bias"])
def test_a_pattern_without_quotes_is_told_of_them(text: str) -> None:
    with pytest.raises(MergeflowError, match=r"is not valid YAML: .*begins with \* needs quotes"):
        parse_yaml(text, "text")


@pytest.mark.parametrize("text", ["[" * 100_000, "- " * 50_000 + "1", "{a: " * 20_000 + "1" + "}" * 20_000])
def test_deep_nesting_is_an_error_and_ends_no_process(text: str) -> None:
    with pytest.raises(MergeflowError, match="text is not valid YAML"):
        parse_yaml(text, "text")


@pytest.mark.parametrize("text", ["tasks:\n\tleft: 1\n", "a:\n  b: 1\n\tc: 2\n", "a: 1\nb:\t\n\t- c\n"])
def test_a_tab_is_named(text: str) -> None:
    with pytest.raises(MergeflowError, match=r"line [23] has a tab where YAML takes spaces alone"):
        parse_yaml(text, "note")


def test_a_key_stands_once() -> None:
    with pytest.raises(MergeflowError, match="the key 'a' is given twice, in lines 1 and 3: keep one"):
        parse_yaml("a: 1\nb: 2\na: 3", "text")
    with pytest.raises(MergeflowError, match="in line 1"):
        parse_yaml("c: {a: 1, a: 3}", "text")


def test_aliases_that_stand_for_a_thousand_million_values_are_refused():
    levels = [f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 10)}]" for i in range(1, 10)]
    with pytest.raises(MergeflowError, match="recipe 'a' is not valid YAML: its aliases amount to more than 1000000"):
        parse_yaml("l0: &l0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "\n".join(levels), "recipe 'a'")
    assert parse_yaml("a: &a [1, 2]\nb: [*a, *a]", "it") == {"a": [1, 2], "b": [[1, 2], [1, 2]]}
