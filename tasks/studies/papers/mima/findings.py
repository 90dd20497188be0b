"""The paper's statements on MIMA, and ours on what it leaves open, held against the rows of the study `mima`."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from tasks.studies.claims import judge, paired, steps_between
from tasks.studies.papers.mima.results import (
    FIXED,
    NAMES,
    TUNED,
    budgets,
    gaps,
    rounds_of,
    task_values,
    trained,
    values,
)
from tasks.studies.results import Finding, with_interval
from tasks.studies.rows import Row

MANY = 16  # from this N on the paper calls task vectors aligned
Curve = Mapping[int, Sequence[float]]


def findings(rows: Sequence[Row]) -> list[Finding]:
    """Hold the paper's statements against the rows, of which each has every model of one N and seed."""
    numbers = rounds_of(rows)
    over = {name: {n: values(rows, n, name) for n in numbers} for name in ("experts", *TUNED, *FIXED.values())}
    return [
        *_of_the_average(rows, over, numbers),
        *_of_validation(over, numbers),
        *_without_validation(over, numbers),
        *_of_the_experts(rows, over["experts"], numbers),
    ]


def _of_the_average(rows: Sequence[Row], over: Mapping[str, Curve], numbers: Sequence[int]) -> list[Finding]:
    """M2's first sentence on Figure 4, its sentence on Figure 9, and M4."""
    first, last = numbers[0], numbers[-1]
    merged = task_values(rows, "average")
    falls = {
        f"{task} (N = {before} → {after})": paired(curve[after], curve[before])
        for task, curve in merged.items()
        for before, after in pairwise(numbers)
    }
    worst = min(falls, key=lambda name: sum(falls[name]))
    return [
        judge(
            "M2",
            "The average and task arithmetic improve monotonically with N.",
            {
                f"{NAMES[name]}, {step}": gains
                for name in ("average", "task_arithmetic")
                for step, gains in steps_between(over[name]).items()
            },
            "paired difference from each N to the next ≥ 0 points, λ of task arithmetic from validation",
            low=0,
        ),
        judge(
            "M2",
            "The average improves uniformly, on every task.",
            {task: paired(curve[last], curve[first]) for task, curve in merged.items()},
            "paired difference from the smallest N to the largest ≥ 0 points on every task",
            low=0,
            beside=f"; the smallest step from one N to the next: {worst} {with_interval(falls[worst])} points",
        ),
        judge(
            "M4",
            f"The single-task gap of the average shrinks to nearly zero at N ≥ {MANY}.",
            {f"N = {n}": gaps(rows, n) for n in numbers if n >= MANY},
            "gap ≤ 2 points (the paper: 0.5 % of relative accuracy at N = 16, ViT-B/32)",
            high=2,
        ),
    ]


def _of_validation(over: Mapping[str, Curve], numbers: Sequence[int]) -> list[Finding]:
    """What the paper says of its Figure 4a, where λ is chosen on validation."""
    first = numbers[0]
    spread = {n: [max(one) - min(one) for one in zip(*(over[name][n] for name in TUNED), strict=True)] for n in numbers}
    return [
        judge(
            "M2",
            "With λ from validation task arithmetic and TIES are more accurate than the average.",
            {
                f"{NAMES[name]}, N = {n}": paired(over[name][n], over["average"][n])
                for name in ("task_arithmetic", "ties")
                for n in numbers
            },
            "paired difference from the average ≥ 0 points at every N",
            low=0,
        ),
        judge(
            "M2",
            f"The methods converge: at N ≥ {MANY} averaging is nearly as effective as task arithmetic and TIES.",
            {
                f"best − worst, less half of that at N = {first}, N = {n}": [
                    one - begun / 2 for one, begun in zip(spread[n], spread[first], strict=True)
                ]
                for n in numbers
                if n >= MANY
            },
            "the lead of the best of the three over the worst is at most half of that at the smallest N",
            high=0,
        ),
    ]


def _without_validation(over: Mapping[str, Curve], numbers: Sequence[int]) -> list[Finding]:
    """What the paper says of its Figure 4b, where λ is fixed."""
    many = [n for n in numbers if n >= MANY]
    fixed = over[FIXED["task_arithmetic"]]
    leads = {name: [paired(over[model][n], over["average"][n]) for n in many] for name, model in FIXED.items() if many}
    return [
        judge(
            "M2",
            "Without validation neither task arithmetic nor TIES consistently outperforms the average at large N.",
            {
                f"{NAMES[name]}, smallest lead over N = {', '.join(map(str, many))}": [
                    min(of_seed) for of_seed in zip(*own, strict=True)
                ]
                for name, own in leads.items()
            },
            f"smallest paired difference from the average ≤ 0 points, of the N from {MANY} on",
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
    """What the paper says of its Figure 8, in the mean over tasks and of any one of them."""
    first, *further = numbers

    def changes(curve: Curve) -> dict[int, list[float]]:
        return {n: paired(curve[n], curve[first]) for n in further}

    return [
        judge(
            "M6",
            "More rounds do not significantly change the accuracy of the experts.",
            {f"N = {first} → {n}": change for n, change in changes(experts).items()},
            "paired difference ≥ −3 points (the paper's own experts go from 90.2 to 87.8 % at N = 8)",
            low=-3,
        ),
        judge(
            "M6",
            "More rounds do not significantly change the accuracy of the expert of any given task.",
            {
                task: [min(of_seed) for of_seed in zip(*changes(curve).values(), strict=True)]
                for task, curve in task_values(rows, "experts").items()
            },
            f"smallest paired difference of any N from N = {first} ≥ −3 points on every task",
            low=-3,
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
