"""What the study `projection` says: tables, findings and figures of its rows, one row per seed."""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from studies.old.papers.projection.figures import Plane, cosine_figure, plane_figure
from studies.old.results import Table, with_interval
from studies.old.rows import Row
from studies.theory.landscape import cosines_from, distances, principal_coordinates

PAIR = ("ties", "breadcrumbs")
OTHERS = ("task_arithmetic", "ties", "breadcrumbs", "dare")  # the methods that the paper names, and their plain sum
COMPARED = ("average", *OTHERS)  # what the smaller planes show: the paper does not say what Figure 4 is fitted to
PLANES = ("all models", "the methods compared", "the same without DARE")


class Space:
    """One seed's models in the whole space, by name."""

    def __init__(self, row: Row) -> None:
        self.row = row
        self._gram = np.array(row["gram"])
        self._index = {name: place for place, name in enumerate(row["names"])}
        self._distances, self._cosines = distances(self._gram), cosines_from(self._gram, self._index["base"])
        self.calm = [name for name in row["merges"] if name not in row["random"]]
        self.ends = {run: names[-1] for run, names in row["paths"].items()}

    def distance(self, one: str, other: str) -> float:
        return float(self._distances[self._index[one], self._index[other]])

    def cosine(self, one: str, other: str) -> float:
        """Return the cosine of two models' moves from the base."""
        return float(self._cosines[self._index[one], self._index[other]])

    def length(self, name: str) -> float:
        return self.distance("base", name)

    def nearest(self, name: str, among: Sequence[str]) -> str:
        return min((other for other in among if other != name), key=lambda other: self.distance(name, other))

    def gap(self, name: str, among: Sequence[str]) -> float:
        """Return the distance to the nearest of some models."""
        return self.distance(name, self.nearest(name, among))

    def pairs(self, names: Sequence[str], measure: Callable[[str, str], float]) -> np.ndarray:
        """Return a measure of every pair, [k (k − 1) / 2]."""
        return np.array([measure(a, b) for i, a in enumerate(names) for b in names[i + 1 :]])

    def plane(self, title: str) -> Plane:
        """Return one of `PLANES`."""
        hidden = set() if title == PLANES[0] else set(self.row["merges"]) - set(COMPARED)
        names = [name for name in self.row["names"] if name not in hidden]
        fitted = [name for name in names if title != PLANES[2] or name not in self.row["random"]]
        found = principal_coordinates(self._gram, [self._index[name] for name in fitted])
        at = {name: self._index[name] for name in names}
        return Plane(
            title,
            {name: (float(found.places[i, 0]), float(found.places[i, 1])) for name, i in at.items()},
            {name: float(found.off[i]) for name, i in at.items() if name not in fitted},
            found.explained.tolist(),
        )

    def planar(self, title: str, one: str, other: str) -> float:
        """Return the distance of two models on a plane.

        Args:
            title: of the plane.
            one, other: the models' names.
        """
        places = self.plane(title).places
        return math.dist(places[one], places[other])


Rows = Sequence[Row]


def each(rows: Rows, measure: Callable[[Space], float]) -> list[float]:
    """Return a measure of every seed."""
    return [measure(Space(row)) for row in rows]


def tables(rows: Rows, across: Mapping[str, Sequence[float]]) -> list[Table]:
    """Return where the merges lie, the distances that the claims are about, and DARE's over its drop."""
    return [_merges(rows), _distances(rows), _across(across), _drops(rows)]


def _merges(rows: Rows) -> Table:
    first = Space(rows[0])
    ends, joint = list(first.ends), rows[0]["joint"]
    cells = []
    for label in (*rows[0]["merges"], *ends, joint):
        name = first.ends.get(label, label)
        near = first.nearest(name, rows[0]["merges"])
        cells.append(
            {
                "model": f"{label}, last round" if label in ends else label,
                "scale": f"{rows[0]['scales'][label]:g}" if label in rows[0]["scales"] else None,
                "‖θ − θ0‖": with_interval(each(rows, lambda s, n=name: s.length(n)), 2),  # type: ignore[misc]
                "cosine with task arithmetic": with_interval(
                    each(rows, lambda s, n=name: s.cosine(n, "task_arithmetic")),  # type: ignore[misc]
                    2,
                ),
                "nearest merge": near,
                "distance to it": with_interval(each(rows, lambda s, n=name, m=near: s.distance(n, m)), 2),  # type: ignore[misc]
                "test accuracy, %": with_interval([row["accuracy"][label] for row in rows]),
                "Σ L_t": with_interval([row["loss"][label] for row in rows], 2),
            }
        )
    return Table("Models made with one budget; `nearest` is that of the first seed", cells)


def _distances(rows: Rows) -> Table:
    first = Space(rows[0])
    main = next(iter(first.ends.values()))
    pairs = [PAIR, ("ties", "task_arithmetic"), ("breadcrumbs", "task_arithmetic"), ("dare", "task_arithmetic")]
    pairs += [("dare", "ties"), (main, "task_arithmetic"), (main, "ties"), (main, rows[0]["joint"])]
    pairs += [(main, end) for end in list(first.ends.values())[1:]]
    cells = []
    for one, other in pairs:
        cell: dict[str, Any] = {"models": f"{one} – {other}"}
        cell["‖θ − θ′‖"] = with_interval(each(rows, lambda s, a=one, b=other: s.distance(a, b)), 2)  # type: ignore[misc]
        for plane in PLANES[:2]:
            planar = each(rows, lambda s, a=one, b=other, p=plane: s.planar(p, a, b))  # type: ignore[misc]
            cell[f"on the plane of {plane}"] = with_interval(planar, 2)
        cell["cosine from θ0"] = with_interval(each(rows, lambda s, a=one, b=other: s.cosine(a, b)), 2)  # type: ignore[misc]
        cells.append(cell)
    return Table("Distances in the whole space and on the planes", cells)


def _across(across: Mapping[str, Sequence[float]]) -> Table:
    return Table(
        "Distance between the same model of two seeds: what another order of the data does",
        [{"model": name, "mean distance": round(between(values), 2)} for name, values in across.items()],
    )


def between(across: Sequence[float]) -> float:
    """Return the mean distance between seeds; NaN where there is one seed, which decides nothing."""
    return fmean(across) if across else math.nan


def _drops(rows: Rows) -> Table:
    cells = []
    for index, drop in enumerate(rows[0]["drops"]):
        own = [row["drops"][index] for row in rows]
        cells.append(
            {
                "drop p": drop["drop"],
                "‖θ_DARE − θ_TA‖": with_interval([one["distance"] for one in own], 3),
                "λ √(p/(1 − p) Σ‖τ‖²)": with_interval([one["expected"] for one in own], 3),
                "validation accuracy, %": with_interval([one["accuracy"] for one in own]),
            }
        )
    return Table(f"DARE beside task arithmetic at the same λ = {rows[0]['scales']['task_arithmetic']:g}", cells)


def notes(rows: Rows, across: Mapping[str, Sequence[float]]) -> list[str]:
    """Return how far the planes can be trusted, and what decides DARE's place."""
    shares = [[100 * sum(Space(row).plane(title).explained) for row in rows] for title in PLANES]
    told = ", ".join(f"{with_interval(share)} % ({title})" for title, share in zip(PLANES, shares, strict=True))
    off = with_interval(each(rows, lambda s: s.plane(PLANES[2]).off["dare"]), 1)
    flat = with_interval(each(rows, lambda s: s.planar(PLANES[2], "dare", "task_arithmetic")), 1)
    far = with_interval(each(rows, lambda s: s.distance("dare", "task_arithmetic")), 1)
    least = min(rows[0]["drops"], key=lambda one: one["drop"])
    return [
        f"The planes show of the variance: {told}. A random mask moves a model at right angles to the "
        "merges without such a mask, so one component of a plane that DARE is fitted to is its mask. On the plane "
        f"without it DARE seems to lie {flat} from task arithmetic; the whole distance is {far}, and DARE lies {off} "
        "off this plane. Read the whole space.",
        "How far DARE lies from task arithmetic follows from scale, drop and the lengths of the task vectors: with "
        f"drop {least['drop']:g} it is {least['distance']:.2f}. Another order of the data moves a merge by TIES by "
        f"{between(across['ties']):.2f}, and by task arithmetic by {between(across['task_arithmetic']):.2f}.",
        "Distance alone does not tell a trajectory from another method: "
        + "; ".join(_alone(rows, run) for run in rows[0]["paths"])
        + ".",
    ]


def _alone(rows: Rows, run: str) -> str:
    """Return how far a trajectory's end is from its nearest merge, and how many merges are as far from theirs."""
    merges = rows[0]["merges"]
    far = each(rows, lambda s: s.gap(s.ends[run], merges))
    as_far = each(rows, lambda s: sum(s.gap(name, merges) >= s.gap(s.ends[run], merges) for name in merges))
    return (
        f"the end of {run} lies {with_interval(far, 2)} from its nearest merge, and {with_interval(as_far)} of the "
        f"{len(merges)} merges lie as far from theirs"
    )


def figures(rows: Rows) -> dict[str, Figure]:
    """Draw both planes of the first seed, and the cosines of the whole space, mean over seeds."""
    row, spaces = rows[0], [Space(one) for one in rows]
    ends = spaces[0].ends
    names = {name: name for name in row["merges"]} | {end: f"{run}, end" for run, end in ends.items()}
    names |= {row["joint"]: "joint training"}
    cosines = np.mean([[[s.cosine(a, b) for b in names] for a in names] for s in spaces], axis=0)
    return {
        "planes": plane_figure(row, [spaces[0].plane(title) for title in PLANES]),
        "cosines": cosine_figure(cosines, list(names.values())),
    }
