"""Tables, findings and notes of the study `interference` on experts."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from studies.old.claims import judge, paired
from studies.old.results import Finding, Table, with_interval
from studies.old.rows import Row, tidy
from studies.old.verdicts import within

Case = tuple[str, int]
USED = 0.08
MEASURES = {
    "whole": "I(k)",
    "kept": "I(k), Σ̃ by what is kept",
    "spectral": "I(k) as printed",
    "loss": "L_k",
}


def of_case(rows: Sequence[Row], case: Case) -> list[Row]:
    """Return the rows of a run's first tasks, one per seed."""
    return [row for row in rows if (row["run"], row["tasks"]) == case]


def points(rows: Sequence[Row], measure: str) -> Iterator[tuple[float, float]]:
    """Yield (centred, original) for every seed, layer and ratio."""
    for row in rows:
        for layer in row["layers"]:
            yield from zip(layer["centred"][measure], layer["original"][measure], strict=True)


def share_lower(rows: Sequence[Row], measure: str) -> float:
    """Return the share of points where centred task vectors have less, in %."""
    return 100 * fmean(centred < original for centred, original in points(rows, measure))


def medians(rows: Sequence[Row], origin: str, measure: str, ratio: float) -> list[float]:
    """Return the median over layers at a ratio, one value per seed.

    Args:
        rows: as of `measure`, one for each seed.
        origin: "original" for differences from the base, "centred" from the experts' mean.
        measure: a curve of a layer.
        ratio: the rank ratio.
    """
    return [median(layer[origin][measure][layer["ratios"].index(ratio)] for layer in row["layers"]) for row in rows]


def tables(rows: Sequence[Row], shown: Sequence[Case]) -> list[Table]:
    """Return where centred is lower, the curves' medians, and every kind of matrix at 8 %."""
    cases = list(dict.fromkeys((row["run"], row["tasks"]) for row in rows))
    lower = Table(
        "Share of layers and ranks where centred task vectors have less, %; common: ‖mean τ‖² / mean ‖τ‖²",
        [_lower_line(case, of_case(rows, case)) for case in cases],
    )
    return [lower, *(table for case in shown for table in _case_tables(case, of_case(rows, case)))]


def _lower_line(case: Case, rows: Sequence[Row]) -> dict[str, Any]:
    cells: dict[str, Any] = {
        "experts": case[0],
        "tasks": case[1],
        "common": with_interval([row["common"] for row in rows], 3),
    }
    for measure, label in MEASURES.items():
        cells[label] = with_interval([share_lower([row], measure) for row in rows])
    ratios = [c / o for c, o in points(rows, "whole") if o > 0]
    cells["I(k) centred / original, median"] = f"{median(ratios):.2f}"
    return cells


def _case_tables(case: Case, rows: Sequence[Row]) -> list[Table]:
    origins, ratios = ("centred", "original"), rows[0]["layers"][0]["ratios"]

    def at(ratio: float) -> dict[str, Any]:
        cells: dict[str, Any] = {"k / r": f"{ratio:g}"}
        for measure, label in (*MEASURES.items(), ("error", "R(k) / R(0)")):
            for origin in origins:
                cells[f"{label}, {origin}"] = with_interval(medians(rows, origin, measure, ratio), 3)
        return cells

    def of_kind(kind: str) -> dict[str, Any]:
        own = [{**row, "layers": [layer for layer in row["layers"] if layer["kind"] == kind]} for row in rows]
        cells: dict[str, Any] = {"matrix": kind, "layers": len(own[0]["layers"])}
        for measure, label in (("whole", "I(k)"), ("spectral", "I(k) as printed"), ("loss", "L_k")):
            for origin in origins:
                cells[f"{label}, {origin}"] = with_interval(medians(own, origin, measure, USED), 3)
        cells["R(k) / R(0), centred"] = with_interval(medians(own, "centred", "error", USED), 3)
        cells["I(k) lower at, %"] = f"{share_lower(own, 'whole'):.0f}"
        return cells

    kinds = dict.fromkeys(layer["kind"] for layer in rows[0]["layers"])
    name = f"{case[0]}, {case[1]} tasks"
    return [
        Table(f"{name}: medians over layers; I(k) per pair of tasks", [at(ratio) for ratio in ratios]),
        Table(f"{name}: by kind of matrix at k / r = {USED:g}", [of_kind(kind) for kind in kinds]),
    ]


def findings(rows: Sequence[Row], shown: Sequence[Case]) -> list[Finding]:
    """Hold the paper's statements against the layers."""
    return [finding for case in shown for finding in _findings(case[1], of_case(rows, case))]


def _findings(count: int, rows: Sequence[Row]) -> list[Finding]:
    number = sum(1 for _ in points(rows, "whole"))

    def lower(measure: str, claim: str, ours: bool = False) -> Finding:
        middle = median(c / o for c, o in points(rows, measure) if o > 0)
        return judge(
            "C3",
            f"{count} tasks: {claim}",
            {"lower at": [share_lower([row], measure) for row in rows]},
            "at 100 % of the layers and ranks, for every seed",
            low=100,
            unit=" %",
            ours=ours,
            beside=f" of {number} points over all seeds; centred / original in the median {middle:.2f}",
        )

    left = [100 * (1 - value) for value in medians(rows, "centred", "error", USED)]
    risen = [_risen(row) for row in rows]
    falling = all(
        later <= earlier
        for row in rows
        for layer in row["layers"]
        for earlier, later in pairwise(layer["centred"]["error"])
    )
    return [
        lower("whole", "I(k), as we read Equation 5, is lower for centred task vectors at every layer and rank."),
        lower(
            "spectral",
            "I(k) as printed, which no direction enters, is lower for centred at every layer and rank.",
        ),
        lower("loss", "task interference L_k is lower for centred task vectors at every layer and rank.", ours=True),
        Finding(
            "C3",
            f"{count} tasks: R(k) falls with k, steeply first: the first 8 % of the ranks hold more than half.",
            f"the median layer has {with_interval(left)} % of ‖θ_t − θ̄‖² in the first 8 %",
            within(left, low=50) if falling else False,
            "R(k) falls at every layer, and the median layer's share ≥ 50 %",
        ),
        judge(
            "C3",
            f"{count} tasks: I(k) rises gradually: at 8 % of the ranks less of it is there than of the task vectors.",
            {"share of ‖θ_t − θ̄‖² less share of I(r), median layer": paired(left, risen)},
            "paired difference ≥ 0",
            low=0,
        ),
    ]


def _risen(row: Row) -> float:
    """Return the share of I(r) that is there at 8 % of the ranks, in %, of the median layer."""
    curves = [(layer["centred"]["whole"], layer["ratios"].index(USED)) for layer in row["layers"]]
    return 100 * median(curve[place] / curve[-1] for curve, place in curves)


def tidy_rows(rows: Sequence[Row], theorem: Mapping[str, Sequence[Row]]) -> list[dict[str, Any]]:
    """Return what was measured, by `part`.

    layer: one row for each run, number of tasks, seed, layer, origin and ratio, with the term k₃ I in `theorem`;
    common: how much of the task vectors is common to all; draws, overlap, condition, readings: of the linear model,
    where `draw` tells the draws of a setting.
    """
    common = [{"part": "common", **{key: row[key] for key in ("seed", "run", "tasks", "common")}} for row in rows]
    drawn = [
        {"part": part, "draw": row["seed"], **{key: value for key, value in row.items() if key != "seed"}}
        for part, own in theorem.items()
        for row in own
    ]
    return tidy([*_layer_rows(rows), *common, *drawn])


def _layer_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    measures = ("whole", "kept", "spectral", "loss", "error", "theorem")
    return [
        {
            "part": "layer",
            **{key: row[key] for key in ("seed", "run", "tasks")},
            "layer": layer["name"],
            "kind": layer["kind"],
            "origin": origin,
            "ratio": ratio,
            **{measure: layer[origin][measure][place] for measure in measures},
        }
        for row in rows
        for layer in row["layers"]
        for origin in ("centred", "original")
        for place, ratio in enumerate(layer["ratios"])
    ]


def notes(rows: Sequence[Row], shown: Sequence[Case]) -> list[str]:
    """Return what decides whether centring lowers I(k), and what the theorem says about these layers."""
    cases = list(dict.fromkeys((row["run"], row["tasks"]) for row in rows))
    course = "; ".join(
        f"{run}, {count} tasks: common part {fmean(row['common'] for row in of_case(rows, (run, count))):.2f}, I(k) "
        f"lower at {share_lower(of_case(rows, (run, count)), 'whole'):.0f} %, L_k at "
        f"{share_lower(of_case(rows, (run, count)), 'loss'):.0f} %"
        for run, count in cases
    )
    own = of_case(rows, shown[0])
    informative = 100 * fmean(
        value < 1 for row in own for layer in row["layers"] for value in layer["centred"]["theorem"]
    )
    terms = [medians(own, "centred", "theorem", ratio) for ratio in (USED, 1.0)]
    return [
        "Centring takes away what all task vectors have in common and makes the rest add up to zero, so that each lies "
        "in the span of the others: with two tasks the centred ones are ±1 times one matrix, and I(k) is the largest "
        "there is. I(k) adds norms, so it counts directions that cancel as much as directions that add up; L_k does "
        f"not. Task vectors at right angles have a common part of 1/T; the measured ones: {course}.",
        f"The theorem's term k₃ I, set beside what ‖V_sᵀ V_t‖ ≤ 1 gives without any measurement, is "
        f"{fmean(terms[0]):.3g} times as large in the median layer at 8 % and {fmean(terms[1]):.3g} times at full rank "
        f"({own[0]['tasks']} tasks, centred); it is smaller, so that I says anything, at "
        f"{informative:.1f} % of layers and ranks. The ratio of the largest to the smallest singular value enters it "
        "squared.",
        "`visual.proj` is measured transposed, since it multiplies its inputs from the right; position embeddings meet "
        "no input but one-hot positions, and are measured as they are stored.",
    ]
