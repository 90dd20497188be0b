"""What decides the findings of a record, told again from its rows: of studies whose notes once outran an interval."""

from collections.abc import Callable, Mapping
from typing import Any

from tasks.studies.judging.cart import models_of_many_tasks
from tasks.studies.judging.merging import epochs_of, lengths_of, models_of_glue
from tasks.studies.judging.pieces import Rows, grouped
from tasks.studies.papers.glue import results as glue
from tasks.studies.papers.many_tasks import results as many_tasks
from tasks.studies.papers.many_tasks.study import ADAPTED, at_end, ends_of
from tasks.studies.papers.one_epoch import study as one_epoch


def of_one_epoch(rows: Rows, options: Any) -> list[str]:
    return one_epoch.notes(*lengths_of(epochs_of(rows), options))


def of_glue(rows: Rows, options: Any) -> list[str]:
    return glue.notes(models_of_glue(rows), options.together)


def of_many_tasks(rows: Rows, options: Any) -> list[str]:
    """Tell which arguments ended at an end of what was tried as well; of AdaMerging's rates the first was taken."""
    args = {(row["tasks"], row["seed"], row["model"]): row for row in rows if row["split"] == "test"}
    rates = grouped([row for row in rows if row["rate"]], "tasks", "model")
    pieces = []
    for piece in models_of_many_tasks(rows):
        count, seed, model = (piece[name] for name in ("tasks", "seed", "model"))
        ends: list[str] = []
        if model in options.methods:
            ends = ends_of(options.methods[model], args[count, seed, model])
        elif model in ADAPTED.values() and at_end(rates[count, model][0]["rate"], options.adapted.rates):
            ends = ["rate"]
        pieces.append(piece | {"ends": ends})
    return many_tasks.notes(pieces, {name: one.label for name, one in options.together.items()})


NOTES: Mapping[str, Callable[[Rows, Any], list[str]]] = {
    "glue": of_glue,
    "many_tasks": of_many_tasks,
    "one_epoch": of_one_epoch,
}
"""Study → what its rows and choices tell of what decides its findings."""
