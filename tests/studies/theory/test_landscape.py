"""A plane of the weights: its geometry, the walk over a grid, and the valleys of surfaces that are known."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mergeflow.errors import MergeflowError
from studies.theory.landscape import (
    Grid,
    angle_between,
    measure_grid,
    plane_through,
    valley,
)

State = dict[str, torch.Tensor]


def model(seed: int, dtype: torch.dtype = torch.float32) -> State:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"matrix": (4, 3), "scalar": (), "none": (0,)}
    state = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    return {**state, "position_ids": torch.arange(3)}


def inner(a: State, b: State) -> float:
    return sum(float((a[name].double() * b[name].double()).sum()) for name in ("matrix", "scalar"))


@given(seed=st.integers(0, 10**6))
@settings(max_examples=20)
def test_plane_is_orthonormal_and_holds_its_three_models(seed: int) -> None:
    base, first, second = model(seed), model(seed + 1), model(seed + 2)
    plane = plane_through(base, first, second)
    assert inner(plane.u, plane.u) == pytest.approx(1, abs=1e-6)
    assert inner(plane.v, plane.v) == pytest.approx(1, abs=1e-6)
    assert inner(plane.u, plane.v) == pytest.approx(0, abs=1e-6)
    for state in (base, first, second):
        place, off = plane.coordinates(state)
        assert off < 1e-5
        for name, tensor in plane.at(*place).items():
            torch.testing.assert_close(tensor, state[name], atol=1e-5, rtol=0)
    assert plane.coordinates(base)[0] == pytest.approx((0, 0))
    x, y = plane.coordinates(first)[0]
    assert x > 0
    assert y == pytest.approx(0, abs=1e-5)


def test_a_model_off_the_plane_is_told_from_its_place_on_it() -> None:
    states = [{"w": torch.tensor(values)} for values in ([0.0, 0, 0], [2.0, 0, 0], [1.0, 3, 0], [4.0, 5, 6])]
    plane = plane_through(*states[:3])
    assert plane.coordinates(states[3]) == ((4.0, 5.0), 6.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_models_keep_their_type(dtype: torch.dtype) -> None:
    base, first, second = (model(seed, dtype) for seed in range(3))
    plane = plane_through(base, first, second)
    assert plane.u["matrix"].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    at = plane.at(*plane.coordinates(second)[0])
    assert at["matrix"].dtype == dtype
    torch.testing.assert_close(at["matrix"], second["matrix"])


def test_one_buffer_serves_the_whole_walk() -> None:
    plane = plane_through(model(0), model(1), model(2))
    seen: list[int] = []
    values: list[torch.Tensor] = []

    def evaluate(state: State) -> dict[str, float]:
        seen.append(state["matrix"].data_ptr())
        values.append(state["matrix"].clone())
        return {"one": float(state["scalar"]), "two": len(seen)}

    grid = Grid(np.array([0.0, 1.0, 2.0]), np.array([-1.0, 1.0]))
    grids = measure_grid(plane, grid, evaluate)
    assert len(set(seen)) == 1
    assert grids["two"].tolist() == [[1, 2, 3], [4, 5, 6]]
    torch.testing.assert_close(values[4], plane.at(1.0, 1.0)["matrix"])
    torch.testing.assert_close(plane.origin["matrix"], model(0)["matrix"])


def test_the_valleys_of_two_bowls_are_where_their_middles_are() -> None:
    grid = Grid.around([(-2.0, -2.0), (2.0, 2.0)], 41, 0.0)
    x, y = np.meshgrid(grid.xs, grid.ys)
    left, right = (valley((x - middle) ** 2 + y**2, grid, 0.25) for middle in (-0.5, 0.5))
    assert left.centre == pytest.approx((-0.5, 0), abs=1e-9)
    assert math.dist(left.centre, right.centre) == pytest.approx(1)
    assert left.overlap(left) == 1
    assert 0 < left.overlap(right) < 0.1
    assert valley((x + 0.5) ** 2 + y**2, grid, 4).overlap(valley((x - 0.5) ** 2 + y**2, grid, 4)) > 0.4


@pytest.mark.parametrize("factor", [0.0, 1.0, -2.0])
def test_models_on_one_line_span_no_plane(factor: float) -> None:
    base, first = model(0), model(1)
    second = {name: base[name] + factor * (first[name] - base[name]) for name in base}
    with pytest.raises(MergeflowError, match="one line"):
        plane_through(base, first, {**second, "position_ids": base["position_ids"]})
    with pytest.raises(MergeflowError, match="one line"):
        plane_through(base, base, first)


def test_angles() -> None:
    assert angle_between((1.0, 0.0), (1.0, 1.0)) == pytest.approx(45)
    assert angle_between((0.3, 0.1), (0.6, 0.2)) == pytest.approx(0, abs=1e-5)
    assert math.isnan(angle_between((0.0, 0.0), (1.0, 1.0)))
