"""The pieces that studies of the three papers on merging measured, rebuilt from the tidy rows that they left.

A study judges its pieces and keeps rows; each function `of_STUDY` goes back from the rows to the pieces, as far as the
rules need them, and returns what the rules find.
"""

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np

from studies.old.judging.pieces import Rows, by_task, fraction, given, grouped, measured
from studies.old.papers.alignment import study as alignment
from studies.old.papers.bases import results as bases
from studies.old.papers.cost import results as cost
from studies.old.papers.equivalence import results as equivalence
from studies.old.papers.glue import results as glue
from studies.old.papers.gradients import study as gradients
from studies.old.papers.interference import results as interference
from studies.old.papers.interference.theorem import theorem_findings
from studies.old.papers.landscape import study as landscape
from studies.old.papers.merge_frequency import study as merge_frequency
from studies.old.papers.mima import findings as mima
from studies.old.papers.one_epoch import study as one_epoch
from studies.old.papers.projection import findings as projection
from studies.old.papers.projection.results import OTHERS
from studies.old.results import Finding
from studies.old.rows import Row, of, picked


def of_one_epoch(rows: Rows, options: Any) -> list[Finding]:
    pieces = epochs_of(rows)
    further = [(of(pieces, run=first), of(pieces, run=last)) for first, last in options.further.items()]
    return one_epoch.findings(*lengths_of(pieces, options), further)


def epochs_of(rows: Rows) -> list[Row]:
    """Return the pieces of the study `one_epoch`."""
    return measured([row for row in rows if row["run"]], "seed", "run", "epoch", "steps", "length")


def lengths_of(pieces: Rows, options: Any) -> tuple[dict[str, list[Row]], list[Row]]:
    """Return the pieces of the two lengths of training that `one_epoch` compares, and those over the epochs."""
    short, curve = (of(pieces, run=one_epoch.RUNS[name]) for name in (one_epoch.SHORT, one_epoch.LONG))
    return {one_epoch.SHORT: short, one_epoch.LONG: of(curve, epoch=options.epochs[-1])}, curve


def of_alignment(rows: Rows, options: Any) -> list[Finding]:
    """Put all pairs of tasks into the first line of a matrix: the rules take what stands above the diagonal."""
    pieces, cosines_of_pairs = [], picked(rows, part="pair")
    for (run, seed), own in grouped(cosines_of_pairs, "run", "seed").items():
        rounds = grouped(own, "round").values()
        cosines = {name: [[[1.0, *(row[name] for row in one)]] for one in rounds] for name in ("tau", "delta")}
        pieces.append({"run": run, "seed": seed, "steps": [one[0]["steps"] for one in rounds], **cosines})
    names = [f"mima_{number}" for number in options.rounds]
    named = list(dict.fromkeys(row["pair"] for row in cosines_of_pairs))
    return alignment.findings([row for row in pieces if row["run"] in names], named, options.similar)


def of_mima(rows: Rows, options: Any) -> list[Finding]:
    pieces = rounds_of_mima(rows)
    whole = [piece for piece in pieces if "ties" in piece]
    return [*mima.findings(whole), *mima.further_findings(pieces, options.at, options.kept)]


def rounds_of_mima(rows: Rows) -> list[Row]:
    """Return the pieces of the study `mima`."""
    return measured([row for row in rows if row["rounds"]], "seed", "rounds", "steps", "optimiser")


def of_cost(rows: Rows) -> list[Finding]:
    settings = ("run", "seed", "budget", "rounds", "tried", "validation")
    return cost.findings(measured(picked(rows, part="model"), *settings, model="split"))


def of_gradients(rows: Rows, options: Any) -> list[Finding]:
    pieces = epochs_of_gradients(rows)
    return [finding for run in options.runs for finding in gradients.findings(pieces, run)]


def epochs_of_gradients(rows: Rows) -> list[Row]:
    """Return the pieces of the study `gradients`."""
    settings, curves = ("run", "task", "seed", "kind", "moved"), ("share", "cosine", *gradients.COSINES)
    return [
        {**dict(zip(settings, key, strict=True)), **{name: [row[name] for row in own] for name in curves}}
        for key, own in grouped(rows, *settings).items()
    ]


def of_merge_frequency(rows: Rows) -> list[Finding]:
    pieces = measured(picked(rows, part="model"), "schedule", "multiple", "rounds", "seed", "steps")
    return merge_frequency.findings(merge_frequency.tuned(pieces))


def of_landscape(rows: Rows, options: Any) -> list[Finding]:
    return landscape.findings(planes_of(rows, options.height))


def planes_of(rows: Rows, height: float) -> list[Row]:
    """Return the pieces of the study `landscape`.

    Args:
        rows: tidy.
        height: what belongs to a valley, error above its smallest.
    """
    return [whole_plane(own, height) for own in grouped(rows, "pair", "rounds", "seed").values()]


def whole_plane(rows: Rows, height: float) -> Row:
    """Return the piece of the study `landscape` that the rows of one plane tell, with its geometry.

    Args:
        rows: of one plane.
        height: what belongs to a valley, error above its smallest.
    """
    (shape,), points = picked(rows, part="plane"), picked(rows, part="grid")
    xs, ys = (list(dict.fromkeys(point[axis] for point in points)) for axis in "xy")
    errors = {
        task: np.reshape([1 - fraction(one["accuracy"]) for one in own], (len(ys), len(xs))).tolist()
        for (task,), own in grouped(points, "task").items()
    }
    models = grouped(picked(rows, part="model"), "model").items()
    plane = {
        **{name: shape[name] for name in ("seed", "rounds", "off")},
        "pair": shape["pair"].split(" – "),
        "xs": xs,
        "ys": ys,
        "errors": errors,
        "places": {name: (own[0]["x"], own[0]["y"]) for (name,), own in models if own[0]["x"] is not None},
        "test": {name: {task: 1 - value for task, value in by_task(own).items()} for (name,), own in models},
    }
    return {**plane, **landscape.geometry(plane, height)}


def of_projection(rows: Rows) -> list[Finding]:
    return projection.findings(*spaces_of(rows))


def spaces_of(rows: Rows) -> tuple[list[Row], dict[str, list[float]]]:
    """Return the pieces of the study `projection`, and the distances of each model between seeds."""
    between = grouped(picked(rows, part="seeds"), "model")
    across = {name: [row["distance"] for row in own] for (name,), own in between.items()}
    seeds = grouped((row for row in rows if row["part"] != "seeds"), "seed").values()
    return [space_of(own) for own in seeds], across


def space_of(rows: Rows) -> Row:
    """Return one seed's piece of the study `projection`."""
    models = {row["model"]: row for row in picked(rows, part="model")}
    names = list(models)
    kinds = {kind: [row["model"] for row in own] for (kind,), own in grouped(models.values(), "kind").items()}
    paths: dict[str, list[str]] = {}
    for name in kinds["round"]:
        paths.setdefault(name.partition(" round ")[0], []).append(name)
    ends = {run: models[path[-1]]["loss"] for run, path in paths.items()}
    pairs = picked(rows, part="pair")
    barriers = {frozenset((row["model"], row["other"])): row["barrier"] for row in pairs}
    return {
        "names": names,
        "gram": gram_of(names, pairs).tolist(),
        "barriers": {f"{one} – {other}": barriers[frozenset((one, other))] for one, other in combinations(OTHERS, 2)},
        "merges": [name for name in names if models[name]["kind"] in ("merge", "random merge")],
        "random": kinds.get("random merge", []),
        "paths": paths,
        "joint": kinds["joint"][0],
        "loss": {name: row["loss"] for name, row in models.items()} | ends,
        "drops": picked(rows, part="drop"),
    }


def gram_of(names: Sequence[str], pairs: Rows) -> np.ndarray:
    """Return the centred Gram matrix of models of which every distance is known: −J D² J / 2 with J = 1 − 11ᵀ/n.

    Args:
        names: of the n models.
        pairs: a row for every two of them, with their distance.

    Returns:
        Shape [n, n], in the order of the names.
    """
    squares = np.zeros((len(names), len(names)))
    for row in pairs:
        places = names.index(row["model"]), names.index(row["other"])
        squares[places] = squares[places[::-1]] = row["distance"] ** 2
    centring = np.eye(len(names)) - 1 / len(names)
    return -centring @ squares @ centring / 2


def of_interference(rows: Rows, options: Any) -> list[Finding]:
    pieces = [
        {"run": run, "tasks": tasks, "seed": seed, "layers": [layer_of(one) for one in grouped(own, "layer").values()]}
        for (run, tasks, seed), own in grouped(picked(rows, part="layer"), "run", "tasks", "seed").items()
    ]
    shown = [(options.run, count) for count in options.shown]
    drawn = {part: picked(rows, part=part) for part in ("draws", "overlap", "readings")}
    return [*interference.findings(pieces, shown), *theorem_findings(drawn)]


def layer_of(rows: Rows) -> Row:
    """Return the curves of one layer."""
    origins = grouped(rows, "origin")
    curves = {
        origin: {name: [row[name] for row in own] for name in (*interference.MEASURES, "error")}
        for (origin,), own in origins.items()
    }
    return {"ratios": [row["ratio"] for row in origins["centred",]], **curves}


def of_bases(rows: Rows, options: Any) -> list[Finding]:
    return bases.findings(*pieces_of_bases(rows, options))


def pieces_of_bases(rows: Rows, options: Any) -> tuple[list[Row], dict[str, str], list[str]]:
    """Return the pieces of the study `bases`, what its bases are called, and those that its rule is about.

    Args:
        rows: tidy.
        options: the study's choices.
    """
    pieces = []
    choices = grouped(picked(rows, part="choice"), "base", "seed")
    for (arm, seed), own in grouped(picked(rows, part="model"), "base", "seed").items():
        args = {row["model"]: given(row, "keep", "rank_ratio", "scale") for row in choices[arm, seed]}
        pieces.append({"arm": arm, "seed": seed, "test": measured(own)[0], "args": args})
    labels = {name: arm.label for name, arm in options.arms.items()}
    return pieces, labels, [name for name, arm in options.arms.items() if arm.style == "prints"]


def of_equivalence(rows: Rows) -> list[Finding]:
    return equivalence.study_result({table: own for (table,), own in grouped(rows, "table").items()}).findings


def of_glue(rows: Rows) -> list[Finding]:
    return glue.findings(models_of_glue(rows))


def models_of_glue(rows: Rows) -> list[Row]:
    """Return the pieces of the study `glue`."""
    chosen = {_piece_of_glue(row): row for row in picked(rows, part="choice")}
    found = measured(picked(rows, part="model"), "seed", "model", "embeddings", model="heads")
    for piece in found:
        if (row := chosen.get(_piece_of_glue(piece))) is not None:
            piece["args"] = given(row, "threshold", "keep", "rank_ratio", "rate", "scale")
    return found


def _piece_of_glue(row: Row) -> tuple[int, str, str]:
    return row["seed"], row["model"], row["embeddings"]
