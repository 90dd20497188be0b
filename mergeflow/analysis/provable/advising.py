"""All advice on some experts: what can be computed of it, and a remark for each part that cannot."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from mergeflow.analysis.geometry import cosine_matrix, norm
from mergeflow.analysis.provable.advice import PairAdvice, advise_pairs, range_json
from mergeflow.analysis.provable.answers import Answers
from mergeflow.analysis.provable.conditions import Interval
from mergeflow.analysis.provable.correlation import Correlations, correlations, output_correlation
from mergeflow.analysis.provable.ranges import scales_of_lengths, scales_of_theory, suggested
from mergeflow.errors import MergeflowError
from mergeflow.modality import State

Matrix = Sequence[Sequence[float]]
ANSWERED = "α̂, and with it the verdicts"
_LONGEST = 10.0  # no longer λ is suggested: task vectors that ask for one cancel each other, but for rounding
_MOST = 8  # experts in one sum for which the suggested range held the best λ, or lost nothing without it
_DIGITS = 6  # of a document: processors differ in the last bits, and nobody reads so far
Part = TypeVar("Part")


@dataclass(frozen=True)
class Advice:
    """What to try with some experts. A part that could not be computed is None, and a remark says why.

    Attributes:
        weighed: Those whose task vectors could be computed.
        cosines: Of these task vectors, in their order.
        alphas: α̂ of their answers, by Equation 11; its names may be fewer.
        changes: α̂ of what tuning changed of the base's answers.
        scales: The λ to try for the sum of all task vectors.
        linear: Pair → whether its features combine as its weights do, as `mergeflow linearity --out` found.
        remarks: What was not computed, and why; what to be careful with.
    """

    names: tuple[str, ...]
    weighed: tuple[str, ...] = ()
    cosines: Matrix | None = None
    alphas: Correlations | None = None
    changes: Correlations | None = None
    pairs: Sequence[PairAdvice] | None = None
    scales: Sequence[float] | None = None
    theory: Interval | None = None
    linear: Mapping[str, str] | None = None
    remarks: list[str] = field(default_factory=list)

    def costs(self, forget: str) -> list[tuple[str, float]]:
        """Return the other tasks with their cosine to the task to forget, those that will lose most first."""
        if self.cosines is None or forget not in self.weighed:
            return []
        row = self.cosines[self.weighed.index(forget)]
        others = [(name, value) for name, value in zip(self.weighed, row, strict=True) if name != forget]
        return sorted(others, key=lambda item: -item[1])

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON, numbers to six digits; `cosines` are in the order of `weighed`, α̂ of `answered`."""
        document = {
            "experts": list(self.names),
            "scales": self.scales,
            "theory": None if self.theory is None else range_json(self.theory),
            "weighed": list(self.weighed),
            "cosines": self.cosines,
            "answered": None if self.alphas is None else list(self.alphas.names),
            "alphas": None if self.alphas is None else self.alphas.values,
            "changes": None if self.changes is None else self.changes.values,
            "pairs": None if self.pairs is None else [pair.as_json() for pair in self.pairs],
            "unlearning": {name: dict(self.costs(name)) for name in self.weighed} if self.cosines else None,
            "linearity": self.linear,
            "remarks": self.remarks,
        }
        rounded: dict[str, Any] = _rounded(document)
        return rounded


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(inner) for inner in value]
    return round(value, _DIGITS) if isinstance(value, float) else value


def advise(
    base: State,
    experts: Mapping[str, State],
    ask: Callable[[], Answers] | None = None,
    remarks: Sequence[str] = (),
    survives: type[Exception] = MergeflowError,
) -> Advice:
    """Return all advice that weights and answers allow.

    Args:
        base: the weights that the experts were tuned from.
        ask: gives the answers of base and experts; without it the weights alone are judged.
        remarks: what is known already not to be computed.
        survives: errors that become remarks; others are raised.

    Example:
        >>> import torch
        >>> base, one, two = (dict(w=torch.tensor(w)) for w in ([0.0, 0.0], [1.0, 0.0], [0.0, 1.0]))
        >>> advise(base, {"a": one, "b": two}).scales
        [0.566, 0.713, 0.898, 1.13]
    """
    notes = list(remarks)
    results: dict[str, Any] = {}
    vectors = or_remark("the task vectors", lambda: _vectors(base, experts, notes), notes, survives)
    if vectors and len(vectors) > 1:
        results |= {"weighed": tuple(vectors), "cosines": cosine_matrix(list(vectors.values()))}
        lengths = scales_of_lengths([norm(vector) for vector in vectors.values()], results["cosines"])
        if len(vectors) < len(experts):
            notes.append("λ was not suggested: it is for the sum of all task vectors.")
        elif lengths.empty or lengths.high > _LONGEST:
            notes.append("λ was not suggested: the task vectors are all zero, or cancel each other.")
        else:
            results["scales"] = suggested(lengths)
            if len(vectors) > _MOST:
                notes.append(
                    f"the suggested λ may be too large for {len(vectors)} experts: the more there are, the more often "
                    "the best lies below the range (docs/advising.md). Try half of the smallest as well."
                )
    if ask is not None:
        able, cosines = results.get("weighed", tuple(experts)), results.get("cosines")
        answered = or_remark(ANSWERED, lambda: _answered(able, ask(), cosines, notes), notes, survives) or {}
        if able != tuple(experts):
            answered.pop("theory", None)  # of all of them it expects nothing
        results |= answered
    return Advice(tuple(experts), **results, remarks=notes)


def or_remark(
    what: str, compute: Callable[[], Part], remarks: list[str], survives: type[Exception] = MergeflowError
) -> Part | None:
    """Return a part of the advice, or None and add the remark that it was not computed."""
    try:
        return compute()
    except survives as error:
        kind = "" if isinstance(error, MergeflowError) else f"{type(error).__name__}: "
        remarks.append(f"{what}: not computed. {kind}{error}")
        return None


def _vectors(base: State, experts: Mapping[str, State], remarks: list[str]) -> dict[str, State]:
    """Return the task vectors that can be computed; remarks name the other experts, and those that are the base."""
    vectors: dict[str, State] = {}
    faults: dict[str, list[str]] = {}
    for expert, state in experts.items():
        try:
            vectors[expert] = _vector(base, state)
        except MergeflowError as error:
            faults.setdefault(str(error), []).append(f"'{expert}'")
            continue
        if not any(value.any() for value in vectors[expert].values()):
            remarks.append(f"'{expert}' has the base's weights: its task vector is zero.")
    remarks += [f"the task vector of {', '.join(names)}: not computed. {why}" for why, names in faults.items()]
    return vectors


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
            f"It has a NaN or an infinity in {broken[0]}{more}: train that expert again, or leave it out."
        )
    return vector


def _answered(names: tuple[str, ...], answers: Answers, cosines: Matrix | None, remarks: list[str]) -> dict[str, Any]:
    """Compare the experts that answer, by their answers; a remark names the others."""
    changes = answers.changes
    silent: dict[str, str] = {}
    # First on an expert's own samples, so that a task that nobody can answer is one fault.
    for on_itself in (True, False):
        answering = [name for name in names if name not in silent]
        for name in answering:
            on = [name] if on_itself else answering
            if why := _silent(name, {task: answers.experts.get(task, {}) for task in on}, changes):
                silent[name] = why
    remarks += [f"α̂ of '{name}': not computed. {why}" for name, why in silent.items()]
    able = [name for name in names if name not in silent]
    if len(able) < 2:
        raise MergeflowError(f"Of {len(names)} experts {len(able)} can be compared by what they answer.")
    part = [
        {task: {name: answered[task][name] for name in able} for task in able}
        for answered in (answers.experts, changes)
    ]
    alphas, changed = (correlations(outputs) for outputs in part)
    if alphas.left_out or changed.left_out:
        remarks.append(
            f"{alphas.left_out + changed.left_out} answers have no direction, because an expert gives there what it "
            "gives on average or what the base gives; they count in no α̂."
        )
    results: dict[str, Any] = {"alphas": alphas, "changes": changed}
    if not silent:
        results["theory"] = scales_of_theory(changed.values)
    if cosines is not None:
        chosen = [names.index(name) for name in able]
        results["pairs"] = advise_pairs(alphas, changed, [[cosines[i][j] for j in chosen] for i in chosen])
    return results


def _silent(name: str, answers: Mapping[str, Any], changes: Mapping[str, Any]) -> str:
    """Return why what an expert answers to some tasks' samples can be compared with nothing; "" where it can."""
    for task, outputs in answers.items():
        if not outputs:
            return f"'{task}' has no samples."
        if not outputs[name].isfinite().all():
            return f"It answers the samples of '{task}' with a NaN or an infinity."
        for what, values in (
            ("all samples of '{}' alike", outputs),
            ("all samples of '{}' as the base does", changes[task]),
        ):
            try:
                output_correlation(values[name], values[name])
            except MergeflowError:
                return f"It answers {what.format(task)}."
    return ""
