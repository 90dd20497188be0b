"""Tables and verdicts of the study `cost`."""

from collections.abc import Sequence
from statistics import fmean

from studies.lab.inputs import mean_accuracy
from studies.old.claims import judge, paired
from studies.old.results import Cell, Finding, Table, with_interval
from studies.old.rows import Row, of


def label(name: str) -> str:
    """Return what a row is called.

    Example:
        >>> [label(name) for name in ("mima_16", "mima_16_480", "joint", "per_round_2_16", "one_epoch")]
        ['MIMA N = 16', 'MIMA N = 16, S = 480', 'joint training', 'α = 2/T, schedule per round, N = 16', 'one epoch']
        >>> label("joint_half"), label("joint_480")
        ('joint training, half the rate', 'joint training, S = 480')
    """
    kind, *numbers = name.split("_")
    if kind == "mima" and numbers:
        return f"MIMA N = {numbers[0]}" + (f", S = {numbers[1]}" if len(numbers) > 1 else "")
    if kind == "joint":
        more = [f", S = {word}" if word.isdigit() else f", {word} the rate" for word in numbers]
        return "joint training" + "".join(more)
    for schedule, words in (("per_round_", "schedule per round"), ("whole_", "one schedule")):
        if name.startswith(schedule):
            multiple, rounds = name.removeprefix(schedule).split("_")
            return f"α = {multiple}/T, {words}, N = {rounds}"
    return name.replace("_", " ")


def called(rows: Sequence[Row], name: str) -> str:
    """Return what the row of a run is called; the run of a one-shot merge gave its experts alone.

    Args:
        rows: as of `measure`.
        name: of the run.
    """
    return f"one-shot merge of {name}" if of(rows, run=name)[0]["tried"] else label(name)


def cost_table(rows: Sequence[Row], tasks: Sequence[str], size: float) -> Table:
    """Return accuracy beside what does not depend on the machine; `size` of one model in MiB.

    Args:
        rows: as of `measure`.
        tasks: their names.
        size: of one model in MiB.
    """

    def line(name: str) -> dict[str, Cell]:
        own = of(rows, run=name)
        rounds = own[0]["rounds"]
        return {
            "model": called(rows, name),
            "test accuracy, %": with_interval(accuracies(rows, name)),
            "steps per task": own[0]["budget"],
            "task steps": round(fmean(row["task_steps"] for row in own)),
            "task steps per round": round(fmean(row["task_steps"] for row in own) / max(rounds, 1)),
            "examples": round(fmean(row["examples"] for row in own)),
            "merges": rounds,
            "sent, MiB": round(2 * rounds * len(tasks) * size) if rounds else "the data",
            "examples of the selection": round(fmean(row["selection"] for row in own)),
        }

    return Table("Accuracy and cost of one seed", [line(name) for name in _runs(rows)])


def time_tables(rows: Sequence[Row]) -> list[Table]:
    """Return what training, selection and one merge by each method take, in processor seconds."""

    def line(name: str) -> dict[str, Cell]:
        own = of(rows, run=name)
        return {
            "model": called(rows, name),
            "training": with_interval([row["times"]["processor_seconds"] for row in own]),
            "a round": with_interval([fmean(row["per_round"]) for row in own]) if own[0]["per_round"] else None,
            "selection": with_interval([row["selecting"] for row in own]) if own[0]["tried"] else None,
            "GPU-seconds": round(fmean(row["times"]["gpu_seconds"] for row in own)),
            "peak MiB": max(row["times"]["peak_memory_mib"] for row in own),
        }

    merged = [row["merging"] for row in rows if row["merging"]]
    methods: list[dict[str, Cell]] = [
        {"method": name, "one merge": with_interval([one[name] for one in merged], 3)} for name in merged[0]
    ]
    return [
        Table("Processor seconds of one seed", [line(name) for name in _runs(rows)]),
        Table("Processor seconds of one merge of all experts, arguments as chosen", methods),
    ]


def choice_table(rows: Sequence[Row]) -> Table:
    """Return what validation chose for the one-shot rows."""
    return Table(
        "What validation chose for the one-shot merges",
        [
            {
                "model": called(rows, row["run"]),
                "seed": row["seed"],
                "candidates": row["tried"],
                "chosen": row["chosen"],
                "validation accuracy, %": round(100 * row["validation"], 1),
                "test accuracy, %": round(mean_accuracy(row["test"]), 1),
            }
            for row in rows
            if row["tried"]
        ],
    )


def findings(rows: Sequence[Row]) -> list[Finding]:
    """Say what the paper leaves open: how MIMA stands to joint training and to the best one-shot merge."""
    joint = next(name for name in _runs(rows) if name.startswith("joint"))
    budget = of(rows, run=joint)[0]["budget"]
    mima = [row["run"] for row in rows if row["run"].startswith("mima") and row["budget"] == budget]
    most = max((name for name in mima if of(rows, run=name)[0]["rounds"]), key=lambda n: int(n.split("_")[1]))
    once = max((row["run"] for row in rows if row["tried"]), key=lambda name: _on_validation(rows, name))
    return [
        judge(
            "M7",
            "With many rounds MIMA comes within 2 points of joint training at the same budget.",
            {f"{called(rows, most)} less joint training": _difference(rows, most, joint)},
            "paired difference ≥ −2 points",
            low=-2,
            ours=True,
        ),
        judge(
            "M7",
            "At the same budget MIMA with many rounds beats the best one-shot merge.",
            {f"{called(rows, most)} less {called(rows, once)}": _difference(rows, most, once)},
            "paired difference ≥ 0",
            low=0,
            ours=True,
        ),
    ]


def _difference(rows: Sequence[Row], first: str, second: str) -> list[float]:
    """Return the paired differences over the seeds that both runs have."""
    both = {row["seed"] for row in of(rows, run=first)} & {row["seed"] for row in of(rows, run=second)}
    own = [[mean_accuracy(row["test"]) for row in of(rows, run=n) if row["seed"] in both] for n in (first, second)]
    return paired(*own)


def notes(rows: Sequence[Row]) -> list[str]:
    """Return how runs in rounds stand to joint training of the same budget."""
    joint = {of(rows, run=name)[0]["budget"]: name for name in _runs(rows) if name.startswith("joint")}
    behind = [
        f"{called(rows, name)} {with_interval(_difference(rows, name, joint[own[0]['budget']]))}"
        for name in _runs(rows)
        if (own := of(rows, run=name))[0]["rounds"] and own[0]["budget"] in joint
    ]
    return [
        f"Points against joint training of the same budget: {'; '.join(behind)}. At the same S, what runs in "
        "rounds cost beyond a one-shot merge is N − 1 more exchanges; steps and examples are the same."
    ]


def _on_validation(rows: Sequence[Row], name: str) -> float:
    return fmean(row["validation"] for row in of(rows, run=name))


def accuracies(rows: Sequence[Row], name: str) -> list[float]:
    """Return a run's mean test accuracy in %, one value per seed.

    Args:
        rows: as of `measure`.
        name: of the run.
    """
    return [mean_accuracy(row["test"]) for row in of(rows, run=name)]


def _runs(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["run"] for row in rows))
