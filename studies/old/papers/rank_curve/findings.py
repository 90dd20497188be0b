"""Findings of the study `rank_curve`: the paper's statements held against the curves of every seed."""

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

from mergeflow.evaluation.averages import mean
from studies.old.claims import judge, paired
from studies.old.papers.rank_curve.results import KINDS, USED, levels, peak, samples, suites
from studies.old.results import Finding
from studies.old.rows import Row

NEAR = (0.04, 0.16)  # a factor of two around the paper's 8 %
NOISE = 0.5  # points
AHEAD = 7.8  # points: half of what CART has over task arithmetic in the paper's Table 1, 15.6 with 8 tasks


def findings(rows: Sequence[Row]) -> list[Finding]:
    """Hold the paper's statements against the curves of every suite."""
    return [finding for count, own in suites(rows).items() for finding in _findings(count, own)]


def _findings(count: int, rows: Sequence[Row]) -> list[Finding]:
    centred, original, alone = ([_curve(row, kind) for row in rows] for kind in KINDS)
    average, zero_shot = levels(rows, "average"), levels(rows, "zero_shot")
    addition = [curve[1.0] for curve in original]
    ends = [max(abs(curve[0.0] - one), abs(curve[1.0] - one)) for curve, one in zip(centred, average, strict=True)]
    return [
        judge(
            "C2",
            f"{count} tasks: the centred curve is bell-shaped, with its peak strictly inside (0, 1).",
            {
                "highest point inside less the higher end": [_inside(curve) for curve in centred],
                "at 8 %, less the higher end": [curve[USED] - max(curve[0.0], curve[1.0]) for curve in centred],
            },
            "paired difference ≥ 1 point, of the highest point as of one that no look at test chose",
            low=1,
        ),
        judge(
            "C2",
            f"{count} tasks: the centred curve is the average at both ends.",
            {"larger difference of the two ends": ends},
            "≤ 0.1 points (rounding of float32 weights)",
            high=0.1,
            digits=3,
        ),
        judge(
            "C2",
            f"{count} tasks: the original curve rises monotonically with the rank.",
            {
                "smallest step between neighbours": [_smallest_step(curve) for curve in original],
                "the same, matrices alone": [_smallest_step(curve) for curve in alone],
            },
            f"no fall between neighbours by more than {NOISE} points",
            low=-NOISE,
        ),
        judge(
            "C2",
            f"{count} tasks: at rank 0 the original curve is the pre-trained model.",
            {"less zero-shot, matrices alone": paired([curve[0.0] for curve in alone], zero_shot)},
            "at most 0.1 points above or below",
            low=-0.1,
            high=0.1,
        ),
        judge(
            "C2",
            f"{count} tasks: it is so too where all other tensors are added at every rank.",
            {"less zero-shot, all other tensors added": paired([curve[0.0] for curve in original], zero_shot)},
            "at most 0.1 points above or below",
            low=-0.1,
            high=0.1,
            ours=True,
        ),
        *_above(count, centred, addition),
        *_each_task(count, rows),
        _near(f"{count} tasks: the centred curve peaks near 8 % of the full rank.", [peak(curve) for curve in centred]),
        judge(
            "C2",
            f"{count} tasks: every task's own centred curve peaks near 8 %.",
            {"tasks with their peak there": [_near_share(row) for row in rows]},
            "of 90 % of the tasks and more between 4 % and 16 %",
            low=90,
            unit=" %",
        ),
        _near(
            f"{count} tasks: with λ chosen for each rank the centred curve peaks near 8 % as well.",
            [peak(_curve(row, "centred", "per rank")) for row in rows],
            ours=True,
        ),
    ]


def _above(count: int, centred: Sequence[dict[float, float]], addition: Sequence[float]) -> list[Finding]:
    """Compare the peak with task arithmetic; TIES and AdaMerging are the study `many_tasks`'s.

    Args:
        count: how many tasks.
        centred: the centred curve of each seed.
        addition: accuracy of task arithmetic of the full rank.
    """
    leads = {
        "peak less task arithmetic": paired([max(curve.values()) for curve in centred], addition),
        "at 8 %, less task arithmetic": paired([curve[USED] for curve in centred], addition),
    }
    points = "of the highest point as of one that no look at test chose"
    return [
        judge(
            "C2",
            f"{count} tasks: the peak of the centred curve significantly outperforms task arithmetic.",
            leads,
            f"paired difference ≥ {AHEAD:g} points, half of the paper's smallest, {points}",
            low=AHEAD,
        ),
        judge(
            "C2",
            f"{count} tasks: the peak of the centred curve lies above task arithmetic.",
            leads,
            f"paired difference ≥ 0, {points}",
            low=0,
            ours=True,
        ),
    ]


def _each_task(count: int, rows: Sequence[Row]) -> list[Finding]:
    """Compare the curves task by task at the paper's rank, with the original one there and where it ends (Figure 6)."""

    def ahead(ratio: float) -> dict[str, list[float]]:
        """Return by task what the centred curve at 8 % is above the original one at a ratio."""
        pairs = {
            task: (samples(rows, "centred", "once", task)[USED], samples(rows, "original", "once", task)[ratio])
            for task in rows[0]["experts"]
        }
        return {task: paired(*pair) for task, pair in pairs.items()}

    rule = "paired difference ≥ 0, on each task"
    return [
        judge("C2", f"{count} tasks: at 8 % CART is above task arithmetic on every task.", ahead(USED), rule, low=0),
        judge(
            "C2",
            f"{count} tasks: at 8 % CART is above task arithmetic of the full rank on every task.",
            ahead(1.0),
            rule,
            low=0,
            ours=True,
        ),
    ]


def _near(claim: str, places: Sequence[float], ours: bool = False) -> Finding:
    """Judge where a curve is highest.

    Args:
        claim: in words.
        places: the rank ratio of the highest point, one for each seed.
        ours: whether the claim is an addition of this project.
    """
    rule = "between 4 % and 16 %, a factor of two either way"
    return judge(
        "C2", claim, {"place of the peak": places}, rule, low=NEAR[0], high=NEAR[1], unit="", digits=3, ours=ours
    )


def _curve(row: Row, kind: str, rule: str = "once") -> dict[float, float]:
    """Return mean test accuracy in % over the ratio."""
    return {point["ratio"]: 100 * mean(point["test"]) for point in row["curves"][kind][rule]}


def _near_share(row: Row) -> float:
    """Return the share of tasks in % whose centred curve, λ chosen once, is highest near 8 %."""
    points = row["curves"]["centred"]["once"]
    peaks = [peak({point["ratio"]: point["test"][task] for point in points}) for task in points[0]["test"]]
    return 100 * fmean(NEAR[0] <= place <= NEAR[1] for place in peaks)


def _inside(curve: dict[float, float]) -> float:
    ends = curve[0.0], curve[1.0]
    return max(value for ratio, value in curve.items() if 0 < ratio < 1) - max(ends)


def _smallest_step(curve: dict[float, float]) -> float:
    return min(after - before for before, after in pairwise(curve[ratio] for ratio in sorted(curve)))
