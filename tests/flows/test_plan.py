"""What a run has to do, which failures it tries again, and what it says of a fault of ours."""

import errno
from typing import Any

import pytest

from flows import dvc_commands, pipeline
from flows.pipeline import is_passing_fault
from flows.status import keep_traceback, own_traceback
from mergeflow.errors import MergeflowError
from tasks.project.graph import load_graph
from tasks.project.stage import Stage
from tests.flows.small_project import ROOT


@pytest.fixture(scope="module")
def stages() -> dict[str, Stage]:
    return load_graph(ROOT)


def todo(monkeypatch: pytest.MonkeyPatch, stages: dict[str, Stage], stale: set[str], **asked: Any) -> list[str]:
    monkeypatch.setattr(dvc_commands, "changes", lambda root, locked: stale)
    return dvc_commands.stages_to_run(ROOT, stages, **asked)


def test_what_depends_on_a_stale_stage_runs(monkeypatch: pytest.MonkeyPatch, stages: dict[str, Stage]) -> None:
    addresses = todo(monkeypatch, stages, {"sweep@cart"})
    assert addresses[0] == "sweep@cart"
    assert {"select", "evaluate", "register"} <= set(addresses)
    assert not any(address.startswith(("finetune", "prepare")) for address in addresses)


def test_targets_are_run_with_what_they_need_alone(monkeypatch: pytest.MonkeyPatch, stages: dict[str, Stage]) -> None:
    addresses = todo(monkeypatch, stages, {"prepare@digits", "sweep@cart"}, targets=["finetune@digits"])
    assert "prepare@digits" in addresses
    assert addresses[-1] == "finetune@digits"
    assert not any(address.startswith(("sweep", "select", "finetune@land")) for address in addresses)
    assert todo(monkeypatch, stages, {"sweep@cart"}, targets=["finetune"]) == []


@pytest.mark.parametrize("targets", [None, ["register"]])
def test_results_that_the_registry_has_lost_are_registered_again(
    monkeypatch: pytest.MonkeyPatch, stages: dict[str, Stage], targets: list[str] | None
) -> None:
    monkeypatch.setattr(dvc_commands, "registration_lost", lambda root: True)
    assert todo(monkeypatch, stages, set(), targets=targets) == ["register"]
    assert todo(monkeypatch, stages, {"sweep@cart"}, targets=targets).count("register") == 1
    assert todo(monkeypatch, stages, set(), targets=["evaluate"]) == []


def test_an_unknown_target(monkeypatch: pytest.MonkeyPatch, stages: dict[str, Stage]) -> None:
    with pytest.raises(MergeflowError, match="did you mean 'select'"):
        todo(monkeypatch, stages, set(), targets=["selekt"])


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (OSError(errno.ETIMEDOUT, "the share"), True),
        (OSError(errno.EIO, "the disk"), True),
        (FileNotFoundError(errno.ENOENT, "gone"), False),
        (OSError(errno.ENOSPC, "full"), False),
        (MergeflowError("bad input"), False),
        (AssertionError("ours"), False),
    ],
)
def test_only_what_may_pass_by_itself_is_tried_again(error: Exception, again: bool) -> None:
    class State:
        def result(self) -> None:
            raise error

    assert is_passing_fault(None, None, State()) is again  # type: ignore[arg-type]


def test_a_fault_of_ours_keeps_its_own_traceback() -> None:
    with pytest.raises(KeyError) as caught:
        raise KeyError("ours")
    keep_traceback(caught.value)
    assert "test_plan.py" in (own_traceback(caught.value) or "")
    refused = MergeflowError("bad input")
    keep_traceback(refused)
    assert own_traceback(refused) is None


@pytest.mark.parametrize(
    ("targets", "published"), [(None, True), (["register"], True), (["evaluate"], False), (["mima"], False)]
)
def test_results_are_published_by_a_run_that_brings_them_up_to_date(
    monkeypatch: pytest.MonkeyPatch, targets: list[str] | None, published: bool
) -> None:
    published_parts: list[str] = []
    monkeypatch.setattr(pipeline, "_run_stages", lambda *_: ["base"])
    monkeypatch.setattr(pipeline, "publish_report", lambda _: published_parts.append("report"))
    monkeypatch.setattr(pipeline, "publish_results", lambda _: published_parts.append("results"))
    assert pipeline.run_project(ROOT, False, targets) == ["base"]
    assert published_parts == (["report", "results"] if published else [])
