"""Tables, notes and figures of the study `many_tasks` from its rows, one for each count, seed and model."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from mergeflow.evaluation.averages import normalised
from studies.lab.inputs import mean_accuracy
from studies.lab.sweeps import NAMES
from studies.old.claims import paired
from studies.old.leading import leader
from studies.old.papers.many_tasks.figures import loss_figure, radar_figure
from studies.old.results import Cell, Table, with_interval
from studies.old.rows import Row, accuracy_rows, tidy

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
    def merges(self) -> list[str]:
        """The merges without data."""
        data = ("zero_shot", "individual", "adamerging_ta", "adamerging_cart", *self.trained)
        return [name for name in self.models if name not in data]

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
        Table("Chosen on validation, in so many of the seeds", _chosen(found)),
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
                    **{f"{count} tasks": _said([row["args"] for row in own]) for count, own in rows.items()},
                    "tried": "; ".join(
                        f"{_spread(row['tried'] for row in own)} ({n} tasks)" for n, own in rows.items()
                    ),
                }
            )
    return lines


def _spread(numbers: Iterable[int]) -> str:
    """Return the smallest and the largest, or the one that all are."""
    known = sorted(set(numbers))
    return f"{known[0]} to {known[-1]}" if len(known) > 1 else str(known[0])


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


def _said(chosen: Sequence[Mapping[str, object]]) -> str:
    """Return the arguments of each choice and how many seeds made it, the most frequent first; a dash for none."""
    counted = Counter(", ".join(f"{name} {value}" for name, value in args.items()) for args in chosen)
    return "; ".join(f"{args} ({count} of {len(chosen)})" if args else "–" for args, count in counted.most_common())


def tidy_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return one row for each count, seed, model, split and task, and one for each look at a course of AdaMerging.

    The split `start` has the test accuracy of what AdaMerging starts from. `tried` is how many candidates validation
    chose from.
    """
    settings = ("seed", "tasks", "model")
    found = []
    for row in rows:
        found += [
            one | row.get("args", {}) | {"tried": row.get("tried")}
            for one in accuracy_rows([row], settings, ("test", "start", "validation"), "split")
        ]
        found += [
            {name: row[name] for name in settings}
            | {"split": "validation", "rate": tried["lr"], "step": int(step), "accuracy": value}
            for tried in row.get("tried_rates", [])
            for step, value in tried["course"].items()
        ]
    return tidy(found)


def notes(rows: Sequence[Row], labels: Labels) -> list[str]:
    """Return what decides the table."""
    found = Results(rows, labels)
    merged = [name for name in found.models if name not in ("zero_shot", "individual", *found.trained)]
    leaders = {
        count: leader({name: found.absolute(count, name) for name in merged if found.seeds(count, name)}, found.names)
        for count in found.counts
    }
    below = [
        f"{with_interval(found.lead(count, 'individual', best))} points ({count} tasks)"
        for count, (best, _) in leaders.items()
    ]
    last = found.counts[-1]
    return [
        f"Of the merges of {last} tasks the highest mean is that of {leaders[last][1]}. The highest mean of a merge "
        f"stays below the experts by {', '.join(below)}.",
        "Tasks differ in what there is to lose: the tables per task show where merging fails.",
        *_ends(found),
    ]


def _ends(found: Results) -> list[str]:
    """Say of which arguments the smallest or the largest value that was tried was taken."""
    ends = Counter(
        f"{argument} of {found.names[model]} ({count} tasks)"
        for model in found.models
        for count in found.counts
        for row in found.of(count, model)
        for argument in row.get("ends", [])
    )
    told = ", ".join(f"{name} for {times} seed{'s' * (times > 1)}" for name, times in ends.items())
    return [f"At an end of what was tried stood {told}."] if ends else []


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
