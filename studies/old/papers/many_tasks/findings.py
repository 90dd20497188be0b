"""Findings of the study `many_tasks`: the paper's statements held against its table."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import fmean

from studies.lab.adapting import NOT_WORSE
from studies.lab.inputs import mean_accuracy
from studies.old.claims import judge
from studies.old.papers.many_tasks.results import BASELINES, Labels, Results
from studies.old.results import Finding, with_interval
from studies.old.rows import Row

# Half of what the paper's Table 1 has, in points
SUBSTANTIAL = 4.75  # CART less Consensus TA, 8 tasks
FAR = 7.3  # individual less average, the smallest
PEAK = 2.3  # CART less AdaMerging, 8 tasks
PEAKED = ("task_arithmetic", "ties", "adamerging_ta")


def findings(rows: Sequence[Row], labels: Labels) -> list[Finding]:
    """Hold the paper's statements against the table."""
    found = Results(rows, labels)
    models = set(found.models)
    asked = [_compare(found, other) for other in BASELINES if other in models]
    if "consensus" in models:
        asked.append(_by_a_margin(found))
    asked += [*_of_the_average(found), _order(found)]
    if {"cart", *PEAKED} <= models:
        asked.append(_peak(found))
    if "cart" in models and len(found.counts) > 1:
        asked.append(_loses_least(found))
    if "adamerging_ta" in models:
        asked.append(_compare(found, "adamerging_ta"))
    if "adamerging_cart" in models:
        asked.append(_improves_further(found))
    asked += [_adapts(found, start) for start in ("ta", "cart") if f"adamerging_{start}" in models]
    if {"adamerging_ta", "adamerging_cart"} <= models:
        asked.append(
            judge(
                "C4",
                "AdaMerging on CART's directions is better than on task vectors.",
                _at_all(found, lambda count: found.lead(count, "adamerging_cart", "adamerging_ta")),
                "paired difference ≥ 0, at every number of tasks",
                low=0,
            )
        )
    return asked


def _at_all(found: Results, values: Callable[[int], list[float]]) -> dict[str, list[float]]:
    """Return a measure at every number of tasks at which there is one."""
    return {f"{count} tasks": own for count in found.counts if (own := values(count))}


def _compare(found: Results, other: str) -> Finding:
    return judge(
        "C1",
        f"CART beats {found.names[other]}, whatever the number of tasks.",
        _at_all(found, lambda count: found.lead(count, "cart", other)),
        "paired difference ≥ 0, at every number of tasks",
        low=0,
    )


def _by_a_margin(found: Results) -> Finding:
    return judge(
        "C1",
        f"CART outperforms {found.names['consensus']} by a substantial margin, whatever the number of tasks.",
        _at_all(found, lambda count: found.lead(count, "cart", "consensus")),
        f"paired difference ≥ {SUBSTANTIAL:g} points, half of the paper's 9.5, at every number of tasks",
        low=SUBSTANTIAL,
    )


def _peak(found: Results) -> Finding:
    """What the paper says of the peak over the rank in its Figure 1: here the rank is that which validation chose."""
    count = found.counts[0]
    return judge(
        "C2",
        f"{count} tasks: at its peak over the rank CART significantly outperforms task arithmetic, TIES and "
        "AdaMerging.",
        {f"less {found.names[name]}": found.lead(count, "cart", name) for name in PEAKED},
        f"paired difference ≥ {PEAK:g} points, half of the paper's smallest, that over AdaMerging; rank and λ as "
        "chosen on validation",
        low=PEAK,
    )


def _of_the_average(found: Results) -> list[Finding]:
    """What the paper says of weight averaging in its Table 1."""
    leads = [found.lead(count, "task_arithmetic", "average") for count in found.counts]
    means = [fmean(of_seed) for of_seed in zip(*leads, strict=True)]
    return [
        judge(
            "C6",
            "Weight averaging is far below the individual experts.",
            _at_all(found, lambda count: found.lead(count, "individual", "average")),
            f"paired difference ≥ {FAR:g} points, half of the paper's smallest, at every number of tasks",
            low=FAR,
        ),
        judge(
            "C6",
            "Weight averaging generally performs worse than task arithmetic.",
            {"mean over the numbers of tasks": means} if means else {},
            "task arithmetic less average ≥ 0 points, in the mean over the numbers of tasks",
            low=0,
        ),
    ]


def _improves_further(found: Results) -> Finding:
    return judge(
        "C4",
        "Combined with test-time adaptation CART improves further.",
        _at_all(found, lambda count: found.lead(count, "adamerging_cart", "cart")),
        "AdaMerging on CART's directions less CART as chosen on validation ≥ 0 points, at every number of tasks",
        low=0,
    )


def _adapts(found: Results, start: str) -> Finding:
    name = f"adamerging_{start}"
    words = "CART (8 %, λ = 1)" if start == "cart" else "task arithmetic (λ from validation)"

    def gains(count: int) -> list[float]:
        return [mean_accuracy(row["test"]) - mean_accuracy(row["start"]) for row in found.of(count, name)]

    return judge(
        "C4",
        f"Adapting is at least as good as its static start, {words}.",
        _at_all(found, gains),
        f"paired difference ≥ {NOT_WORSE} points, at every number of tasks",
        low=NOT_WORSE,
    )


def _order(found: Results) -> Finding:
    ladder = [
        name for name in ("zero_shot", "average", "task_arithmetic", "cart", "individual") if name in found.models
    ]
    steps = {
        f"{count} tasks, {found.names[high]} less {found.names[low]}": found.lead(count, high, low)
        for count in found.counts
        for low, high in pairwise(ladder)
    }
    words = " < ".join(found.names[name] for name in ladder)
    rule = "each paired difference ≥ 0 (in the paper's Table 1 task arithmetic is below the average with 20 tasks)"
    return judge("C6", f"{words}, whatever the number of tasks.", steps, rule, low=0, ours=True)


def _loses_least(found: Results) -> Finding:
    first, last = found.ends
    compared = [name for name in found.merges if name != "cart"]
    own = found.lost("cart")
    more = {
        f"{found.names[name]} loses more by": [lost[seed] - own[seed] for seed in sorted(lost.keys() & own.keys())]
        for name in compared
        if (lost := found.lost(name))
    }
    return judge(
        "C6",
        f"From {first} to {last} tasks CART loses least of all merges without data.",
        more,
        "paired difference of what is lost, normalised, ≥ 0 against every other merge without data (the paper does not "
        "say so: in its Table 1 the average loses less)",
        low=0,
        ours=True,
        beside=f"; CART loses {with_interval(list(own.values()))}",
    )
