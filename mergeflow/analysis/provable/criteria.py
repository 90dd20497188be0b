"""Has a merged model learnt what it should, and forgotten what it should? In losses, accuracies and Rouge-L."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from mergeflow.errors import MergeflowError, unknown_name

Form = Literal["loss", "accuracy", "recall"]


@dataclass(frozen=True)
class Criterion:
    """What is asked of one task, and what was found."""

    task: str
    kept: bool  # whether it must be solved; else it must have been forgotten
    form: Form  # what `measured` and `limit` are: losses ≥ 0, or accuracies or recalls of Rouge-L in [0, 1]
    measured: float  # of the merged model
    limit: float  # the worst figure of a task that is kept, or the best of one that is forgotten

    @property
    def holds(self) -> bool:
        """Whether the figure is on the right side of its limit; exactly at it, it is."""
        at_most = self.kept == (self.form == "loss")
        return self.measured <= self.limit if at_most else self.measured >= self.limit

    @property
    def figure(self) -> str:
        """What was measured, in words."""
        return "Rouge-L recall" if self.form == "recall" else self.form

    @property
    def reason(self) -> str:
        """What was found and what was asked, for people."""
        bound = "at most" if self.kept == (self.form == "loss") else "at least"
        numbers = (self.measured, self.limit)
        figure, asked = (f"{value:.3f}" if self.form == "loss" else f"{100 * value:.2f} %" for value in numbers)
        duty = "kept" if self.kept else "forgotten"
        return f"{self.task} must be {duty}: its {self.figure} is {figure}, {bound} {asked} was asked for"


def addition_criteria(
    measured: Mapping[str, float], limits: Mapping[str, float], form: Form = "loss"
) -> list[Criterion]:
    """Return the criteria of a merge for several tasks.

    loss, in any unit: E ℓ(T_i) ≤ ε_i for all i;  accuracy or recall, in [0, 1]: A(T_i) ≥ a_i for all i

    The limits are ε_i, or a_i; for an accuracy usually an expert's less a tolerance.

    Source: Li et al. 2025, Equation 2; the other forms are ours.
    """
    return [_criterion(task, True, form, measured, limit) for task, limit in limits.items()]


def unlearning_criteria(
    measured: Mapping[str, float],
    limits: Mapping[str, float],
    forget: Mapping[str, float],
    form: Form = "loss",
) -> list[Criterion]:
    """Return the criteria of a merge that keeps some tasks and has forgotten others.

    loss: E ℓ(T_i) ≥ c_i for i ∈ V_N and E ℓ(T_j) ≤ ε_j for the others;
    accuracy: A(T_i) ≤ a_i for i ∈ V_N and A(T_j) ≥ a_j for the others

    recall: as accuracy, of what a language model writes behind a passage's beginning, against the passage's own words.
    The forms differ: with tasks that have something in common a loss can be large while all predictions are right. The
    limits are ε_j or a_j, and of the tasks to forget, which come first, c_i or a_i.

    Source: Li et al. 2025, Equation 3; the other forms are ours.
    """
    if both := [task for task in forget if task in limits]:
        raise MergeflowError(f"'{both[0]}' is to be kept and to be forgotten; name it once.")
    forgotten = [_criterion(task, False, form, measured, limit) for task, limit in forget.items()]
    return [*forgotten, *addition_criteria(measured, limits, form)]


def all_met(criteria: Iterable[Criterion]) -> bool:
    """Whether every criterion holds."""
    return all(criterion.holds for criterion in criteria)


def _criterion(task: str, keep: bool, form: Form, measured: Mapping[str, float], limit: float) -> Criterion:
    if form not in get_args(Form):
        raise unknown_name("form of a criterion", form, get_args(Form))
    if task not in measured:
        raise unknown_name("task", task, measured)
    figure = measured[task]
    if math.isnan(figure):
        raise MergeflowError(
            f"the task '{task}' has no figure (NaN): it has no samples. Give it some, or leave it out."
        )
    high = math.inf if form == "loss" else 1.0
    # Below 0 are Matthews' correlation, which stands for an accuracy, and an accuracy less a tolerance.
    for name, value in (("", figure), ("limit of the ", limit)):
        if not value <= high:
            shares = {"accuracy": "; accuracies are shares of 1", "recall": "; recalls are shares of 1"}.get(form, "")
            raise MergeflowError(
                f"the {name}{form} of the task '{task}' is {value:g}; expected {high:g} at most{shares}."
            )
    return Criterion(task, keep, form, figure, limit)
