"""The paper's statements on the cosines of task vectors and increments, held against the rows of the study."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import fmean, quantiles

from studies.old.claims import judge, paired, steps_between
from studies.old.papers.alignment.pairs import mean_cosine, pairs
from studies.old.results import Finding, with_interval
from studies.old.rows import Row, of

QUARTILES = ("lower quartile", "median", "upper quartile")


class Cosines:
    """The rows by N, each N with one row for each seed."""

    def __init__(self, rows: Sequence[Row], named: Sequence[str]) -> None:
        """Take the rows of `mima_N`.

        Args:
            rows: as of `measure`.
            named: the pairs of tasks, in the order of the matrices.
        """
        runs = dict.fromkeys(row["run"] for row in rows)
        self.by_rounds = dict(sorted((int(name.rpartition("_")[2]), of(rows, run=name)) for name in runs))
        self.named = list(named)

    @property
    def first(self) -> int:
        return min(self.by_rounds)

    @property
    def most(self) -> int:
        return max(self.by_rounds)

    def final(self, measure: Callable[[list[float]], float]) -> dict[int, list[float]]:
        """Return N → a measure of the pairs' cosines of final task vectors, one value for each seed."""
        return {n: [measure(pairs(row["tau"][-1])) for row in own] for n, own in self.by_rounds.items()}

    def pair(self, n: int, kind: str, place: int, pair: int) -> list[float]:
        """Return the cosine of two tasks, one value for each seed.

        Args:
            n: N.
            kind: "tau" or "delta".
            place: of the round, from 0.
            pair: its place in `named`.
        """
        return [pairs(row[kind][place])[pair] for row in self.by_rounds[n]]


def findings(rows: Sequence[Row], named: Sequence[str], similar: Sequence[Sequence[str]]) -> list[Finding]:
    """Hold the paper's statements against the rows of `mima_N`.

    Args:
        rows: as of `measure`.
        named: the pairs of tasks, in the order of the matrices.
        similar: pairs of tasks that are similar in meaning.
    """
    found = Cosines(rows, named)
    return [*_once(found, similar), *_over_rounds(found), *_of_increments(found), _course(found)]


def _once(found: Cosines, similar: Sequence[Sequence[str]]) -> list[Finding]:
    """What the paper says of Figure 10, and of Figure 5 at its left end."""
    medians = found.final(_median)[found.first]
    asked = [(name, found.named.index(name)) for name in found.named if _among(name, similar)]
    return [
        judge(
            "M3",
            "Task vectors that were tuned independently are nearly orthogonal, with cosines centred around 0.0 to 0.1.",
            {f"median, N = {found.first}": medians},
            "median cosine over the pairs between 0 and 0.1 at the smallest N",
            low=0,
            high=0.1,
            unit="",
            digits=3,
        ),
        judge(
            "M3",
            "Two tasks that are similar in meaning have task vectors with a larger cosine.",
            {
                f"{name} less the median, N = {found.first}": paired(found.pair(found.first, "tau", -1, place), medians)
                for name, place in asked
            },
            "paired difference from the median over all pairs ≥ 0 at the smallest N",
            low=0,
            unit="",
            digits=3,
        ),
    ]


def _among(name: str, similar: Sequence[Sequence[str]]) -> bool:
    return any(name in (f"{one} – {other}", f"{other} – {one}") for one, other in similar)


def _median(cosines: Sequence[float]) -> float:
    return _quartile(cosines, 1)


def _quartile(cosines: Sequence[float], which: int) -> float:
    return quantiles(cosines, n=4, method="inclusive")[which] if len(cosines) > 1 else cosines[0]


def _over_rounds(found: Cosines) -> list[Finding]:
    """What the paper says of Figure 5 over N."""
    steps = {
        f"{name}, {step}": changes
        for which, name in enumerate(QUARTILES)
        for step, changes in steps_between(found.final(lambda one, w=which: _quartile(one, w))).items()  # type: ignore[misc]
    }
    return [
        judge(
            "M3",
            "The median and the interquartile range of the cosines of final task vectors shift steadily towards 1.",
            steps,
            "paired difference of each quartile over the pairs from each N to the next ≥ 0",
            low=0,
            unit="",
            digits=3,
        ),
        judge(
            "M3",
            "For large N final task vectors are nearly parallel.",
            {f"N = {found.most}": found.final(fmean)[found.most]},
            "mean cosine ≥ 0.8 at the largest N (the paper's Figure 5: about 0.9 and more)",
            low=0.8,
            unit="",
            digits=3,
        ),
    ]


def _of_increments(found: Cosines) -> list[Finding]:
    """What the paper says of the increments in Figure 11, in the mean over the pairs and of any two tasks."""
    means, single = {}, {}
    for n, own in found.by_rounds.items():
        over = [[mean_cosine(row["delta"][place]) for row in own] for place in range(len(own[0]["steps"]))]
        farthest = max(over, key=lambda values: abs(fmean(values)))
        means[f"mima_{n}, round {over.index(farthest) + 1}"] = farthest
        cells = {
            f"mima_{n}, {name}, round {place + 1}": found.pair(n, "delta", place, pair)
            for place in range(len(over))
            for pair, name in enumerate(found.named)
        }
        label = max(cells, key=lambda name, own=cells: abs(fmean(own[name])))  # type: ignore[misc]
        single[label] = cells[label]
    return [
        judge(
            "M3",
            "Increments stay nearly orthogonal in every round.",
            means,
            "mean cosine over the pairs, in the round where it is farthest from 0, between −0.3 and 0.3 (the paper's "
            "Figure 11: near 0)",
            low=-0.3,
            high=0.3,
            unit="",
            digits=3,
        ),
        judge(
            "M3",
            "Increments of any two tasks stay nearly orthogonal in every round.",
            single,
            "cosine of the pair and round in which it is farthest from 0 between −0.3 and 0.3, at every N",
            low=-0.3,
            high=0.3,
            unit="",
            digits=3,
        ),
    ]


def _course(found: Cosines) -> Finding:
    """What the paper says of the task vectors in Figure 11."""
    steps = {}
    for n, own in found.by_rounds.items():
        courses = [[mean_cosine(matrix) for matrix in row["tau"]] for row in own]
        if n > 1:
            least = [min(after - before for before, after in pairwise(course)) for course in courses]
            steps[f"mima_{n}, smallest step from a round to the next"] = least
    last = found.by_rounds[found.most]
    ends = [with_interval([mean_cosine(row["tau"][place]) for row in last], 2) for place in (0, -1)]
    return judge(
        "M3",
        "The cosine of task vectors increases with each round.",
        steps,
        "paired difference of the mean cosine from any round to the next ≥ 0, at every N",
        low=0,
        unit="",
        digits=4,
        beside=f"; at N = {found.most} from {ends[0]} to {ends[1]}",
    )
