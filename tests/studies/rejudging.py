"""The pieces that studies of the three papers on merging measured, rebuilt from the tidy rows that they left.

A study judges its pieces and keeps rows; each function `of_STUDY` goes back from the rows to the pieces, as far as the
rules need them, and returns what the rules find.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tasks.studies.papers.alignment import study as alignment
from tasks.studies.papers.bases import results as bases
from tasks.studies.papers.cost import study as cost
from tasks.studies.papers.equivalence import results as equivalence
from tasks.studies.papers.glue import results as glue
from tasks.studies.papers.gradients import study as gradients
from tasks.studies.papers.interference import results as interference
from tasks.studies.papers.interference.theorem import theorem_findings
from tasks.studies.papers.landscape import study as landscape
from tasks.studies.papers.merge_frequency import study as merge_frequency
from tasks.studies.papers.mima import findings as mima
from tasks.studies.papers.one_epoch import study as one_epoch
from tasks.studies.papers.projection import results as projection
from tasks.studies.results import Finding
from tasks.studies.rows import Row, of, picked
from tests.studies.documented import read_documented
from tests.studies.rejudging_pieces import Rows, choices, grouped, measured

PARTLY = {
    "cost": {
        "At the same budget MIMA with many rounds beats the best one-shot merge.": (
            "validation tells which one-shot merge is the best, and the rows have accuracy on test alone: the one that "
            "the record names is compared"
        ),
    },
    "projection": {
        "TIES and Breadcrumbs converge to similar basins: of the paper's methods no two lie closer.": (
            "the plane is fitted to the experts and to every round too, and the rows have no distances among these: "
            "what is said after the first semicolon is not compared"
        ),
    },
}
"""Study → claim → what of its recorded finding cannot be made of the recorded rows, and why; all others can wholly."""


def of_one_epoch(rows: Rows, options: Any = None) -> list[Finding]:
    """Judge the record, or rows that were measured with other choices."""
    options = options or choices("one_epoch")
    pieces = measured([row for row in rows if row["run"]], "seed", "run", "epoch", "steps")
    short, curve = (of(pieces, run=one_epoch.RUNS[name]) for name in (one_epoch.SHORT, one_epoch.LONG))
    further = [(of(pieces, run=first), of(pieces, run=last)) for first, last in options.further.items()]
    return one_epoch.findings(
        {one_epoch.SHORT: short, one_epoch.LONG: of(curve, epoch=options.epochs[-1])}, curve, further
    )


def of_alignment(rows: Rows) -> list[Finding]:
    """Put all pairs of tasks into the first line of a matrix: the rules take what stands above the diagonal."""
    pieces = []
    for (run, seed), own in grouped(rows, "run", "seed").items():
        rounds = grouped(own, "round").values()
        cosines = {name: [[[1.0, *(row[name] for row in one)]] for one in rounds] for name in ("tau", "delta")}
        pieces.append({"run": run, "seed": seed, "steps": [one[0]["steps"] for one in rounds], **cosines})
    names = [f"mima_{number}" for number in choices("alignment").rounds]
    return alignment.findings([row for row in pieces if row["run"] in names])


def of_mima(rows: Rows) -> list[Finding]:
    options = choices("mima")
    pieces = measured([row for row in rows if row["rounds"]], "seed", "rounds", "steps", "optimiser")
    whole = [piece for piece in pieces if "ties" in piece]
    return [*mima.findings(whole), *mima.further_findings(pieces, options.at, options.kept)]


def of_gradients(rows: Rows) -> list[Finding]:
    settings = ("run", "task", "seed", "kind")
    pieces = [
        {**dict(zip(settings, key, strict=True)), **{name: [row[name] for row in own] for name in ("share", "cosine")}}
        for key, own in grouped(rows, *settings).items()
    ]
    return [finding for run in choices("gradients").runs for finding in gradients.findings(pieces, run)]


def of_merge_frequency(rows: Rows) -> list[Finding]:
    pieces = measured(rows, "schedule", "multiple", "rounds", "seed", "steps")
    return merge_frequency.findings(merge_frequency.tuned(pieces))


def of_landscape(rows: Rows) -> list[Finding]:
    """Have the mean error of two tasks stand for that of each."""
    models = ("base", "mean", "merged")
    tests = [{name: {"both": row[f"error_{name}"] / 100} for name in models} for row in rows]
    planes = zip(rows, tests, strict=True)
    return landscape.findings([{**row, "pair": row["pair"].split(" – "), "test": test} for row, test in planes])


def of_projection(rows: Rows) -> list[Finding]:
    """Have the distances of the pairs and from the base make up the space; experts and first rounds are not in it."""
    between = grouped(picked(rows, part="seeds"), "model")
    across = {name: [row["distance"] for row in own] for (name,), own in between.items()}
    seeds = grouped((row for row in rows if row["part"] != "seeds"), "seed").values()
    return projection.findings([space_of(own) for own in seeds], across)


def space_of(rows: Rows) -> Row:
    """Return one seed's piece of the study `projection`: its base, merges, ends of paths and joint model."""
    models, pairs = {row["model"]: row for row in picked(rows, part="model")}, picked(rows, part="pair")
    options = choices("projection")
    ends = {run: [name for name in models if name.startswith(f"{run} round ")][-1] for run in options.paths}
    named = list(dict.fromkeys(name for row in pairs for name in (row["model"], row["other"])))
    losses = {**{name: row["loss"] for name, row in models.items()}, **{r: models[e]["loss"] for r, e in ends.items()}}
    return {
        "names": ["base", *named],
        "gram": gram_of(["base", *named], models, pairs).tolist(),
        "merges": [name for name in named if name not in (*ends.values(), options.joint)],
        "random": [],
        "paths": {run: [end] for run, end in ends.items()},
        "joint": options.joint,
        "loss": losses,
        "drops": picked(rows, part="drop"),
    }


def gram_of(names: Sequence[str], models: Mapping[str, Row], pairs: Rows) -> np.ndarray:
    """Return the centred Gram matrix of models of which every distance is known."""
    squares = np.zeros((len(names), len(names)))
    lengths = [("base", name, models[name]["length"]) for name in names]
    for one, other, distance in [*lengths, *((row["model"], row["other"], row["distance"]) for row in pairs)]:
        places = names.index(one), names.index(other)
        squares[places] = squares[places[::-1]] = distance**2
    centring = np.eye(len(names)) - 1 / len(names)
    return -centring @ squares @ centring / 2


def of_cost(rows: Rows) -> list[Finding]:
    """Have the one-shot merge that the record compares be the best on validation, which no row tells."""
    told = [one.measured.partition(": ")[0] for one in read_documented("cost").findings if one.claim in PARTLY["cost"]]
    return cost.findings(
        [
            {**piece, "validation": float(told[0].endswith(f" less {cost.label(piece['run'])}"))}
            for piece in measured(rows, "run", "seed", "budget", "rounds", "tried")
        ]
    )


def of_interference(rows: Rows) -> list[Finding]:
    options = choices("interference")
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


def of_bases(rows: Rows) -> list[Finding]:
    arms = choices("bases").arms
    models = grouped(rows, "base", "seed").items()
    pieces = [{"arm": arm, "seed": seed, "test": measured(own)[0]} for (arm, seed), own in models]
    asked = [name for name, arm in arms.items() if arm.style == "prints"]
    return bases.findings(pieces, {name: arm.label for name, arm in arms.items()}, asked)


def of_equivalence(rows: Rows) -> list[Finding]:
    return equivalence.study_result({table: own for (table,), own in grouped(rows, "table").items()}).findings


def of_glue(rows: Rows) -> list[Finding]:
    return glue.findings(measured(rows, "seed", "model", "embeddings", model="heads"))


RULES: dict[str, Callable[[Rows], list[Finding]]] = {
    "alignment": of_alignment,
    "bases": of_bases,
    "cost": of_cost,
    "equivalence": of_equivalence,
    "glue": of_glue,
    "gradients": of_gradients,
    "interference": of_interference,
    "landscape": of_landscape,
    "merge_frequency": of_merge_frequency,
    "mima": of_mima,
    "one_epoch": of_one_epoch,
    "projection": of_projection,
}
