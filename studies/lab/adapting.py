"""AdaMerging for studies: coefficients learned by entropy, which asks examples for predictions and never for labels."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from mergeflow.evaluation.adamerging import entropy_gradient
from mergeflow.merging import MethodCall, configure, prepare
from mergeflow.merging.learned.adamerging import Learned, learn
from studies.lab.inputs import Laboratory, State, mean_accuracy

Direction = Literal["task_vectors", "cart"]
Granularity = Literal["task", "layer"]
NOT_WORSE = -0.2  # points, of C4 in both studies: one test image in 500
CART_START = 1.0  # λ of CART where AdaMerging starts from it, as in its paper, at the rank ratio 0.08
Split = Literal["test", "validation"]
Watch = Callable[[int, Mapping[str, Tensor]], None]


@dataclass(frozen=True)
class Adaptation:
    """One way of adapting.

    Attributes:
        on: The directions that the coefficients multiply: task vectors on θ0, or CART's on the mean.
        granularity: One coefficient per expert, or per expert and tensor.
        images: The split whose images are seen, without labels.
        init: First value of every coefficient: the scale of the static merge that it starts from.
        lr: Adam's learning rate.
        steps: Steps of Adam.
        batch_size: Images per task and step.
        rank_ratio: Of CART's directions.
        seed: Of the batches.
    """

    on: Direction
    granularity: Granularity
    images: Split
    init: float
    lr: float
    steps: int = 80
    batch_size: int = 16
    rank_ratio: float = 0.08
    seed: int = 0

    @property
    def call(self) -> MethodCall:
        """The merge method and its arguments."""
        names = ("on", "granularity", "init", "lr", "steps", "rank_ratio")
        return configure("adamerging", {name: getattr(self, name) for name in names})

    @property
    def static(self) -> MethodCall:
        """The static merge that it starts from."""
        if self.on == "cart":
            return configure("cart", {"rank_ratio": self.rank_ratio, "scale": self.init})
        return configure("task_arithmetic", {"scale": self.init})


@dataclass(frozen=True)
class Adapted:
    """An adapted merge.

    Attributes:
        state: The merged model.
        learned: Its coefficients, and the course of loss and coefficients.
        seconds: Wall time per step, the mean.
    """

    state: State
    learned: Learned
    seconds: float


def adapt(
    inputs: Laboratory, experts: Mapping[str, Mapping[str, Tensor]], plan: Adaptation, watch: Watch | None = None
) -> Adapted:
    """Learn the coefficients on the images of the study's tasks, and merge with them.

    Args:
        inputs: Base, encoder, images and heads; its tasks are those adapted to.
        experts: State dicts by task, in memory or lazy.
        plan: How.
        watch: Shown every step's merged model before the step is taken: (step, state).

    Raises:
        MergeflowError: A task without images, experts that do not fit, or an entropy that is not finite.
    """
    learned, seconds = learn_on(inputs, experts, plan, watch)
    data = {"coefficients": learned.coefficients}
    state = prepare(plan.call, inputs.base, experts, data=data, device=str(inputs.device)).at(1.0)
    return Adapted(state, learned, seconds)


def choose_rate(
    inputs: Laboratory,
    experts: Mapping[str, Mapping[str, Tensor]],
    plan: Adaptation,
    rates: Sequence[float],
    every: int,
) -> list[dict[str, Any]]:
    """Adapt with every learning rate on validation images; return a row for each, the best one first.

    The rate is the one with the highest accuracy on validation after all steps: labels of validation choose among the
    runs, and adapt none of them. Test is not there to be read.

    Args:
        inputs: the study's.
        experts: State dicts by task, in memory or lazy.
        plan: how, but for the rate and the images.
        rates: those tried.
        every: steps between two looks at the course.

    Returns:
        `lr`, `accuracy` after all steps in %, and `course`: step → validation accuracy in %.
    """
    blind, rows = inputs.blind(), []
    for rate in rates:
        course: dict[int, float] = {}

        def watch(step: int, state: Mapping[str, Tensor], course: dict[int, float] = course) -> None:
            if step % every == 0:
                course[step] = mean_accuracy(blind.accuracy(dict(state), "validation"))

        made = adapt(blind, experts, replace(plan, lr=rate, images="validation"), watch)
        course[plan.steps] = mean_accuracy(blind.accuracy(made.state, "validation"))
        rows.append({"lr": rate, "accuracy": course[plan.steps], "course": course})
    return sorted(rows, key=lambda row: -float(row["accuracy"]))


def learn_on(
    inputs: Laboratory, experts: Mapping[str, Mapping[str, Tensor]], plan: Adaptation, watch: Watch | None = None
) -> tuple[Learned, float]:
    """Learn the coefficients as `adapt` does, without merging with them.

    Args: As of `adapt`.

    Returns:
        The coefficients with their course, and the mean seconds of a step without what `watch` took.
    """
    tasks, spent = inputs.examples(plan.images), 0.0

    def loss(state: dict[str, Tensor], step: int) -> tuple[float, Mapping[str, Tensor]]:
        nonlocal spent
        if watch is not None:
            start = time.perf_counter()
            watch(step, state)
            spent += time.perf_counter() - start
        return entropy_gradient(inputs.model, tasks, state, plan.batch_size, plan.seed, step)

    start = time.perf_counter()
    learned = learn(plan.call, inputs.base, experts, loss, device=str(inputs.device), scratch=inputs.io.scratch)
    return learned, (time.perf_counter() - start - spent) / max(plan.steps, 1)
