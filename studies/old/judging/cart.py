"""The pieces of the studies of CART from their tidy rows, and what the studies' rules find in them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mergeflow.evaluation.averages import normalised
from studies.old.judging.pieces import Rows, by_task, given, grouped, measured
from studies.old.papers.adaptation import results as adaptation
from studies.old.papers.cart_landscape import results as cart_landscape
from studies.old.papers.compression import results as compression
from studies.old.papers.many_tasks import findings as many_tasks
from studies.old.papers.rank_curve import findings as rank_curve
from studies.old.papers.rank_curve.results import LEVELS
from studies.old.papers.subset_scaling import findings as subset_scaling
from studies.old.results import Finding
from studies.old.rows import Row, picked

_VARIANT = ("on", "granularity", "images", "seed")


def of_adaptation(rows: Sequence[Row]) -> list[Finding]:
    """Return what the rules of `adaptation` make of its rows."""
    merges = picked(rows, part="merges")
    adapted = [
        {**{name: one[name] for name in _VARIANT}, "test": by_task(group)}
        for one, group in groups((row for row in merges if row["granularity"] != "static"), _VARIANT)
    ]
    starts = [
        {"seed": one["seed"], **{own["on"]: {"test": by_task(group)} for own, group in groups(of_seed, ("on",))}}
        for one, of_seed in groups(picked(merges, granularity="static"), ("seed",))
    ]
    return adaptation.findings(adapted, starts, picked(rows, part="memory"), _labels(picked(rows, part="labels")))


def _labels(rows: Sequence[Row]) -> Row:
    runs: Row = {}
    for one, group in groups(rows, ("labels",)):
        coefficients: Row = {}
        for row in group:
            if row["coefficient"] is not None:
                coefficients.setdefault(row["task"], {})[row["tensor"]] = row["coefficient"]
        runs[one["labels"]] = {
            "coefficients": coefficients,
            "losses": [row["loss"] for row in group if row["loss"] is not None],
            "accuracy": by_task(row for row in group if row["accuracy"] is not None),
        }
    return {"runs": runs}


def of_compression(rows: Sequence[Row], target: float) -> list[Finding]:
    """Return what the rules of `compression` make of its rows; the rank ratio of the claims is that of `own`.

    Args:
        rows: tidy.
        target: the share of individual accuracy that is to be kept, of the study's choices.
    """
    found, ratio = suites_of_compression(rows)
    return compression.findings(found, ratio, target)


def suites_of_compression(rows: Sequence[Row]) -> tuple[list[Row], float]:
    """Return the pieces of the study `compression`, and the rank ratio of its claims."""
    suites = picked(rows, part="suites")
    found = []
    for one, group in groups(suites, ("tasks", "seed", "kind", "rank_ratio", "threshold")):
        relative = {
            row["split"]: normalised(by_task(own), by_task(own, "expert")) for row, own in groups(group, ("split",))
        }
        args = given(one, "rank_ratio", "threshold")
        found.append({**one, "args": args, "relative": relative})
    return found, picked(suites, kind="own")[0]["rank_ratio"]


def of_cart_landscape(rows: Sequence[Row]) -> list[Finding]:
    """Return what the rules of `cart_landscape` make of its rows."""
    return cart_landscape.findings([_seed(group) for _, group in groups(picked(rows, part="models"), ("seed",))])


def _seed(rows: Sequence[Row]) -> Row:
    models = []
    for one, group in groups(rows, ("kind", "scale", "rank", "expert")):
        losses = {row["task"]: row["loss"] for row in group}
        models.append({**one, "task": one["expert"], "losses": losses, "place": (one["x"], one["y"])})
    (addition,) = {row["scale"] for row in rows if row["chosen"]}
    return {"seed": rows[0]["seed"], "tasks": list(models[0]["losses"]), "addition": addition, "models": models}


def of_rank_curve(rows: Sequence[Row]) -> list[Finding]:
    return rank_curve.findings(curves_of(rows))


def curves_of(rows: Sequence[Row]) -> list[Row]:
    """Return the pieces of the study `rank_curve`."""
    found = []
    for (count, seed), own in grouped(rows, "tasks", "seed").items():
        curves: dict[str, dict[str, list[Row]]] = {}
        for (kind, rule, ratio), points in grouped(
            [row for row in own if row["rule"]], "curve", "rule", "ratio"
        ).items():
            point = {"ratio": ratio, "scale": points[0]["scale"], "test": by_task(points)}
            curves.setdefault(kind, {}).setdefault(rule, []).append(point)
        levels = {name: by_task(picked(own, curve=name)) for name in LEVELS}
        found.append({"tasks": count, "seed": seed, "curves": curves, **levels})
    return found


def of_subset_scaling(rows: Sequence[Row], starts: Sequence[int]) -> list[Finding]:
    return subset_scaling.findings(*subsets_of(rows), starts)


def subsets_of(rows: Sequence[Row]) -> tuple[list[Row], list[Row], dict[int, Any]]:
    """Return the pieces of the study `subset_scaling`: its subsets, plans, and what is known of every task."""
    found, plans = [], {}
    known: dict[int, Any] = {}
    for (seed, size, subset), own in grouped(rows, "seed", "size", "subset").items():
        methods = {
            name: {"test": by_task(tasks), "args": {key: tasks[0][key] for key in ("scale", "keep", "rank_ratio")}}
            for (name,), tasks in grouped(own, "method").items()
        }
        found.append({"seed": seed, "size": size, "tasks": subset.split(), "methods": methods})
        first = own[0]
        ends = {"range": [first["a"] / 100, first["b"] / 100], "margin": first["epsilon"] / 100}
        plans[size] = {"size": size, "population": first["population"], **ends}
        levels = known.setdefault(seed, {"individual": {}, "zero_shot": {}})
        for name, column in (("individual", "expert"), ("zero_shot", "zero_shot")):
            levels[name] |= by_task(own, column)
    return found, list(plans.values()), known


def of_many_tasks(rows: Sequence[Row], labels: Mapping[str, str]) -> list[Finding]:
    """Return what the rules of `many_tasks` make of its rows.

    Args:
        rows: tidy.
        labels: what readers call the joint and iterative runs, by name.
    """
    return many_tasks.findings(models_of_many_tasks(rows), labels)


def models_of_many_tasks(rows: Rows) -> list[Row]:
    """Return the pieces of the study `many_tasks`."""
    return measured([row for row in rows if row["task"]], "tasks", "model", "seed", model="split")


def groups(rows: Iterable[Row], columns: Sequence[str]) -> list[tuple[Row, Rows]]:
    """Return the rows by their values in some columns: the first of each, and all of them."""
    return [(own[0], own) for own in grouped(rows, *columns).values()]
