"""Findings and tables of the study `coloured_digits`, from its rows."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

from studies.old.claims import judge, paired
from studies.old.papers.coloured_digits.measuring import CASES, FIRST, MARGINS, ONTO, name_of
from studies.old.results import Finding, Table, with_interval
from studies.old.rows import Row, by_seed, picked
from studies.old.verdicts import all_hold, within

LEARNT = 93.0  # %, the plan's; the paper's experts have 92 to 96


def column(rows: Sequence[Row], key: str | Callable[[Row], float], **wanted: Any) -> list[float]:
    """Return one number for each seed: the mean of a column over its rows with these values.

    Args:
        rows: of any part.
        key: the column, or a function of a row.
        wanted: column → value.
    """
    value = key if callable(key) else lambda row: float(row[key])
    return by_seed(picked(rows, **wanted), lambda own: fmean(value(row) for row in own))


def overlap(rows: Sequence[Row], margin: float) -> tuple[list[float], list[float]]:
    """Return IoU and precision of Equation 7's region against the good points, one number for each seed, in %.

    Args:
        rows: of one length.
        margin: of the region.
    """
    ious, precisions = [], []
    for seed in sorted({row["seed"] for row in picked(rows, part="grid")}):
        points = [(row[f"promised_{margin:g}"], row["good"]) for row in picked(rows, part="grid", seed=seed)]
        both = sum(told and good for told, good in points)
        either, told = sum(told or good for told, good in points), sum(told for told, _ in points)
        ious.append(100 * both / either if either else 0.0)
        precisions.append(100 * both / told if told else 0.0)
    return ious, precisions


def findings(rows: Sequence[Row]) -> list[Finding]:
    """Hold the paper's statements against the rows, for each length of tuning."""
    return [
        found for steps in sorted({row["steps"] for row in rows}) for found in _at(picked(rows, steps=steps), steps)
    ]


def _at(rows: list[Row], steps: int) -> list[Finding]:
    after = f" ({steps} steps)"
    return [
        _learnt(rows, after),
        _order(rows, after),
        *_irrelevant(rows, after),
        *_cases(rows, after),
        *_regions(rows, after),
        *_additions(rows, after),
        *_target(rows, after),
    ]


def _learnt(rows: list[Row], after: str) -> Finding:
    own = {
        name: column(rows, "test_1", part="pair", first=name, second=name)
        for name in dict.fromkeys(row["first"] for row in rows if row["part"] == "pair")
    }
    told = ", ".join(f"{name} {with_interval(found)} %" for name, found in own.items())
    verdict = all_hold([within(found, low=LEARNT) for found in own.values()])
    return Finding("P2", f"Each expert solves its own task{after}.", told, verdict, f"≥ {LEARNT:g} %, each")


def _order(rows: list[Row], after: str) -> Finding:
    alphas = {
        case: column(rows, "alpha", part="pair", first=name_of(FIRST), second=name_of(second))
        for case, second in CASES.items()
    }
    up = ("contradictory", "irrelevant", "aligned")
    steps = [within(paired(alphas[b], alphas[a]), low=0.05) for a, b in pairwise(up)]
    told = ", ".join(f"{case} {with_interval(alphas[case], 2)}" for case in up)
    return Finding("P5", f"α̂: contradictory < irrelevant < aligned{after}.", told, all_hold(steps), "by ≥ 0.05 each")


def _irrelevant(rows: list[Row], after: str) -> list[Finding]:
    """The paper's α̂ of two pairs that it calls irrelevant: 0.164 and 0.115."""
    pairs = {
        "The pair called irrelevant": (name_of(FIRST), name_of(CASES["irrelevant"])),
        "The pair of the third task": (name_of(ONTO[0]), name_of(ONTO[1])),
    }
    return [
        judge(
            "P5",
            f"{words} has α̂ near 0{after}.",
            {"α̂": column(rows, "alpha", part="pair", first=one, second=other)},
            "|α̂| within ± 0.3 (the paper's: 0.164 and 0.115)",
            low=-0.3,
            high=0.3,
            unit="",
            digits=2,
        )
        for words, (one, other) in pairs.items()
    ]


def _regions(rows: list[Row], after: str) -> list[Finding]:
    """What the paper's Figure 1 shows of all λ ≤ 0, not of the best one."""
    found = []
    for case, most in (("irrelevant", 55.0), ("contradictory", 15.0)):
        own = [row for row in picked(rows, part="curve", case=case) if row["scale"] <= 0]
        found.append(
            judge(
                "P6",
                f"Every λ ≤ 0 unlearns the {case} task{after}.",
                {"T2, the largest": by_seed(own, lambda seed: max(float(row["validation_2"]) for row in seed))},
                f"T2 on validation ≤ {most:g} % at every λ tried that is not above 0",
                high=most,
                unit=" %",
            )
        )
    return found


def _additions(rows: list[Row], after: str) -> list[Finding]:
    """What the paper says of adding, case by case."""
    found = []
    for case in ("irrelevant", "aligned"):
        chosen = picked(rows, part="chosen", case=case, way="addition")
        gaps = {
            f"T{n} below its expert": column(chosen, lambda row, n=n: row[f"expert_{n}"] - row[f"test_{n}"])  # type: ignore[misc]
            for n in (1, 2)
        }
        claim = f"Adding two {case} tasks does both{after}."
        found.append(judge("P6", claim, gaps, "≤ 6 points each (the paper's largest gap is 5.65)", high=6))
    own = picked(rows, part="curve", case="contradictory")
    best = by_seed(own, lambda seed: max(min(float(row["validation_1"]), float(row["validation_2"])) for row in seed))
    found.append(
        judge(
            "P6",
            f"No λ adds contradictory tasks{after}.",
            {"the worse task at the best λ": best},
            "≤ 85 % on validation",
            high=85,
            unit=" %",
        )
    )
    return found


def _cases(rows: list[Row], after: str) -> list[Finding]:
    def chosen(case: str, way: str, key: str | Callable[[Row], float]) -> list[float]:
        return column(rows, key, part="chosen", case=case, way=way)

    found = []
    for case, most, lost in (("irrelevant", 55.0, 3.0), ("contradictory", 15.0, 4.0)):
        two, gap = (chosen(case, "unlearning", key) for key in ("test_2", lambda row: row["expert_1"] - row["test_1"]))
        told = f"T2 {with_interval(two)} %, T1 {with_interval(gap)} points below its expert"
        verdict = all_hold([within(two, high=most), within(gap, high=lost)])
        claim = f"An {case} task" if case == "irrelevant" else f"A {case} task"
        rule = f"T2 ≤ {most:g} %, T1 within {lost:g} points of its expert"
        found.append(Finding("P6", f"{claim} is unlearned while T1 is kept{after}.", told, verdict, rule))
        fell = paired(chosen(case, "λ = 0", "test_2"), two)
        told = f"T2 falls by {with_interval(fell)} points from λ = 0 to the chosen λ"
        claim = f"Unlearning the {case} task is the merit of ΔΨ_2{after}."
        found.append(Finding("P6", claim, told, within(fell, low=5), "by ≥ 5 points", ours=True))
    curve = picked(rows, part="curve", case="aligned")
    able = [
        float(any(row["validation_2"] <= 70 and row["validation_1"] >= 90 for row in curve if row["seed"] == seed))
        for seed in sorted({row["seed"] for row in curve})
    ]
    told = f"in {sum(able):.0f} of {len(able)} seeds some λ does"
    rule = "no λ with T2 ≤ 70 % and T1 ≥ 90 %, in every seed"
    rule += "; nearly given by the data: 95 % of the pictures of the two tasks are the same"
    claim = f"No λ unlearns an aligned task and keeps T1{after}."
    found.append(Finding("P6", claim, told, not any(able), rule, ours=True))
    sums = {case: chosen(case, "addition", lambda row: row["test_1"] + row["test_2"]) for case in CASES}
    down = ("aligned", "irrelevant", "contradictory")
    order = [within(paired(sums[a], sums[b]), low=0) for a, b in pairwise(down)]
    told = ", ".join(f"{case} {with_interval(sums[case])}" for case in down)
    claim = f"Addition: the best sum of both accuracies falls from aligned to irrelevant to contradictory{after}."
    found.append(Finding("P6", claim, told, all_hold(order), "paired differences ≥ 0", ours=True))
    return found


def _target(rows: list[Row], after: str) -> list[Finding]:
    own, one, two, best = (
        column(rows, "test_1", part="target", way=way)
        for way in ("the third task's own expert", "expert 1", "expert 2", "the best of the grid")
    )
    told = f"; {with_interval(best)} %, its own expert {with_interval(own)}"
    told += f", expert 1 {with_interval(one)}, expert 2 {with_interval(two)}"
    found = [
        judge(
            "P7",
            f"λ_1, λ_2 chosen on validation are better on the third task than either expert{after}.",
            {"less expert 1": paired(best, one), "less expert 2": paired(best, two)},
            "by ≥ 1 point (the paper gains 3.64)",
            low=1,
            beside=told,
        ),
        judge(
            "P7",
            f"They reach the third task's own expert{after}.",
            {"less its own expert": paired(best, own)},
            "≥ −1 point",
            low=-1,
            ours=True,
        ),
    ]
    iou, _ = overlap(rows, MARGINS[-1])
    found.append(
        judge(
            "P8",
            f"Equation 7's region with margin {MARGINS[-1]:g} is that of the good points{after}.",
            {"IoU": iou},
            "≥ 50 %, where good is within 2 points of the best, by our definition",
            low=50,
            unit=" %",
        )
    )
    for margin in MARGINS:
        iou, precision = overlap(rows, margin)
        told = f"precision {with_interval(precision)} %, IoU {with_interval(iou)} %"
        claim = f"The points of Equation 7 with margin {margin:g} are good{after}."
        found.append(Finding("P8", claim, told, within(precision, low=80), "precision ≥ 80 %"))
    return found


def tables(rows: Sequence[Row]) -> list[Table]:
    """Return Tables 1 and 2 of the paper for each length, α̂ beside cosines, and which feature each expert uses."""
    lengths = sorted({row["steps"] for row in rows})
    one: list[dict[str, Any]] = []
    for steps in lengths:
        for case in CASES:
            for way in ("addition", "unlearning", "λ = 0"):
                wanted = {"part": "chosen", "steps": steps, "case": case, "way": way}
                line = {"steps": steps, "case": case, "λ by": way, "λ": with_interval(column(rows, "scale", **wanted))}
                for number in (1, 2):
                    gap = column(rows, lambda row, n=number: row[f"test_{n}"] - row[f"expert_{n}"], **wanted)  # type: ignore[misc]
                    line[f"T{number}, %"] = with_interval(column(rows, f"test_{number}", **wanted))
                    line[f"less its expert {number}"] = with_interval(gap)
                one.append(line)
    two = [
        {
            "steps": steps,
            "model": way,
            "third task, %": with_interval(column(rows, "test_1", part="target", steps=steps, way=way)),
        }
        for steps in lengths
        for way in dict.fromkeys(row["way"] for row in picked(rows, part="target"))
    ]
    pairs: list[dict[str, Any]] = []
    for steps in lengths:
        for row in picked(rows, part="pair", steps=steps, seed=rows[0]["seed"]):
            wanted = {"part": "pair", "steps": steps, "first": row["first"], "second": row["second"]}
            figures = {"α̂": "alpha", "α̂ of changes": "change", "cosine": "cosine"}
            told = {name: with_interval(column(rows, key, **wanted), 2) for name, key in figures.items()}
            score = with_interval(column(rows, "test_1", **wanted))
            pairs.append({"steps": steps, "expert": row["first"], "task": row["second"], **told, "test, %": score})
    return [
        Table("Addition and unlearning, λ chosen on validation, test accuracy", one),
        Table("A task that neither expert was tuned on (r_o = 0.9)", two),
        Table(
            "All pairs: α̂ of two experts beside the cosine of their task vectors; the expert's accuracy on the task",
            pairs,
        ),
    ]
