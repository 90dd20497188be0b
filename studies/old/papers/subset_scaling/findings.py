"""Findings of the study `subset_scaling`: means over subsets, judged over the seeds of the experts."""

from collections.abc import Mapping, Sequence

import numpy as np

from studies.old.claims import judge
from studies.old.papers.subset_scaling.samples import OURS, WIDER, Known, Rows, Sample, name_of, seeds_of
from studies.old.results import Finding

SUPERIOR = 0.1  # points: the least that a table prints


def findings(rows: Rows, plans: Rows, known: Mapping[int, Known], starts: Sequence[int]) -> list[Finding]:
    """Hold the paper's statements against the subsets, by the experts' seeds.

    Args:
        rows: as of `measure`, one for each seed and subset.
        plans: what the study planned for each N.
        known: seed → `individual` and `zero_shot` accuracy per task on test.
        starts: the N from which CART's lead is followed.
    """
    seeds = list(seeds_of(rows, plans, known).values())
    methods = [method for method in rows[0]["methods"] if method != OURS]
    plain = [method for method in methods if not method.endswith(WIDER)]
    wide = [method for method in methods if method not in plain]
    steadiest = "CART has the smallest error bars at every number of tasks, but for TIES with four."
    found = [_leads(seeds, plain, "CART is superior to averaging, task arithmetic and TIES at every number of tasks.")]
    if wide:
        found.append(_leads(seeds, wide, "So it is against task arithmetic that may choose larger λ.", ours=True))
    found.append(_fall(seeds, plain))
    found += [_loses_least(seeds, size, methods) for size in starts if size in {one.size for one in seeds[0]}]
    found.append(_steadiest(seeds, plain, steadiest))
    if wide:
        beside = "CART's error bars are no larger than those of task arithmetic that may choose larger λ."
        found.append(_steadiest(seeds, wide, beside, ours=True))
    return [*found, _promise(seeds), _bounded(seeds)]


def _mean_lead(sample: Sample, method: str) -> float:
    return float(np.mean(sample.ahead(method)))


def _leads(seeds: Sequence[Sequence[Sample]], methods: Sequence[str], claim: str, ours: bool = False) -> Finding:
    gaps = {
        f"less {name_of(method)}, N = {one.size}": [_mean_lead(samples[place], method) for samples in seeds]
        for method in methods
        for place, one in enumerate(seeds[0])
    }
    rule = (
        f"mean paired difference over the subsets ≥ {SUPERIOR} points, the least that is printed, at every N; of two "
        "tasks CART is the average, and no better than it"
    )
    return judge("C7", claim, gaps, rule, low=SUPERIOR, ours=ours)


def _loses_least(seeds: Sequence[Sequence[Sample]], size: int, methods: Sequence[str]) -> Finding:
    """Compare the falls: CART loses less where its lead grows."""
    place = [one.size for one in seeds[0]].index(size)
    last = seeds[0][-1].size
    growth = {
        f"CART's lead over {name_of(method)} grows by": [
            _mean_lead(samples[-1], method) - _mean_lead(samples[place], method) for samples in seeds
        ]
        for method in methods
    }
    claim = f"CART degrades least from {size} to {last} tasks."
    rule = "growth of the mean paired lead ≥ 0, against every method"
    return judge("C7", claim, growth, rule, low=0, ours=True)


def _fall(seeds: Sequence[Sequence[Sample]], methods: Sequence[str]) -> Finding:
    first, last = seeds[0][0].size, seeds[0][-1].size
    changes = {
        f"{name_of(method)}, N = {first} → {last}": [
            float(np.mean(samples[-1].absolute(method)) - np.mean(samples[0].absolute(method))) for samples in seeds
        ]
        for method in methods
    }
    return judge(
        "C7",
        "Averaging, task arithmetic and TIES degrade notably as the number of tasks increases.",
        changes,
        "mean accuracy over the subsets falls by ≥ 1 point from the smallest number of tasks to the largest",
        high=-1,
    )


def _steadiest(seeds: Sequence[Sequence[Sample]], methods: Sequence[str], claim: str, ours: bool = False) -> Finding:
    """CART's spread over subsets against the others', at each N that has more than one subset.

    The paper finds TIES's error bars comparable with four tasks. With two, CART is the average.
    """
    compared = {
        place: [method for method in methods if (method, one.size) not in (("ties", 4), ("average", 2))]
        for place, one in enumerate(seeds[0])
        if one.count > 1
    }
    gaps = {
        f"N = {seeds[0][place].size}": [
            samples[place].deviation(OURS) - min(samples[place].deviation(method) for method in others)
            for samples in seeds
        ]
        for place, others in compared.items()
        if others
    }
    return judge(
        "C7",
        claim,
        gaps,
        "standard deviation over subsets less the smallest of the others ≤ 0; with two tasks CART is the average, "
        "which does not count there",
        high=0,
        ours=ours,
    )


def _promise(seeds: Sequence[Sequence[Sample]]) -> Finding:
    places = [place for place, one in enumerate(seeds[0]) if one.count < one.population]
    epsilon = {one.plan["margin"] for one in seeds[0]}.pop()
    widest = {
        f"N = {seeds[0][place].size}, m = {seeds[0][place].count}": [
            samples[place].realised(samples[place].absolute) for samples in seeds
        ]
        for place in places
    }
    return judge(
        "C7",
        "The sample is large enough: no method's 95 % interval of mean accuracy over subsets is wider than ± ε.",
        widest,
        f"widest half interval on test ≤ ε = {100 * epsilon:g} points",
        high=100 * epsilon,
    )


def _bounded(seeds: Sequence[Sequence[Sample]]) -> Finding:
    """The bound of σ rests on values in [a, b], which merging does not guarantee."""
    ends = [
        (one, [value for samples in seeds for m in one.rows[0]["methods"] for value in samples[place].absolute(m)])
        for place, one in enumerate(seeds[0])
    ]
    inside = all(100 * one.plan["range"][0] <= min(v) and max(v) <= 100 * one.plan["range"][1] for one, v in ends)
    numbers = ", ".join(
        f"{min(v):.1f} … {max(v):.1f} in {100 * one.plan['range'][0]:.1f} … {100 * one.plan['range'][1]:.1f} "
        f"(N = {one.size})"
        for one, v in ends
    )
    claim = "Every measured mean accuracy lies in [a, b], as the bound of σ assumes."
    return Finding("C7", claim, numbers, inside, "no subset of any seed outside: one refutes it")
