"""What to try with some experts: λ by the lengths of their task vectors, and how their tasks are related."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from typing import Any, Literal

from mergeflow.analysis.geometry import cosine_matrix, norm
from mergeflow.analysis.provable.answers import Answers
from mergeflow.analysis.provable.conditions import NOTHING, Interval, addition, unlearning
from mergeflow.analysis.provable.correlation import Correlations, correlations
from mergeflow.errors import MergeflowError, together
from mergeflow.modality import State

RELATED = 1 / 3
"""From this α̂ on two tasks are aligned, and from its negative contradictory; the paper prints no threshold."""
POINTS = 4
_LENGTH = (0.8, 1.6)  # the range of λ in units of the λ that keeps the experts' length
_LONGEST = 10.0  # no longer λ is suggested: task vectors that ask for one cancel each other, but for rounding
_MANY = 4  # from so many experts on the best λ lay below the range on real tasks (worlds/real-texts)
_DIGITS = 6  # of a document: processors differ in the last bits, and nobody reads so far

Verdict = Literal["aligned", "irrelevant", "contradictory"]


def verdict(alpha: float) -> Verdict:
    """Return the kind of a pair of tasks by its α̂, in [−1, 1].

    Example:
        >>> [verdict(alpha) for alpha in (0.891, 0.164, -0.849)]
        ['aligned', 'irrelevant', 'contradictory']

    Source: Li et al. 2025, Section 3.3; the three values are those of its Table 1.
    """
    return "irrelevant" if abs(alpha) < RELATED else "aligned" if alpha > 0 else "contradictory"


@dataclass(frozen=True)
class PairAdvice:
    """What to expect of two experts."""

    first: str
    second: str
    alpha: float  # α̂ of their answers (Equation 11)
    changes: float  # α̂ of what tuning changed of the base's answers
    cosine: float  # of their task vectors
    relation: Verdict  # the verdict by `changes`
    addition: Interval  # λ with which the first's vector plus λ times the second's is expected to solve both
    unlearning: Interval  # λ with which the same is expected to keep the first and to forget the second

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON, a range as [low, high] with None for no end, and None for an empty one."""
        return {key: _range(value) if isinstance(value, Interval) else value for key, value in vars(self).items()}


@dataclass(frozen=True)
class Advice:
    """What to try with some experts. What could not be computed is None, and a remark says why."""

    names: tuple[str, ...]
    cosines: Sequence[Sequence[float]]  # of the task vectors, [T][T]
    scales: Sequence[float] | None  # the λ to try for the sum of all task vectors
    alphas: Correlations | None = None  # α̂ of the experts' answers, by Equation 11
    changes: Correlations | None = None  # α̂ of what tuning changed of the base's answers
    remarks: list[str] = field(default_factory=list)  # what was not computed, and why; what to be careful with

    @property
    def pairs(self) -> list[PairAdvice] | None:
        """What to expect of each pair; None without answers."""
        if self.alphas is None or self.changes is None:
            return None
        pairs = []
        for i, j in combinations(range(len(self.names)), 2):
            change = self.changes.values[i][j]
            relation = verdict(change)
            # Within the threshold the tasks count as irrelevant, and the theory's α as 0.
            near = 0.0 if relation == "irrelevant" else change
            measured = self.alphas.values[i][j], change, self.cosines[i][j]
            pairs.append(
                PairAdvice(self.names[i], self.names[j], *measured, relation, addition(near), unlearning(near))
            )
        return pairs

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON, numbers to six digits; matrices are in the order of `experts`."""
        document = {
            "experts": list(self.names),
            "scales": self.scales,
            "cosines": self.cosines,
            "alphas": None if self.alphas is None else self.alphas.values,
            "changes": None if self.changes is None else self.changes.values,
            "pairs": None if self.pairs is None else [pair.as_json() for pair in self.pairs],
            "remarks": self.remarks,
        }
        rounded: dict[str, Any] = _rounded(document)
        return rounded


def advise(
    base: State, experts: Mapping[str, State], ask: Callable[[], Answers] | None = None, remarks: Sequence[str] = ()
) -> Advice:
    """Return the advice that weights allow, and answers too where `ask` gives them.

    Example:
        >>> import torch
        >>> base, one, two = (dict(w=torch.tensor(w)) for w in ([0.0, 0.0], [1.0, 0.0], [0.0, 1.0]))
        >>> advise(base, {"a": one, "b": two}).scales
        [0.566, 0.713, 0.898, 1.13]
    """
    notes = list(remarks)
    vectors: dict[str, State] = {}

    def add(name: str) -> None:
        try:
            vectors[name] = _vector(base, experts[name])
        except MergeflowError as error:
            raise MergeflowError(f"the task vector of '{name}': {error}") from None

    together(*(partial(add, name) for name in experts))
    notes += [
        f"'{name}' has the base's weights: its task vector is zero."
        for name, vector in vectors.items()
        if not any(value.any() for value in vector.values())
    ]
    cosines = cosine_matrix(list(vectors.values()))
    scales = _scales([norm(vector) for vector in vectors.values()], cosines, notes)
    alphas = changes = None
    if ask is not None:
        try:
            answers = ask()
            alphas, changes = correlations(answers.experts), correlations(answers.changes)
        except MergeflowError as error:
            notes.append(not_computed(error))
        else:
            if left_out := alphas.left_out + changes.left_out:
                notes.append(
                    f"{left_out} answers have no direction, because an expert gives there what it gives on average or "
                    "what the base gives; they count in no α̂."
                )
    return Advice(tuple(experts), cosines, scales, alphas, changes, notes)


def not_computed(error: MergeflowError) -> str:
    """Return the remark that the answers could not be compared."""
    return f"α̂, and with it the verdicts: not computed. {error}"


def _scales(norms: Sequence[float], cosines: Sequence[Sequence[float]], remarks: list[str]) -> list[float] | None:
    """Return the λ to try; None, and a remark, where the task vectors cancel each other."""
    lengths = scales_of_lengths(norms, cosines)
    if lengths.empty or lengths.high > _LONGEST:
        remarks.append("λ was not suggested: the task vectors are all zero, or cancel each other.")
        return None
    scales = suggested(lengths)
    lower = [scales[0] / 4, scales[0] / 2] if len(norms) >= _MANY else []
    return [*(float(f"{scale:.3g}") for scale in lower), *scales]


def scales_of_lengths(norms: Sequence[float], cosines: Sequence[Sequence[float]]) -> Interval:
    """Return the range of λ around the one with which the merge is as far from the base as an expert.

    λ° = mean_i ‖τ_i‖ / ‖Σ τ_i‖;  the range is 0.8 λ° to 1.6 λ°

    It is empty if the task vectors cancel each other. `norms` are ‖τ_i‖, [T], and `cosines` of all pairs, [T][T].

    Example:
        >>> found = scales_of_lengths([1.0] * 4, [[float(i == j) for j in range(4)] for i in range(4)])
        >>> round(found.low, 2), round(found.high, 2)
        (0.4, 0.8)

    Source: ours.
    """
    square = sum(
        a * b * cosine for a, row in zip(norms, cosines, strict=True) for b, cosine in zip(norms, row, strict=True)
    )
    mean = sum(norms) / len(norms)
    if square <= 1e-12 * mean**2:
        return NOTHING
    centre = mean / math.sqrt(square)
    return Interval(_LENGTH[0] * centre, _LENGTH[1] * centre)


def suggested(scales: Interval) -> list[float]:
    """Return four λ from one end of a positive range to the other, each the same factor above the one before.

    Example:
        >>> suggested(Interval(0.4, 0.8))
        [0.4, 0.504, 0.635, 0.8]
    """
    factor = (scales.high / scales.low) ** (1 / (POINTS - 1))
    return [float(f"{scales.low * factor**step:.3g}") for step in range(POINTS)]


def _vector(base: State, expert: State) -> State:
    names = [name for name, value in base.items() if value.is_floating_point()]
    wrong = [name for name in names if name not in expert or expert[name].shape != base[name].shape]
    if wrong:
        raise MergeflowError(
            f"{len(wrong)} of the base's tensors are missing or of another shape, such as {wrong[0]}. Name the base "
            "that it was tuned from, or leave tensors out: in a recipe `ignore: [patterns]` takes them from the base, "
            "and `missing: base` those that an expert lacks."
        )
    vector = {name: (expert[name].double() - base[name].double()).float() for name in names}
    if broken := [name for name, value in vector.items() if not value.isfinite().all()]:
        more = f" and {len(broken) - 1} more" if broken[1:] else ""
        raise MergeflowError(
            f"it has a NaN or an infinity in {broken[0]}{more}: train that expert again, or leave it out."
        )
    return vector


def range_text(scales: Interval) -> str:
    """Return a range of λ in words.

    Example:
        >>> inf = math.inf
        >>> [range_text(Interval(*ends)) for ends in ((0.5, inf), (-inf, 0), (0, 0.25), (1, 0))]
        ['≥ 0.50', '≤ 0.00', '0.00 … 0.25', 'none']
    """
    if scales.empty:
        return "none"
    if math.isinf(scales.high):
        return f"≥ {scales.low:.2f}"
    return f"≤ {scales.high:.2f}" if math.isinf(scales.low) else f"{scales.low:.2f} … {scales.high:.2f}"


def _range(scales: Interval) -> list[float | None] | None:
    if scales.empty:
        return None
    return [None if math.isinf(end) else end for end in (scales.low, scales.high)]


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(inner) for inner in value]
    return round(value, _DIGITS) if isinstance(value, float) else value
