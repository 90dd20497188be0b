"""Planes and principal components of models: geometry, the walk over a grid, valleys, paths; against scikit-learn."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.decomposition import PCA

from mergeflow.errors import MergeflowError
from mergeflow.evaluation import losses
from mergeflow.modalities.classification import Classification
from mergeflow.modalities.heads import Head
from mergeflow.modality import Network
from studies.theory import landscape
from studies.theory.landscape import (
    Grid,
    angle_between,
    centred_gram,
    cosines_from,
    distances,
    measure_grid,
    plane_through,
    principal_components,
    principal_coordinates,
    principal_plane,
    roundness,
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


# Principal components

SHAPES = {"conv": (3, 2, 2), "scalar": (), "none": (0, 4), "matrix": (5, 3)}


def models(count: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, State]:
    """Random models with different variances along different axes, one integer tensor, far from the origin."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"model {number}": {
            **{
                name: (7 + torch.randn(shape, generator=generator, dtype=torch.float64) * (1 + index)).to(dtype)
                for index, (name, shape) in enumerate(SHAPES.items())
            },
            "position_ids": torch.arange(4) + number,
        }
        for number in range(count)
    }


def matrix(states: dict[str, State]) -> np.ndarray:
    rows = [torch.cat([state[name].double().flatten() for name in SHAPES]) for state in states.values()]
    return torch.stack(rows).numpy()


@given(count=st.integers(3, 9), components=st.integers(1, 2), seed=st.integers(0, 10**6))
@settings(max_examples=25)
def test_equals_sklearn(count: int, components: int, seed: int) -> None:
    states = models(count, seed)
    projection = principal_components(states, components)
    pca = PCA(components, svd_solver="full").fit(matrix(states))
    expected = pca.transform(matrix(states))
    ours = np.array(list(projection.coordinates.values()))
    np.testing.assert_allclose(np.abs(ours), np.abs(expected), atol=1e-8)
    np.testing.assert_allclose(projection.explained, pca.explained_variance_ratio_, atol=1e-10)
    others = models(4, seed + 1)
    coordinates, off = projection.project(others)
    signs = np.sign((ours * expected).sum(axis=0))
    placed = pca.transform(matrix(others)) * signs
    np.testing.assert_allclose(np.array(list(coordinates.values())), placed, atol=1e-8)
    rest = matrix(others) - pca.inverse_transform(pca.transform(matrix(others)))
    np.testing.assert_allclose(list(off.values()), np.linalg.norm(rest, axis=1), atol=1e-6)


@given(seed=st.integers(0, 10**6), block=st.integers(1, 20))
@settings(max_examples=15)
def test_blocks_do_not_matter(seed: int, block: int) -> None:
    states = models(4, seed)
    whole = centred_gram(states)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(landscape, "_BLOCK", block)
        np.testing.assert_allclose(centred_gram(states), whole, rtol=1e-12, atol=1e-10)


def test_distances_and_cosines_are_those_of_the_whole_vectors() -> None:
    states = models(5, dtype=torch.float32)
    gram, rows = centred_gram(states), matrix(states)
    np.testing.assert_allclose(distances(gram), np.linalg.norm(rows[:, None] - rows[None], axis=2), atol=1e-6)
    moves = rows - rows[2]
    lengths = np.linalg.norm(moves, axis=1)
    expected = moves @ moves.T / np.where(lengths == 0, 1, lengths)[:, None] / np.where(lengths == 0, 1, lengths)[None]
    np.testing.assert_allclose(cosines_from(gram, 2), expected, atol=1e-9)


def test_components_are_orthonormal_models_and_rebuild_what_lies_on_the_plane() -> None:
    states = models(3)
    components = principal_components(states)
    centre, first, two = components.centre(), components.component(0), components.component(1)
    flat = [torch.cat([part[name].flatten() for name in SHAPES]) for part in (first, two)]
    inner = torch.stack(flat) @ torch.stack(flat).T
    torch.testing.assert_close(inner, torch.eye(2, dtype=torch.float64), atol=1e-12, rtol=0)
    assert "position_ids" in centre
    assert "position_ids" not in first
    for name, (x, y) in components.coordinates.items():  # three points always lie on a plane
        for key in SHAPES:
            torch.testing.assert_close(centre[key] + x * first[key] + y * two[key], states[name][key])


@given(count=st.integers(3, 8), more=st.integers(0, 4), seed=st.integers(0, 10**6))
@settings(max_examples=15)
def test_the_gram_matrix_is_enough_to_place_points_on_the_components_of_some(count: int, more: int, seed: int) -> None:
    states = models(count + more, seed)
    fitted = dict(list(states.items())[more:])  # the last ones
    projected = principal_coordinates(centred_gram(states), range(more, count + more))
    projection = principal_components(fitted)
    coordinates, off = projection.project(states)
    np.testing.assert_allclose(projected.places, list(coordinates.values()), atol=1e-8)
    np.testing.assert_allclose(projected.off, list(off.values()), atol=1e-5)
    np.testing.assert_allclose(projected.explained, projection.explained, atol=1e-12)


def test_half_precision_models_are_measured_in_float64() -> None:
    states = models(4, dtype=torch.bfloat16)
    expected = np.linalg.norm(matrix(states)[0] - matrix(states)[1])
    assert distances(centred_gram(states))[0, 1] == pytest.approx(expected, rel=1e-12)
    assert principal_components(states).component(0)["matrix"].dtype == torch.bfloat16


def test_faults_are_named() -> None:
    states = models(3)
    with pytest.raises(MergeflowError, match="3 models lie in 2 dimensions, but 3"):
        principal_components(states, 3)
    with pytest.raises(MergeflowError, match="no model"):
        centred_gram({})
    with pytest.raises(MergeflowError, match=r"'other' has tensor 'matrix' of shape \[2, 2\]"):
        principal_components(states).project({"other": {**states["model 0"], "matrix": torch.zeros(2, 2)}})


# Paths, and the losses along them

numbers = st.floats(-100, 100).map(lambda number: round(number, 3))


@given(st.integers(3, 40), st.floats(0.1, 10), numbers, numbers)
def test_a_regular_polygon_is_as_round_as_it_should_be(sides: int, radius: float, x: float, y: float) -> None:
    turns = 2 * np.pi * np.arange(sides) / sides
    path = [(x + radius * float(np.cos(t)), y + radius * float(np.sin(t))) for t in turns]
    assert roundness(path) == pytest.approx(np.pi / sides / np.tan(np.pi / sides), rel=1e-4)
    assert roundness(path[::-1]) == pytest.approx(roundness(path), rel=1e-4)


@given(st.lists(st.tuples(numbers, numbers), min_size=3, max_size=12))
def test_no_path_is_rounder_than_a_circle(path: list[tuple[float, float]]) -> None:
    assert 0 <= roundness(path) <= 1 + 1e-9


def test_the_plane_has_the_projection_s_coordinates() -> None:
    generator = torch.Generator().manual_seed(0)
    points = {str(number): {"w": torch.randn(4, 3, generator=generator), "ids": torch.arange(2)} for number in range(5)}
    components = principal_components(points)
    plane = principal_plane(components)
    for name, point in points.items():
        place, off = plane.coordinates(point)
        assert place == pytest.approx(tuple(components.coordinates[name]), abs=1e-5)
        assert plane.coordinates(plane.at(*place))[1] == pytest.approx(0, abs=1e-5)
        _, offs = components.project({"one": point})
        assert off == pytest.approx(offs["one"], abs=1e-5)


@given(st.integers(1, 7))
def test_losses_are_torch_s_whatever_the_batch(batch_size: int) -> None:
    generator = torch.Generator().manual_seed(1)
    images, labels = torch.randn(6, 3, generator=generator), torch.tensor([0, 1, 2, 2, 1, 0])
    weight = torch.randn(3, 3, generator=generator)
    data = Classification("t", images, labels, Head(weight, 2.0, ["a", "b", "c"]))
    expected = torch.nn.functional.cross_entropy(2 * images @ weight.T, labels)
    assert losses(Network(torch.nn.Identity()), {"t": data}, batch_size)["t"] == pytest.approx(
        float(expected), abs=1e-6
    )
