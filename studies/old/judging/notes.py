"""What decides the findings of a record, told again from its rows."""

from collections.abc import Callable, Mapping
from typing import Any

from studies.lab.sweeps import ADAPTED, ranges_of
from studies.old.ends import at_end, ends_of
from studies.old.judging.cart import curves_of, models_of_many_tasks, subsets_of, suites_of_compression
from studies.old.judging.merging import (
    epochs_of,
    epochs_of_gradients,
    lengths_of,
    models_of_glue,
    pieces_of_bases,
    planes_of,
    rounds_of_mima,
    spaces_of,
)
from studies.old.judging.pieces import Rows, grouped
from studies.old.papers.alignment import study as alignment
from studies.old.papers.bases import results as bases
from studies.old.papers.bases.study import tried as tried_of_bases
from studies.old.papers.compression import results as compression
from studies.old.papers.equivalence import results as equivalence
from studies.old.papers.glue import results as glue
from studies.old.papers.glue.study import tried as tried_of_glue
from studies.old.papers.gradients import study as gradients
from studies.old.papers.landscape import study as landscape
from studies.old.papers.many_tasks import results as many_tasks
from studies.old.papers.mima import results as mima
from studies.old.papers.one_epoch import study as one_epoch
from studies.old.papers.projection import results as projection
from studies.old.papers.rank_curve import results as rank_curve
from studies.old.papers.subset_scaling import results as subset_scaling
from studies.old.papers.subset_scaling.samples import WIDER
from studies.old.rows import picked


def of_one_epoch(rows: Rows, options: Any) -> list[str]:
    return one_epoch.notes(*lengths_of(epochs_of(rows), options))


def of_bases(rows: Rows, options: Any) -> list[str]:
    return bases.notes(*pieces_of_bases(rows, options), tried_of_bases(options))


def of_glue(rows: Rows, options: Any) -> list[str]:
    return glue.notes(models_of_glue(rows), options.together, tried_of_glue(options))


def of_many_tasks(rows: Rows, options: Any) -> list[str]:
    """Tell which arguments ended at an end of what was tried as well; of AdaMerging's rates the first was taken."""
    args = {(row["tasks"], row["seed"], row["model"]): row for row in rows if row["split"] == "test"}
    rates = grouped([row for row in rows if row["rate"]], "tasks", "model")
    pieces = []
    for piece in models_of_many_tasks(rows):
        count, seed, model = (piece[name] for name in ("tasks", "seed", "model"))
        ends: list[str] = []
        if model in options.methods:
            ends = ends_of(args[count, seed, model], ranges_of(options.methods[model]))
        elif model in ADAPTED.values() and seed == rows[0]["seed"]:  # one choice, for all seeds
            ends = ["rate"] if at_end(rates[count, model][0]["rate"], options.adapted.rates) else []
        pieces.append(piece | {"ends": ends})
    return many_tasks.notes(pieces, {name: one.label for name, one in options.together.items()})


def of_mima(rows: Rows, options: Any) -> list[str]:
    key = ("seed", "rounds", "steps", "optimiser")
    scales = {tuple(row[name] for name in key): row["scale"] for row in picked(rows, model="ties")}
    whole = [piece for piece in rounds_of_mima(rows) if "ties" in piece]
    return mima.notes([{**one, "scale": {"ties": scales[tuple(one[name] for name in key)]}} for one in whole])


def of_rank_curve(rows: Rows, options: Any) -> list[str]:
    tried = {kind: [min(scales), max(scales)] for kind, scales in options.scales.items()}
    return rank_curve.notes([{**piece, "tried": tried} for piece in curves_of(rows)])


def of_subset_scaling(rows: Rows, options: Any) -> list[str]:
    """Tell how often an end of what was tried was taken as well."""
    subsets, plans, known = subsets_of(rows)
    for subset in subsets:
        for name, one in subset["methods"].items():
            method = name.removesuffix(WIDER)
            tried = dict(options.grids[method])
            if name != method:
                tried["scale"] = [*tried["scale"], *options.wider[method]]
            one["ends"] = ends_of(one["args"], tried)
    return subset_scaling.notes(subsets, plans, known)


NOTES: Mapping[str, Callable[[Rows, Any], list[str]]] = {
    "alignment": lambda rows, options: alignment.notes(picked(rows, part="last")),
    "bases": of_bases,
    "compression": lambda rows, options: compression.notes(*suites_of_compression(rows)),
    "equivalence": lambda rows, options: equivalence.NOTES,
    "glue": of_glue,
    "gradients": lambda rows, options: gradients.notes(epochs_of_gradients(rows)),
    "landscape": lambda rows, options: landscape.notes(planes_of(rows, options.height)),
    "many_tasks": of_many_tasks,
    "mima": of_mima,
    "one_epoch": of_one_epoch,
    "projection": lambda rows, options: projection.notes(*spaces_of(rows)),
    "rank_curve": of_rank_curve,
    "subset_scaling": of_subset_scaling,
}
"""Study → what its rows and choices tell of what decides its findings."""
