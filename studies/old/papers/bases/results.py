"""Study `bases`: its tables, findings, note and figure."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from studies.lab.inputs import mean_accuracy
from studies.old.claims import judge, paired
from studies.old.ends import ends_of
from studies.old.papers.bases.ranks import SHOWN, mean_rank
from studies.old.results import Cell, Finding, StudyResult, Table, with_interval
from studies.old.rows import Row, accuracy_rows, tidy
from tasks.plotting.drawing import FULL_WIDTH, dress, legend, panels
from tasks.plotting.intervals import curve

NAMES = {
    "zero_shot": "zero-shot",
    "individual": "experts",
    "average": "average",
    "task_arithmetic": "task arithmetic",
    "ties": "TIES",
    "cart": "CART",
    "tsv": "TSV-M",
    "iso_c": "Iso-C",
    "mima": "MIMA",
}
GAP = 15.0  # points between experts and average that the field's suites have
Labels = Mapping[str, str]
Tried = Mapping[str, Mapping[str, Sequence[float]]]
METHODS = ("task_arithmetic", "ties", "cart", "tsv", "iso_c")


def result(
    rows: Sequence[Row], labels: Labels, asked: Sequence[str], tried: Tried
) -> tuple[StudyResult, dict[str, Figure]]:
    """Return all that the study leaves in words and numbers, and its figure.

    Args:
        rows: as of `measure`, one for each base and seed.
        labels: what each base is called.
        asked: the bases that the rule is about.
        tried: method → argument → the values that were tried of it.
    """
    written = StudyResult(
        [accuracy_table(rows, labels), curve_table(rows, labels), rank_table(rows, labels), choice_table(rows, labels)],
        findings(rows, labels, asked),
        notes(rows, labels, asked, tried),
        tidy_rows(rows),
    )
    return written, {"ranks": rank_figure(rows, labels)}


def tidy_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return one row for each base, seed and: model and task; method; task.

    Args:
        rows: as of `measure`.

    Returns:
        `model`: test accuracy on a task in %. `choice`: a method's arguments, and the mean accuracy on validation in %
        that chose them. `rank`: the measures of `ranks_of`, shares from 0 to 1.
    """
    found: list[dict[str, Any]] = []
    for row in rows:
        own = {"seed": row["seed"], "base": row["arm"]}
        models = accuracy_rows([own | row["test"]], ("seed", "base"), list(row["test"]))
        found += [{"part": "model", **one} for one in models]
        for method, args in row["args"].items():
            found.append(
                {"part": "choice", **own, "model": method, "validation": 100 * row["validation"][method], **args}
            )
        found += [{"part": "rank", **own, "task": task, **ranks} for task, ranks in row["ranks"].items()]
    return tidy(found)


def of(rows: Sequence[Row], arm: str) -> list[Row]:
    """Return the rows of one base, one per seed."""
    return sorted((row for row in rows if row["arm"] == arm), key=lambda row: int(row["seed"]))


def reached(rows: Sequence[Row], arm: str, model: str) -> list[float]:
    """Return mean test accuracy in %, one value per seed.

    Args:
        rows: as of `measure`.
        arm: the base.
        model: a key of `NAMES`, or `cart RATIO`.
    """
    return [mean_accuracy(row["test"][model]) for row in of(rows, arm)]


def lead(rows: Sequence[Row], arm: str, better: str, worse: str) -> list[float]:
    """Return the paired differences of accuracy in points.

    Args:
        rows: as of `measure`.
        arm: the base.
        better: a model.
        worse: the model it is compared with.
    """
    return paired(reached(rows, arm, better), reached(rows, arm, worse))


def accuracy_table(rows: Sequence[Row], labels: Labels) -> Table:
    """Return mean test accuracy of every model on every base, and the gap that merging is about."""
    lines: list[dict[str, Cell]] = []
    for model, name in NAMES.items():
        lines.append({"model": name, **{label: with_interval(reached(rows, a, model)) for a, label in labels.items()}})
    gaps = {label: with_interval(lead(rows, arm, "individual", "average")) for arm, label in labels.items()}
    return Table("Mean test accuracy by base, %", [*lines, {"model": "experts less average", **gaps}])


def ratios_of(rows: Sequence[Row]) -> list[float]:
    """Return CART's rank ratios."""
    return sorted(float(model.partition(" ")[2]) for model in rows[0]["test"] if model.startswith("cart "))


def curve_table(rows: Sequence[Row], labels: Labels) -> Table:
    """Return CART over its rank, λ chosen for each."""
    lines: list[dict[str, Cell]] = [
        {
            "k / r": f"{ratio:g}",
            **{label: with_interval(reached(rows, arm, f"cart {ratio:g}")) for arm, label in labels.items()},
        }
        for ratio in ratios_of(rows)
    ]
    return Table("CART over its rank, λ chosen on validation for each: mean test accuracy, %", lines)


def rank_table(rows: Sequence[Row], labels: Labels) -> Table:
    """Return the rank of what fine-tuning changes."""
    words = {
        "kept": "of ‖τ‖² in the leading 8 % of the rank, %",
        "weights": "rank that holds 90 % of ‖τ‖², % of the full",
        "features": "rank that holds 90 % of the change of class means, % of the classes",
    }
    lines: list[dict[str, Cell]] = [
        {
            "share": text,
            **{
                label: with_interval([mean_rank(row["ranks"], name) for row in of(rows, arm)])
                for arm, label in labels.items()
            },
        }
        for name, text in words.items()
    ]
    return Table("The rank of what fine-tuning changes, mean over tasks", lines)


def choice_table(rows: Sequence[Row], labels: Labels) -> Table:
    """Return what validation chose."""
    lines: list[dict[str, Cell]] = []
    for model in METHODS:
        cells = {label: "; ".join(_said(row["args"][model]) for row in of(rows, a)) for a, label in labels.items()}
        lines.append({"method": NAMES[model], **cells})
    return Table("Chosen on validation, one value per seed", lines)


def _said(args: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in args.items())


def findings(rows: Sequence[Row], labels: Labels, asked: Sequence[str]) -> list[Finding]:
    """Hold the rule, and the paper's statements, against every base.

    Args:
        rows: as of `measure`.
        labels: what each base is called.
        asked: the bases that the rule is about.
    """
    found = [finding for arm in asked for finding in _rule(rows, arm, labels[arm])]
    ahead = {label: lead(rows, arm, "cart", "task_arithmetic") for arm, label in labels.items()}
    found.append(
        judge(
            "C1",
            "CART beats task arithmetic, whatever the base.",
            ahead,
            "paired difference ≥ 0, on every base",
            low=0,
            ours=True,
        )
    )
    average = {arm: reached(rows, arm, "average") for arm in labels}
    inside = {f"{label}, highest": _inside(rows, arm) for arm, label in labels.items()}
    at_used = {arm: reached(rows, arm, f"cart {SHOWN:g}") for arm in labels}
    inside |= {f"{label}, at 8 %": paired(at_used[arm], average[arm]) for arm, label in labels.items()}
    rule = "accuracy less the average's ≥ 1 point on every base, at the highest point as at one that no test chose"
    bell = judge("C2", "CART's curve over the rank is a bell, whatever the base.", inside, rule, low=1, ours=True)
    return [*found, bell]


def _rule(rows: Sequence[Row], arm: str, label: str) -> list[Finding]:
    gap = {"experts less average": lead(rows, arm, "individual", "average")}
    rule = f"paired difference ≥ {GAP:g} points"
    found = [judge("C1", f"{label}: experts are {GAP:g} points above their average.", gap, rule, low=GAP, ours=True)]
    for model in ("cart", "tsv"):
        ahead = {f"{NAMES[model]} less task arithmetic": lead(rows, arm, model, "task_arithmetic")}
        claim = f"{label}: {NAMES[model]} beats task arithmetic."
        found.append(judge("C1", claim, ahead, "paired difference ≥ 0", low=0, ours=True))
    return found


def _inside(rows: Sequence[Row], arm: str) -> list[float]:
    ratios = [ratio for ratio in ratios_of(rows) if ratio < 1]
    curves = [reached(rows, arm, f"cart {ratio:g}") for ratio in ratios]
    return paired([max(values) for values in zip(*curves, strict=True)], reached(rows, arm, "average"))


def notes(rows: Sequence[Row], labels: Labels, asked: Sequence[str], tried: Tried) -> list[str]:
    """Return whether the bases asked about keep the rule, what CART gains on each base, and which choices may go on.

    Args: As of `result`.
    """
    return [rule_note(rows, labels, asked), *ends_note(rows, labels, tried)]


def rule_note(rows: Sequence[Row], labels: Labels, asked: Sequence[str]) -> str:
    """Return whether the bases asked about keep the rule, and what CART gains on each base.

    Args: As of `findings`.
    """
    kept = [labels[arm] for arm in asked if all(finding.holds for finding in _rule(rows, arm, labels[arm]))]
    gains = {label: with_interval(lead(rows, arm, "cart", "task_arithmetic")) for arm, label in labels.items()}
    verdict = (
        f"By the rule the suite's base should be: {', '.join(kept)}."
        if kept
        else "By the rule no base without a planted error shows the gaps of the field."
    )
    told = "; ".join(f"{label} {gain}" for label, gain in gains.items())
    return f"{verdict} CART less task arithmetic, points: {told}."


def ends_note(rows: Sequence[Row], labels: Labels, tried: Tried) -> list[str]:
    """Return which choices stand at an end of what was tried, so that other values may do better.

    Args:
        rows: as of `measure`.
        labels: what each base is called.
        tried: method → argument → the values that were tried of it.
    """
    told = []
    for arm, label in labels.items():
        own = of(rows, arm)
        for model in METHODS:
            ends = [ends_of(row["args"][model], tried[model]) for row in own]
            for name in tried[model]:
                if count := sum(name in one for one in ends):
                    told.append(f"{NAMES[model]}'s {name} with {label} ({count} of {len(own)} seeds)")
    return (
        [f"Chosen at an end of what was tried, so that other values may do better: {'; '.join(told)}."] if told else []
    )


def rank_figure(rows: Sequence[Row], labels: Labels) -> Figure:
    """Draw CART over its rank with the level of task arithmetic, a panel for each base."""
    figure, axes = panels(len(labels), 2, 3.2)
    for index, (panel, (arm, label)) in enumerate(zip(axes, labels.items(), strict=True)):
        dress(panel, label, "rank ratio k / r", "mean test accuracy, %" if index % 2 == 0 else "")
        ratios = ratios_of(rows)
        hidden = "_" if index else ""
        for number, model in enumerate(("cart", "task_arithmetic", "average", "individual")):
            samples = {r: reached(rows, arm, f"cart {r:g}" if model == "cart" else model) for r in ratios}
            curve(panel, samples, hidden + NAMES[model], number, **({} if model == "cart" else {"marker": ""}))
        panel.set_xscale("log", base=2)
    legend(figure, FULL_WIDTH, loc="outside lower center")
    return figure
