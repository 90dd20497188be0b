"""Findings and tables of the study `linearity_experts`, from its rows."""

from collections.abc import Mapping, Sequence

from studies.lab.linear_rows import (
    DIRECTION_RULE,
    LENGTH_RULE,
    by_seed,
    direction,
    length,
    loss_gaps,
    mean_over,
    worst_share,
)
from studies.old.papers.linearity_edits import study as edits
from studies.old.papers.linearity_stitches import study as stitches
from studies.old.results import Finding, Table, with_interval
from studies.old.rows import Row
from studies.old.verdicts import within

FLAT = 0.1  # nats of LMC
Rows = Mapping[str, list[Row]]


def findings(rows: Rows, scale: float, scales: Sequence[float]) -> list[Finding]:
    """Hold the paper's statements against the rows.

    Args:
        rows: part of the study → its rows.
        scale: λ at which Equations 2 and 3 are judged.
        scales: λ at which Equation 4 is.
    """
    told, verdict = direction(rows["pairs"])
    where = "all pairs, blocks and α"
    claim = f"Features of averaged experts point where their averaged features do: {where}."
    found = [Finding("L1", claim, told, verdict, DIRECTION_RULE)]
    told, verdict = length(rows["pairs"])
    found.append(Finding("L1", f"They have their length too: {where}.", told, verdict, LENGTH_RULE))
    smallest = [min(gaps.values()) for gaps in loss_gaps(rows["paths"]).values()]
    found.append(
        Finding(
            "L4",
            "Linear mode connectivity fails between experts of different tasks, on D_i and D_j.",
            f"smallest {with_interval(smallest, 2)} nat",
            within(smallest, low=FLAT),
            f"the larger of (difference of the ends, barrier) above {FLAT} nat, for each pair and D",
        )
    )
    return [*found, *edits.findings(rows["edits"], scale, scales), *stitches.findings(rows["stitches"])]


def tables(rows: Rows) -> list[Table]:
    """Return the blocks, the pairs, and the tables of edits and stitches."""
    blocks = []
    for layer in dict.fromkeys(row["layer"] for row in rows["pairs"]):
        own = by_seed(rows["pairs"], layer=layer).values()
        blocks.append(
            {
                "block": layer,
                "1 − cos": with_interval(mean_over(rows["pairs"], "distance", layer=layer), 4),
                "baseline": with_interval(mean_over(rows["pairs"], "base", layer=layer), 3),
                "worst share": with_interval([worst_share(one) for one in own], 3),
                "coef": with_interval(mean_over(rows["pairs"], "coef", layer=layer), 3),
                "error": with_interval(mean_over(rows["pairs"], "error", layer=layer), 4),
            }
        )
    gaps, pairs = loss_gaps(rows["paths"]).values(), []
    for pair in dict.fromkeys(row["combination"] for row in rows["pairs"]):
        shares = [worst_share(one) for one in by_seed(rows["pairs"], combination=pair).values()]
        smallest = [min(value for (own, _), value in one.items() if own == pair) for one in gaps]
        pairs.append(
            {
                "pair": pair,
                "worst share": with_interval(shares, 3),
                "gap of the loss, nat": with_interval(smallest, 2),
            }
        )
    return [
        Table("Pairs: means over pairs and α, by block", blocks),
        Table("Pairs, all α", pairs),
        *edits.tables(rows["edits"]),
        *stitches.tables(rows["stitches"]),
    ]
