"""Paths on a plane of principal components, and the losses along them."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mergeflow.evaluation import losses
from mergeflow.modalities.classification import Classification
from mergeflow.modalities.heads import Head
from mergeflow.modality import Network
from studies.theory.landscape import principal_components, principal_plane, roundness

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
