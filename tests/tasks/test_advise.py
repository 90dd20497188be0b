"""Stage `advise`: what it writes of a toy project, and that nothing that is wrong with the experts ends the run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mergeflow.advice_document import ADVICE
from mergeflow.analysis.provable.advising import advise
from tests.toy_project import make_toy_project, run_pipeline


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy project whose experts are trained; tests that break one put it back."""
    folder = make_toy_project(tmp_path_factory.mktemp("advised") / "project")
    run_pipeline(folder, ("prepare", "base", "multitask", "finetune"))
    return folder


def advised(project: Path) -> dict[str, Any]:
    run_pipeline(project, ("advise",))
    found: dict[str, Any] = json.loads((project / ADVICE).read_text())
    return found


def test_it_is_whole_and_the_same_each_time(project: Path) -> None:
    first = advised(project)
    assert first["remarks"] == []
    assert first["experts"] == first["answered"] == ["left", "right"]
    assert first["changes"][0][1] == first["changes"][1][0]
    assert advised(project) == first


def test_a_broken_expert_is_a_remark_and_the_run_goes_on(project: Path) -> None:
    path = project / "outputs/experts/right/model.safetensors"
    kept = path.read_bytes()
    state = load_file(path)
    name = next(name for name, value in state.items() if value.ndim == 2)
    try:
        save_file(state | {name: torch.full_like(state[name], torch.nan)}, path)
        found = advised(project)
        assert [remark.split(":")[0] for remark in found["remarks"]] == [
            "the task vector of 'right'",
            "α̂ of 'right'",
            "α̂, and with it the verdicts",
        ]
        assert name in found["remarks"][0]
        assert found["scales"] is found["pairs"] is None
        path.write_bytes(kept[: len(kept) // 2])
        assert advised(project)["remarks"][0].startswith("advice: not computed. ")
    finally:
        path.write_bytes(kept)


def test_an_expert_that_never_moved_is_named(project: Path) -> None:
    path = project / "outputs/experts/right/model.safetensors"
    kept = path.read_bytes()
    try:
        path.write_bytes((project / "outputs/base/model.safetensors").read_bytes())
        found = advised(project)
        assert found["remarks"][0] == "'right' has the base's weights: its task vector is zero."
        assert len(found["scales"]) == 4
    finally:
        path.write_bytes(kept)


def test_of_more_than_eight_experts_the_range_comes_with_a_warning() -> None:
    """In the study adviser_suites the best λ of 14 and 20 tasks lay below the range."""
    base = {"w": torch.zeros(9)}
    experts = {f"task{index}": {"w": one} for index, one in enumerate(torch.eye(9))}
    (told,) = advise(base, experts).remarks
    assert "too large for 9 experts" in told
    assert "half of the smallest" in told
    eight = dict(list(experts.items())[:8])
    assert advise(base, eight).remarks == []
