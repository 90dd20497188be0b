"""Several stages that fail in one run: what the user can mend is told, whatever else went wrong."""

import pytest
from prefect.states import Failed

from flows.pipeline import _raise_first
from mergeflow.errors import MergeflowError


def test_bad_input_is_told_in_one_message() -> None:
    states = {name: Failed(data=MergeflowError(f"no file {name}")) for name in ("one", "two")}
    with pytest.raises(MergeflowError) as raised:
        _raise_first(states)
    assert str(raised.value) == "one: no file one\ntwo: no file two"


def test_a_fault_of_ours_alone_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="ours"):
        _raise_first({"one": Failed(data=ValueError("ours"))})
    assert capsys.readouterr().err == ""


def test_a_fault_of_ours_hides_no_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    states = {"one": Failed(data=ValueError("ours")), "two": Failed(data=MergeflowError("no file two"))}
    with pytest.raises(ValueError, match="ours"):
        _raise_first(states)
    assert capsys.readouterr().err == "two: no file two\n"
