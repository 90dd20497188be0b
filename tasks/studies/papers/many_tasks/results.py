"""What the study `many_tasks` says: tables, findings and figures of its rows, one row per count, seed and model."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean

from matplotlib.figure import Figure

from mergeflow.evaluation.averages import normalised
from tasks.studies.adapting import NOT_WORSE
from tasks.studies.claims import judge, paired
from tasks.studies.inputs import mean_accuracy
from tasks.studies.papers.many_tasks.figures import loss_figure, radar_figure
from tasks.studies.results import Cell, Finding, Table, with_interval
from tasks.studies.rows import Row

NAMES = {
    "zero_shot": "zero-shot",
    "individual": "individual",
    "average": "average",
    "task_arithmetic": "task arithmetic",
    "ties": "TIES",
    "consensus": "Consensus TA",
    "cart": "CART",
    "tsv": "TSV-M",
    "iso_c": "Iso-C",
    "iso_cts": "Iso-CTS",
    "wudi": "WUDI",
    "pcb": "PCB",
    "adamerging_ta": "AdaMerging + TA",
    "adamerging_cart": "AdaMerging + CART",
}
BASELINES = ("task_arithmetic", "ties", "consensus")
RADAR = ("task_arithmetic", "ties", "consensus", "cart", "adamerging_cart")
Labels = Mapping[str, str]


class Results:
    """The rows, asked by count and model; `labels` name the models that are trained beside the merges."""

    def __init__(self, rows: Sequence[Row], labels: Labels) -> None:
        self._rows = {(row["tasks"], row["seed"], row["model"]): row for row in rows}
        self.counts = sorted({row["tasks"] for row in rows})
        self.trained = list(labels)
        zero_shot, individual, *rest = NAMES.items()
        self.names = dict([zero_shot, individual, *labels.items(), *rest])
        self.models = [name for name in self.names if any(row["model"] == name for row in rows)]

    def seeds(self, count: int, model: str) -> list[int]:
        """Return the seeds for which a model was measured, which may be none."""
        return sorted(seed for tasks, seed, name in self._rows if (tasks, name) == (count, model))

    def row(self, count: int, seed: int, model: str) -> Row:
        """Return what was measured of one model.

        Args:
            count: how many tasks.
            seed: of the experts.
            model: its name.
        """
        return self._rows[count, seed, model]

    def of(self, count: int, model: str) -> list[Row]:
        """Return a model's rows, one per seed."""
        return [self.row(count, seed, model) for seed in self.seeds(count, model)]

    def absolute(self, count: int, model: str) -> list[float]:
        """Return mean test accuracy in %, one value per seed."""
        return [mean_accuracy(row["test"]) for row in self.of(count, model)]

    def relative(self, count: int, model: str) -> list[float]:
        """Return normalised test accuracy in %, one value per seed."""
        pairs = [(row, self.row(count, row["seed"], "individual")) for row in self.of(count, model)]
        return [100 * normalised(one["test"], own["test"]) for one, own in pairs]

    def lead(self, count: int, better: str, worse: str) -> list[float]:
        """Return the paired differences of accuracy over the seeds that both have.

        Args:
            count: how many tasks.
            better: a model.
            worse: the model it is compared with.
        """
        both = sorted(set(self.seeds(count, better)) & set(self.seeds(count, worse)))
        return paired(
            *([mean_accuracy(self.row(count, seed, name)["test"]) for seed in both] for name in (better, worse))
        )

    def lost(self, model: str) -> dict[int, float]:
        """Return by seed what a model loses of normalised accuracy from the fewest tasks to the most, in points."""
        first, last = (dict(zip(self.seeds(n, model), self.relative(n, model), strict=True)) for n in self.ends)
        return {seed: first[seed] - last[seed] for seed in first.keys() & last.keys()}

    @property
    def ends(self) -> tuple[int, int]:
        return self.counts[0], self.counts[-1]

    def per_task(self, count: int, model: str) -> dict[str, list[float]]:
        """Return test accuracy in % of each task, one value per seed."""
        tests = [row["test"] for row in self.of(count, model)]
        return {task: [100 * test[task] for test in tests] for task in tests[0]}


def tables(rows: Sequence[Row], labels: Labels) -> list[Table]:
    """Return the paper's Table 1 with its further rows, accuracy per task, and what was chosen."""
    found = Results(rows, labels)
    return [
        Table("Mean test accuracy, %", [_line(found, model, found.absolute) for model in found.models]),
        Table("Normalised test accuracy, %", [_line(found, model, found.relative) for model in found.models]),
        *(_per_task(found, count) for count in found.counts),
        Table("Chosen on validation, one value per seed", _chosen(found)),
        *_rates(found),
    ]


def _line(found: Results, model: str, values: Callable[[int, str], list[float]]) -> dict[str, Cell]:
    cells = {count: values(count, model) for count in found.counts}
    first, last = found.ends
    both = set(found.seeds(first, model)) & set(found.seeds(last, model))
    change = [
        after - before
        for seed, before in zip(found.seeds(first, model), cells[first], strict=True)
        for other, after in zip(found.seeds(last, model), cells[last], strict=True)
        if seed == other and seed in both
    ]
    return {
        "model": found.names[model],
        **{f"{count} tasks": with_interval(own) if own else None for count, own in cells.items()},
        f"{first} → {last}": with_interval(change) if change else None,
    }


def _per_task(found: Results, count: int) -> Table:
    def line(model: str) -> dict[str, Cell]:
        cells = {t: f"{fmean(v):.1f}" for t, v in found.per_task(count, model).items()}
        return {"model": found.names[model], **cells}

    there = [model for model in found.models if found.seeds(count, model)]
    return Table(f"Test accuracy per task, %, {count} tasks, mean over seeds", [line(model) for model in there])


def _chosen(found: Results) -> list[dict[str, Cell]]:
    lines: list[dict[str, Cell]] = []
    for model in found.models:
        rows = {count: found.of(count, model) for count in found.counts}
        if all(own and "args" in own[0] for own in rows.values()):
            lines.append(
                {
                    "method": found.names[model],
                    **{f"{count} tasks": "; ".join(_said(row["args"]) for row in own) for count, own in rows.items()},
                    "tried": str(rows[found.counts[0]][0]["tried"]),
                }
            )
    return lines


def _rates(found: Results) -> list[Table]:
    """Return the course of AdaMerging for each rate, where it was adapted at all."""
    lines: list[dict[str, Cell]] = []
    for model in found.models:
        for count in found.counts:
            own = found.of(count, model)
            for place, one in enumerate(own[0].get("tried_rates", []) if own else []):
                lines.append(
                    {
                        "method": found.names[model],
                        "tasks": count,
                        "rate": f"{one['lr']:g}",
                        "validation accuracy over the steps": ", ".join(
                            f"{value:.1f} ({step})" for step, value in one["course"].items()
                        ),
                        "chosen": "" if place else "×",
                    }
                )
    return [Table("AdaMerging's learning rates on validation images, first seed, %", lines)] if lines else []


def _said(args: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in args.items())


def findings(rows: Sequence[Row], labels: Labels) -> list[Finding]:
    """Hold the paper's statements against the table."""
    found = Results(rows, labels)
    models = set(found.models)
    asked = [_compare(found, other) for other in BASELINES if other in models]
    asked.append(_order(found))
    if "cart" in models and len(found.counts) > 1:
        asked.append(_loses_least(found))
    asked += [_adapts(found, start) for start in ("ta", "cart") if f"adamerging_{start}" in models]
    if {"adamerging_ta", "adamerging_cart"} <= models:
        asked.append(
            judge(
                "C4",
                "AdaMerging on CART's directions is better than on task vectors.",
                _at_all(found, lambda count: found.lead(count, "adamerging_cart", "adamerging_ta")),
                "paired difference ≥ 0, at every number of tasks",
                low=0,
            )
        )
    return asked


def _at_all(found: Results, values: Callable[[int], list[float]]) -> dict[str, list[float]]:
    """Return a measure at every number of tasks at which there is one."""
    return {f"{count} tasks": own for count in found.counts if (own := values(count))}


def _compare(found: Results, other: str) -> Finding:
    return judge(
        "C1",
        f"CART beats {found.names[other]}, whatever the number of tasks.",
        _at_all(found, lambda count: found.lead(count, "cart", other)),
        "paired difference ≥ 0, at every number of tasks",
        low=0,
    )


def _adapts(found: Results, start: str) -> Finding:
    name = f"adamerging_{start}"
    words = "CART (8 %, λ = 1)" if start == "cart" else "task arithmetic (λ from validation)"

    def gains(count: int) -> list[float]:
        return [mean_accuracy(row["test"]) - mean_accuracy(row["start"]) for row in found.of(count, name)]

    return judge(
        "C4",
        f"Adapting is at least as good as its static start, {words}.",
        _at_all(found, gains),
        f"paired difference ≥ {NOT_WORSE} points (one test image in 500), at every number of tasks",
        low=NOT_WORSE,
    )


def _order(found: Results) -> Finding:
    ladder = [
        name for name in ("zero_shot", "average", "task_arithmetic", "cart", "individual") if name in found.models
    ]
    steps = {
        f"{count} tasks, {found.names[high]} less {found.names[low]}": found.lead(count, high, low)
        for count in found.counts
        for low, high in pairwise(ladder)
    }
    words = " < ".join(found.names[name] for name in ladder)
    return judge("C6", f"{words}, whatever the number of tasks.", steps, "each paired difference ≥ 0", low=0)


def _loses_least(found: Results) -> Finding:
    first, last = found.ends
    compared = [name for name in (*BASELINES, "average") if name in found.models]
    own = found.lost("cart")
    more = {
        f"{found.names[name]} loses more by": [lost[seed] - own[seed] for seed in sorted(lost.keys() & own.keys())]
        for name in compared
        if (lost := found.lost(name))
    }
    return judge(
        "C6",
        f"From {first} to {last} tasks CART loses least of all merges without data.",
        more,
        "paired difference of what is lost, normalised, ≥ 0 against task arithmetic, TIES, Consensus and the average",
        low=0,
        beside=f"; CART loses {with_interval(list(own.values()))}",
    )


def notes(rows: Sequence[Row], labels: Labels) -> list[str]:
    """Return what decides the table."""
    found = Results(rows, labels)
    last = found.counts[-1]
    merged = [name for name in found.models if name not in ("zero_shot", "individual", *found.trained)]
    there = {count: [name for name in merged if found.seeds(count, name)] for count in found.counts}
    best = max(there[last], key=lambda name: fmean(found.absolute(last, name)))
    gaps = {
        count: fmean(found.absolute(count, "individual")) - max(fmean(found.absolute(count, name)) for name in names)
        for count, names in there.items()
    }
    edges = _edges(found)
    return [
        f"The best merge of {last} tasks is {found.names[best]}. The best merge stays below the experts by "
        + ", ".join(f"{gap:.1f} points ({count} tasks)" for count, gap in gaps.items())
        + ".",
        "Tasks differ in what there is to lose: the tables per task show where merging fails.",
        *([f"At the end of its grid stood the scale of {', '.join(edges)}."] if edges else []),
    ]


def _edges(found: Results) -> list[str]:
    return [
        f"{found.names[model]} ({count} tasks)"
        for model in found.models
        for count in found.counts
        if any(row.get("edge") for row in found.of(count, model))
    ]


def figures(rows: Sequence[Row], labels: Labels) -> dict[str, Figure]:
    """Draw normalised accuracy per task, and over the number of tasks."""
    found = Results(rows, labels)
    radar = {
        count: {
            found.names[model]: {
                task: fmean(values) / fmean(found.per_task(count, "individual")[task]) * 100
                for task, values in found.per_task(count, model).items()
            }
            for model in RADAR
            if found.seeds(count, model)
        }
        for count in found.counts
    }
    curves = {
        found.names[model]: {count: own for count in found.counts if (own := found.relative(count, model))}
        for model in found.models
        if model != "individual"  # 100 by definition
    }
    return {"radar": radar_figure(radar), "counts": loss_figure(curves)}
