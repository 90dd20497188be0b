"""What the study `cart_landscape` says: tables, findings and figures of its rows, one row per seed."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from mergeflow.evaluation.averages import mean
from studies.old.claims import judge
from studies.old.papers.cart_landscape.figures import Trace, basin_figure, curve_figure, path_figure, task_figure
from studies.old.papers.cart_landscape.seed import LABELS, SHOWN, Rows, Seed, each, seeds, total
from studies.old.results import Cell, Finding, Table, with_interval
from studies.old.rows import Row
from studies.old.verdicts import all_hold, within
from studies.theory.landscape import roundness

LOWER = 0.1  # nat, of Σ L_t: what counts as lower
TOLERANCE = 1e-3  # of a path's reach: rounding of float32 weights


def tables(rows: Rows) -> list[Table]:
    """Return losses at the models themselves, along both paths, per task, and what the planes show."""
    return [_models(rows), _over_ranks(rows), _over_scales(rows), _per_task(rows), _fits(rows)]


def _models(rows: Rows) -> Table:
    cells: list[dict[str, Cell]] = [
        {
            "model": label,
            "Σ L_t, validation": each(rows, lambda s, n=name: total(s.named(n))),  # type: ignore[misc]
            "Σ L_t, test": each(rows, lambda s, n=name: sum(s.row["test"][n]["losses"].values())),  # type: ignore[misc]
            "test accuracy, %": each(rows, lambda s, n=name: 100 * mean(s.row["test"][n]["accuracy"]), 1),  # type: ignore[misc]
            "‖θ − θ_avg‖": each(rows, lambda s, n=name: s.named(n)["away"]),  # type: ignore[misc]
            "off the plane": each(rows, lambda s, n=name: s.named(n)["off"]),  # type: ignore[misc]
        }
        for name, label in LABELS.items()
    ]
    experts: dict[str, Cell] = {
        "model": "experts, each on its own task",
        "Σ L_t, validation": each(rows, lambda s: sum(one["losses"][one["task"]] for one in s.experts())),
        "Σ L_t, test": None,
        "test accuracy, %": None,
        "‖θ − θ_avg‖": each(rows, lambda s: float(np.mean([one["away"] for one in s.experts()]))),
        "off the plane": each(rows, lambda s: float(np.mean([one["off"] for one in s.experts()]))),
    }
    return Table("Multi-task loss at the models themselves, and where they lie", [*cells, experts])


def _over_ranks(rows: Rows) -> Table:
    """Both paths over k; task arithmetic's best λ is each seed's own."""
    first = seeds(rows)[0]
    lines: list[dict[str, Cell]] = []
    for number, one in enumerate(first.path("cart", 1.0)):
        cells: dict[str, Cell] = {"k / full": f"{one['rank']:g}"}
        for scale in first.scales("cart"):
            cells[f"CART, λ = {scale:g}"] = each(
                rows,
                lambda s, n=number, at=scale: total(s.path("cart", at)[n]),  # type: ignore[misc]
            )
        for name, scale_of in _additions(first).items():
            cells[f"low rank, {name}"] = each(
                rows,
                lambda s, n=number, f=scale_of: total(s.path("low_rank", f(s))[n]),  # type: ignore[misc]
            )
        lines.append(cells)
    return Table("Multi-task loss Σ_t L_t over the rank kept, validation", lines)


def _additions(first: Seed) -> dict[str, Callable[[Seed], float]]:
    """Return the λ of the low-rank paths by name."""
    return {
        f"λ = 1/{len(first.tasks)}": lambda s: 1 / len(s.tasks),
        "best λ": lambda s: s.addition,
        "λ = 1": lambda s: 1.0,
    }


def _over_scales(rows: Rows) -> Table:
    first = seeds(rows)[0]
    lines: list[dict[str, Cell]] = []
    for kind, rank, label in (("task_arithmetic", None, "task arithmetic"), ("cart", SHOWN, "CART, 8 %")):
        for one in first.along(kind, rank):

            def of(seed: Seed, kind: str = kind, rank: float | None = rank, scale: float = one["scale"]) -> Row:
                return seed.one(kind, scale, rank)

            lines.append(
                {
                    "path": label,
                    "λ": f"{one['scale']:g}",
                    "Σ L_t, validation": each(rows, lambda s, o=of: total(o(s))),  # type: ignore[misc]
                    "‖θ − θ_avg‖": each(rows, lambda s, o=of: o(s)["away"]),  # type: ignore[misc]
                    "off the plane": each(rows, lambda s, o=of: o(s)["off"]),  # type: ignore[misc]
                }
            )
    return Table("Multi-task loss over λ", lines)


def _per_task(rows: Rows) -> Table:
    shown = ("average", "task_arithmetic", "cart")
    lines: list[dict[str, Cell]] = []
    for number, task in enumerate(rows[0]["tasks"]):
        cells: dict[str, Cell] = {"task": task}
        cells["θ_t"] = each(rows, lambda s, n=number, t=task: s.experts()[n]["losses"][t])  # type: ignore[misc]
        for name in shown:
            cells[LABELS[name]] = each(rows, lambda s, n=name, t=task: s.named(n)["losses"][t])  # type: ignore[misc]
        lines.append(cells)
    return Table("Loss per task, validation", lines)


def _fits(rows: Rows) -> Table:
    kinds = {"cart": "CART's path", "low_rank": "low-rank path", "expert": "experts", "base": "θ0"}
    lines: list[dict[str, Cell]] = [
        {
            "components found from": title,
            "variance they explain, %": each(rows, lambda s, t=title: 100 * s.row["fits"][t]["explained"], 0),  # type: ignore[misc]
            **{
                f"{label}: part of ‖θ − θ_avg‖ seen, %": each(
                    rows,
                    lambda s, t=title, k=kind: 100 * s.row["fits"][t]["shares"][k],  # type: ignore[misc]
                    0,
                )
                for kind, label in kinds.items()
            },
        }
        for title in rows[0]["fits"]
    ]
    return Table("What two components show of the distance from the average, by the models they are found from", lines)


def findings(rows: Rows) -> list[Finding]:
    """Hold the paper's statements against the models of all seeds; losses are those of the models themselves."""
    return [_passes(rows), _loop(rows), _ends_outside(rows), _leaves(rows), _closer(rows)]


def _passes(rows: Rows) -> Finding:
    found = seeds(rows)
    gained, at_used = (
        [total(point(seed)) - total(seed.named("average")) for seed in found]
        for point in (Seed.lowest, lambda seed: seed.named("cart"))
    )
    ends = max(_ends(seed) for seed in found)
    lowest = ", ".join(f"{seed.lowest()['rank']:g}" for seed in found)
    return Finding(
        "C8",
        "CART's path over k starts and ends at θ_avg and passes lower multi-task loss in between.",
        f"at its ends it is {ends:.1e} of its reach away from θ_avg; Σ L_t less that at θ_avg: "
        f"{with_interval(gained, 2)} nat at the lowest point (k / full = {lowest} by seed), "
        f"{with_interval(at_used, 2)} nat at {100 * SHOWN:g} %",
        all_hold([within(values, high=-LOWER) for values in (gained, at_used)]) if ends < TOLERANCE else False,
        f"ends within {TOLERANCE:g} of the reach for every seed, and paired difference of Σ L_t ≤ −{LOWER} nat, at the "
        f"lowest point as at {100 * SHOWN:g} %, which these losses did not choose",
    )


def _ends(seed: Seed) -> float:
    """Return how far the path's ends are from θ_avg, in shares of its reach."""
    path = seed.path("cart", 1.0)
    return float(max(path[0]["away"], path[-1]["away"]) / max(max(one["away"] for one in path), 1e-30))


def _loop(rows: Rows) -> Finding:
    def round_path(kind: str, scale: Callable[[Seed], float]) -> list[float]:
        paths = [seed.path(kind, scale(seed)) for seed in seeds(rows)]
        return [roundness([tuple(one["place"]) for one in path]) for path in paths]

    values = round_path("cart", lambda seed: 1.0)
    other = with_interval(round_path("low_rank", lambda seed: seed.addition), 2)
    return judge(
        "C8",
        "On the plane fitted to the paths the path over k is a loop, nearer to a circle than to a line out and back.",
        {"roundness on the plane of the paths": values},
        "roundness ≥ 0.5, halfway from a line to a circle",
        low=0.5,
        unit="",
        digits=2,
        beside="; roundness alone makes no loop: task arithmetic's path over k at its best λ, which does not return to "
        f"its start, closed by a line has {other}",
    )


def _ends_outside(rows: Rows) -> Finding:
    found = seeds(rows)
    over = [total(s.path("low_rank", s.addition)[-1]) - total(s.lowest()) for s in found]
    ends = {
        name: each(rows, lambda s, f=scale_of: total(s.path("low_rank", f(s))[-1]))  # type: ignore[misc]
        for name, scale_of in _additions(found[0]).items()
    }
    return judge(
        "C8",
        "Task arithmetic's path over k ends farther from the common basin: at full rank its loss is above CART's best.",
        {"Σ L_t at full rank, best λ, less CART's lowest at λ = 1": over},
        "paired difference ≥ 0",
        low=0,
        unit=" nat",
        digits=2,
        beside=f"; at full rank: {', '.join(f'{value} ({name})' for name, value in ends.items())}",
    )


def _leaves(rows: Rows) -> Finding:
    found = seeds(rows)
    apart = max(s.one("task_arithmetic", 1 / len(s.tasks))["away"] / max(s.named("base")["away"], 1e-30) for s in found)
    risen = [total(s.named("task_arithmetic, largest")) - total(s.named("average")) for s in found]
    largest = found[0].along("task_arithmetic")[-1]["scale"]
    return Finding(
        "C8",
        "Over λ task arithmetic passes the average at λ = 1/T and leaves the common basin at large λ.",
        f"at λ = 1/{len(found[0].tasks)} it is {apart:.1e} ‖θ0 − θ_avg‖ away from θ_avg; Σ L_t at λ = {largest:g} less "
        f"that at θ_avg: {with_interval(risen, 2)} nat",
        within(risen, low=0) if apart < TOLERANCE else False,
        f"within {TOLERANCE:g} for every seed, and paired difference of Σ L_t ≥ 0",
    )


def _closer(rows: Rows) -> Finding:
    shares = [100 * seed.closer() for seed in seeds(rows)]
    return judge(
        "C8",
        "CART is closer to the basins of the tasks: most tasks' loss is lower at CART than at task arithmetic.",
        {"tasks with a lower loss": shares},
        "share ≥ 51 %, more than half of the tasks",
        low=51,
        unit=" %",
        digits=0,
        beside=f"; mean L_t {each(rows, lambda s: total(s.named('cart')) / len(s.tasks))} (CART), "
        f"{each(rows, lambda s: total(s.named('task_arithmetic')) / len(s.tasks))} (task arithmetic)",
    )


def notes(rows: Rows, basins: Mapping[str, Any]) -> list[str]:
    """Return what decides what was seen, and what the pictures do not show."""
    drawn, experts = list(rows[0]["fits"])[:2]
    seen = {}
    for title in (drawn, experts):
        seen[title] = each(rows, lambda s, t=title: 100 * s.row["fits"][t]["shares"]["cart"], 0)  # type: ignore[misc]
    off = float(np.mean([one["off"]["average"] for one in basins.values()]))
    reach = float(np.mean([one["away"] for one in Seed(rows[0]).experts()]))
    best = each(rows, lambda s: total(s.named("cart, best")))
    return [
        f"Which models the components are found from decides the picture: found from {drawn} they show {seen[drawn]} % "
        f"of how far CART is from θ_avg, found from {experts} {seen[experts]} %: the experts' deviations from their "
        "mean are nearly orthogonal and sum to zero, and so CART moves across them. An expert's place on the plane "
        "of the paths says little, so none is drawn there; each has a plane of its own.",
        f"θ_avg is not drawn on a task's own plane: it lies {off:.2f} off (mean; the experts are {reach:.2f} away from "
        "it), and the contours there are not its loss. The curves and tables have every model's own.",
        f"λ = 1 was not chosen: the lowest loss of all of CART's k and λ tried is {best}, at (k / full, λ) = "
        f"{', '.join(_where(s.named('cart, best')) for s in seeds(rows))} by seed, beside "
        f"{each(rows, lambda s: total(s.lowest()))} with λ = 1.",
    ]


def _where(one: Row) -> str:
    return f"({one['rank']:g}, {one['scale']:g})"


def figures(rows: Rows, paths: Row, basins: Mapping[str, Any]) -> dict[str, Figure]:
    """Draw the planes of the first seed, and the losses along the paths of all.

    Args:
        rows: as of `measure`, one for each seed.
        paths: as of `draw_paths`.
        basins: as of `draw_basins`.
    """
    first = Seed(rows[0])
    places = {name: tuple(first.named(name)["place"]) for name in ("base", "average", "cart", "task_arithmetic")}
    ours = [_trace(first, "cart", scale) for scale in first.scales("cart")]
    low = [_trace(first, "low_rank", s) for s in first.scales("low_rank") if s <= first.addition]
    over_scale = [
        Trace("task arithmetic over λ", [_place(one) for one in first.along("task_arithmetic")], 2, True),
        Trace("CART, 8 %, over λ", [places["average"], *map(_place, first.along("cart", SHOWN))], 1, True),
    ]
    return {
        "multi_task": path_figure(paths, places, [*ours, *low], over_scale),
        "tasks": task_figure(paths, places, ours),
        "basins": basin_figure(basins),
        "losses": curve_figure(*_curves(rows)),
    }


def _trace(seed: Seed, kind: str, scale: float) -> Trace:
    name, main, number = ("CART", 1.0, 1) if kind == "cart" else ("low rank", seed.addition, 2)
    places = [_place(one) for one in seed.path(kind, scale)]
    return Trace(f"{name}, λ = {scale:g}", places, number, scale == main)


def _place(one: Row) -> tuple[float, float]:
    x, y = one["place"]
    return x, y


def _curves(rows: Rows) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return name → x → one multi-task loss per seed, over k and over λ."""
    found = seeds(rows)
    first = found[0]
    over_rank: dict[str, dict[float, list[float]]] = {}
    for number, one in enumerate(first.path("cart", 1.0)):
        for scale in first.scales("cart"):
            values = [total(s.path("cart", scale)[number]) for s in found]
            over_rank.setdefault(f"CART, λ = {scale:g}", {})[one["rank"]] = values
        for name, scale_of in _additions(first).items():
            values = [total(s.path("low_rank", scale_of(s))[number]) for s in found]
            over_rank.setdefault(f"low rank, {name}", {})[one["rank"]] = values
    over_scale = {
        label: {
            one["scale"]: [total(s.one(kind, one["scale"], rank)) for s in found] for one in first.along(kind, rank)
        }
        for kind, rank, label in (("task_arithmetic", None, "task arithmetic"), ("cart", SHOWN, "CART, 8 %"))
    }
    return over_rank, over_scale
