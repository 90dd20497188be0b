"""What is printed at the end of a run."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from flows.summary import print_summary
from mergeflow import layout


def printed(root: Path, signs: float) -> str:
    rows = [
        {"name": name, "args": {}, "accuracy": {"signs": one, "land": 0.9}, "mean": 0.5, "normalised": 0.5}
        for name, one in (("zero_shot", 0.6), ("individual", signs), ("average", 0.6))
    ]
    path = root / layout.TEST
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"tasks": ["signs", "land"], "rows": rows, "winner": "average"}))
    (root / "params.yaml").write_text("tasks: {signs: 'imagefolder:signs', land: 'imagefolder:land'}\n")
    console = Console(width=200)
    with console.capture() as shown:
        print_summary(root, console)
    return shown.get()


@pytest.mark.parametrize(("signs", "told"), [(0.2, True), (0.6, False)])
def test_an_expert_that_is_worse_than_its_base_is_named(tmp_path: Path, signs: float, told: bool) -> None:
    line = "Experts worse than the base on test: signs (20.0 against 60.0)."
    assert (line in printed(tmp_path, signs)) is told
