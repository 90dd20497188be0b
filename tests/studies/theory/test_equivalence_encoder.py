"""A CLIP image encoder as losses of one float64 vector: the same losses, one epoch of experts is one joint step."""

import copy

import pytest
import torch
from torch import Tensor

from mergeflow.modalities.classification import Classification
from mergeflow.modalities.vision.models import ImageEncoder, build_head, load_clip
from mergeflow.modality import Network
from mergeflow.training import FineTuneSettings
from mergeflow.training import fine_tune as train
from studies.theory.gradient_descent import Problem, gradient, image_problem, merge
from suites.pocket import get_suite


@pytest.fixture(scope="module")
def encoder_and_tasks() -> tuple[ImageEncoder, list[Classification]]:
    clip = load_clip("pocket-clip", "pocket8")
    tasks = []
    for name in ("signs", "land"):
        task = get_suite("pocket8").tasks[name]
        pairs = [task.sample("train", index) for index in range(3)]
        tasks.append(
            Classification(
                name,
                torch.stack([torch.from_numpy(image) for image, _ in pairs]),
                torch.tensor([label for _, label in pairs]),
                build_head(clip, task.class_names, task.templates),
            )
        )
    return ImageEncoder(clip), tasks


@pytest.fixture(scope="module")
def problem(encoder_and_tasks: tuple[ImageEncoder, list[Classification]]) -> Problem:
    return image_problem(*encoder_and_tasks)


def test_the_losses_are_those_of_the_image_encoder(encoder_and_tasks, problem) -> None:
    encoder, tasks = encoder_and_tasks
    start, losses = problem.start, problem.losses
    before = {name: tensor.clone() for name, tensor in Network(encoder).state().items()}
    for task, loss in zip(tasks, losses, strict=True):
        reference = task.loss(Network(encoder), torch.arange(len(task)))
        reference.backward()
        torch.testing.assert_close(loss(start).float(), reference.detach(), rtol=1e-5, atol=1e-6)
        slope = torch.cat([parameter.grad.flatten() for parameter in encoder.visual.parameters()])
        torch.testing.assert_close(gradient(loss, start).float(), slope, rtol=1e-3, atol=1e-4)
        encoder.zero_grad()
    assert all(torch.equal(tensor, before[name]) for name, tensor in Network(encoder).state().items())


def test_the_regime_full_batch_gd_makes_such_task_vectors(encoder_and_tasks, problem, tmp_path) -> None:
    """The project's own experts, in float32: −η∇L to float32's rounding, and their sum is one joint step."""
    encoder, tasks = encoder_and_tasks
    start, losses = problem.start, problem.losses
    rate = 1e-2
    settings = FineTuneSettings(regime="full_batch_gd", epochs=1, batch_size=2, learning_rate=rate)

    joint = FineTuneSettings(
        regime="joint", steps=1, optimiser="sgd", weight_decay=0.0, warmup=0.0, schedule="constant", gradient_clip=0.0
    )

    def trained(data: list[Classification], step: float, name: str) -> Tensor:
        expert = copy.deepcopy(encoder)
        chosen = (settings if len(data) == 1 else joint).model_copy(update={"learning_rate": step})
        train(Network(expert), data, chosen, 0, tmp_path / name, lambda: 0.0)
        return torch.cat([parameter.detach().flatten() for parameter in expert.visual.parameters()]).double() - start

    vectors = [trained([task], rate, str(number)) for number, task in enumerate(tasks)]
    for vector, loss in zip(vectors, losses, strict=True):
        torch.testing.assert_close(vector, -rate * gradient(loss, start), rtol=1e-3, atol=5e-7)
    together = trained(tasks, 0.7 * rate, "joint")
    torch.testing.assert_close(merge(vectors, 0.7), together, rtol=1e-3, atol=1e-6)
