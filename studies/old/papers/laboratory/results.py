"""What the study `laboratory` makes of its rows: tables, findings, and notes on the published text."""

from collections.abc import Iterator
from statistics import fmean

from studies.old.papers.laboratory.editing import addition_findings, unlearning_findings
from studies.old.papers.laboratory.findings import (
    reduced_findings,
    structure_findings,
    target_findings,
    training_findings,
)
from studies.old.papers.laboratory.options import Options
from studies.old.papers.laboratory.rows import Rows, whole
from studies.old.results import Cell, StudyResult, Table, with_interval
from studies.old.rows import picked, tidy

NOTES = [
    "*Far below 0.* Theorem 2 lets λ go to −∞ for α = 0 and to −Θ(1/α²) for α < 0; Remark 1 says that no λ solves two "
    "contradictory tasks. With λ < −2 task 2 comes back, for every α: −ΔW turns attention of μ towards −μ, −ΔV turns "
    "the sign once more, and y f rises again. Contradictory tasks are then both solved. The proofs hold attention on "
    "the right tokens fixed. The end down to which task 1 is kept does follow 1/α².",
    "*Case C.* For 0 < α < 1 − c the task is forgotten in hinge loss alone: f ≈ λ + α > 0, and every prediction stays "
    "right. The paper's own Table 1 (90.5 % after unlearning an aligned task) shows it.",
    "*Equations 75 and 76.* With C as printed the second sum of Equation 7 is (1 + c)√(Σγ⁴/Σγ²), less than 1 + c; the "
    "numerator must be √Σγ². No λ exists where all γ that are not 0 are one negative number; the paper names the case "
    "in which all γ are equal. The condition is sufficient and far from necessary.",
    "*Equations 90 and 132* lack the mask 1[y f < 1] of the hinge; with it they agree with automatic differentiation "
    "to 1e-10, and without it they do not (tests/analysis/test_provable.py).",
    "*Corollaries.* ΔV has rank 2, not 1: the mean of the irrelevant patterns is its second direction. The two kinds "
    "of rows do not show: nearly all rows of ΔV are large, because a row whose ReLU is closed on μ is open on −μ. "
    "Pruning then costs in proportion to what is cut, whichever rows go.",
    "*Equation 21* holds to rounding by construction: the second task's pattern is orthogonal to all that the first "
    "one's gradients contain but μ_1.",
    "*Not testable as printed.* Table 6 (a = 1/√m) and the proofs (a = √m) differ in notation; the Θ(1/M) of Remark 1 "
    "appears in no theorem; B ≥ ε² log M after Equation 39 must be ε^−2; Remark 1's 1 − β against Theorem 1's 1 + β "
    "lies within the allowance; Theorem 1 does not depend on δ_* − δ_#, though nothing can be learned when that is 0.",
]


def study_result(rows: Rows, options: Options) -> StudyResult:
    """Return tables, findings, notes and tidy rows."""
    found = [
        *training_findings(rows, options),
        *addition_findings(rows, options),
        *unlearning_findings(rows, options),
        *structure_findings(rows),
        *target_findings(rows, options),
        *reduced_findings(rows, options),
    ]
    tables = [*_phase_tables(rows), _convergence_table(rows), _structure_table(rows), _target_table(rows, options)]
    return StudyResult(tables, found, NOTES, tidy(rows))


def _phase_tables(rows: Rows) -> Iterator[Table]:
    shown = [-3, -2, -1, -0.5, 0, 0.2, 0.5, 0.8, 1, 2]
    for number in (1, 2):
        lines: list[dict[str, Cell]] = []
        for alpha in sorted({row["alpha"] for row in whole(rows)}):
            line: dict[str, Cell] = {"α": f"{alpha:g}"}
            for scale in shown:
                cells = picked(whole(rows), alpha=alpha, scale=scale)
                if cells:
                    hinge = fmean(row[f"hinge_{number}"] for row in cells)
                    line[f"λ = {scale:g}"] = (
                        f"{hinge:.2f} ({100 * fmean(row[f'accuracy_{number}'] for row in cells):.0f})"
                    )
            lines.append(line)
        yield Table(f"P13: hinge loss (and accuracy in %) of Ψ^(0) + ΔΨ_1 + λ ΔΨ_2 on task {number}", lines)


def _convergence_table(rows: Rows) -> Table:
    names = {"step": "η", "relevant": "δ_*", "batch": "B", "bits": "labels c", "width": "m", "spread": "ξ√m"}
    lines: list[dict[str, Cell]] = []
    own = picked(rows, part="convergence")
    for varied, at in dict.fromkeys((row["varied"], row["at"]) for row in own):
        cells = picked(own, varied=varied, at=at)
        line: dict[str, Cell] = {"varied": f"{names[varied]} = {at:g}"}
        for key, digits in (("steps", 0), ("early_hinge", 4), ("hinge", 4), ("large_rows", 3)):
            values = [row[key] for row in cells if row.get(key) is not None]
            line[key.replace("_", " ")] = with_interval(values, digits) if values else None
        lines.append(line)
    title = "P12, P17, P23: steps until solved, hinge after some and after all steps, share of large rows of ΔV"
    return Table(title, lines)


def _structure_table(rows: Rows) -> Table:
    own = picked(rows, part="structure")
    keys = ["attention_ratio", "value_ratio", "attention_mass", "value_cosine", "value_left_1", "value_left_2"]
    lines: list[dict[str, Cell]] = []
    for alpha in sorted({row["alpha"] for row in own}):
        cells = picked(own, alpha=alpha)
        line: dict[str, Cell] = {"α": f"{alpha:g}", "α²": f"{alpha**2:.3f}"}
        line |= {key.replace("_", " "): f"{fmean(row[key] for row in cells):.3f}" for key in keys}
        lines.append(line)
    return Table("P14, P16: the task vector of task 1 seen from both patterns", lines)


def _target_table(rows: Rows, options: Options) -> Table:
    own = picked(rows, part="target")
    lines: list[dict[str, Cell]] = []
    for gammas in dict.fromkeys(row["gammas"] for row in own):
        cells = picked(own, gammas=gammas)
        drawn = picked(cells, kind="drawn")
        line: dict[str, Cell] = {
            "γ": gammas,
            "λ that meet Eq. 7": sum(row["promised"] for row in drawn),
            "of them solved": sum(row["promised"] and row["hinge_1"] <= options.solved for row in drawn),
            "solved of all": f"{sum(row['hinge_1'] <= options.solved for row in drawn)} of {len(drawn)}",
        }
        for kind in ("printed", "derived"):
            closed = picked(cells, kind=kind)
            line[f"hinge, {kind} λ"] = with_interval([row["hinge_1"] for row in closed], 3) if closed else None
        lines.append(line)
    return Table("P9, P15: tasks that nobody trained", lines)
