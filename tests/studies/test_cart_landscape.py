"""Study `cart_landscape`, on a small laboratory and on made-up rows."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from studies.lab.inputs import Laboratory
from studies.old.judging.cart import of_cart_landscape
from studies.old.judging.pieces import grouped
from studies.old.papers.cart_landscape import study as cart_landscape
from studies.old.papers.cart_landscape.results import _closer, findings
from studies.old.papers.cart_landscape.seed import Seed, total
from studies.old.papers.cart_landscape.study import Model, Site
from studies.old.results import StudyResult
from studies.old.rows import Row, picked
from tests.studies.small_lab import run_study, study_io
from tests.studies.toy_lab import SEEDS, WrongTest

SMALL = {
    "tasks": 3,
    "images": 6,
    "ranks": [0.02, 0.04, 0.16],
    "scales": [1.0, 2.0],
    "additions": [0.3, 1.0],
    "size": 3,
    "near": 3,
}


@pytest.fixture(scope="module")
def io(many_lab: Path, tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    return study_io(many_lab, "cart_landscape", tmp_path_factory.mktemp("cart_landscape"), **SMALL)


@pytest.fixture(scope="module")
def site(io) -> Site:  # type: ignore[no-untyped-def]
    inputs = Laboratory(io)
    options = cart_landscape.DECLARED.chosen(io)
    return Site(inputs.first(3), options, 0)


@pytest.mark.slow
def test_the_study_covers_paths_tasks_and_fits(io) -> None:  # type: ignore[no-untyped-def]
    cart_landscape.run(io)
    folder = io.scratch / "building/outputs/studies/cart_landscape"
    assert {path.stem for path in folder.glob("*.svg")} == {"multi_task", "tasks", "basins", "losses"}
    result = StudyResult.read(folder)
    models, ranks, _, tasks, fits = result.tables
    assert len(models.rows) == 7
    assert [row["k / full"] for row in ranks.rows] == ["0", "0.02", "0.04", "0.08", "0.16", "1"]
    assert [row["task"] for row in tasks.rows] == ["red", "blue", "grey"]
    assert len(fits.rows) == 3
    assert of_cart_landscape(result.rows) == result.findings
    assert {len(picked(result.rows, part=part, seed=0)) for part in ("test", "fits", "basins")} == {6 * 3, 3 * 4, 3 * 5}
    drawn = grouped(picked(result.rows, part="grid"), "plane", "task")
    assert set(drawn) == {("paths", task) for task in ("red", "blue", "grey")} | {
        (task, task) for task in ("red", "blue", "grey")
    }
    assert {len({(row["x"], row["y"]) for row in own}) for own in drawn.values()} == {3 * 3}


def test_paths_start_and_end_where_they_should(site: Site) -> None:
    average, base = site.state(Model("average")), site.inputs.base
    for ends, meant in (
        ((Model("cart", 2.0, 0.0), Model("cart", 2.0, 1.0), Model("task_arithmetic", 1 / 3)), average),
        ((Model("low_rank", 0.3, 0.0),), base),
        ((Model("low_rank", 0.3, 1.0),), site.state(Model("task_arithmetic", 0.3))),
    ):
        for model in ends:
            for name, tensor in site.state(model).items():
                np.testing.assert_allclose(tensor, meant[name], atol=2e-5)


def test_the_path_leaves_the_average_in_between(site: Site) -> None:
    average = site.state(Model("average"))
    middle = site.state(Model("cart", 1.0, 0.08))
    assert max(float((middle[name] - average[name]).abs().max()) for name in average) > 1e-4


def made_up(cart: list[float], low_rank: list[float], additions: list[float], seed: int = 0) -> Row:
    """Three ranks between k = 0 and full; loss of one task each, places on a square."""
    square, ranks = [(0.0, 0.0), (1.0, 0.0), (1.0, 1.0), (0.0, 1.0), (0.0, 0.0)], [0.0, 0.04, 0.08, 0.5, 1.0]

    def model(kind: str, loss: float, away: float = 1.0, **made: Any) -> Row:
        fields = {"scale": None, "rank": None, "task": None, "place": (0.0, 0.0), "off": 0.1} | made
        return {"kind": kind, "losses": {"a": loss, "b": loss}, "away": away, **fields}

    models = [model("base", 3.0), model("average", cart[0], 0.0), *(model("expert", 0.1, task=t) for t in "ab")]
    for scale, loss in zip((0.25, 0.5, 1.0), additions, strict=True):
        models.append(model("task_arithmetic", loss, abs(scale - 0.5), scale=scale))
    for rank, place, ours, theirs in zip(ranks, square, cart, low_rank, strict=True):
        models.append(model("cart", ours, float(0 < rank < 1), scale=1.0, rank=rank, place=place))
        models += [model("low_rank", theirs, scale=s, rank=rank) for s in (0.25, 0.5, 1.0)]
    best = min(zip(additions, (0.25, 0.5, 1.0), strict=True))[1]
    return {"seed": seed, "tasks": ["a", "b"], "addition": best, "models": models}


def test_findings_follow_the_numbers() -> None:
    good = [made_up([2.0, 1.5, 1.0, 1.5, 2.0], [3.0, 2.5, 2.0, 1.9, 1.8], [1.8, 2.0, 5.0], seed) for seed in range(3)]
    found = findings(good)
    assert [finding.holds for finding in found] == [True] * 5
    assert "100 ± 0 %" in found[-1].measured
    bad = [made_up([1.0, 1.5, 2.0, 1.5, 1.0], [3.0, 2.5, 2.0, 0.9, 0.8], [0.8, 1.0, 0.9], seed) for seed in range(3)]
    assert [finding.holds for finding in findings(bad)] == [False, True, False, False, False]


def test_a_path_that_does_not_return_is_told() -> None:
    row = made_up([2.0, 1.5, 1.0, 1.5, 2.0], [3.0, 2.5, 2.0, 1.9, 1.8], [1.8, 2.0, 5.0])
    Seed(row).path("cart", 1.0)[-1]["away"] = 0.2
    assert findings([row] * 3)[0].holds is False
    assert total(Seed(row).lowest()) == 2.0


HIGH, RISING = [3.0, 2.5, 2.0, 1.9, 1.8], [1.8, 2.0, 5.0]


def test_every_margin_is_the_one_that_is_written() -> None:
    def verdict(number: int, cart: list[float], low_rank: list[float] = HIGH, additions: list[float] = RISING) -> Any:
        return findings([made_up(cart, low_rank, additions, seed) for seed in range(3)])[number].holds

    assert [verdict(0, [2.0, 2.0, lowest, 2.0, 2.0]) for lowest in (1.949, 1.951)] == [True, False]
    assert verdict(0, [2.0, 1.0, 1.96, 2.0, 2.0]) is False, "8 % is judged as well as the lowest point"
    assert [verdict(2, [2.0, 2.0, lowest, 2.0, 2.0]) for lowest in (1.799, 1.801)] == [True, False]
    low_rank_starts_lower = [1.0, 1.0, 1.0, 1.0, 1.8]
    assert verdict(2, [2.0, 2.0, 1.7, 2.0, 2.0], low_rank_starts_lower) is True
    assert [verdict(3, [2.0] * 5, additions=[1.8, 2.0, last]) for last in (2.001, 1.999)] == [True, False]


@pytest.mark.parametrize(("width", "round_enough"), [(0.26, True), (0.24, False)])
def test_a_loop_is_nearer_to_a_circle_than_to_a_line(width: float, round_enough: bool) -> None:
    """A rectangle of sides 1 and w has the roundness π w / (1 + w)², half where w is about 0.25."""
    row = made_up([2.0, 1.5, 1.0, 1.5, 2.0], HIGH, RISING)
    for one in Seed(row).path("cart", 1.0):
        one["place"] = (one["place"][0], width * one["place"][1])
    assert findings([row] * 3)[1].holds is round_enough


def test_one_seed_whose_path_strays_is_enough() -> None:
    cart = [2.0, 1.5, 1.0, 1.5, 2.0]
    rows = [made_up(cart, HIGH, RISING, seed) for seed in range(3)]
    Seed(rows[1]).path("cart", 1.0)[0]["away"] = 0.002
    assert [finding.holds for finding in findings(rows)] == [False, True, True, True, True]
    rows = [made_up(cart, HIGH, RISING, seed) for seed in range(3)]
    Seed(rows[2]).one("task_arithmetic", 0.5)["away"] = 0.002
    assert [finding.holds for finding in findings(rows)] == [True, True, True, False, True]


def test_most_tasks_are_half_of_them_or_more() -> None:
    row = made_up([2.0, 1.5, 1.0, 1.5, 2.0], HIGH, RISING)
    cart, addition = (Seed(row).named(name)["losses"] for name in ("cart", "task_arithmetic"))
    row["tasks"] = list("abcde")
    for lower, holds in ((3, True), (2, False)):
        cart.update({task: float(number >= lower) for number, task in enumerate("abcde")})
        addition.update(dict.fromkeys("abcde", 0.5))
        assert _closer([row] * 3).holds is holds


NETS = {
    "tasks": 3,
    "images": 100,
    "ranks": [0.05, 0.16, 0.32],
    "scales": [1.0],
    "additions": [0.2, 1.0, 2.0],
    "size": 3,
    "near": 3,
}


@pytest.mark.slow
def test_small_nets_show_what_the_paper_shows(toy_experts: Path, tmp_path: Path) -> None:
    """C8: CART's path leaves the average, passes lower loss and returns; task arithmetic leaves the basin for good."""
    every = StudyResult.read(run_study(toy_experts, "cart_landscape", tmp_path, **NETS)).rows
    rows = picked(every, part="models")
    for seed in SEEDS:
        own = [row for row in rows if row["seed"] == seed]

        def loss(kind: str, scale: float | None = None, rank: float | None = None, own: list[Row] = own) -> float:
            return sum(r["loss"] for r in own if (r["kind"], r["scale"], r["rank"]) == (kind, scale, rank))

        average = loss("average")
        assert loss("cart", 1.0, 0.0) == pytest.approx(average, abs=1e-5)
        assert loss("cart", 1.0, 1.0) == pytest.approx(average, abs=1e-5)
        assert min(loss("cart", 1.0, rank) for rank in (0.05, 0.08, 0.16)) < average - 0.02
        assert loss("task_arithmetic", 1 / 3) == pytest.approx(average, abs=1e-5)
        assert loss("task_arithmetic", 2.0) > loss("task_arithmetic", 1.0) > average + 1
        experts = sum(row["loss"] for row in own if row["kind"] == "expert" and row["expert"] == row["task"])
        assert experts < average / 3
        away = {r["rank"]: r["away"] for r in own if (r["kind"], r["scale"]) == ("cart", 1.0)}
        assert max(away[0.0], away[1.0]) < 1e-4 < 0.1 < away[0.08]


def test_no_loss_on_the_paths_and_no_scale_depends_on_test(toy_experts: Path, tmp_path: Path) -> None:
    io = study_io(toy_experts, "cart_landscape", tmp_path, **NETS)
    options = cart_landscape.DECLARED.chosen(io)
    right, wrong = (cart_landscape.measure(inputs.first(3), options, 0) for inputs in (Laboratory(io), WrongTest(io)))
    assert right["models"] == wrong["models"]
    assert right["addition"] == wrong["addition"]
    for name, found in right["test"].items():
        assert {task: 1 - value for task, value in wrong["test"][name]["accuracy"].items()} == pytest.approx(
            found["accuracy"]
        )
