"""What validation chose in the study `glue`: its tables, what stands at an end of what was tried, and the tidy rows."""

from collections.abc import Mapping, Sequence
from typing import Any

from studies.old.ends import ends_of
from studies.old.results import Cell, Table
from studies.old.rows import Row, accuracy_rows, tidy

Names = Mapping[str, str]
Tried = Mapping[str, Mapping[str, Sequence[float]]]


def of_model(rows: Sequence[Row], names: Names) -> dict[tuple[str, str], list[Row]]:
    """Return by model and embeddings the rows that tell what was chosen, one per seed.

    Args:
        rows: of the study.
        names: model → what readers call it, in the order of the tables.
    """
    keys = [(model, embeddings) for model in names for embeddings in ("merged", "base")]
    found = {key: [row for row in rows if (row["model"], row["embeddings"]) == key and "args" in row] for key in keys}
    return {key: sorted(own, key=lambda row: int(row["seed"])) for key, own in found.items() if own}


def choice_table(rows: Sequence[Row], names: Names) -> Table:
    """Return what was chosen, and how many candidates there were.

    Args: As of `of_model`.
    """
    lines: list[dict[str, Cell]] = []
    for (model, embeddings), own in of_model(rows, names).items():
        chosen = "; ".join(", ".join(f"{name} {value}" for name, value in row["args"].items()) for row in own)
        tried = "; ".join(str(row["tried"]) for row in own) if "tried" in own[0] else None
        lines.append({"method": names[model], "embeddings": embeddings, "chosen": chosen, "tried": tried})
    return Table("Chosen on validation, one value per seed", lines)


def rate_table(rows: Sequence[Row], names: Names) -> Table:
    """Return the course of AdaMerging on validation for each rate, on the first seed.

    Args: As of `of_model`.
    """
    lines: list[dict[str, Cell]] = []
    for (model, _), own in of_model(rows, names).items():
        for place, one in enumerate(own[0].get("tried_rates", [])):
            course = ", ".join(f"{value:.1f} ({step})" for step, value in one["course"].items())
            lines.append({"method": names[model], "rate": f"{one['lr']:g}", "mean figure over the steps": course})
            lines[-1]["chosen"] = "" if place else "×"
    return Table("AdaMerging's learning rates on validation, first seed, %", lines)


def ends_note(rows: Sequence[Row], names: Names, tried: Tried) -> list[str]:
    """Return which choices stand at an end of what was tried, so that other values may do better.

    Args:
        rows: of the study.
        names: model → what readers call it.
        tried: model → argument → the values that were tried of it.
    """
    told = []
    for (model, embeddings), own in of_model(rows, names).items():
        ends = [ends_of(row["args"], tried[model]) for row in own]
        for name in tried[model]:
            if count := sum(name in one for one in ends):
                whose = " and the base's embeddings" if embeddings == "base" else ""
                told.append(f"{name} of {names[model]}{whose} ({count} of {len(own)} seeds)")
    return [f"At an end of what was tried stood {'; '.join(told)}: other values may do better."] if told else []


def tidy_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return one row for each seed, model and: heads and task; choice; storage; rate and step.

    Args:
        rows: of the study.

    Returns:
        `model`: test figure of a task in %. `choice`: the arguments, how many were tried, and the mean figure on
        validation in % that chose them. `stored`: the share in % of all experts' bytes. `rate`: AdaMerging's mean
        figure on validation in % after so many steps, for the first seed, whose course chose the rate of all.
    """
    settings = ("seed", "model", "embeddings")
    models = accuracy_rows(rows, settings, ("fixed", "probed"), as_column="heads")
    found: list[dict[str, Any]] = [{"part": "model", **one} for one in models]
    for row in rows:
        own = {name: row[name] for name in settings}
        if "args" in row:
            chosen = {"tried": row["tried"], "validation": 100 * row["validation"]} if "tried" in row else {}
            found.append({"part": "choice", **own, **row["args"], **chosen})
        if "stored" in row:
            found.append({"part": "stored", **own, "stored": 100 * row["stored"]})
        if row["seed"] == rows[0]["seed"]:
            found += [
                {"part": "rate", **own, "rate": one["lr"], "step": int(step), "validation": value}
                for one in row.get("tried_rates", [])
                for step, value in one["course"].items()
            ]
    return tidy(found)
