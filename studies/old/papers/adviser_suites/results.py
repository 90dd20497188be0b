"""Findings and tables of the studies of the adviser on suites, from their rows."""

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from statistics import fmean
from typing import Any

import numpy as np

from studies.lab.ranks import rank_correlation
from studies.old.claims import judge, paired
from studies.old.papers.adviser.measuring import FIXED, TRIALS, WAYS
from studies.old.papers.adviser.results import FEWER, HITS, LOSS, PREDICTIONS
from studies.old.papers.adviser_suites.measuring import GRID, RANGES
from studies.old.results import Finding, Table, with_interval
from studies.old.rows import Row, by_seed

NAMES = {"theory": "the theory's range", "lengths": "the range by lengths"}


def sets_of(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows of added tasks in two groups: few of a suite's tasks, and whole suites.

    Args:
        rows: of all parts.
    """
    few, whole = "pairs and triples", "whole suites"
    groups: dict[str, list[Row]] = {few: [], whole: []}
    for row in rows:
        if row["part"] == "set":
            groups[few if row["size"] <= 3 else whole].append(row)
    return {name: group for name, group in groups.items() if group}


def column(key: str) -> Callable[[list[Row]], float]:
    """Return what takes a column's mean.

    Args:
        key: the column.
    """
    return lambda rows: fmean(float(row[key]) for row in rows)


def findings(rows: Sequence[Row]) -> list[Finding]:
    """Judge the suggested λ, of few tasks and of whole suites, and the predicted costs of unlearning.

    Args:
        rows: of all parts.
    """
    found = [one for group, sets in sets_of(rows).items() for one in _set_findings(group, sets)]
    edits = [row for row in rows if row["part"] == "edit"]
    return [*found, *(_edit_findings(edits) if edits else [])]


def _set_findings(group: str, sets: list[Row]) -> list[Finding]:
    told = partial(judge, "P10", ours=True)
    of = f" ({len(sets)} {group})"
    means = {(part, way): by_seed(sets, column(f"{part}_{way}")) for part in ("validation", "test") for way in WAYS}
    found = []
    for way, name in NAMES.items():
        hits = [100 * share for share in by_seed(sets, column(f"hit_{way}"))]
        rule = f"in ≥ {HITS:g} % of the sets"
        found.append(told(f"The best λ of the grid lies in {name}{of}.", {"sets": hits}, rule, low=HITS, unit=" %"))
    for way, name in NAMES.items():
        tries = len(GRID) / fmean(row[f"tried_{way}"] for row in sets)
        lost = {part: paired(means[part, "grid"], means[part, way]) for part in ("validation", "test")}
        rule = f"≤ {LOSS:g} points lost on validation and on test, with ≥ {FEWER} × fewer candidates"
        claim = f"Four λ of {name} stand instead of the grid of {len(GRID)}{of}."
        high = LOSS if tries >= FEWER - 1e-9 else -np.inf
        beside = f"; {tries:.1f} × fewer candidates"
        found.append(told(claim, lost, rule, high=float(high), digits=2, beside=beside))
    others = {"optuna": f"Optuna's {TRIALS} trials", "fixed": f"λ = {FIXED:g}", "theory": "those of the theory's range"}
    for way, name in others.items():
        more = {"test": paired(means["test", "lengths"], means["test", way])}
        claim = f"Four λ of the range by lengths are better than {name}{of}."
        found.append(told(claim, more, "paired difference ≥ 0", low=0, digits=2))
    return found


def _edit_findings(edits: list[Row]) -> list[Finding]:
    found = []
    cosine = by_seed(edits, partial(rank_correlation, prediction=itemgetter("cosine"), by="run"))
    for key in ("eq11", "changes", "response"):
        own = by_seed(edits, partial(rank_correlation, prediction=itemgetter(key), by="run"))
        beside = f"; {with_interval(own, 2)} against {with_interval(cosine, 2)}"
        better = f"is better predicted by the {PREDICTIONS[key]} than by the cosine"
        claim = f"What unlearning a task of a suite costs the others {better}."
        rule = "paired difference of rank correlations ≥ 0"
        gain = {"rank correlation": paired(own, cosine)}
        found.append(judge("P10", claim, gain, rule, low=0, digits=2, unit="", ours=True, beside=beside))
    fell = paired(by_seed(edits, column("left_out")), by_seed(edits, column("left")))
    claim = "Negating a task's vector unlearns it further than leaving the vector out."
    measured = {"accuracy from 0 to −λ falls by": fell}
    return [*found, judge("P10", claim, measured, "by ≥ 5 points", low=5, ours=True)]


def tables(rows: Sequence[Row]) -> list[Table]:
    """Return what each way of choosing λ gives, by run and size of the set; and of unlearning, by run.

    Args:
        rows: of all parts.
    """
    sets, edits = ([row for row in rows if row["part"] == part] for part in ("set", "edit"))
    chosen: list[dict[str, Any]] = []
    for run, size in sorted({(row["run"], row["size"]) for row in sets}):
        own = [row for row in sets if (row["run"], row["size"]) == (run, size)]
        for way in WAYS:
            hits = with_interval([100 * one for one in by_seed(own, column(f"hit_{way}"))]) if way in RANGES else None
            chosen.append(
                {
                    "run": run,
                    "tasks": size,
                    "λ by": way,
                    "candidates": f"{fmean(row[f'tried_{way}'] for row in own):.1f}",
                    "validation, %": with_interval(by_seed(own, column(f"validation_{way}")), 2),
                    "test, %": with_interval(by_seed(own, column(f"test_{way}")), 2),
                    "mean λ": f"{fmean(row[f'scale_{way}'] for row in own):.2f}",
                    "best λ of the grid inside, %": hits,
                }
            )
    unlearned: list[dict[str, Any]] = []
    for run in sorted({row["run"] for row in edits}):
        own = [row for row in edits if row["run"] == run]
        ranks = {
            f"rank correlation, {name}": with_interval(
                by_seed(own, partial(rank_correlation, prediction=itemgetter(key), by="run")), 2
            )
            for key, name in PREDICTIONS.items()
        }
        lost = {f"{name}, %": with_interval(by_seed(own, column(key))) for key, name in _LEFT.items()}
        others = with_interval(by_seed(own, column("loss")))
        unlearned.append({"run": run, **lost, "others lose, points": others, **ranks})
    found = {
        "λ of a sum of task vectors, chosen on validation": chosen,
        "One task of the suite negated (−λ) against left out (0): test accuracy": unlearned,
    }
    return [Table(title, lines) for title, lines in found.items() if lines]


_LEFT = {"left_out": "the task, left out", "left": "the task, negated"}
