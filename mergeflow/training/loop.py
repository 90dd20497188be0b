"""The one training loop: every regime is this loop with other batches, resumable to the bit."""

import math
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from mergeflow.errors import MergeflowError
from mergeflow.modalities.modules import draws, own_generator
from mergeflow.modality import Examples, Model, device_of, prefetch
from mergeflow.training.arithmetic import arithmetic, warn_of_slow
from mergeflow.training.batches import Part, plan_batches
from mergeflow.training.compiling import Forward
from mergeflow.training.saved import load_state, save_state
from mergeflow.training.settings import FineTuneSettings
from mergeflow.training.trajectory import Cost, Trajectory

Report = Callable[[int, int], None]


@dataclass(frozen=True)
class Span:
    """The steps `first` .. `last` − 1 of a budget; the learning rate is that of (step − origin)/length.

    A run of its own is Span(0, S, 0, S). Round r of an iterative run is Span((r−1)K, rK, 0, S) with a schedule over
    the whole budget, and Span((r−1)K, rK, (r−1)K, K) with a schedule per round.
    """

    first: int
    last: int
    origin: int
    length: int


@dataclass(frozen=True)
class Outcome:
    """What a run leaves besides the trained weights: its trajectory, its cost, its optimiser's state."""

    trajectory: Trajectory
    cost: Cost
    optimiser: dict[str, Any]


def fine_tune(
    model: Model,
    data: Sequence[Examples],
    settings: FineTuneSettings,
    seed: int,
    saved: Path,
    validate: Callable[[], float],
    report: Report = lambda done, total: None,
    *,
    span: Span | None = None,
    optimiser_state: Mapping[str, Any] | None = None,
    each_epoch: Callable[[int], None] = lambda epoch: None,
) -> Outcome:
    """Fine-tune `model` in place, and the tasks' heads that are trained.

    Minimises Σ_parts w · loss(rows), a mean over the rows, with the parts of `plan_batches`. The state
    (weights, optimiser, position, trajectory, random numbers) is saved to `saved` every `settings.save_every` steps;
    when the file exists the run continues from it and ends with the same bits as an uninterrupted one on the same
    machine.

    Args:
        model: its module's parameters with `requires_grad` are trained.
        data: the tasks' examples, heads on the model's device; more than one for `joint` alone.
        seed: of the batch order, at least 0.
        validate: returns the validation accuracy of the model as it stands; called once an epoch.
        report: called as `report(done, total)` after each step of the span.
        span: which part of the budget to do; the whole by default.
        optimiser_state: state to start the optimiser with, from the `Outcome` of an earlier span.
        each_epoch: called with the epoch's number after each row; the place to keep a task vector.
    """
    assert len(data) == 1 or settings.regime == "joint", f"regime {settings.regime} trains one task at a time"
    for task in data:
        if len(task) == 0:
            raise MergeflowError(f"task '{task.task}' has no training examples: check its source in params.yaml.")
    batches = plan_batches([len(task) for task in data], settings, seed)
    total = settings.total_steps(batches.steps_per_epoch)
    span = span or Span(0, total, 0, total)
    switches = arithmetic(tf32=settings.precision == "tf32", deterministic=settings.deterministic)
    device = device_of(model)
    warn_of_slow(settings.precision, device)
    # On the processor, models with dropout are trained one after the other: they draw from one generator.
    alone = device.type == "cpu" and draws(model.module)
    with switches, own_generator(seed * 1_000_003 + span.first, device, alone):
        run = _Run(model, data, settings, span, seed, optimiser_state)
        first = run.resume(saved) if saved.exists() else span.first
        run.begin_training()
        started = _clocks()
        parts = batches.parts(first)
        for step in range(first, span.last):
            coming = batches.parts(step + 1) if step + 1 < span.last else []
            run.step(parts, coming, step)
            parts = coming
            report(step + 1 - span.first, span.last - span.first)
            if step + 1 == span.last or (step + 1) % batches.steps_per_epoch == 0:
                run.modules.eval()
                run.optimiser.zero_grad(set_to_none=True)  # the gradients' memory is the validation's
                run.close_epoch(step + 1, validate())
                each_epoch(len(run.trajectory.rows))
                run.begin_training()
            if (step + 1) % settings.save_every == 0 and step + 1 < span.last:
                run.charge(started)
                started = _clocks()
                run.save(saved, step + 1)
        run.modules.eval()
        run.charge(started)
    return Outcome(run.trajectory, run.cost, run.optimiser.state_dict())


def learning_rate_factor(settings: FineTuneSettings, progress: float) -> float:
    """Return the learning rate at `progress` ∈ [0, 1) as a fraction of its peak.

    With warm-up share w: p/w while p < w, then (1 + cos(π (p − w)/(1 − w)))/2 for `cosine`, or 1 for `constant`.
    Full-batch gradient descent has the factor 1 throughout.

    Example:
        >>> learning_rate_factor(FineTuneSettings(warmup=0.5), 0.25)
        0.5
    """
    if settings.regime == "full_batch_gd":
        return 1.0
    if progress < settings.warmup:
        return progress / settings.warmup
    if settings.schedule == "constant":
        return 1.0
    return 0.5 * (1.0 + math.cos(math.pi * (progress - settings.warmup) / (1.0 - settings.warmup)))


class _Run:
    """The moving parts of a run: weights, optimiser, trajectory, cost."""

    def __init__(
        self,
        model: Model,
        data: Sequence[Examples],
        settings: FineTuneSettings,
        span: Span,
        seed: int,
        optimiser_state: Mapping[str, Any] | None,
    ) -> None:
        self.data, self.settings, self.span, self.seed = data, settings, span, seed
        heads = [task.head for task in data if task.head is not None and is_trained(task.head)]
        self.modules = nn.ModuleList([model.module, *heads])
        self.parameters = [p for p in self.modules.parameters() if p.requires_grad]
        self.start = [p.detach().clone() for p in self.parameters]
        self.optimiser = _make_optimiser(self.parameters, settings)
        if optimiser_state is not None:
            self.optimiser.load_state_dict(dict(optimiser_state))
        self.trajectory, self.cost = Trajectory(), Cost()
        self.device = device_of(model)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self.forward = Forward(model, settings.compile)
        self.settle: Callable[[], None] = lambda: None

    def begin_training(self) -> None:
        """Turn dropout on and, unless its statistics are frozen, BatchNorm's own batches."""
        self.modules.train()
        if self.settings.batch_norm == "frozen":
            for module in self.modules.modules():
                if isinstance(module, _NormBase):
                    module.eval()

    def step(self, parts: Sequence[Part], coming: Sequence[Part], step: int) -> None:
        """Do one step; `coming` are the parts of the next, after which `_settle` reads this step's numbers.

        A device computes while the CPU prepares the next step. An early read would make the CPU wait: on small models
        two reads a step cost a third of the time.
        """
        settings, span = self.settings, self.span
        with self._explaining_full_memory():
            losses = self.forward.run(lambda model: self._losses(model, parts, coming))
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        norm = nn.utils.get_total_norm(gradients)
        numbers = _read_later([norm, *losses])
        self.trajectory.add_gradients(gradients)
        if settings.gradient_clip and settings.regime != "full_batch_gd":
            nn.utils.clip_grads_with_norm_(self.parameters, settings.gradient_clip, norm)
        factor = learning_rate_factor(settings, (step - span.origin) / span.length)
        for group in self.optimiser.param_groups:
            group["lr"] = settings.learning_rate * factor
        self.optimiser.step()
        self.cost.steps += 1
        self.cost.examples += sum(len(part.indices) for part in parts)
        self.settle()
        self.settle = lambda: self._settle(parts, numbers(), step + 1)

    @contextmanager
    def _explaining_full_memory(self) -> Iterator[None]:
        """Replace a device's out-of-memory error by one that says what to change."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            settings, names = self.settings, ", ".join(task.task for task in self.data)
            full_batch = settings.regime == "full_batch_gd"
            way = f"batch_size below {settings.batch_size}" if full_batch else f"accumulate above {settings.accumulate}"
            raise MergeflowError(
                f"task '{names}': {self.device} has too little memory for a part of a batch. Set finetune.{way}; "
                "`mergeflow check` says what a step takes."
            ) from error

    def _losses(self, model: Model, parts: Sequence[Part], coming: Sequence[Part]) -> list[Tensor]:
        """Return the parts' losses, their gradients added up."""
        self.optimiser.zero_grad(set_to_none=True)
        autocast, losses = self.settings.precision == "bfloat16", []
        for part, following in zip_longest(parts, [*parts[1:], *coming[:1]]):
            if following is not None:
                prefetch(self.data[following.task], following.indices)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=autocast):
                losses.append(self.data[part.task].loss(model, part.indices) * part.weight)
            losses[-1].backward()
        return losses

    def _settle(self, parts: Sequence[Part], numbers: Sequence[float], step: int) -> None:
        """Check the numbers of a step: the 2-norm of the gradient, and each part's loss."""
        self.settle = lambda: None
        length, *losses = numbers
        loss = sum(losses)
        if not math.isfinite(loss):
            bad = [part.task for part, share in zip(parts, losses, strict=True) if not math.isfinite(share)]
            raise self._diverged("loss", loss, step, bad)
        if not math.isfinite(length):
            raise self._diverged("gradient", length, step)
        self.trajectory.add_step(loss, length)

    def _diverged(self, what: str, value: float, step: int, tasks: Sequence[int] = ()) -> MergeflowError:
        names = dict.fromkeys(self.data[task].task for task in tasks or range(len(self.data)))
        return MergeflowError(
            f"task '{', '.join(names)}': the {what} became {value} at step {step} of {self.span.last}. "
            f"Lower finetune.learning_rate (now {self.settings.learning_rate}) or raise finetune.warmup."
        )

    def close_epoch(self, steps: int, accuracy: float) -> None:
        self.settle()
        self.trajectory.close_epoch(steps, [p.detach() for p in self.parameters], self.start, accuracy)
        length = self.trajectory.rows[-1].parameter_norm
        if not math.isfinite(length):
            raise self._diverged("2-norm of the weights", length, steps)

    def charge(self, started: tuple[float, float]) -> None:
        """Add what passed since then to the cost; called before each save, so that a resumed run counts it too."""
        seconds, processor = (now - then for now, then in zip(_clocks(), started, strict=True))
        cuda = self.device.type == "cuda"
        of_process = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        peak = torch.cuda.max_memory_allocated(self.device) // 2**20 if cuda else of_process
        gpu_seconds = seconds if cuda else 0.0
        self.cost += Cost(seconds=seconds, gpu_seconds=gpu_seconds, peak_memory_mib=peak, processor_seconds=processor)

    @property
    def identity(self) -> dict[str, Any]:
        """The values that a saved state must share with this run to be continued."""
        examples = {task.task: len(task) for task in self.data}
        steps, settings = list(asdict(self.span).values()), self.settings.model_dump_json()
        return {"settings": settings, "seed": self.seed, "examples": examples, "steps": steps}

    def save(self, saved: Path, step: int) -> None:
        self.settle()
        random = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self.device)
        state = {
            "run": self.identity,
            "step": step,
            "weights": self.modules.state_dict(),
            "start": self.start,
            "optimiser": self.optimiser.state_dict(),
            "trajectory": self.trajectory.as_state(),
            "cost": asdict(self.cost),
            "random": random,
        }
        save_state(saved, state)

    def resume(self, saved: Path) -> int:
        # From the processor's memory: on the device a second copy of weights and optimiser might not fit.
        state = load_state(saved, self.identity)
        self.modules.load_state_dict(state["weights"])
        self.start = [p.to(self.device) for p in state["start"]]
        self.optimiser.load_state_dict(state["optimiser"])
        self.trajectory, self.cost = Trajectory.from_state(state["trajectory"], self.device), Cost(**state["cost"])
        torch.set_rng_state(state["random"]["cpu"])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state["random"]["cuda"], self.device)
        return int(state["step"])


def is_trained(head: nn.Module | None) -> bool:
    """Return whether a task's head is trained with the model."""
    return head is not None and any(p.requires_grad for p in head.parameters())


def _clocks() -> tuple[float, float]:
    """Return wall time and this thread's processor time, in seconds."""
    return time.perf_counter(), time.thread_time()


def _make_optimiser(parameters: list[nn.Parameter], settings: FineTuneSettings) -> torch.optim.Optimizer:
    rate, decay = settings.learning_rate, settings.weight_decay
    if settings.regime == "full_batch_gd":
        return torch.optim.SGD(parameters, lr=rate)
    if settings.optimiser == "sgd":
        return torch.optim.SGD(parameters, lr=rate, momentum=settings.momentum, weight_decay=decay)
    return torch.optim.AdamW(parameters, lr=rate, weight_decay=decay, fused=settings.fused)


def _read_later(values: Sequence[Tensor]) -> Callable[[], list[float]]:
    """Return a function that gives the values as numbers; call it when the device has more work to do.

    A CUDA device copies them in order of its queue; a plain `float(value)` would wait until the queue is empty.
    """
    together = torch.stack([value.detach().double().reshape(()) for value in values])
    if not together.is_cuda:
        return together.tolist
    copied = torch.empty(len(values), dtype=torch.float64, pin_memory=True)
    copied.copy_(together, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(together.device))

    def read() -> list[float]:
        arrived.synchronize()
        numbers: list[float] = copied.tolist()
        return numbers

    return read
