"""The figures: the same bytes for the same data, whatever the thread; and small, large and odd runs."""

import json
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from .conftest import draw

FULL = {f"{name}.svg" for name in ("accuracy", "argument_curves", "cosines", "radar", "scale_curves", "training")}


@pytest.mark.slow
def test_all_figures_are_well_formed_and_speak_of_the_run(drawn):
    assert set(drawn) == FULL
    for svg in drawn.values():
        ElementTree.fromstring(svg)
    assert b"digits" in drawn["radar.svg"]
    assert b"rank_ratio" in drawn["argument_curves.svg"]
    assert b"chosen: " in drawn["scale_curves.svg"]


@pytest.mark.slow
def test_the_same_data_gives_the_same_bytes_in_any_thread(drawn, make_run, tmp_path):
    root = make_run()
    with ThreadPoolExecutor(2) as threads:
        together = list(threads.map(lambda number: draw(root, tmp_path / f"s{number}"), range(2)))
    assert together == [drawn, drawn]


@pytest.mark.slow
def test_no_global_setting_of_matplotlib_is_changed(make_run, tmp_path):
    import matplotlib

    before = dict(matplotlib.rcParams)
    draw(make_run(), tmp_path / "scratch")
    assert dict(matplotlib.rcParams) == before


def test_one_task_and_one_method_leave_out_what_cannot_be_drawn(make_run, tmp_path):
    made = draw(make_run(["digits"], {"average": {"scale": [1.0]}}), tmp_path / "scratch")
    assert set(made) == {"accuracy.svg", "training.svg"}


@pytest.mark.slow
def test_names_around_the_circle_point_away_from_it(make_run, tmp_path):
    sides = {"top": "middle", "right": "start", "low": "middle", "left_long_name": "end"}
    svg = ElementTree.fromstring(draw(make_run([*sides]), tmp_path / "scratch")["radar.svg"])
    styles = {text.text: text.get("style") for text in svg.iter("{http://www.w3.org/2000/svg}text")}
    assert all(f"text-anchor: {side};" in styles[task] for task, side in sides.items())


def test_every_series_that_dvc_plots_is_written_even_without_points(make_run, tmp_path):
    draw(make_run(["digits"], {"average": {"scale": [1.0]}}), tmp_path / "scratch")
    plots = yaml.safe_load((Path(__file__).parents[2] / "dvc.yaml").read_text())["plots"]
    files = {file for plot in plots for body in plot.values() for file in body["y"]}
    points = {file: json.loads((tmp_path / "scratch/building" / file).read_text()) for file in files}
    assert points.pop("outputs/results/series/arguments.json") == []
    assert all(points.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "grid",
    [
        {"t": [0.25, 0.5, 0.75]},
        {"keep": [0.1, 0.2], "trim": ["global", "tensor"], "scale": [0.5, 1.0]},
        {"scale": [-1.0, 0.0, 0.5, 1.0]},
        {"flag": [True, False], "scale": [1, 2]},
    ],
)
def test_methods_with_other_arguments_are_drawn(grid, make_run, tmp_path, monkeypatch):
    monkeypatch.setattr("math.log", lambda value: value)
    made = draw(make_run(["a", "b"], {"odd": grid}), tmp_path / "scratch")
    assert made["accuracy.svg"]
    assert ("scale_curves.svg" in made) == ("scale" in grid)


def test_dollar_signs_in_names_are_text(make_run, tmp_path):
    grid = {"matrices": [r"$\frac$", "<b>&"], "scale": [0.5, 1.0]}
    made = draw(make_run(["a", "b"], {"odd": grid}), tmp_path / "scratch")
    assert rb"$\frac$" in made["scale_curves.svg"]
    assert b"&lt;b&gt;&amp;" in made["scale_curves.svg"]


@pytest.mark.slow
def test_twenty_tasks_and_ten_methods_are_drawn(make_run, tmp_path):
    grids = {f"method_{number}": {"scale": [0.5, 1.0, 2.0]} for number in range(10)}
    assert "cosines.svg" in draw(make_run([f"task{n}" for n in range(20)], grids), tmp_path / "scratch")


def test_long_names_leave_room_for_the_curves(make_run, tmp_path):
    patterns = [f"visual.transformer.resblocks.{number}.attn.in_proj_weight and many more" for number in range(9)]
    grids = {"a_method_with_a_very_long_name_indeed_" * 2: {"matrices": patterns, "scale": [0.5, 1.0, 2.0]}}
    made = draw(make_run([f"task-{'x' * 80}-{number}" for number in range(4)], grids), tmp_path / "scratch")
    assert b"best 8 of 9" in made["scale_curves.svg"]


def test_curves_of_a_task_of_numbers_are_not_called_accuracy_and_cross_entropy(make_run, tmp_path):
    root = make_run(["mood", "stars", "ships"])
    path = root / "outputs/results/test.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"metrics": {"stars": "pearson"}}))
    made = draw(root, tmp_path / "scratch")
    assert b"nats" not in made["training.svg"]
    for figure in ("training", "accuracy", "radar"):
        assert b"stars (pearson)" in made[f"{figure}.svg"]
