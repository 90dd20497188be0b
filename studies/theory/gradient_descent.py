"""Full-batch gradient descent on losses of one flat parameter vector, and products with their Hessians.

Models and examples as losses of one flat float64 vector, and their training by the training loop.

The nets of Theorem 2, which are those of the modality `toy` without heads; and small random tasks for them.

What the theorems are measured on: small feed-forward nets, and a project's model, in float64.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import normalize

from mergeflow.errors import MergeflowError, unknown_name
from mergeflow.modalities.classification import Classification
from mergeflow.modalities.toy.modality import ACTIVATIONS, FeedForward
from mergeflow.modalities.toy.preparation import open_toy
from mergeflow.modalities.vision.models import ImageEncoder
from mergeflow.modality import Model, Network
from mergeflow.training import FineTuneSettings, fine_tune

Loss: TypeAlias = Callable[[Tensor], Tensor]
"""A mean loss over all data of a task, a scalar, as a function of the flat parameters [P]."""


def gradient(loss: Loss, point: Tensor) -> Tensor:
    """Return ∇L(θ), [P].

    Example:
        >>> gradient(lambda theta: (theta**3).sum(), torch.tensor([1.0, 2.0])).tolist()
        [3.0, 12.0]
    """
    leaf = point.detach().clone().requires_grad_()
    (slope,) = torch.autograd.grad(loss(leaf), leaf)
    return slope


def hessian_vector(loss: Loss, point: Tensor, vector: Tensor) -> Tensor:
    """Return ∇²L(θ) v, [P], by differentiating ⟨∇L(θ), v⟩: twice the memory of a gradient, no matrix.

    Args:
        point: θ, [P].
        vector: v, [P].

    Example:
        >>> hessian_vector(lambda theta: (theta**3).sum(), torch.tensor([1.0, 2.0]), torch.tensor([1.0, 1.0])).tolist()
        [6.0, 12.0]
    """
    leaf = point.detach().clone().requires_grad_()
    (slope,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    (product,) = torch.autograd.grad(slope @ vector, leaf)
    return product


def hessian(loss: Loss, point: Tensor) -> Tensor:
    """Return ∇²L(θ), [P, P], all its rows in one batch; for small nets only.

    Example:
        >>> hessian(lambda theta: theta.prod(), torch.tensor([2.0, 3.0])).tolist()
        [[0.0, 1.0], [1.0, 0.0]]
    """
    leaf = point.detach().clone().requires_grad_()
    (slope,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    (rows,) = torch.autograd.grad(slope, leaf, torch.eye(len(point)).to(point), is_grads_batched=True)
    return rows


def spectral_norm(loss: Loss, point: Tensor, products: int) -> float:
    """Return an estimate from below of ‖∇²L(θ)‖₂: power iteration with `products` Hessian-vector products.

    Args:
        point: θ, [P].

    Example:
        >>> round(spectral_norm(lambda theta: (theta**2 * torch.tensor([1.0, -3.0])).sum(), torch.zeros(2), 20), 4)
        6.0
    """
    vector = torch.randn(len(point), generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(point)
    for _ in range(products):
        vector = hessian_vector(loss, point, vector / vector.norm())
        if not vector.any():
            return 0.0
    return float(vector.norm())


def summed(losses: Sequence[Loss]) -> Loss:
    """Return the joint loss Σ_t L_t(θ)."""
    return lambda point: torch.stack([loss(point) for loss in losses]).sum()


def descend(loss: Loss, start: Tensor, step: float, epochs: int) -> list[Tensor]:
    r"""Run full-batch gradient descent; one epoch is one step.

    τ^(0) = 0,  τ^(e+1) = τ^(e) − η ∇L(θ0 + τ^(e)).

    The displacement is summed in a variable of its own: rounding is relative to τ and not to θ0, and differences of
    order η³ stay visible in float64 down to η = 1e-6.

    Args:
        loss: the loss; of the task, or `summed` of all tasks.
        start: θ0, [P].
        step: η > 0.

    Returns:
        The k + 1 displacements τ^(0), ..., τ^(k) from θ0; the last is the task vector.

    Raises:
        MergeflowError: the descent leaves the finite numbers.

    Example:
        >>> descend(lambda theta: (theta**2).sum() / 2, torch.tensor([1.0]), 0.5, 2)
        [tensor([0.]), tensor([-0.5000]), tensor([-0.7500])]

    Source: Zhou et al. 2025, On Task Vectors and Gradients, section 2.
    """
    moves = [torch.zeros_like(start)]
    for epoch in range(epochs):
        moves.append(moves[-1] - step * gradient(loss, start + moves[-1]))
        if not moves[-1].isfinite().all():
            raise MergeflowError(
                f"gradient descent with step {step:g} diverged in epoch {epoch + 1} of {epochs}: choose a smaller step."
            )
    return moves


def merge(vectors: Sequence[Tensor], scale: float) -> Tensor:
    """Return the displacement of task arithmetic, θ_TA − θ0 = α Σ_t τ_t.

    Args:
        vectors: T task vectors, each [P].

    Example:
        >>> merge([torch.tensor([1.0]), torch.tensor([3.0])], 0.5)
        tensor([2.])

    Source: Ilharco et al. 2023, Editing Models with Task Arithmetic.
    """
    return scale * torch.stack(list(vectors)).sum(dim=0)


_PARTS = 4  # micro-batches per epoch
_DESCENT = {
    "regime": "joint",
    "optimiser": "sgd",
    "weight_decay": 0.0,
    "warmup": 0.0,
    "schedule": "constant",
    "gradient_clip": 0.0,
}


def flat_weights(module: nn.Module) -> Tensor:
    """Return a module's parameters as one vector [P]."""
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def weights_at(module: nn.Module, point: Tensor) -> dict[str, Tensor]:
    """Return the parts of a flat vector [P] in the shapes and by the names of a module's parameters."""
    shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
    parts = point.split([shape.numel() for shape in shapes.values()])
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def flat_loss(module: nn.Module, examples: Classification) -> Loss:
    """Return the mean loss over all examples as a function of the module's flat weights.

    Attention takes the plain kernel, the only one with a second derivative.

    Args:
        module: whose weights vary; it stays as it is.

    Example:
        >>> module = nn.Linear(2, 3, bias=False)
        >>> loss = flat_loss(module, Classification("pets", torch.ones(4, 2), torch.tensor([0, 1, 2, 0])))
        >>> round(float(loss(torch.zeros(6))), 4)
        1.0986
    """
    rows = torch.arange(len(examples))

    def loss(point: Tensor) -> Tensor:
        weights = weights_at(module, point)
        at_point = replace(examples, encode=lambda called, inputs: functional_call(called, weights, (inputs,)))
        with sdpa_kernel(SDPBackend.MATH):
            return at_point.loss(Network(module), rows)

    return loss


def trained(module: nn.Module, tasks: Sequence[Classification], step: float, epochs: int) -> Tensor:
    """Return the flat weights θ^(k) after k epochs of full-batch descent on the sum of the tasks' losses, [P].

    The training loop makes them, as it makes a project's experts: SGD in place, gradients summed over micro-batches.
    `descend` computes the same in another way; that the two agree is measured, not assumed.

    Args:
        module: θ0; it stays as it is.
        tasks: one for an expert, several for a joint run.
    """
    whole = max(len(task) for task in tasks)
    settings = FineTuneSettings.model_validate(
        {**_DESCENT, "steps": epochs, "batch_size": whole, "accumulate": _PARTS, "learning_rate": step}
    )
    model = Network(deepcopy(module).requires_grad_())
    with TemporaryDirectory() as folder, sdpa_kernel(SDPBackend.MATH):
        fine_tune(model, tasks, settings, 0, Path(folder) / "state.pt", lambda: 0.0)
    return flat_weights(model.module)


# name: β = sup |φ'|, γ = sup |φ''| where it exists. All have φ(0) = 0.
SLOPES = {"tanh": (1.0, 4 / (3 * 3**0.5)), "relu": (1.0, 0.0), "linear": (1.0, 0.0)}


@dataclass(frozen=True)
class Net:
    r"""A depth-L net f(x) = W_L φ(W_{L−1} ... φ(W_1 x)), and what the theorem bounds of it at flat weights.

    Args:
        widths: D_0 (input), ..., D_L (classes); layer l has the weight W_l of shape [D_l, D_{l−1}].
        activation: a name of `SLOPES`.
        seed: of the weights, N(0, 2 / fan-in).

    Raises:
        MergeflowError: for an unknown activation.

    Source: Zhou et al. 2025, Theorem 2.
    """

    widths: tuple[int, ...]
    activation: str
    seed: int = 0

    def __post_init__(self) -> None:
        if self.activation not in SLOPES:
            raise unknown_name("activation", self.activation, SLOPES)

    @cached_property
    def module(self) -> FeedForward:
        """The net in float64, its last layer without activation."""
        return FeedForward(self.widths, self.activation, seed=self.seed, logits=True)

    @property
    def start(self) -> Tensor:
        """The drawn weights, [P]."""
        return flat_weights(self.module)

    @property
    def slopes(self) -> tuple[float, float]:
        """Return β ≥ |φ'| and γ ≥ |φ''|."""
        return SLOPES[self.activation]

    def switched(self, points: Sequence[Tensor], inputs: Tensor) -> int:
        """Count the (input, hidden unit) pairs whose pre-activation changes its sign between the points.

        A Taylor expansion of a ReLU net holds while none does: beyond a kink the gradient jumps.

        Args:
            points: flat weights, [P] each.
            inputs: [N, D_0].
        """
        sides = torch.stack([self._sides(point, inputs) for point in points])
        return int((sides != sides[0]).any(dim=0).sum())

    def spectral_norms(self, points: Sequence[Tensor]) -> list[float]:
        """Return s_l = max over the points, flat weights [P], of ‖W_l‖₂, for every layer."""
        norms = [[float(torch.linalg.matrix_norm(w, 2)) for w in self._matrices(point)] for point in points]
        return [max(layer) for layer in zip(*norms, strict=True)]

    def _matrices(self, point: Tensor) -> list[Tensor]:
        return [*weights_at(self.module, point).values()]

    def _sides(self, point: Tensor, inputs: Tensor) -> Tensor:
        sides = []
        for weight in self._matrices(point)[:-1]:
            inputs = inputs @ weight.T
            sides.append(inputs > 0)
            inputs = ACTIVATIONS[self.activation]()(inputs)
        return torch.cat(sides, dim=1)


def random_tasks(count: int, inputs: int, classes: int, examples: int, seed: int) -> list[Classification]:
    """Return `count` tasks of the source `toy:clouds` with float64 inputs [N, D], ‖x‖₂ ≤ 1, and labels [N].

    Every task has its own mean and its own teacher, so that the tasks' gradients differ.

    Args:
        inputs: D, the width of the inputs.
        examples: N, for each task.
    """
    place = f"clouds,inputs={inputs},classes={classes},train={examples},seed={seed}"
    tasks = []
    for number in range(1, count + 1):
        drawn = list(open_toy(f"task {number}", place, 0, Path()).splits["train"]())
        points = torch.stack([torch.from_numpy(example.read()) for example in drawn])
        labels = torch.tensor([example.label for example in drawn])
        tasks.append(Classification(f"task {number}", points / points.norm(dim=1).max(), labels))
    return tasks


@dataclass(frozen=True)
class Problem:
    """T tasks from one starting point. `step` is η > 0, `scale` α, with which the joint run has the step αη.

    Args:
        module: the model in float64, with the weights θ0.
        examples: of every task.
        net: the feed-forward net that `module` is, or None.
    """

    name: str
    module: nn.Module
    examples: tuple[Classification, ...]
    net: Net | None = None

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(task_examples.task for task_examples in self.examples)

    @cached_property
    def start(self) -> Tensor:
        """θ0, float64 [P]."""
        return flat_weights(self.module)

    @cached_property
    def losses(self) -> tuple[Loss, ...]:
        """Per task the mean loss over all its examples."""
        return tuple(flat_loss(self.module, task_examples) for task_examples in self.examples)

    def expert(self, task: int, step: float, epochs: int) -> Tensor:
        """Return θ_t^(k) of the task with this number as the training loop makes it, [P]."""
        return trained(self.module, self.examples[task : task + 1], step, epochs)

    def joint(self, step: float, epochs: int) -> Tensor:
        """Return θ_MT^(k) of the joint run as the training loop makes it, [P]."""
        return trained(self.module, self.examples, step, epochs)

    def joint_points(self, scale: float, step: float, count: int) -> list[Tensor]:
        """Return the joint iterates θ_MT^(0), ..., θ_MT^(count−1), each [P]."""
        return [self.start + move for move in descend(summed(self.losses), self.start, scale * step, count - 1)]

    def switched_units(self, scale: float, step: float, epochs: int) -> int:
        """Count ReLUs that switch side at any iterate but the last of the experts or the joint run; 0 if smooth."""
        if self.net is None or self.net.activation != "relu":
            return 0
        joint = self.joint_points(scale, step, epochs)
        count = 0
        for loss, task_examples in zip(self.losses, self.examples, strict=True):
            alone = [self.start + move for move in descend(loss, self.start, step, epochs - 1)]
            assert isinstance(task_examples.inputs, Tensor)
            count += self.net.switched([*joint, *alone], task_examples.inputs)
        return count


def feed_forward_problem(
    activation: str, widths: tuple[int, ...], tasks: int = 3, samples: int = 32, seed: int = 0, gain: float = 1.0
) -> Problem:
    """Return random tasks for a random net.

    Args:
        activation: of `nets.SLOPES`.
        widths: input width, hidden widths, number of classes.
        gain: factor on the initial weights; small ones make the spectral norms small.
    """
    net = Net(widths, activation, seed)
    module = deepcopy(net.module)
    with torch.no_grad():
        for weight in module.parameters():
            weight.mul_(gain)
    data = random_tasks(tasks, widths[0], widths[-1], samples, seed)
    return Problem(f"{activation} net", module, tuple(data), net)


class _Tower(nn.Module):
    """The image tower in float64, from normalised pixels to unit features; `ImageEncoder` rounds these to float32."""

    def __init__(self, encoder: ImageEncoder) -> None:
        super().__init__()
        self.visual = deepcopy(encoder.visual).double()

    def forward(self, pixels: Tensor) -> Tensor:
        return normalize(self.visual(pixels), dim=-1)


def image_problem(encoder: ImageEncoder, tasks: Sequence[Classification]) -> Problem:
    """Return an image encoder on tasks of images, all in float64.

    Args:
        encoder: the encoder; it stays as it is.
    """
    examples = tuple(
        Classification(task.task, encoder.normalised_pixels(task.inputs[:]).double(), task.labels, task.head)
        for task in tasks
    )
    return Problem("CLIP image encoder", _Tower(encoder), examples)


def model_problem(model: Model, tasks: Sequence[Classification]) -> Problem:
    """Return a project's model on examples of its tasks, all in float64: an image encoder, or any net of numbers.

    Args:
        model: the model; it stays as it is.
        tasks: T tasks, judged by a frozen head or by the net's own logits.

    Raises:
        MergeflowError: a task's head is trained beside the model, or its inputs are not one tensor.
    """
    moving = [task.task for task in tasks if task.head is not None and getattr(task.head, "trained", False)]
    if moving:
        raise MergeflowError(
            f"the heads of {', '.join(moving)} are trained beside the model, and the theorems are of a loss of the "
            "shared weights alone: name tasks whose heads are frozen."
        )
    if isinstance(model.module, ImageEncoder):
        return image_problem(model.module, tasks)
    module = deepcopy(model.module).double()
    examples = []
    for task in tasks:
        if not isinstance(task.inputs, Tensor) or not task.inputs.is_floating_point():
            raise MergeflowError(
                f"task '{task.task}': its inputs are not one tensor of numbers, which the theorems are measured on. "
                "Name no task there, and the study measures its random nets alone."
            )
        examples.append(replace(task, inputs=task.inputs.double()))
    return Problem(type(module).__name__, module, tuple(examples))
