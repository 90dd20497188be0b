"""docs/merge-tutorial.md: its code runs, from top to bottom."""

import re
from pathlib import Path

import pytest
import torch

from mergeflow.merging import configure, prepare

PAGE = (Path(__file__).parents[2] / "docs/merge-tutorial.md").read_text().partition("## In Python\n")[2]


def test_the_pages_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)
    assert len(blocks) == 3
    names: dict[str, object] = {}
    for text in blocks:
        exec(text, names)
    assert Path("merged.safetensors").exists()


def test_modules_and_names_give_the_bits_of_state_dicts_and_calls() -> None:
    base, first, two = (torch.nn.Linear(6, 5) for _ in range(3))
    states = {"one": first.state_dict(), "two": two.state_dict()}
    plain = prepare(configure("ties", {"keep": 0.4}), base.state_dict(), states).at(0.7)
    before = {name: value.clone() for name, value in base.state_dict().items()}
    merged = prepare("ties", base, {"one": first, "two": two}, keep=0.4).at(0.7)
    assert all(torch.equal(merged[name], plain[name]) and not merged[name].requires_grad for name in plain)
    assert all(torch.equal(before[name], value) for name, value in base.state_dict().items())


def test_a_merge_may_be_loaded_into_the_base_before_the_next_scale() -> None:
    base, expert = torch.nn.Linear(6, 5), torch.nn.Linear(6, 5)
    direction = prepare("task_arithmetic", base, {"one": expert})
    first = direction.at(0.5)
    for scale in (2.0, 1.0):
        base.load_state_dict(direction.at(scale))
    assert all(torch.equal(value, first[name]) for name, value in direction.at(0.5).items())
