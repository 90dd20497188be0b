"""Findings of the study `projection`: what Figure 4 says, held against the whole space and the lines between merges."""

from collections.abc import Mapping, Sequence
from itertools import combinations

from studies.old.claims import judge, paired
from studies.old.papers.projection.results import OTHERS, PAIR, PLANES, Rows, between, each
from studies.old.results import Finding, with_interval

FLAT = 0.1  # nat: as the study linearity_experts has it for linear mode connectivity


def findings(rows: Rows, across: Mapping[str, Sequence[float]]) -> list[Finding]:
    """Hold the paper's statements about Figure 4, and four of ours, against the whole space."""
    ours = [_close(rows), _apart(rows), _law(rows)]
    return [*_basins(rows), _diverges(rows), *ours, _elsewhere(rows, across), _better(rows)]


def _basins(rows: Rows) -> list[Finding]:
    """What lies on the straight line between merges, in the mean loss over tasks."""
    barriers = {name: [row["barriers"][name] for row in rows] for name in rows[0]["barriers"]}
    pair = " – ".join(PAIR)
    rule = f"barrier of the mean loss over tasks on the line between them ≤ {FLAT} nat"
    return [
        judge(
            "G8",
            "TIES and Breadcrumbs converge to similar basins.",
            {pair: barriers[pair]},
            rule,
            high=FLAT,
            unit=" nat",
            digits=3,
        ),
        judge(
            "G8",
            "Task arithmetic and DARE lie in that basin as well: no barrier between any two of the four.",
            {name: values for name, values in barriers.items() if name != pair},
            rule,
            high=FLAT,
            unit=" nat",
            digits=3,
            ours=True,
        ),
    ]


def _diverges(rows: Rows) -> Finding:
    own, dare = each(rows, lambda s: s.distance(*PAIR)), each(rows, lambda s: min(s.distance("dare", n) for n in PAIR))
    flat = with_interval(each(rows, lambda s: s.planar(PLANES[1], *PAIR)), 2)
    return judge(
        "G8",
        "DARE diverges significantly from TIES and Breadcrumbs.",
        {"their distance less that of DARE from the nearer of the two": paired(own, dare)},
        "paired difference ≤ 0 in the whole space",
        high=0,
        unit="",
        digits=2,
        beside=f"; on the plane of the methods compared they are {flat} apart, their cosine from θ0 is "
        f"{with_interval(each(rows, lambda s: s.cosine(*PAIR)), 2)}",
    )


def _close(rows: Rows) -> Finding:
    others = [pair for pair in combinations(OTHERS, 2) if pair != PAIR]
    nearest = each(rows, lambda s: min(s.distance(*pair) for pair in others))
    own = each(rows, lambda s: s.distance(*PAIR))
    return judge(
        "G8",
        "No two of task arithmetic, TIES, Breadcrumbs and DARE lie closer together than TIES and Breadcrumbs.",
        {"their distance less that of the nearest other pair": paired(own, nearest)},
        "paired difference ≤ 0 in the whole space",
        high=0,
        unit="",
        digits=2,
        ours=True,
    )


def _apart(rows: Rows) -> Finding:
    dare = each(rows, lambda s: s.gap("dare", OTHERS))
    others = each(rows, lambda s: max(s.gap(name, OTHERS) for name in OTHERS if name != "dare"))
    every = each(rows, lambda s: max(s.gap(name, s.row["merges"]) for name in s.row["merges"] if name != "dare"))
    own = with_interval(each(rows, lambda s: s.gap("dare", s.row["merges"])), 2)
    return judge(
        "G8",
        "DARE lands farther from its nearest merge than task arithmetic, TIES and Breadcrumbs from theirs.",
        {"DARE's gap less the largest of the others": paired(dare, others)},
        "paired difference ≥ 0 in the whole space, among task arithmetic, TIES, Breadcrumbs and DARE",
        low=0,
        unit="",
        digits=2,
        ours=True,
        beside=f"; among all methods DARE is {own} from its nearest, the most lonely other {with_interval(every, 2)}",
    )


def _law(rows: Rows) -> Finding:
    off = [max(abs(one["distance"] / one["expected"] - 1) for one in row["drops"]) for row in rows]
    return judge(
        "G8",
        "How far DARE lands from task arithmetic is the size of its random mask: λ √(p/(1 − p) Σ_t ‖τ_t‖²).",
        {"largest relative difference of measured and expected": [100 * value for value in off]},
        "≤ 5 %",
        high=5,
        unit=" %",
        ours=True,
    )


def _elsewhere(rows: Rows, across: Mapping[str, Sequence[float]]) -> Finding:
    beyond, turned = {}, []
    for run in rows[0]["paths"]:
        gaps = each(rows, lambda s, r=run: s.gap(s.ends[r], s.row["merges"]))  # type: ignore[misc]
        seeds = between(across[run])
        beyond[f"{run}, from its nearest merge, less {seeds:.2f} between seeds"] = [gap - seeds for gap in gaps]
        cosines = each(rows, lambda s, r=run: max(s.cosine(s.ends[r], name) for name in s.row["merges"]))  # type: ignore[misc]
        turned.append(f"{run} {with_interval(cosines, 2)}")
    return judge(
        "G8",
        "The iterative trajectory moves toward a distinct region.",
        beyond,
        "farther from every one-shot merge than ends of different seeds are from each other",
        low=0,
        unit="",
        digits=2,
        beside=f"; largest cosine from θ0 with a merge: {', '.join(turned)}; a merge by TIES of two seeds is "
        f"{between(across['ties']):.2f} apart",
    )


def _better(rows: Rows) -> Finding:
    best = [min(row["loss"][name] for name in row["merges"]) for row in rows]
    ends = {run: paired([row["loss"][run] for row in rows], best) for run in rows[0]["paths"]}
    toward = {run: each(rows, lambda s, r=run: s.cosine(s.ends[r], s.row["joint"])) for run in ends}  # type: ignore[misc]
    merges = each(rows, lambda s: max(s.cosine(name, s.row["joint"]) for name in s.row["merges"]))
    aims = ", ".join(f"{run} {with_interval(values, 2)}" for run, values in toward.items())
    return judge(
        "G8",
        "The trajectory ends at a lower loss than every one-shot merge.",
        {f"{run}, Σ L_t less that of the best merge": values for run, values in ends.items()},
        "paired difference of the multi-task loss on test images ≤ 0",
        high=0,
        unit=" nat",
        digits=2,
        beside=f"; cosine with joint training, from θ0: {aims}; a one-shot merge at most {with_interval(merges, 2)}",
    )
