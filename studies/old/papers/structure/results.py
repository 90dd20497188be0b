"""Findings and tables of the study `structure`, from its rows."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from studies.lab.reductions import CONTROL, DARE, FULL, LORA, PRUNED, ROWS, SVD, TIES
from studies.old.claims import judge, paired
from studies.old.results import Finding, Table, with_interval
from studies.old.rows import Row, by_seed

LOST, VITAL = 1.0, 5.0
HALF = 0.5
UNIFORM = 5 / 9
_FORGOTTEN = ("irrelevant", "contradictory")


def addition(rows: list[Row]) -> float:
    """Return the mean accuracy on both tasks of the three cases, λ chosen for their sum.

    Args:
        rows: of one seed and variant.
    """
    return fmean((row["test_1"] + row["test_2"]) / 2 for row in rows if row["way"] == "addition")


def unlearning(rows: list[Row]) -> float:
    """Return how far T1 stays above T2, in points, where T2 can be unlearned.

    Args:
        rows: of one seed and variant.
    """
    return fmean(
        row["test_1"] - row["test_2"] for row in rows if row["way"] == "unlearning" and row["case"] in _FORGOTTEN
    )


def third(rows: list[Row]) -> float:
    """Return the accuracy on the third task, λ_1 and λ_2 chosen.

    Args:
        rows: of one seed and variant.
    """
    return fmean(row["test_1"] for row in rows if row["part"] == "target")


SCORES: dict[str, Callable[[list[Row]], float]] = {
    "addition": addition,
    "unlearning": unlearning,
    "a third task": third,
}


class Scores:
    """The three scores of every variant, a number for each seed.

    Args:
        rows: of all parts and seeds.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows: dict[tuple[str, float | None], list[Row]] = {}
        for row in rows:
            if row["part"] in ("case", "target"):
                self.rows.setdefault((row["kind"], row["amount"]), []).append(row)

    def of(self, kind: str, amount: float | None, score: str) -> list[float]:
        """Return one score of one variant.

        Args:
            kind: of the variant.
            amount: of the variant.
            score: a name of `SCORES`.
        """
        return by_seed(self.rows[kind, amount], SCORES[score])

    def lost(self, kind: str, amount: float | None) -> dict[str, list[float]]:
        """Return what a variant loses against whole task vectors, by score.

        Args:
            kind: of the variant.
            amount: of the variant.
        """
        return {name: paired(self.of(FULL, None, name), self.of(kind, amount, name)) for name in SCORES}

    def amounts(self, kind: str) -> list[float]:
        """Return the amounts of one kind, rising.

        Args:
            kind: of the variants.
        """
        return sorted(amount for known, amount in self.rows if known == kind and amount is not None)


def findings(rows: Sequence[Row]) -> list[Finding]:
    """Hold Corollaries 1 and 2 against the rows.

    Args:
        rows: of all parts and seeds.
    """
    scores = Scores(rows)
    least, ranks, adapted = f"≤ {LOST:g} point lost in each", scores.amounts(SVD), scores.amounts(LORA)
    found = [
        judge("P16", claim, scores.lost(kind, amount), least, high=LOST, ours=ours)
        for kind, amount, claim, ours in (
            (SVD, ranks[0], f"Task vectors of rank {ranks[0]:g} do what whole ones do.", False),
            (SVD, ranks[-1], f"Task vectors of rank {ranks[-1]:g} do what whole ones do.", True),
            (LORA, adapted[-1], f"Task vectors tuned as LoRA of rank {adapted[-1]:g} do what whole ones do.", False),
        )
    ]
    modes = by_seed([row for row in rows if row["part"] == "rows"], lambda own: fmean(r["bimodality"] for r in own))
    rule = "Sarle's coefficient ≥ 5/9, that of a uniform distribution"
    claim = "The rows of the MLPs' task vectors fall into large and small ones."
    found.append(judge("P17", claim, {"coefficient": modes}, rule, low=UNIFORM, unit="", digits=2))
    half = f"{100 * HALF:g} %"
    claim = f"The {half} smallest rows can be left out."
    found.append(judge("P17", claim, scores.lost(ROWS, HALF), least, high=LOST))
    claim, rule = f"The {half} largest rows cannot be left out.", f"≥ {VITAL:g} points lost in addition"
    lost = {"addition": scores.lost(CONTROL, HALF)["addition"]}
    found.append(judge("P17", claim, lost, rule, low=VITAL, ours=True))
    for other in (TIES, DARE):
        smallest = scores.amounts(ROWS)[0]
        gained = {name: paired(scores.of(ROWS, smallest, name), scores.of(other, smallest, name)) for name in SCORES}
        share = f"{100 * smallest:g} % of the MLPs' numbers"
        claim = f"Of {share}, whole rows keep no less than the entries that {other} keeps."
        found.append(judge("P17", claim, gained, "paired difference ≥ 0 in each", low=0, ours=True))
    return found


def tables(rows: Sequence[Row]) -> list[Table]:
    """Return what every variant keeps of each score, what it takes to store it, and what tuning takes.

    Args:
        rows: of all parts and seeds.
    """
    scores, lines = Scores(rows), []
    for (kind, amount), own in scores.rows.items():
        line: dict[str, Any] = {"task vectors": kind, "rank, or share kept": "" if amount is None else f"{amount:g}"}
        line["stored, %"] = f"{fmean(row['stored'] for row in own):.1f}"
        lines.append(line | {name: with_interval(scores.of(kind, amount, name)) for name in SCORES})
    memory = [row for row in rows if row["part"] == "memory"]
    whole = next((row["bytes"] for row in memory if row["kind"] == FULL), 1)
    taken: list[dict[str, Any]] = [
        {
            "tuned": row["kind"] if row["amount"] is None else f"{row['kind']} of rank {row['amount']:g}",
            "trained numbers, %": f"{_trained(scores.rows, row):.1f}",
            "peak memory of a step, MiB": f"{row['bytes'] / 2**20:.1f}",
            "of all weights', %": f"{100 * row['bytes'] / whole:.0f}",
        }
        for row in memory
    ]
    return [
        Table("Test accuracy of addition, T1 above T2 in unlearning, and accuracy on a third task, %", lines),
        *([Table("What tuning takes, foretold for a CUDA device", taken)] if taken else []),
    ]


def _trained(known: Mapping[tuple[str, float | None], Sequence[Row]], row: Row) -> float:
    return float(known[row["kind"], row["amount"]][0]["stored"])


def curves(rows: Sequence[Row]) -> dict[str, dict[float, list[float]]]:
    """Return addition's score over the share kept, by way of pruning.

    Args:
        rows: of all parts and seeds.
    """
    scores = Scores(rows)
    return {kind: {amount: scores.of(kind, amount, "addition") for amount in scores.amounts(kind)} for kind in PRUNED}
