"""`mergeflow registry ...` in this process, against a small registry."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mergeflow.errors import MergeflowError
from registry import commands as registry_commands
from registry.promotion import register
from registry.versions import METHOD, history
from tests.command import invoke

PARAMS = Path(__file__).parents[2] / "params.yaml"


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A function (words) -> result of the command, in a project whose model is called as params.yaml says."""
    shutil.copyfile(PARAMS, tmp_path / "params.yaml")
    monkeypatch.chdir(tmp_path)
    return partial(invoke, lambda app: registry_commands.add_commands(app, tmp_path), "registry")


@pytest.mark.slow
def test_list_shows_method_and_tasks_in_80_columns(store, make_candidate, command):
    tags = {METHOD: "task_arithmetic"}
    register(store, "merged", make_candidate(1, tags=tags))
    shown = command("list", "--model", "merged").output.splitlines()
    assert shown[0].split() == ["version", "aliases", "method", "tasks", "normalised", "fingerprint"]
    assert shown[1].split() == ["1", "@candidate", "task_arithmetic", "2", "fingerprint-"]
    assert len(shown) == 2
    assert max(map(len, shown)) <= 80


def test_an_empty_registry_says_what_to_run(store, command):
    answer = command("list")
    assert isinstance(answer.exception, MergeflowError)
    assert "run the pipeline with `mergeflow run`" in str(answer.exception)


@pytest.mark.slow
def test_promote_keeps_who_and_why_and_says_when_nothing_changes(store, make_candidate, command):
    candidate = make_candidate(1)
    register(store, "merged", replace(candidate, evidence=replace(candidate.evidence, reproducible=True)))
    assert command("promote", "merged/1", "--who", "ada", "--why", "first light").exit_code == 0
    event = history(store, "merged")[0]
    assert (event.action, event.who, event.why.partition(";")[0]) == ("promote", "ada", "first light")
    again = command("promote", "merged/1", "--force", "--who", "ada", "--why", "x")
    assert (again.exit_code, again.output) == (
        0,
        "merged: version 1 is champion already; nothing was changed or recorded\n",
    )
    assert len(history(store, "merged")) == 1


@pytest.mark.slow
def test_show_and_history_are_read_by_people_and_with_json_by_programs(store, make_candidate, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    candidate = make_candidate(1)
    register(store, "merged", replace(candidate, evidence=replace(candidate.evidence, reproducible=True)))
    assert command("promote", "merged/1", "--who", "ada", "--why", "first light").exit_code == 0
    shown = command("show", "merged/1").output
    assert shown.startswith("merged version 1 @champion, ties\n")
    assert ["digits", "80.00", "%", "95.00", "%"] in [line.split() for line in shown.splitlines()]
    assert ["normalised", "0.8000"] in [line.split() for line in shown.splitlines()]
    assert "The gates let it be champion:" in shown
    assert "{" not in shown
    heads, row = command("history", "--model", "merged").output.splitlines()
    assert heads.split() == ["when", "(UTC)", "action", "champion", "before", "who", "why"]
    assert row.split()[2:8] == ["promote", "1", "–", "ada", "first", "light;"]
    assert json.loads(command("show", "merged/1", "--json").output)["accuracy"]["digits"] == 0.8
    (event,) = json.loads(command("history", "--model", "merged", "--json").output)
    assert (event["action"], event["version"], event["who"]) == ("promote", "1", "ada")


def test_a_picture_is_svg_and_stands_beside_json(store, make_candidate, command):
    register(store, "merged", make_candidate(1))
    refused = command("lineage", "merged/1", "--picture", "tree.png")
    assert isinstance(refused.exception, MergeflowError)
    assert "ends in .svg" in str(refused.exception)
    assert not Path("tree.png").exists()
    both = command("lineage", "merged/1", "--json", "--picture", "tree.svg")
    assert json.loads(both.stdout)["version"] == "1"
    assert "<svg" in Path("tree.svg").read_text()


def test_serving_nothing_tells_no_address(store, make_candidate, command):
    register(store, "merged", make_candidate(1))
    answer = command("serve", "merged/77")
    assert isinstance(answer.exception, MergeflowError)
    assert answer.output == ""


def test_serving_tells_the_version_and_not_the_alias_that_may_move(store, make_candidate, command, monkeypatch):
    register(store, "merged", make_candidate(1))
    served = lambda store, name, which, host, port, ready, **_: ready("1", f"http://{host}:{port}")  # noqa: E731
    monkeypatch.setattr("registry.serving.serve", served)
    assert command("serve", "merged@candidate").output == "merged version 1 on http://127.0.0.1:5001\n"
