"""What is printed at the end of a run."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from flows.status import grid_ends, print_summary
from mergeflow import layout
from mergeflow.errors import MergeflowError


def printed(root: Path, signs: float) -> str:
    rows = [
        {"name": name, "args": {}, "accuracy": {"signs": accuracy, "land": land}, "mean": 0.5, "normalised": 0.5}
        for name, accuracy, land in (("zero_shot", 0.6, 0.9), ("individual", signs, 0.95), ("average", 0.6, 0.9))
    ]
    path = root / layout.TEST
    path.parent.mkdir(parents=True, exist_ok=True)
    test = {"split": "test", "tasks": ["signs", "land"], "examples": {"signs": 9, "land": 9}, "winner": "average"}
    path.write_text(json.dumps({**test, "rows": rows}))
    (root / "params.yaml").write_text("tasks: {signs: 'imagefolder:signs', land: 'imagefolder:land'}\n")
    console = Console(width=200)
    with console.capture() as shown:
        print_summary(root, console)
    return shown.get()


@pytest.mark.parametrize("path", [layout.TEST, layout.SELECTION, layout.REGISTRATION])
@pytest.mark.parametrize("text", ["", "[]", '{"rows": [', "\xff"])
def test_a_damaged_document_is_named(tmp_path: Path, path: str, text: str) -> None:
    printed(tmp_path, 1.0)
    (tmp_path / path).write_text(text, encoding="latin-1")
    (tmp_path / "params.yaml").write_text("")
    with pytest.raises(MergeflowError, match=rf"{Path(path).name} is not what its stage wrote \(.+\): `mergeflow run`"):
        print_summary(tmp_path, Console(quiet=True))


def test_choices_in_another_encoding_are_named(tmp_path: Path) -> None:
    printed(tmp_path, 1.0)
    (tmp_path / "params.yaml").write_bytes(b"seed: 0\n# Fr\xfcchte\n")
    with pytest.raises(MergeflowError, match=r"params\.yaml is not UTF-8 text: byte 0xfc in line 2"):
        print_summary(tmp_path, Console(quiet=True))


@pytest.mark.parametrize("methods", [1, 4, 12])
@pytest.mark.parametrize("width", [40, 80])
def test_no_number_of_the_table_is_cut(tmp_path: Path, methods: int, width: int) -> None:
    printed(tmp_path, 1.0)
    test = json.loads((tmp_path / layout.TEST).read_text())
    row = test["rows"][1]
    test["rows"] += [{**row, "name": f"subspace_boosting_{k}"} for k in range(methods)]
    (tmp_path / layout.TEST).write_text(json.dumps(test | {"metrics": {"signs": "macro_f1"}}))
    console = Console(width=width)
    with console.capture() as shown:
        print_summary(tmp_path, console)
    assert "…" not in shown.get()
    assert shown.get().count("100.0") == 1 + methods


@pytest.mark.parametrize(("signs", "named"), [(0.2, True), (0.6, True), (0.7, False)])
def test_an_expert_that_is_no_better_than_its_base_is_named(tmp_path: Path, signs: float, named: bool) -> None:
    line = f"Experts no better than the base on test: signs ({100 * signs:.1f} against 60.0)."
    assert (line in printed(tmp_path, signs)) is named


def choose(root: Path, **methods: dict[str, object]) -> None:
    scores = {"accuracy": {"signs": 0.5}, "mean": 0.5, "normalised": 0.5}
    rest = {"recipe": {}, "fingerprint": "00", "candidates": 1, "validation": scores}
    chosen = {name: {**rest, **choice} for name, choice in methods.items()}
    path = root / layout.SELECTION
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"tasks": ["signs"], "winner": "cart", "individual": {"signs": 0.5}, "methods": chosen}))


def test_an_argument_at_the_end_of_its_grid_is_named_with_values_to_add(tmp_path: Path) -> None:
    chosen = {"args": {"scale": 0.4, "rank_ratio": 1.0}, "at_grid_edge": ["scale", "rank_ratio"]}
    choose(tmp_path, cart=chosen, ties={"args": {"keep": 0.2}, "at_grid_edge": []})
    grid = "{scale: [0.1, 0.2, 0.3, 0.4], rank_ratio: [0.25, 0.5, 1.0]}"
    (tmp_path / "params.yaml").write_text(f"sweep: {{cart: {grid}, ties: {{keep: [0.2]}}}}\n")
    assert list(grid_ends(tmp_path)) == [
        "cart scale 0.4 of 0.1 … 0.4; add 0.5, 0.6 to sweep.cart.scale",
        "cart rank_ratio 1.0 of 0.25 … 1.0",
    ]


def test_near_the_bound_of_an_argument_the_value_halfway_is_named(tmp_path: Path) -> None:
    choose(tmp_path, cart={"args": {"rank_ratio": 0.64}, "at_grid_edge": ["rank_ratio"]})
    (tmp_path / "params.yaml").write_text("sweep: {cart: {rank_ratio: [0.16, 0.32, 0.64]}}\n")
    assert list(grid_ends(tmp_path)) == [
        "cart rank_ratio 0.64 of 0.16 … 0.64; add 0.96 to sweep.cart.rank_ratio",
    ]


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ({"signs": "suite:pocket8", "land": "folder:land"}, "Embedded suite (signs): examples drawn"),
        ({"signs": "suite:pocket8", "land": "suite:pocket8"}, "Embedded suite: examples drawn"),
        ({"signs": "folder:signs", "land": "folder:land"}, None),
    ],
)
def test_only_drawn_tasks_are_not_to_be_compared(tmp_path: Path, sources: dict[str, str], expected: str | None) -> None:
    printed(tmp_path, 0.6)
    (tmp_path / "params.yaml").write_text(json.dumps({"tasks": sources}))
    console = Console(width=200)
    with console.capture() as shown:
        print_summary(tmp_path, console)
    assert (expected in shown.get()) if expected else ("Embedded" not in shown.get())
