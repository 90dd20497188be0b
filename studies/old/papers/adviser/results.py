"""Findings and tables of the study `adviser`, from its rows."""

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from statistics import fmean
from typing import Any

from studies.lab.ranks import rank_correlation
from studies.old.claims import paired
from studies.old.papers.adviser.measuring import FIXED, GRID, TRIALS, WAYS
from studies.old.results import Finding, Table, with_interval
from studies.old.rows import Row, by_seed
from studies.old.verdicts import within

PREDICTIONS = {
    "eq11": "α̂ of the logits",
    "changes": "α̂ of what tuning changed",
    "response": "response A_12",
    "cosine": "cosine of the task vectors",
}
LOSS = 0.3
FEWER = 5
HITS = 50.0


def _mean(key: str) -> Callable[[list[Row]], float]:
    return lambda rows: fmean(float(row[key]) for row in rows)


def findings(sets: Sequence[Row], edits: Sequence[Row]) -> list[Finding]:
    """Judge the suggested λ and the predicted costs of unlearning."""
    found = []
    best = by_seed(sets, _mean("test_grid"))
    for way, name in (("theory", "the theory's range"), ("lengths", "the range by lengths")):
        hits = [100 * share for share in by_seed(sets, _mean(f"hit_{way}"))]
        told = f"{with_interval(hits)} % of {len(sets)} sets"
        claim = f"The best λ of the grid lies in {name}."
        found.append(Finding("P10", claim, told, within(hits, low=HITS), f"in ≥ {HITS:g} % of the sets", ours=True))
    for way, name in (("theory", "the theory"), ("lengths", "the lengths")):
        lost = paired(best, by_seed(sets, _mean(f"test_{way}")))
        tries = len(GRID) / fmean(row[f"tried_{way}"] for row in sets)
        told = f"{with_interval(lost, 2)} points of test accuracy lost, with {tries:.1f} × fewer candidates"
        claim = f"Four λ by {name} stand instead of the grid of {len(GRID)}."
        rule = f"loss ≤ {LOSS:g} points with ≥ {FEWER} × fewer candidates"
        found.append(Finding("P10", claim, told, within(lost, high=LOSS) if tries >= FEWER else False, rule, ours=True))
    for way, name in (("optuna", f"Optuna's {TRIALS} trials"), ("fixed", f"λ = {FIXED:g}"), ("theory", "the theory's")):
        more = paired(by_seed(sets, _mean("test_lengths")), by_seed(sets, _mean(f"test_{way}")))
        claim = f"Four λ by the lengths are better than {name}."
        told = f"{with_interval(more, 2)} points of test accuracy"
        found.append(Finding("P10", claim, told, within(more, low=0), "paired difference ≥ 0", ours=True))
    cosine = by_seed(edits, partial(rank_correlation, prediction=itemgetter("cosine"), by="steps"))
    for key in ("eq11", "changes", "response"):
        own = by_seed(edits, partial(rank_correlation, prediction=itemgetter(key), by="steps"))
        told = f"rank correlation {with_interval(own, 2)}, the cosine's {with_interval(cosine, 2)}"
        claim = f"What unlearning costs is better predicted by the {PREDICTIONS[key]} than by the cosine."
        rule = "paired difference of rank correlations ≥ 0"
        found.append(Finding("P10", claim, told, within(paired(own, cosine), low=0), rule, ours=True))
    return found


def tables(sets: Sequence[Row], edits: Sequence[Row]) -> list[Table]:
    """Return what each way of choosing λ gives, by length and size of the set; rank correlations by length."""
    chosen: list[dict[str, Any]] = []
    for steps in sorted({row["steps"] for row in sets}):
        for size in sorted({row["size"] for row in sets}):
            own = [row for row in sets if (row["steps"], row["size"]) == (steps, size)]
            for way in WAYS:
                hit = [100 * one for one in by_seed(own, _mean(f"hit_{way}"))] if f"hit_{way}" in own[0] else None
                chosen.append(
                    {
                        "steps": steps,
                        "tasks": size,
                        "λ by": way,
                        "candidates": f"{fmean(row[f'tried_{way}'] for row in own):.1f}",
                        "test accuracy, %": with_interval(by_seed(own, _mean(f"test_{way}")), 2),
                        "mean λ": f"{fmean(row[f'scale_{way}'] for row in own):.2f}",
                        "best λ of the grid inside, %": None if hit is None else with_interval(hit),
                    }
                )
    ranks: list[dict[str, Any]] = []
    for steps in sorted({row["steps"] for row in edits}):
        own = [row for row in edits if row["steps"] == steps]
        for key, name in PREDICTIONS.items():
            values = by_seed(own, partial(rank_correlation, prediction=itemgetter(key), by="steps"))
            ranks.append({"steps": steps, "prediction": name, "rank correlation": with_interval(values, 2)})
    return [
        Table("λ of a sum of task vectors, chosen on validation", chosen),
        Table("What task 1 loses in Ψ⁰ + ΔΨ₁ − ΔΨ₂, over all ordered pairs", ranks),
    ]
