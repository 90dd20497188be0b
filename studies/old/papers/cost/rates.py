"""The learning rate of joint training, chosen on validation before any look at test."""

from collections.abc import Callable, Sequence
from statistics import fmean

from studies.lab.inputs import Laboratory, mean_accuracy
from studies.old.results import Table, with_interval
from studies.old.rows import Row


def try_rates(inputs: Laboratory, names: Sequence[str]) -> list[Row]:
    """Return joint training at every learning rate: run, rate, seeds, and each one's mean validation accuracy in %.

    Args:
        inputs: the study's inputs.
        names: the runs; they are compared on the seeds that all of them have.
    """
    blind = inputs.blind()
    runs = {name: blind.run(name) for name in names}
    seeds = sorted(set.intersection(*(set(run.seeds) for run in runs.values())))
    return [
        {
            "run": name,
            "rate": run.joint_settings(seeds[0])["learning_rate"],
            "seeds": seeds,
            "validation": [mean_accuracy(blind.accuracy(run.model(seed), "validation")) for seed in seeds],
        }
        for name, run in runs.items()
    ]


def best_rate(rates: Sequence[Row]) -> Row:
    """Return the row of the highest mean validation accuracy; of equal ones the first.

    Args:
        rates: as of `try_rates`.
    """
    return max(rates, key=lambda row: fmean(row["validation"]))


def rate_table(rates: Sequence[Row], label: Callable[[str], str]) -> Table:
    """Return validation accuracy at every learning rate of joint training.

    Args:
        rates: as of `try_rates`.
        label: what a run is called.
    """
    best = best_rate(rates)
    return Table(
        "Joint training by its learning rate: mean validation accuracy, %",
        [
            {
                "model": label(row["run"]),
                "learning rate": f"{row['rate']:g}",
                "seeds": len(row["validation"]),
                "validation accuracy, %": with_interval(row["validation"]),
                "chosen": "×" if row is best else "",
            }
            for row in rates
        ],
    )


def rate_note(rates: Sequence[Row]) -> str:
    """Return whether the best learning rate of joint training is the largest or the smallest of those tried."""
    if len(rates) == 1:
        return "Joint training has one learning rate here, that of single tasks: it may do better with another."
    best, tried = best_rate(rates)["rate"], sorted(row["rate"] for row in rates)
    place = "inside" if tried[0] < best < tried[-1] else "at the end of"
    return (
        f"The best learning rate of joint training, {best:g}, stands {place} those tried, "
        f"{', '.join(f'{rate:g}' for rate in tried)}; the table does not count the other {len(rates) - 1} trainings. "
        "Joint runs of another budget have the rate of single tasks."
    )
