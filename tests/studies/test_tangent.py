"""Linearised experts in the tangent space of the base: features to the derivative, losses of what was trained."""

from pathlib import Path

import pytest
import torch

from studies.lab.inputs import Laboratory
from studies.lab.tuning import task_vector
from studies.mergeability import TangentFeatures, in_tangent_space
from tests.studies.small_lab import study_io

SMALL = {"runs": {"linearised": "linearised"}, "rounds": [1, 4], "images": 64}


@pytest.fixture
def inputs(toy_lab: Path, tmp_path: Path) -> Laboratory:
    return Laboratory(study_io(toy_lab, "mergeability", tmp_path, **SMALL))


def test_an_expert_reaches_the_accuracy_that_its_training_ended_with(inputs: Laboratory) -> None:
    linear, run = in_tangent_space(inputs), inputs.run("linearised")
    for task in inputs.tasks:
        trained = run.training(0, task)
        state = run.expert(0, task)
        assert linear.accuracy(state, "validation", [task])[task] == pytest.approx(trained["validation_accuracy"])
        assert inputs.accuracy(state, "validation", [task])[task] == pytest.approx(
            trained["validation_accuracy_nonlinear"]
        )


def test_features_are_those_of_the_first_order_expansion(inputs: Laboratory) -> None:
    linear, rows, step = in_tangent_space(inputs), torch.arange(5), 1e-3
    data, expert = inputs.examples("validation")["north"], inputs.run("linearised").expert(0, "north")
    linear.model.load(expert)
    layers = [name for name, part in inputs.model.module.named_modules() if isinstance(part, torch.nn.ReLU)]
    features = TangentFeatures(data).features(linear.model, rows, layers)
    tau = task_vector(expert, inputs.base)
    near = []
    for sign in (1, -1):
        inputs.model.load({name: value + sign * step * tau[name] for name, value in inputs.base.items()})
        near.append(data.features(inputs.model, rows, layers))
    inputs.model.load(inputs.base)
    origin = data.features(inputs.model, rows, layers)
    for layer in layers:
        expected = origin[layer] + (near[0][layer] - near[1][layer]) / (2 * step)
        torch.testing.assert_close(features[layer], expected.flatten(1), atol=2e-3, rtol=2e-3)


def test_what_was_opened_before_is_left_alone(inputs: Laboratory) -> None:
    state = inputs.run("linearised").expert(0, "north")
    before = inputs.accuracy(state, "test")
    linear = in_tangent_space(inputs)
    assert linear.accuracy(state, "test") != before
    assert inputs.accuracy(state, "test") == before
    assert all(part.requires_grad for part in inputs.model.module.parameters())
