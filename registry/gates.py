"""The decision: may this candidate replace the champion? A pure function of figures, without MLflow."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mergeflow.analysis.provable.criteria import Criterion
from tasks.project.sections import GateSettings

_COUNTS_AT_ONCE = 1 << 20  # of int64: 8 MiB, where every example has a score of its own


@dataclass(frozen=True)
class Evidence:
    """The figures of a model on the validation split.

    Args:
        accuracy: task to accuracy, 0..1; or to a figure by another metric, -1..1.
        expert_accuracy: task to the accuracy of its own expert, in (0, 1]; what accuracies are normalised by.
        scores: task to float32 [n], one score per validation example in the split's order, whose mean is the accuracy;
            empty where not recorded.
        digests: task to the SHA-256 of its validation split; two models are paired example by example only where equal.
        reproducible: whether replaying the recipe gave the same bytes; None when nobody tried.
        criteria: of a model made to forget a task: what was asked for that task and for each other one.
    """

    accuracy: Mapping[str, float]
    expert_accuracy: Mapping[str, float]
    scores: Mapping[str, np.ndarray] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)
    reproducible: bool | None = None
    criteria: Sequence[Criterion] = ()


@dataclass(frozen=True)
class Gate:
    """One question and its answer; `reason` gives the measured value and the required one."""

    name: str
    passed: bool
    reason: str


@dataclass(frozen=True)
class Decision:
    """Whether to promote, why, and the figures it rests on.

    Args:
        numbers: figures by name, accuracies as fractions.
    """

    promote: bool
    gates: tuple[Gate, ...]
    numbers: dict[str, Any]

    @property
    def reasons(self) -> list[str]:
        """The failed gates' reasons, or every gate's when all passed."""
        return [gate.reason for gate in self.gates if self.promote or not gate.passed]


def decide(
    candidate: Evidence,
    champion: Evidence | None,
    settings: GateSettings,
    *,
    withdrawn: bool = False,
    removed_tasks: Collection[str] = (),
    unreadable: str = "",
) -> Decision:
    """Decide by the gates. All are asked, so that the answer is complete.

    gain = 1/T Σ_t (a_t − b_t) / e_t over the T shared tasks, with the validation accuracies a of the candidate, b of
    the champion and e of the candidate's experts; its interval is a paired bootstrap over examples

    With the same tasks on both sides the candidate must gain; where its tasks differ (one was added, or removed on
    purpose) it is judged on the shared ones, where it must lose no more than the tolerance on average and on each.

    Args:
        removed_tasks: tasks the candidate lacks on purpose (unmerge).
        unreadable: why the champion's evidence cannot be read, in words; then only a person can replace it.

    Example:
        >>> old = Evidence({"digits": 0.80}, {"digits": 0.90}, reproducible=True)
        >>> new = Evidence({"digits": 0.86}, {"digits": 0.90}, reproducible=True)
        >>> decide(new, old, GateSettings(confidence=None)).promote
        True
        >>> decide(old, new, GateSettings(confidence=None)).reasons
        ['mean normalised validation accuracy changes by -6.67 points, needed: a gain of more than 0', \
'digits: 80.00 % against 86.00 %, more than 5.00 points worse']
    """
    numbers: dict[str, Any] = {"settings": settings.model_dump(include=set(GateSettings.model_fields))}
    gates = [_complete("candidate", candidate)]
    gates.append(_reproducible(candidate, settings))
    gates.append(Gate("in service", not withdrawn, _withdrawn_text(withdrawn)))
    gates += [
        Gate("kept" if criterion.kept else "forgotten", criterion.holds, criterion.reason)
        for criterion in candidate.criteria
    ]
    if not gates[0].passed:
        return Decision(False, tuple(gates), numbers)
    numbers["normalised"] = _mean_normalised(candidate, sorted(candidate.accuracy))
    if unreadable:
        gates.append(Gate("champion", False, unreadable))
    elif champion is None:
        gates.append(Gate("champion", True, "there is no champion yet: the first complete model becomes it"))
    elif not (whole := _complete("champion", champion)).passed:
        gates.append(whole)
    else:
        gates += _against(candidate, champion, settings, set(removed_tasks), numbers)
    return Decision(all(gate.passed for gate in gates), tuple(gates), numbers)


def comparable(candidate: Evidence, champion: Evidence) -> bool:
    """Say whether both were evaluated on the same validation examples for every task that they share."""
    return all(_paired(candidate, champion, task) for task in set(candidate.accuracy) & set(champion.accuracy))


def _complete(who: str, evidence: Evidence) -> Gate:
    accuracy, experts = evidence.accuracy, evidence.expert_accuracy
    wrong = [
        task
        for task in {**accuracy, **experts}
        if not (-1.0 <= accuracy.get(task, math.nan) <= 1.0 and 0.0 < experts.get(task, math.nan) <= 1.0)
    ]
    if not evidence.accuracy:
        return Gate("metrics", False, f"the {who} has no validation accuracy at all")
    if wrong:
        listed = "; ".join(
            f"'{task}' ({accuracy.get(task, 'missing')}, its expert's {experts.get(task, 'missing')})" for task in wrong
        )
        asked = "at most 1 is expected, and of an expert more than 0"
        return Gate("metrics", False, f"the {who}'s validation figures are missing or out of range ({asked}): {listed}")
    return Gate("metrics", True, f"the {who} has every validation figure of {len(evidence.accuracy)} tasks")


def _reproducible(candidate: Evidence, settings: GateSettings) -> Gate:
    outcome = {True: "gave the same bytes", False: "gave other bytes", None: "was not tried"}[candidate.reproducible]
    passed = candidate.reproducible is True or not settings.require_reproducible
    asked = "" if settings.require_reproducible else " (not asked for)"
    return Gate("reproducible", passed, f"replaying the recipe {outcome}{asked}")


def _withdrawn_text(withdrawn: bool) -> str:
    if withdrawn:
        return "a rollback took this version out of service: only a forced promotion brings it back"
    return "no rollback has taken this version out of service"


def _against(
    candidate: Evidence, champion: Evidence, settings: GateSettings, removed: set[str], numbers: dict[str, Any]
) -> list[Gate]:
    shared = sorted(set(candidate.accuracy) & set(champion.accuracy))
    lost = sorted(set(champion.accuracy) - set(candidate.accuracy) - removed)
    gates = []
    if lost or not shared:
        names = ", ".join(lost) or "every task"
        gates.append(Gate("tasks", False, f"the candidate lacks tasks that the champion serves: {names}"))
    if not shared:
        return gates
    gain = _mean_normalised(candidate, shared) - _mean_normalised(champion, shared, candidate.expert_accuracy)
    numbers |= {"gain": gain, "shared_tasks": shared}
    same = set(candidate.accuracy) == set(champion.accuracy)
    other = any(champion.expert_accuracy.get(task) != candidate.expert_accuracy[task] for task in shared)
    by = " (both normalised by the candidate's experts)" if other else ""
    gates.append(_gain_gate(gain, settings, same, by))
    if settings.confidence is not None and same:
        gates.append(_interval_gate(candidate, champion, settings, shared, numbers))
    gates.append(_tolerance_gate(candidate, champion, settings, shared, numbers))
    return gates


def _gain_gate(gain: float, settings: GateSettings, same: bool, by: str) -> Gate:
    text = f"mean normalised validation accuracy changes by {100 * gain:+.2f} points{by}"
    if same:
        passed = gain > 0.0 and gain >= settings.margin
        needed = f"at least {100 * settings.margin:.2f}" if settings.margin else "more than 0"
        return Gate("margin", passed, f"{text}, needed: a gain of {needed}")
    passed = gain >= -settings.tolerance
    return Gate("margin", passed, f"{text} on the shared tasks, allowed: a loss of {100 * settings.tolerance:.2f}")


def _interval_gate(
    candidate: Evidence, champion: Evidence, settings: GateSettings, tasks: list[str], numbers: dict[str, Any]
) -> Gate:
    assert settings.confidence is not None
    unpaired = [task for task in tasks if not _paired(candidate, champion, task)]
    if unpaired:
        return Gate(
            "interval",
            False,
            f"no paired interval: the scores by example of {', '.join(unpaired)} are missing or of other examples; "
            "evaluate the champion on the present validation split, or set confidence to null",
        )
    low, high = paired_interval(
        {task: np.asarray(candidate.scores[task]) for task in tasks},
        {task: np.asarray(champion.scores[task]) for task in tasks},
        {task: candidate.expert_accuracy[task] for task in tasks},
        settings,
    )
    numbers["interval"] = [low, high]
    text = f"the {100 * settings.confidence:g} % interval of the gain is {100 * low:+.2f} to {100 * high:+.2f} points"
    return Gate("interval", low > 0.0, f"{text}, needed: above 0")


def _paired(candidate: Evidence, champion: Evidence, task: str) -> bool:
    if task not in candidate.scores or task not in champion.scores:
        return False
    same_examples = candidate.digests.get(task) == champion.digests.get(task)
    return same_examples and len(candidate.scores[task]) == len(champion.scores[task]) > 0


def _tolerance_gate(
    candidate: Evidence, champion: Evidence, settings: GateSettings, tasks: list[str], numbers: dict[str, Any]
) -> Gate:
    losses = {task: candidate.accuracy[task] - champion.accuracy[task] for task in tasks}
    numbers["change"] = losses
    # A hair of slack: 0.82 - 0.80 is a little more than 0.02 in floating point.
    worse = [task for task in tasks if losses[task] < -settings.tolerance - 1e-12]
    limit = f"{100 * settings.tolerance:.2f} points"
    if not worse:
        return Gate("tolerance", True, f"no task is more than {limit} worse than the champion's")
    listed = "; ".join(
        f"{task}: {100 * candidate.accuracy[task]:.2f} % against {100 * champion.accuracy[task]:.2f} %"
        for task in worse
    )
    return Gate("tolerance", False, f"{listed}, more than {limit} worse")


def _mean_normalised(evidence: Evidence, tasks: list[str], experts: Mapping[str, float] | None = None) -> float:
    # Both sides are divided by the candidate's experts: a retrained expert must not move the champion's figure.
    divisor = experts or evidence.expert_accuracy
    return float(np.mean([evidence.accuracy[task] / divisor[task] for task in tasks]))


def paired_interval(
    candidate: Mapping[str, np.ndarray],
    champion: Mapping[str, np.ndarray],
    expert_accuracy: Mapping[str, float],
    settings: GateSettings,
) -> tuple[float, float]:
    r"""Return the percentile interval of the gain in mean normalised accuracy, resampling examples within each task.

    gain = 1/T Σ_t (1/n_t) Σ_i (a_ti − b_ti) / e_t, where a and b are the scores of candidate and champion on example
    i. A resample of n_t examples is one multinomial draw of how often each distinct difference a − b occurs.

    Args:
        candidate: task to scores [n_t] in [0, 1].

    Source: Efron and Tibshirani 1993, "An introduction to the bootstrap", sections 13.3 (percentile interval) and
    8.3 (strata).
    """
    assert settings.confidence is not None
    random = np.random.default_rng(settings.seed)
    total = np.zeros(settings.resamples)
    for task in sorted(candidate):
        difference = candidate[task].astype(np.float64) - champion[task].astype(np.float64)
        total += _resampled_sums(difference, settings.resamples, random) / len(difference) / expert_accuracy[task]
    tail = (1.0 - settings.confidence) / 2.0
    low, high = np.quantile(total / len(candidate), [tail, 1.0 - tail])
    return float(low), float(high)


def _resampled_sums(difference: np.ndarray, resamples: int, random: np.random.Generator) -> np.ndarray:
    """Return Σ_i d_i of each of `resamples` samples drawn with replacement, [resamples]."""
    # -1, 0 and 1 always have a place, so that scores of 0 and 1 draw the same numbers whichever differences occur.
    values, counts = np.unique(np.concatenate([[-1.0, 0.0, 1.0], difference]), return_counts=True)
    chances = (counts - np.isin(values, (-1.0, 0.0, 1.0))) / len(difference)
    chances /= np.sum(chances)
    block = max(1, _COUNTS_AT_ONCE // len(values))
    sizes = (min(block, resamples - start) for start in range(0, resamples, block))
    return np.concatenate([random.multinomial(len(difference), chances, size=size) @ values for size in sizes])
