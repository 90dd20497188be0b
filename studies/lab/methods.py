"""Merge methods in studies: sweeps and names, AdaMerging, and compression into one file."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, Literal, TypeVar

import pandas as pd
from pydantic import Field
from torch import Tensor

from mergeflow import layout
from mergeflow.checkpoints import open_checkpoint
from mergeflow.evaluation.adamerging import entropy_gradient
from mergeflow.evaluation.averages import mean
from mergeflow.merging import MethodCall, configure, prepare
from mergeflow.merging.compression.compressor import configure_compressor
from mergeflow.merging.compression.suite_file import Compressed, compress, extract_task
from mergeflow.merging.learned import Learned, learn
from mergeflow.search.candidates import Scored, best_on_line, grid_of, line, score_all
from mergeflow.search.candidates import grid as candidate_grid
from studies.lab.claims import with_interval
from studies.lab.inputs import Accuracy, Laboratory, State, grid, mean_accuracy
from studies.lab.rows import Row, paired
from tasks.project.sections import Section

Name = TypeVar("Name")
NAMES = {
    "zero_shot": "zero-shot",
    "individual": "individual",
    "average": "average",
    "task_arithmetic": "task arithmetic",
    "ties": "TIES",
    "consensus": "Consensus TA",
    "cart": "CART",
    "tsv": "TSV-M",
    "iso_c": "Iso-C",
    "iso_cts": "Iso-CTS",
    "wudi": "WUDI",
    "pcb": "PCB",
    "adamerging_ta": "AdaMerging + TA",
    "adamerging_cart": "AdaMerging + CART",
}
ADAPTED = {"task_vectors": "adamerging_ta", "cart": "adamerging_cart"}
"""What AdaMerging scales → the model."""
OUTPERFORMS = "At its peak over the rank CART significantly outperforms task arithmetic, TIES and AdaMerging."
PEAK: dict[str, Any] = {
    "low": 5.4,
    "unit": "% of the headroom",
    "of": "paired difference, half of the paper's smallest share,",
    "paper": "4.6 points over AdaMerging + TA, 10.8 % of the headroom, 8 tasks",
}
"""How both studies that ask it judge this sentence."""


class Scales(Section):
    """A grid of scales, walked from `start`."""

    low: float
    high: float
    step: float = Field(gt=0)
    start: float


class Sweep(Section):
    """What is tried of one method. `args`: every other argument's values."""

    scale: Scales | None = None
    args: dict[str, list[Any]] = Field(default_factory=dict)


def best_of(sweep: Sweep, method: str, score: Callable[[MethodCall], Mapping[str, float]]) -> tuple[Scored, int]:
    """Return the best candidate of a method on validation, and how many were tried."""
    if sweep.scale is None:
        tried_calls = list(score_all(method, candidate_grid(method, sweep.args), score, mean))
        return max(tried_calls, key=lambda call: call.value), len(tried_calls)
    values, best, tried = grid(sweep.scale.low, sweep.scale.high, sweep.scale.step), list[Scored](), 0
    for args in grid_of(method, sweep.args):
        tried_calls = list(score_all(method, line("scale", values, sweep.scale.start, args), score, mean))
        best.append(best_on_line(tried_calls, "scale"))
        tried += len(tried_calls)
    return max(best, key=lambda call: call.value), tried


def ranges_of(sweep: Sweep) -> dict[str, Sequence[Any]]:
    """Return argument → the values that a sweep tries; of a scale the two ends."""
    return {**sweep.args, **({"scale": [sweep.scale.low, sweep.scale.high]} if sweep.scale else {})}


def at_end(value: float, tried: Iterable[float]) -> bool:
    """Say whether the smallest or the largest of two values or more was taken.

    Example:
        >>> at_end(0.1, [0.1, 0.2]), at_end(0.2, [0.1, 0.2, 0.3]), at_end(0.1, [0.1])
        (True, False, False)
    """
    values = set(tried)
    return len(values) > 1 and value in (min(values), max(values))


def ends_note(choices: Iterable[str]) -> list[str]:
    """Return one sentence on the choices at an end of their grids, beyond which better ones may lie; none of none."""
    listed = "; ".join(choices)
    return [f"Chosen at an end of its grid, so that a value beyond it may do better: {listed}."] if listed else []


ARGUMENTS = ("scale", "keep", "threshold", "rank_ratio", "rate")


def arguments_of(choices: pd.DataFrame) -> list[str]:
    """Return the arguments of each row that have a value, in words.

    Example:
        >>> arguments_of(pd.DataFrame({"scale": [0.5, 1.0], "keep": [0.2, None]}))
        ['scale 0.5, keep 0.2', 'scale 1']
    """
    given = choices[[name for name in ARGUMENTS if name in choices]].to_dict("records")
    return [", ".join(f"{name} {value:g}" for name, value in args.items() if pd.notna(value)) for args in given]


def leader(values: Mapping[Name, Sequence[float]], names: Mapping[Name, str]) -> tuple[Name, str]:
    """Return the model with the highest mean, and its name for readers with its paired lead over the next.

    Args:
        values: model → accuracy in %, one value for each seed, the same seeds for all.

    Example:
        >>> leader({"ties": [70.0, 71.0], "cart": [72.0, 73.0]}, {"ties": "TIES", "cart": "CART"})
        ('cart', 'CART, 2.0 ± 0.0 points above TIES, the next')
        >>> leader({"ties": [70.0, 71.0]}, {"ties": "TIES"})
        ('ties', 'TIES')
    """
    first, *others = sorted(values, key=lambda model: fmean(values[model]), reverse=True)
    if not others:
        return first, names[first]
    lead = with_interval(paired(values[first], values[others[0]]))
    return first, f"{names[first]}, {lead} points above {names[others[0]]}, the next"


# AdaMerging: coefficients learned by entropy, which asks examples for predictions and never for labels


Direction = Literal["task_vectors", "cart"]
Granularity = Literal["task", "layer"]
NOT_WORSE = -0.2  # points, of C4 in both studies: one test image in 500
IMPROVES = "Combined with test-time adaptation CART improves further."
FURTHER: dict[str, Any] = {
    "low": 0,
    "of": "adapted on test images less CART of the same rank, 8 %, λ from validation,",
    "paper": "1.1, 2.8, 6.4 points with 8, 14, 20 tasks",
    "caveat": "80 steps, the paper has 500; the rate is chosen on labelled validation images",
}
USED = 0.08  # CART's rank ratio, as in its paper
CART_START = 1.0  # λ of CART where AdaMerging starts from it, as in its paper, at that rank ratio
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
        batch_size: Images per task and step.
    """

    on: Direction
    granularity: Granularity
    images: Split
    init: float
    lr: float
    steps: int = 80
    batch_size: int = 16
    rank_ratio: float = USED
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
    """An adapted merge."""

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
        plan: how, but for the rate and the images.
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


def adapt_with_rates(
    inputs: Laboratory,
    experts: Mapping[str, State],
    plan: Adaptation,
    rates: Sequence[float],
    name: str,
    seed: int,
    first: int,
) -> tuple[Adapted, list[dict[str, Any]]]:
    """Adapt with the rate that is best on validation for the first seed; return the rows of `choose_rate` too.

    Args:
        plan: how, but for the rate and the seed.
        name: of the piece that keeps what the first seed chose, for the others to read.
        first: the seed that is measured first.
    """

    def choose_once() -> list[dict[str, Any]]:
        assert seed == first, "the first seed is measured first"
        return choose_rate(inputs, experts, plan, rates, every=max(plan.steps // 4, 1))

    tried = inputs.keep(name, choose_once)
    return adapt(inputs, experts, replace(plan, lr=tried[0]["lr"], seed=seed)), tried


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


# Experts compressed into one file


def measure_file(
    lab: Laboratory, experts: Mapping[str, State], name: str, args: dict[str, Any], splits: Sequence[str]
) -> tuple[dict[str, Accuracy], Row]:
    """Write one file with all tasks, read each back out of it, and return accuracies by split, and bytes."""
    small = compress(configure_compressor(name, args), lab.base, experts)
    accuracy: dict[str, Accuracy] = {split: {} for split in splits}
    with TemporaryDirectory(dir=lab.io.scratch) as folder:
        path, base = Path(folder) / "suite.safetensors", lab.io.dep(layout.BASE_MODEL)
        small.write(path)
        for task in experts:
            state = extract_task(path, task, base)
            for split in splits:
                accuracy[split][task] = lab.accuracy(state, split, [task])[task]
        return accuracy, _bytes(path, small, next(iter(experts)), sum(t.nbytes for t in lab.base.values()))


def _bytes(path: Path, small: Compressed, task: str, base: int) -> Row:
    """Return the file's bytes, those of a task's own part and of the shared part, and what reading one task takes."""
    with open_checkpoint(path) as state:
        sizes = {name: info.nbytes for name, info in state.infos.items()}
    shared = sum(size for name, size in sizes.items() if name.startswith("shared/"))
    task_bytes = sum(size for name, size in sizes.items() if name.startswith(f"task/{task}/"))
    header = path.stat().st_size - sum(sizes.values())
    return {
        "file": path.stat().st_size,
        "shared": shared,
        "own": task_bytes,
        "one_task": header + shared + task_bytes,
        "all_experts": small.expert_bits // 8,
        "base": base,
        "needs_base": small.call.method.needs_base,
    }
