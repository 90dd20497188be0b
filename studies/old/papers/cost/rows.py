"""The tidy rows of the study `cost`: its models, and the learning rates that joint training was tried with."""

from collections.abc import Sequence
from typing import Any

from studies.old.rows import Row, accuracy_rows, tidy

_TRAINING = ("seed", "run", "budget", "rounds", "task_steps", "examples", "tried")


def tidy_rows(rows: Sequence[Row], rates: Sequence[Row]) -> list[dict[str, Any]]:
    """Return one row for each run, seed and task, and one for each rate and seed; accuracies are in %.

    Args:
        rows: as of `measure`.
        rates: as of `try_rates`.

    Returns:
        `model`: test accuracy on a task; of a one-shot merge what was chosen, and its mean validation accuracy.
        `rate`: mean validation accuracy of joint training with a rate.
    """
    models = [
        {"part": "model", **one, **_chosen(row)}
        for row in rows
        for one in accuracy_rows([row], _TRAINING, ("test",), "split")
    ]
    tried = [
        {"part": "rate", "seed": seed, "run": row["run"], "rate": row["rate"], "validation": value}
        for row in rates
        for seed, value in zip(row["seeds"], row["validation"], strict=True)
    ]
    return tidy([*models, *tried])


def _chosen(row: Row) -> dict[str, Any]:
    return {"chosen": row["chosen"], "validation": 100 * row["validation"]} if row["tried"] else {}
