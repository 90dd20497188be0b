"""The features of combined weights beside the combination of the models' features, and the verdict on them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations as subsets
from math import sqrt
from typing import Literal, Protocol

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from mergeflow.errors import MergeflowError, unknown_name
from mergeflow.modality import Model, State


class Featured(Protocol):
    """Examples as far as the kernel needs them: no labels, no head."""

    def __len__(self) -> int: ...

    def features(self, model: Model, rows: Tensor, layers: Sequence[str]) -> dict[str, Tensor]:
        """Return the outputs of the named submodules for `rows`, [n, ...] each."""


@dataclass(frozen=True)
class Combination:
    """Models and weights a_i that sum to 1.

    `base` compares the models, `ends`, with each other, or the combined model with `each` of them.
    """

    weights: Mapping[str, float]  # name of a model → a_i; any sign
    state: State | None = None  # the combined model where it is not Σ a_i θ_i, as with new statistics of BatchNorm
    baseline: Literal["ends", "each"] = "ends"
    on: frozenset[str] | None = None  # names of the sources whose samples count; all where it is None

    def __post_init__(self) -> None:
        if not self.weights or abs(sum(self.weights.values()) - 1) > 1e-9:
            raise MergeflowError(
                f"the weights {dict(self.weights)} sum to {sum(self.weights.values()):g}; an affine combination of "
                "models needs weights that sum to 1."
            )


@dataclass(frozen=True)
class Linearity:
    """How one combination fares at one layer: one value for each sample, float64 [n].

    f are the features of the combined model and g = Σ a_i f(θ_i), both flattened.
    """

    distance: np.ndarray  # 1 − cos(f, g), in [0, 2]
    coef: np.ndarray  # ⟨f, g⟩ / ‖g‖², the length of f along g in lengths of g
    error: np.ndarray  # ‖f − g‖² / ‖g‖² = (1 − coef)² + coef² (1/cos² − 1), which joins both
    base: np.ndarray  # 1 − cos of the baseline, the mean over its pairs
    origin: np.ndarray  # name of each sample's source


def combine(states: Sequence[State], weights: Sequence[float]) -> dict[str, Tensor]:
    """Return Σ a_i θ_i, summed in float64 and rounded once; integer buffers are those of the first.

    Example:
        >>> combine([{"w": torch.tensor([1.0])}, {"w": torch.tensor([3.0])}], [0.25, 0.75])
        {'w': tensor([2.5000])}
    """
    first = states[0]
    return {
        name: sum(a * state[name].double() for a, state in zip(weights, states, strict=True) if a).to(value.dtype)  # type: ignore[union-attr]
        if value.is_floating_point()
        else value
        for name, value in first.items()
    }


@contextmanager
def borrowed(model: Model) -> Iterator[None]:
    """Let other weights be loaded into a model for evaluation; at the end it has its own weights and mode again."""
    before = {name: value.clone() for name, value in model.state().items()}
    training = model.module.training
    model.module.eval()
    try:
        yield
    finally:
        model.load(before)
        model.module.train(training)


def clone_shared(state: State, model: Model) -> State:
    """Return weights that stay as they are when others are loaded: those that are the model's own are copied."""
    storages = {value.data_ptr() for value in model.state().values()}
    return {name: value.clone() if value.data_ptr() in storages else value for name, value in state.items()}


@torch.no_grad()
def affine(
    model: Model,
    sources: Mapping[str, Featured],
    ends: Mapping[str, State],
    combinations: Mapping[str, Combination],
    layers: Sequence[str],
    *,
    batch_size: int = 64,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, dict[str, Linearity]]:
    """Compare f(Σ a_i θ_i) with Σ a_i f(θ_i) at every layer, for many combinations in one pass over the samples.

    Features of one batch are in memory at a time; of each model they are computed once for all combinations. No result
    depends on the size of batches, and the model has its own weights back at the end.

    Args:
        layers: Names of submodules, whose outputs are the features.
        report: Called as `report(done, total)` after each batch.

    Returns:
        Combination → layer → values in the order of the sources and their rows.

    Source:
        Zhou et al. 2024, Cross-Task Linearity Emerges in the Pretraining-Finetuning Paradigm, Sections 4.1 to 4.3.
    """
    _check(sources, ends, combinations)
    ends = {name: clone_shared(state, model) for name, state in ends.items()}
    parts: dict[tuple[str, str], list[np.ndarray]] = {}
    origins: dict[str, list[str]] = {name: [] for name in combinations}
    todo = [(s, rows) for s, data in sources.items() for rows in torch.arange(len(data)).split(batch_size)]
    with borrowed(model):
        for done, (source, rows) in enumerate(todo, start=1):
            asked = {name: each for name, each in combinations.items() if each.on is None or source in each.on}

            def features(state: State, source: str = source, rows: Tensor = rows) -> dict[str, Tensor]:
                model.load(state)
                return _vectors(sources[source].features(model, rows, layers), len(rows))

            needed = dict.fromkeys(end for combination in asked.values() for end in combination.weights)
            of_ends = {end: features(ends[end]) for end in needed}
            for name, combination in asked.items():
                weights = list(combination.weights.values())
                combined = features(combination.state or combine([ends[end] for end in combination.weights], weights))
                for layer in layers:
                    own_ends = [of_ends[end][layer] for end in combination.weights]
                    values = _compare(combined[layer], own_ends, weights, combination.baseline)
                    parts.setdefault((name, layer), []).append(values)
                origins[name] += [source] * len(rows)
            report(done, len(todo))
    return {name: {layer: _joined(parts[name, layer], origins[name]) for layer in layers} for name in combinations}


def _joined(parts: list[np.ndarray], origins: list[str]) -> Linearity:
    distance, coef, error, base = np.concatenate(parts, axis=1)
    return Linearity(distance, coef, error, base, np.array(origins))


def _check(sources: Mapping[str, Featured], ends: Mapping[str, State], combinations: Mapping[str, Combination]) -> None:
    for combination in combinations.values():
        for end in combination.weights:
            if end not in ends:
                raise unknown_name("model", end, ends)
        for source in combination.on or ():
            if source not in sources:
                raise unknown_name("source", source, sources)
        if not sum(len(sources[source]) for source in (sources if combination.on is None else combination.on)):
            raise MergeflowError("there are no samples to compare features on: name a source that has some.")


def _vectors(features: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
    """Return each layer's features as float64 [n, d], so that neither sums nor 1 − cos lose digits."""
    for layer, value in features.items():
        if value.shape[0] != count:
            raise MergeflowError(
                f"layer '{layer}' gives {tuple(value.shape)} for {count} samples; expected the samples first. "
                "Choose a layer whose output has them there."
            )
    return {layer: value.flatten(1).double() for layer, value in features.items()}


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(1)


def _distance(a: Tensor, b: Tensor) -> Tensor:
    """Return 1 − cos per row; 0 where both are zero vectors, 1 where one is."""
    aa, bb = _dot(a, a), _dot(b, b)
    cosine = _dot(a, b) / (aa.sqrt() * bb.sqrt())
    # √x · √x differs from x in the last bit, so equal vectors are told by comparing them.
    same = (a == b).all(1)
    return torch.where(same, 0.0, torch.where((aa == 0) | (bb == 0), 1.0, 1 - cosine))


def _compare(combined: Tensor, ends: Sequence[Tensor], weights: Sequence[float], baseline: str) -> np.ndarray:
    """Return rows distance, coef, error, base of one batch, [4, n]."""
    mixed = sum((a * end for a, end in zip(weights, ends, strict=True) if a), torch.zeros_like(combined))
    size = _dot(mixed, mixed)
    residual = combined - mixed
    coef = torch.where(size > 0, _dot(combined, mixed) / size, _dot(combined, combined).eq(0).double())
    error = torch.where(_dot(residual, residual) == 0, 0.0, _dot(residual, residual) / size)
    pairs = [(combined, end) for end in ends] if baseline == "each" else list(subsets(ends, 2))
    base = torch.stack([_distance(a, b) for a, b in pairs]).mean(0) if pairs else torch.zeros_like(coef)
    return torch.stack([_distance(combined, mixed), coef, error, base]).cpu().numpy()


# Ours, written before any study ran: the paper says "close to 0" and "close to 1" and prints no threshold.
DIRECTION = 0.3  # 1 − cos at most this share of the baseline's
TRIVIAL = 0.02  # a smaller baseline says nothing: the models' features are nearly the same
LENGTH = 0.1  # the median of coef within 1 ± this
CONFIDENCE = 0.95


@dataclass(frozen=True)
class LayerVerdict:
    """What one combination gives at one layer; three numbers are the lower quartile, the middle, the upper quartile."""

    layer: str
    distance: tuple[float, float, float]  # 1 − cos over samples; the middle is the mean
    base: float  # mean of the baseline
    coef: tuple[float, float, float]  # over samples; the middle is the median
    error: float  # mean relative error ‖f − g‖² / ‖g‖²
    direction: bool | None  # whether 1 − cos ≤ 0.3 of the baseline; None is undecided
    length: bool | None  # whether the median of coef is within 1 ± 0.1; None is undecided


def judge(measured: Mapping[str, Linearity]) -> list[LayerVerdict]:
    """Judge each layer of one combination by 95 % intervals over samples.

    Direction: the interval of the paired mean of (1 − cos) − 0.3 · base lies below 0 (holds) or above (does not);
    undecided where it has 0 in it or where the baseline is below 0.02. Length: the interval of coef's median, by order
    statistics, lies within 1 ± 0.1 (holds), outside (does not) or on a border.
    """
    return [_judge(layer, values) for layer, values in measured.items()]


def overall(verdicts: list[LayerVerdict]) -> dict[str, bool | None]:
    """Return one verdict for all layers: `LLFC` for the direction alone, `CTL` for direction and length.

    One layer where it fails is enough for a failure; layers that the baseline cannot decide do not count, unless there
    are no others.
    """
    directions = [verdict.direction for verdict in verdicts if verdict.base > TRIVIAL]
    llfc = _all(directions) if directions else None
    return {"LLFC": llfc, "CTL": _all([llfc, *(verdict.length for verdict in verdicts)])}


def word(verdict: bool | None) -> str:
    """Return the verdict as a person reads it."""
    return "undecided" if verdict is None else "holds" if verdict else "does not hold"


def _all(verdicts: list[bool | None]) -> bool | None:
    return False if False in verdicts else None if None in verdicts else True


def _judge(layer: str, measured: Linearity) -> LayerVerdict:
    low, high = np.quantile(measured.distance, [0.25, 0.75])
    base = float(measured.base.mean())
    return LayerVerdict(
        layer,
        (float(low), float(measured.distance.mean()), float(high)),
        base,
        tuple(float(q) for q in np.quantile(measured.coef, [0.25, 0.5, 0.75])),  # type: ignore[arg-type]
        float(measured.error.mean()),
        _below(measured.distance - DIRECTION * measured.base) if base > TRIVIAL else None,
        _within(measured.coef),
    )


def _below(values: np.ndarray) -> bool | None:
    """Whether the mean is below 0, by its interval over samples."""
    centre, count = float(values.mean()), len(values)
    spread = float(values.std(ddof=1)) / sqrt(count) if count > 1 else float("inf")
    half = float(stats.t.ppf(0.5 + CONFIDENCE / 2, max(count - 1, 1))) * spread
    return True if centre + half < 0 else False if centre - half > 0 else None


def _within(coef: np.ndarray) -> bool | None:
    """Whether the median is within 1 ± LENGTH, by its interval from order statistics."""
    values, count = np.sort(coef), len(coef)
    low = int(stats.binom.ppf(0.5 - CONFIDENCE / 2, count, 0.5))
    left, right = values[max(low - 1, 0)], values[min(count - low, count - 1)]
    if left >= 1 - LENGTH and right <= 1 + LENGTH:
        return True
    return False if right < 1 - LENGTH or left > 1 + LENGTH else None
