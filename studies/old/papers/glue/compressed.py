"""The experts of the study `glue` compressed into one file (the paper's Table 4): table and findings."""

from collections.abc import Sequence
from statistics import fmean

from mergeflow.evaluation.averages import normalised
from studies.lab.inputs import mean_accuracy
from studies.old.claims import judge, paired
from studies.old.results import Cell, Finding, Table, with_interval
from studies.old.rows import Row, of

NAMES = {"emr": "EMR", "cart_indexing": "CART-Indexing"}
PRINTED = {"emr": 80.18, "cart_indexing": 84.93}  # CART's Table 4, mean over eight tasks of GLUE, in per cent
KEPT = 99  # per cent of the experts' figures; the paper keeps 99.3


def compressed_table(rows: Sequence[Row]) -> Table:
    """Return the compressed experts' figures and storage.

    Args:
        rows: of the study.
    """
    lines: list[dict[str, Cell]] = []
    for model in (name for name in NAMES if of(rows, model=name)):
        own = of(rows, model=model)
        lines.append(
            {
                "method": NAMES[model],
                **{task: f"{fmean(100 * row['fixed'][task] for row in own):.1f}" for task in own[0]["fixed"]},
                "mean": with_interval([mean_accuracy(row["fixed"]) for row in own]),
                "relative": with_interval(_relative(rows, model)),
                "stored, % of all experts": with_interval([100 * row["stored"] for row in own]),
                "mean in the paper": f"{PRINTED[model]:.1f}",
            }
        )
    return Table("Experts compressed into one file: test figures, %, mean over seeds", lines)


def compressed_findings(rows: Sequence[Row]) -> list[Finding]:
    """Hold what the paper says of CART-Indexing on texts; nothing where it was not measured.

    Args:
        rows: of the study.
    """
    figures = {name: [mean_accuracy(row["fixed"]) for row in of(rows, model=name)] for name in NAMES}
    found = []
    if figures["cart_indexing"]:
        found.append(
            judge(
                "C5",
                "CART-Indexing keeps the figures of eight experts on texts (99.3 % of them in the paper).",
                {"relative to the experts": _relative(rows, "cart_indexing")},
                f"mean over tasks of compressed / expert ≥ {KEPT} %",
                low=KEPT,
                unit=" %",
            )
        )
    if figures["cart_indexing"] and figures["emr"]:
        found.append(
            judge(
                "C5",
                "On texts CART-Indexing is ahead of EMR (84.9 and 80.2 in the paper).",
                {"CART-Indexing less EMR": paired(figures["cart_indexing"], figures["emr"])},
                "paired difference ≥ 0",
                low=0,
            )
        )
    return found


def _relative(rows: Sequence[Row], model: str) -> list[float]:
    pairs = zip(of(rows, model=model), of(rows, model="individual", embeddings="merged"), strict=True)
    return [100 * normalised(row["fixed"], own["fixed"]) for row, own in pairs]
