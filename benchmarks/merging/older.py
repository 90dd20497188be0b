"""What this checkout takes of the processor beside an older one: merges, and a sweep of a project, in turn."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parents[2]

Measure = Callable[[dict[str, Any]], dict[str, Any]]


def sweep_job(file: Path, out: Path) -> dict[str, Any]:
    """Return the job of a sweep in the folder of its project.

    Args:
        file: the sweep; its paths begin at the current folder, of which the outputs are those of a pipeline.
        out: where each checkout puts its results; removed before each run.
    """
    return {"kind": "sweep", "experts": [], "sweep": str(file.resolve()), "out": str(out)}


def older_table(
    measure: Measure, jobs: dict[str, dict[str, Any]], older: Path, rounds: int, most: float = 1.05
) -> list[dict[str, Any]]:
    """Print the processor seconds (user and system) of each job here and there, and their ratio; return the rows.

    The checkouts take turns, and every second round begins with the older one; of the rounds the least counts, which
    on a shared machine says more than the mean. Of merges, reading Python and torch in is left out, but
    for the last column; a sweep is a whole process.

    Args:
        rounds: how often each job runs at either side.
        most: ratio from which on a row is marked as slower.
    """
    print("| work | here | older | here / older | of whole processes |\n|---|---|---|---|---|")
    rows = []
    for label, job in jobs.items():
        sides: dict[str, list[dict[str, Any]]] = {str(HERE): [], str(older.resolve()): []}
        for turn in range(rounds):
            for side in list(sides)[:: -1 if turn % 2 else 1]:
                sides[side].append(measure({**job, "checkout": side}))
        here, there = (
            {"alone": min(run.get("alone", run["cpu"]) for run in runs), "cpu": min(run["cpu"] for run in runs)}
            for runs in sides.values()
        )
        ratio, whole = (here[key] / there[key] for key in ("alone", "cpu"))
        slower = " slower" if ratio > most else ""
        print(
            f"| {label} | {here['alone']:.2f} s | {there['alone']:.2f} s | {ratio:.2f}{slower} | {whole:.2f} |",
            flush=True,
        )
        rows.append({"label": label, "here": here, "older": there, "ratio": ratio, "whole": whole})
    return rows
