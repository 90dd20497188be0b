"""Study `adaptation`: its findings, notes, and the numbers of its figures."""

from collections.abc import Sequence
from itertools import product
from statistics import fmean
from typing import Any, get_args

from mergeflow.merging.matrices import is_matrix
from studies.lab.adapting import NOT_WORSE, Direction, Granularity
from studies.lab.inputs import mean_accuracy
from studies.old.claims import judge, paired
from studies.old.papers.adaptation.figures import accuracy_figure, coefficient_figure, course_figure, memory_figure
from studies.old.papers.adaptation.rows import tidy_rows
from studies.old.papers.adaptation.tables import accuracy_table, level_table, memory_table, rate_table, task_table
from studies.old.papers.adaptation.variants import NAMES, Variant, static, values
from studies.old.results import Finding, StudyResult
from studies.old.rows import Row

_ADAMERGING_TA = Variant("task_vectors", "layer", "test")
_RULE = f"paired difference ≥ {NOT_WORSE} points, as in `many_tasks`"


def result(
    rows: Sequence[Row],
    starts: Sequence[Row],
    tried: Sequence[Row],
    memory: Sequence[Row],
    levels: Sequence[Row],
    blind: Row,
) -> StudyResult:
    """Return all that the study leaves in words and numbers.

    Args:
        rows: the adaptations, as of `measure`.
        starts: the static merges, as of `start`, one for each seed.
        tried: the runs with every learning rate, as of `choose_rates`.
        memory: as of `weigh`, for each number of tasks and direction.
        levels: as of `compare_levels`.
        blind: as of `permute_labels`.
    """
    tables = [
        accuracy_table(rows, starts),
        task_table(rows, starts),
        rate_table(tried, rows),
        level_table(levels),
        memory_table(memory),
    ]
    found = findings(rows, starts, memory, blind)
    told = tidy_rows(rows, starts, tried, memory, levels, blind)
    return StudyResult(tables, found, notes(rows, levels, tried), told)


def findings(rows: Sequence[Row], starts: Sequence[Row], memory: Sequence[Row], blind: Row) -> list[Finding]:
    """Hold the papers' statements against the rows.

    Args:
        rows: the adaptations, as of `measure`.
        starts: the static merges, as of `start`, one for each seed.
        memory: as of `weigh`, for each number of tasks and direction.
        blind: as of `permute_labels`.
    """
    statics = [*((on, on, "its static start") for on in NAMES), ("cart", "cart_tuned", "CART with λ from validation")]
    layers = {v: paired(values(rows, v), values(rows, _wise(v, "task"))) for v in Variant.all() if _layer(v)}
    carts = {v: paired(values(rows, v), values(rows, _other(v))) for v in Variant.all() if v.on == "cart"}
    return [
        *(
            _beats(rows, on, granularity, static(starts, rival), told)
            for (on, rival, told), granularity in product(statics, get_args(Granularity))
        ),
        judge(
            "C4",
            "Layer-wise coefficients are at least as good as task-wise ones.",
            {f"{NAMES[v.on]} on {v.images} images": gap for v, gap in layers.items()},
            _RULE,
            low=NOT_WORSE,
        ),
        judge(
            "C4",
            "AdaMerging on CART's directions is better than on task vectors.",
            {f"per {v.granularity}, {v.images} images": gap for v, gap in carts.items()},
            "paired difference ≥ 0",
            low=0,
        ),
        judge(
            "C4",
            "CART without adaptation, λ from validation, is better than task vectors adapted per layer on test images.",
            {"CART less AdaMerging + TA": paired(static(starts, "cart_tuned"), values(rows, _ADAMERGING_TA))},
            "paired difference ≥ 0",
            low=0,
        ),
        _labels_finding(blind),
        _memory_finding(memory),
    ]


def _beats(rows: Sequence[Row], on: str, granularity: str, level: Sequence[float], rival: str) -> Finding:
    variants = [v for v in Variant.all() if (v.on, v.granularity) == (on, granularity)]
    return judge(
        "C4",
        f"Adapted per {granularity} on {NAMES[on]}, a merge is at least as good as {rival}.",
        {f"{v.images} images": paired(values(rows, v), level) for v in variants},
        _RULE,
        low=NOT_WORSE,
    )


def _labels_finding(blind: Row) -> Finding:
    true, moved = (blind["runs"][labels] for labels in ("true", "moved"))
    same = all(true[name] == moved[name] for name in ("coefficients", "losses"))
    return Finding(
        "C4",
        "Labels have no part: with every label moved to another image the coefficients are the same, bit for bit.",
        f"the same: {same}; accuracy {mean_accuracy(true['accuracy']):.1f} % against the true labels, "
        f"{mean_accuracy(moved['accuracy']):.1f} % against the others",
        same,
        "equal bits; one seed decides it",
    )


def _memory_finding(memory: Sequence[Row]) -> Finding:
    growth = {}
    for on in NAMES:
        own = sorted((row for row in memory if row["on"] == on), key=lambda row: int(row["tasks"]))
        growth[on] = (own[-1]["peak"] - own[0]["peak"]) / own[0]["model"]
    few, most = min(row["tasks"] for row in memory), max(row["tasks"] for row in memory)
    told = "; ".join(f"{NAMES[on]} {more:+.2f} models" for on, more in growth.items())
    return Finding(
        "C4",
        "Memory while learning does not depend on the number of tasks.",
        f"peak of {most} tasks − peak of {few} tasks: {told}",
        max(growth.values()) < 0.5,
        "growth below half a model; counted in bytes, the same for every seed",
        ours=True,
    )


def _layer(variant: Variant) -> bool:
    return variant.granularity == "layer"


def _wise(variant: Variant, granularity: Granularity) -> Variant:
    return Variant(variant.on, granularity, variant.images)


def _other(variant: Variant) -> Variant:
    return Variant("task_vectors", variant.granularity, variant.images)


def notes(rows: Sequence[Row], levels: Sequence[Row], tried: Sequence[Row]) -> list[str]:
    """Return what the tables do not say by themselves.

    Args:
        rows: the adaptations, as of `measure`.
        levels: as of `compare_levels`.
        tried: the runs with every learning rate, as of `choose_rates`.
    """
    told = []
    for on in NAMES:
        own = [row for row in levels if row["on"] == on]
        best, surest = max(own, key=lambda row: row["accuracy"]), min(own, key=lambda row: row["entropy"])
        told.append(
            f"on {NAMES[on]} accuracy is best at λ = {best['scale']:.3g} ({best['accuracy']:.1f} %) and entropy least "
            f"at λ = {surest['scale']:.3g} ({surest['accuracy']:.1f} %)"
        )
    gaps = [
        fmean(values(rows, Variant(on, "layer", "validation"))) - fmean(values(rows, Variant(on, "layer", "test")))
        for on in get_args(Direction)
    ]
    return [
        "Entropy is not accuracy: a longer step along the same directions makes a model surer, right or wrong. With "
        f"one λ for all experts, {' and '.join(told)}.",
        _rate_note(rows, tried),
        "Adapting layer by layer on validation images instead of test images costs "
        f"{', '.join(f'{-gap:.1f} points ({name})' for gap, name in zip(gaps, NAMES.values(), strict=True))}.",
        "Layer by layer, mean λ by block, first to last: "
        + "; ".join(f"{', '.join(f'{value:.2f}' for value in depths(rows, on))} on {NAMES[on]}" for on in NAMES)
        + " (test images).",
        "Experts stay on disk and pass by one tensor at a time; CART's directions are written once, in low rank. "
        "Beside the merged model, its gradient and the activations of one batch, learning on CART keeps the mean. "
        "Time grows with the number of tasks, for every task's images go through the model. The peak is that of two "
        "steps: the bytes of tensors that the allocator gave out less those that it took back, at their highest.",
    ]


def _rate_note(rows: Sequence[Row], tried: Sequence[Row]) -> str:
    """Return which of the chosen learning rates stand at an end of those tried."""
    rates = sorted({row["lr"] for row in tried})
    chosen = {(row["on"], row["granularity"]): row["lr"] for row in rows}
    ends = [
        f"{rate:g} ({NAMES[on]}, per {granularity})"
        for (on, granularity), rate in chosen.items()
        if rate in (rates[0], rates[-1])
    ]
    if not ends:
        return f"Every chosen learning rate lies inside those tried, {rates[0]:g} to {rates[-1]:g}."
    return (
        f"Learning rates from {rates[0]:g} to {rates[-1]:g} were tried. Chosen at an end of them, so that a better one "
        f"may lie beyond: {', '.join(ends)}."
    )


def depths(rows: Sequence[Row], on: str) -> list[float]:
    """Return the mean coefficient of each block's matrices, first block first, layer-wise on test images."""
    found: dict[int, list[float]] = {}
    for row in rows:
        if (row["on"], row["granularity"], row["images"]) == (on, "layer", "test"):
            for tensors in row["coefficients"].values():
                for name, value in tensors.items():
                    if is_matrix(name, (2, 2), "attn_mlp") and name.endswith("weight"):
                        block = next(int(part) for part in name.split(".") if part.isdigit())
                        found.setdefault(block, []).append(value)
    return [fmean(found[block]) for block in sorted(found)]


def figures(rows: Sequence[Row], starts: Sequence[Row], memory: Sequence[Row]) -> dict[str, Any]:
    """Return the study's figures.

    Args:
        rows: the adaptations, as of `measure`.
        starts: the static merges, as of `start`, one for each seed.
        memory: as of `weigh`, for each number of tasks and direction.
    """
    bars: dict[tuple[str, str, str], list[float]] = {
        (v.on, v.granularity, v.images): values(rows, v) for v in Variant.all()
    }
    first = [row for row in rows if row["course"]]
    return {
        "accuracy": accuracy_figure(bars, {on: static(starts, on) for on in NAMES}, NAMES),
        "coefficients": coefficient_figure(
            {NAMES[on]: [row["coefficients"] for row in Variant(on, "layer", "test").of(rows)] for on in NAMES}  # type: ignore[arg-type]
        ),
        "course": course_figure(first, NAMES),
        "memory": memory_figure(memory, NAMES),
    }
