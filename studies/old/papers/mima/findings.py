"""The paper's statements on MIMA, and ours on what it leaves open, held against the rows of the study `mima`."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean

from studies.old.claims import judge, paired, steps_between
from studies.old.papers.mima.results import (
    FIXED,
    NAMES,
    TUNED,
    budgets,
    gaps,
    relative,
    rounds_of,
    task_values,
    trained,
    values,
)
from studies.old.results import Finding, with_interval
from studies.old.rows import Row

MANY = 16  # from this N on the paper calls task vectors aligned
SUFFICIENT = 8  # from this N on the paper calls the number of rounds sufficient
Curve = Mapping[int, Sequence[float]]


def findings(rows: Sequence[Row]) -> list[Finding]:
    """Hold the paper's statements against the rows, of which each has every model of one N and seed."""
    numbers = rounds_of(rows)
    over = {name: {n: values(rows, n, name) for n in numbers} for name in ("experts", *TUNED, *FIXED.values())}
    return [
        *_with_more_rounds(rows, over, numbers),
        *_against_the_experts(rows, numbers),
        *_with_validation(over, numbers),
        *_without_validation(over, numbers),
        *_of_the_experts(rows, over["experts"], numbers),
    ]


def _with_more_rounds(rows: Sequence[Row], over: Mapping[str, Curve], numbers: Sequence[int]) -> list[Finding]:
    """What the paper says of Figures 4 and 9: that merges improve from N to N, on every task."""
    worst, whole = {}, {}
    for task, curve in task_values(rows, "average").items():
        step = min(pairwise(numbers), key=lambda ends, own=curve: fmean(own[ends[1]]) - fmean(own[ends[0]]))  # type: ignore[misc]
        worst[f"{task}, N = {step[0]} → {step[1]}"] = paired(curve[step[1]], curve[step[0]])
        whole[task] = paired(curve[numbers[-1]], curve[numbers[0]])
    told = ", ".join(f"{task} {with_interval(change)}" for task, change in whole.items())
    return [
        judge(
            "M2",
            "The average and task arithmetic improve monotonically with N.",
            _named_steps(over, ("average", "task_arithmetic")),
            "paired difference from each N to the next ≥ 0 points, λ of task arithmetic from validation",
            low=0,
        ),
        judge(
            "M2",
            "With validation sets TIES benefits from more rounds as task arithmetic does.",
            _named_steps(over, ("ties",)),
            "paired difference from each N to the next ≥ 0 points, λ of TIES from validation",
            low=0,
        ),
        judge(
            "M2",
            "The average improves uniformly on all tasks as N grows.",
            worst,
            "paired difference from each N to the next ≥ 0 points on every task; the smallest step of each is told",
            low=0,
            beside=f"; from N = {numbers[0]} to {numbers[-1]}: {told}",
        ),
    ]


def _named_steps(over: Mapping[str, Curve], models: Sequence[str]) -> dict[str, list[float]]:
    return {f"{NAMES[name]}, {step}": gains for name in models for step, gains in steps_between(over[name]).items()}


def _against_the_experts(rows: Sequence[Row], numbers: Sequence[int]) -> list[Finding]:
    """What the paper says of Figure 6 and of relative accuracy."""
    return [
        judge(
            "M4",
            f"The single-task gap of the average shrinks to nearly zero at N ≥ {MANY}.",
            {f"N = {n}": gaps(rows, n) for n in numbers if n >= MANY},
            "gap within ± 2 points (the paper: 0.5 % of relative accuracy at N = 16, ViT-B/32)",
            low=-2,
            high=2,
        ),
        judge(
            "M4",
            f"From N = {SUFFICIENT} on merged models have relative accuracies near or above 100 %.",
            {f"{NAMES[name]}, N = {n}": relative(rows, n, name) for name in TUNED for n in numbers if n >= SUFFICIENT},
            "relative accuracy ≥ 97.6 % (the smallest that the paper calls near: average, ViT-B/16)",
            low=97.6,
            unit=" %",
        ),
    ]


def _with_validation(over: Mapping[str, Curve], numbers: Sequence[int]) -> list[Finding]:
    """What the paper says of Figure 4a, where λ is chosen on validation."""
    first, last = numbers[0], numbers[-1]
    leads = {
        NAMES[name]: {n: paired(over[name][n], over["average"][n]) for n in numbers}
        for name in TUNED
        if name != "average"
    }
    return [
        judge(
            "M2",
            "With λ from validation task arithmetic and TIES are more accurate than the average.",
            {f"{name}, N = {n}": lead for name, own in leads.items() for n, lead in own.items()},
            "paired difference from the average ≥ 0 points at every N (the paper's own Table 1 has 87.3 % for task "
            "arithmetic and 87.6 % for the average with ViT-B/32, N = 16)",
            low=0,
        ),
        judge(
            "M2",
            "The advantage of task arithmetic and TIES over the average diminishes as N increases.",
            {f"{name}, N = {first} → {last}": paired(own[last], own[first]) for name, own in leads.items()},
            "paired difference of the lead, from the smallest N to the largest, ≤ 0 points",
            high=0,
        ),
        judge(
            "M2",
            f"At N ≥ {MANY} averaging is nearly as effective as task arithmetic and TIES.",
            {f"{name}, N = {n}": lead for name, own in leads.items() for n, lead in own.items() if n >= MANY},
            "lead over the average ≤ 1 point (the paper: at most 0.5, TIES with ViT-B/16 and ViT-B/32)",
            high=1,
        ),
    ]


def _without_validation(over: Mapping[str, Curve], numbers: Sequence[int]) -> list[Finding]:
    """What the paper says of Figure 4b, where λ is fixed."""
    fixed, leads = over[FIXED["task_arithmetic"]], {}
    for name, model in FIXED.items():
        own = {n: paired(over[model][n], over["average"][n]) for n in numbers if n >= MANY}
        if own:
            least = min(own, key=lambda n, lead=own: fmean(lead[n]))  # type: ignore[misc]
            leads[f"{NAMES[name]}, N = {least}"] = own[least]
    return [
        judge(
            "M2",
            "Without validation neither task arithmetic nor TIES consistently outperforms the average at large N.",
            leads,
            f"paired difference from the average ≤ 0 points, at that N of {MANY} and more where it is smallest",
            high=0,
        ),
        judge(
            "M2",
            "Task arithmetic with λ fixed at 0.4 degrades with N.",
            {f"N = {numbers[0]} → {numbers[-1]}": paired(fixed[numbers[-1]], fixed[numbers[0]])},
            "falls by ≥ 1 point from the smallest N to the largest",
            high=-1,
        ),
    ]


def _of_the_experts(rows: Sequence[Row], experts: Curve, numbers: Sequence[int]) -> list[Finding]:
    """What the paper says of Figure 8, in the mean over tasks and of any one of them."""
    first, *further = numbers

    def changes(curve: Curve) -> dict[int, list[float]]:
        return {n: paired(curve[n], curve[first]) for n in further}

    farthest = {}
    for task, curve in task_values(rows, "experts").items():
        own = changes(curve)
        most = max(own, key=lambda n, change=own: abs(fmean(change[n])))  # type: ignore[misc]
        farthest[f"{task}, N = {first} → {most}"] = own[most]
    return [
        judge(
            "M6",
            "More rounds do not significantly change the accuracy of the experts.",
            {f"N = {first} → {n}": change for n, change in changes(experts).items()},
            "paired difference within ± 3 points (the paper's own experts go from 90.2 to 87.8 % at N = 8)",
            low=-3,
            high=3,
        ),
        judge(
            "M6",
            "More rounds do not significantly change the accuracy of the expert of any given task.",
            farthest,
            f"paired difference from N = {first} within ± 3 points on every task, at the N where it is largest",
            low=-3,
            high=3,
        ),
    ]


def further_findings(rows: Sequence[Row], at: Sequence[int], kept: Sequence[int]) -> list[Finding]:
    """Hold what the paper leaves open against the runs with other budgets and with the optimiser kept.

    Args:
        rows: as of `measure_briefly`.
        at: the N that are compared over the budget.
        kept: the N with a run that keeps the optimiser.
    """
    found = []
    few, most = min(at, default=0), max(at, default=0)
    drops = {
        budget: paired(trained(rows, most, budget, "experts"), trained(rows, few, budget, "experts"))
        for budget in budgets(rows, at)
    }
    if len(drops) > 1:
        low, high = min(drops), max(drops)
        shared = min(len(drops[low]), len(drops[high]))
        found.append(
            judge(
                "M6",
                f"What experts lose from N = {few} to N = {most} shrinks with the budget.",
                {f"S = {low} → {high}": paired(drops[high][:shared], drops[low][:shared])},
                "the difference of the experts rises by ≥ 0.5 points from the smallest to the largest budget",
                low=0.5,
                ours=True,
                beside="".join(f"; at S = {s}: {with_interval(own)}" for s, own in drops.items()),
            )
        )
    return [*found, *(_of_the_moments(rows, n) for n in kept)]


def _of_the_moments(rows: Sequence[Row], rounds: int) -> Finding:
    (usual,) = {row["steps"] for row in rows if row["rounds"] == rounds and row["optimiser"] == "kept"}
    changes = {}
    for model in ("experts", "average"):
        own = trained(rows, rounds, usual, model, "kept")
        changes[model] = paired(own, trained(rows, rounds, usual, model)[: len(own)])
    return judge(
        "M1",
        f"Forgetting AdamW's moments at the merges costs less than a point (N = {rounds}).",
        {f"{model}, kept less reset": change for model, change in changes.items()},
        "paired differences within ± 1 point",
        low=-1,
        high=1,
        ours=True,
    )
