"""Streamed principal components: against numpy and scikit-learn, in float64, whatever the shapes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.decomposition import PCA

from mergeflow.errors import MergeflowError
from studies.theory import landscape
from studies.theory.landscape import centred_gram, cosines_from, distances, principal_components, principal_coordinates

SHAPES = {"conv": (3, 2, 2), "scalar": (), "none": (0, 4), "matrix": (5, 3)}
State = dict[str, torch.Tensor]


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
