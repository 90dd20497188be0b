"""Editing params.yaml: one line more or less, nothing else."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from mergeflow.errors import MergeflowError
from tasks.project.new import add_line, remove_task_line, write_whole
from tests.flows.small_project import ROOT

NAMES = st.from_regex(r"[a-z0-9][a-z0-9_-]{0,8}", fullmatch=True)
SOURCES = st.one_of(
    st.sampled_from(["suite:pocket8", "hf:a/b#c@d", "folder:inputs/a: b", "folder:x # y", "folder:été", "null", "1"]),
    st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=200),
)


@settings(max_examples=15)
@given(NAMES, SOURCES)
def test_a_task_goes_in_and_out_of_the_real_file(name: str, source: str) -> None:
    text = (ROOT / "params.yaml").read_text()
    params = yaml.safe_load(text)
    if name in params["tasks"]:
        return
    longer = add_line(text, "tasks", name, source)
    assert yaml.safe_load(longer) == {**params, "tasks": {**params["tasks"], name: source}}
    assert len(longer.splitlines()) == len(text.splitlines()) + 1
    assert remove_task_line(longer, name) == text


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("tasks: {a: suite:x}  # one\nseed: 0\n", "tasks: {a: suite:x, b: folder:b}  # one\nseed: 0\n"),
        ("seed: 0\ntasks:\n    a: suite:x", "seed: 0\ntasks:\n    a: suite:x\n    b: folder:b\n"),
        ("tasks:\n  a: >-\n    suite:x\n\n# next\nseed: 0\n", None),
        (
            "tasks:\n  a: suite:x # y\n\n  # a remark\nseed: 0\n",
            "tasks:\n  a: suite:x # y\n  b: folder:b\n\n  # a remark\nseed: 0\n",
        ),
    ],
)
def test_every_way_to_write_the_tasks(before: str, after: str | None) -> None:
    edited = add_line(before, "tasks", "b", "folder:b")
    assert after is None or edited == after
    assert yaml.safe_load(edited)["tasks"]["b"] == "folder:b"


def test_a_task_that_is_not_there_is_not_taken_out() -> None:
    assert remove_task_line("tasks:\n  a: suite:x\nseed: 0\n", "b") == "tasks:\n  a: suite:x\nseed: 0\n"
    assert remove_task_line("tasks: {a: suite:x}\n", "b") == "tasks: {a: suite:x}\n"


def test_what_cannot_be_edited_is_left_to_the_person() -> None:
    with pytest.raises(MergeflowError, match="by hand"):
        add_line("shared: &t {a: suite:x}\ntasks: *t\nother: *t\n", "tasks", "b", "folder:b")
    with pytest.raises(MergeflowError, match="by hand"):
        remove_task_line("tasks: {a: suite:x}\n", "a")


def test_a_link_stays_one_and_what_it_points_to_is_changed(tmp_path: Path) -> None:
    shared = tmp_path / "shared.yaml"
    shared.write_text("seed: 0\n")
    link = tmp_path / "project/params.yaml"
    link.parent.mkdir()
    link.symlink_to("../shared.yaml")
    write_whole(link, "seed: 1\n")
    assert link.is_symlink()
    assert shared.read_text() == "seed: 1\n"
