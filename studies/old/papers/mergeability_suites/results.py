"""Findings and tables of the study `mergeability_suites`, from its rows."""

from collections.abc import Mapping, Sequence
from statistics import fmean

from studies.old.claims import paired
from studies.old.papers.mergeability.results import BETTER, LAST, PREDICTIONS, RANKS, judge_ranks, within_runs
from studies.old.results import Finding, Table, with_interval
from studies.old.rows import Row, mean_over

Suites = Mapping[int, Sequence[str]]


def pairs_of(rows: Sequence[Row], tasks: Sequence[str]) -> list[Row]:
    """Return the rows of the pairs within a suite.

    Args:
        rows: a row for each run, seed and pair.
        tasks: of the suite.
    """
    return [row for row in rows if set(row["pair"].split(" – ")) <= set(tasks)]


def findings(rows: Sequence[Row], suites: Suites, runs: Mapping[str, str]) -> list[Finding]:
    """Hold the explanation of merging against the rows of each suite.

    Args:
        rows: a row for each run, seed and pair.
        suites: how many tasks → which.
        runs: run → label.
    """
    ranks = {
        name: {count: within_runs(pairs_of(rows, tasks), runs, one) for count, tasks in suites.items()}
        for name, one in PREDICTIONS.items()
    }
    found = [
        judge_ranks(
            "The less linear the features of two experts are, the more their average loses, in suites of any size.",
            {f"{count} tasks": values for count, values in ranks[LAST].items()},
            f"mean rank correlation over the ways of training ≥ {RANKS} in each suite",
            low=RANKS,
        )
    ]
    found += [
        judge_ranks(
            f"Linearity of features predicts what merging loses better than the {name} does, in suites of any size.",
            {f"{count} tasks": paired(ranks[LAST][count], ranks[name][count]) for count in suites},
            f"paired difference of rank correlations ≥ {BETTER} in each suite",
            low=BETTER,
        )
        for name in ("cosine of task vectors", "distance", "sign conflict")
    ]
    few, many = min(suites), max(suites)
    best = max(PREDICTIONS, key=lambda name: fmean(ranks[name][few]))
    behind = {name: paired(ranks[best][many], ranks[name][many]) for name in PREDICTIONS if name != best}
    rule = f"paired difference of rank correlations at {many} tasks from every other prediction ≥ −{BETTER}"
    return [
        *found,
        judge_ranks(
            f"The prediction that ranks the pairs of {few} tasks best, {best}, ranks those of {many} tasks as well.",
            behind,
            rule,
            low=-BETTER,
        ),
    ]


def tables(rows: Sequence[Row], suites: Suites, runs: Mapping[str, str]) -> list[Table]:
    """Return the rank correlations by suite and run, and what pairs lose.

    Args:
        rows: a row for each run, seed and pair.
        suites: how many tasks → which.
        runs: run → label.
    """
    own = {count: pairs_of(rows, tasks) for count, tasks in suites.items()}
    ranks: list[Row] = [
        {
            "prediction": name,
            **{
                f"{label}, {count} tasks": with_interval(within_runs(own[count], {run: label}, one), 2)
                for run, label in runs.items()
                for count in suites
            },
        }
        for name, one in PREDICTIONS.items()
    ]
    lost: list[Row] = [
        {"experts": label, "tasks": count, "pairs": len(suites[count]) * (len(suites[count]) - 1) // 2}
        | {
            title: with_interval(mean_over(own[count], key, run=run), digits)
            for title, key, digits in (
                ("loss of merging, points", "loss", 1),
                ("cosine", "cosine", 3),
                ("sign conflict", "sign_conflict", 3),
            )
        }
        for run, label in runs.items()
        for count in suites
    ]
    return [
        Table("Rank correlation with the loss of merging", ranks),
        Table("Pairs of a suite: what merging loses, and how task vectors lie", lost),
    ]
