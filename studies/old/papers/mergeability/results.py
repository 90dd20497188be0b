"""Findings and tables of the study `mergeability`, from its rows."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean

from studies.lab.ranks import rank_correlation
from studies.old.claims import judge, paired, steps_between
from studies.old.results import Finding, Table, with_interval
from studies.old.rows import Row

RANKS, BETTER, ACROSS = 0.5, 0.05, 0.7  # rank correlations, and by how much one is better than another
LAST = "CTL error, last block"
Prediction = Callable[[Row], float]
judge_ranks = partial(judge, "L1", unit="", digits=2, ours=True)


def as_nets(run: str) -> str:
    """Return what the rows of a run's linearised experts are called that are judged as ordinary nets."""
    return f"{run} as ordinary nets"


def blocks_of(row: Row) -> list[str]:
    """Return the columns of the blocks' CTL errors, from the first block to the last."""
    return [key for key in row if key.startswith("block_")]


PREDICTIONS: dict[str, Prediction] = {
    LAST: lambda row: float(row[blocks_of(row)[-1]]),
    "CTL error, mean of the blocks": lambda row: fmean(row[key] for key in blocks_of(row)),
    "CTL error, largest of the blocks": lambda row: max(row[key] for key in blocks_of(row)),
    "cosine of task vectors": lambda row: -float(row["cosine"]),
    "distance": lambda row: float(row["distance"]),
    "sign conflict": lambda row: float(row["sign_conflict"]),
}
"""What is said to rise with the loss of merging."""


def within_runs(rows: Sequence[Row], runs: Mapping[str, str], prediction: Prediction) -> list[float]:
    """Return for each seed the mean rank correlation over the ways of training.

    Args:
        rows: of all runs and seeds.
        runs: the runs that count.
        prediction: of a pair.
    """
    return [rank_correlation(own, prediction, by="run") for own in _by_seed(rows, runs)]


def across_runs(rows: Sequence[Row], runs: Mapping[str, str], prediction: Prediction) -> list[float]:
    """Return for each seed the rank correlation over the pairs of all ways of training.

    Args:
        rows: of all runs and seeds.
        runs: the runs that count.
        prediction: of a pair.
    """
    return [rank_correlation(own, prediction) for own in _by_seed(rows, runs)]


def _by_seed(rows: Sequence[Row], runs: Mapping[str, str]) -> list[list[Row]]:
    counted = [row for row in rows if row["run"] in runs]
    return [[row for row in counted if row["seed"] == seed] for seed in common_seeds(rows, runs)]


def common_seeds(rows: Sequence[Row], runs: Mapping[str, str]) -> list[int]:
    """Return the seeds that all of these runs have."""
    return sorted(set.intersection(*({row["seed"] for row in rows if row["run"] == run} for run in runs)))


def errors_over_rounds(rows: Sequence[Row], iterative: Mapping[int, str]) -> dict[int, list[float]]:
    """Return N → the mean CTL error of the last block over all pairs, for each seed that all N have."""
    if not iterative:
        return {}
    seeds = common_seeds(rows, dict.fromkeys(iterative.values(), ""))
    return {
        number: [
            fmean(PREDICTIONS[LAST](row) for row in rows if (row["run"], row["seed"]) == (run, seed)) for seed in seeds
        ]
        for number, run in iterative.items()
    }


def findings(rows: Sequence[Row], runs: Mapping[str, str], iterative: Mapping[int, str]) -> list[Finding]:
    """Hold the explanation of merging against the rows.

    Args:
        rows: a row for each run, seed and pair.
        runs: run → label, those that are judged.
        iterative: N → run.
    """
    ranks = {name: within_runs(rows, runs, one) for name, one in PREDICTIONS.items()}
    found = [
        judge_ranks(
            "The less linear the features of two experts are, the more their average loses.",
            {LAST: ranks[LAST]},
            f"mean rank correlation over the ways of training ≥ {RANKS}",
            low=RANKS,
        ),
        judge_ranks(
            "It tells pairs of different ways of training apart as well.",
            {LAST: across_runs(rows, runs, PREDICTIONS[LAST])},
            f"rank correlation over the pairs of all ways together ≥ {ACROSS}",
            low=ACROSS,
        ),
    ]
    found += [
        judge_ranks(
            f"Linearity of features predicts what merging loses better than the {name} does.",
            {"difference of rank correlations": paired(ranks[LAST], ranks[name])},
            f"paired difference ≥ {BETTER}",
            low=BETTER,
            beside=f" ({with_interval(ranks[LAST], 2)} against {with_interval(ranks[name], 2)})",
        )
        for name in ("cosine of task vectors", "distance", "sign conflict")
    ]
    claim = "Merging while tuning makes the features of the last experts more linear, the more the oftener."
    rule = "paired fall of the mean CTL error of the last block from each N to the next ≥ 0"
    falls = steps_between(errors_over_rounds(rows, iterative), sign=-1)
    return [*found, judge("L1", claim, falls, rule, low=0, unit="", digits=4, ours=True)]


def tables(rows: Sequence[Row], runs: Mapping[str, str], iterative: Mapping[int, str]) -> list[Table]:
    """Return the rank correlations by way of training, those of each block, and what pairs lose.

    Args:
        rows: a row for each run, seed and pair.
        runs: run → label.
        iterative: N → run.
    """
    blocks = {f"block {n}": _column(key) for n, key in enumerate(blocks_of(rows[0]), start=1)}
    measured = {row["run"] for row in rows}
    beside = {as_nets(run): as_nets(label) for run, label in runs.items() if as_nets(run) in measured}
    kinds = {**{run: f"MIMA, N = {n}" for n, run in iterative.items()}, **runs, **beside}
    return [
        Table("Rank correlation with the loss of merging, by way of training", _ranks(rows, runs, PREDICTIONS)),
        Table("The same of the CTL error at each block", _ranks(rows, runs, blocks)),
        Table(
            "Pairs: what merging loses, and how linear features are",
            [
                {
                    "experts": label,
                    "loss of merging, points": with_interval(_means(rows, run, _column("loss")), 1),
                    "CTL error, last block": with_interval(_means(rows, run, PREDICTIONS[LAST]), 4),
                    "cosine": with_interval(_means(rows, run, _column("cosine")), 3),
                    "sign conflict": with_interval(_means(rows, run, _column("sign_conflict")), 3),
                }
                for run, label in kinds.items()
            ],
        ),
    ]


def _ranks(rows: Sequence[Row], runs: Mapping[str, str], predictions: Mapping[str, Prediction]) -> list[Row]:
    return [
        {
            "prediction": name,
            **{label: with_interval(within_runs(rows, {run: label}, one), 2) for run, label in runs.items()},
            "mean": with_interval(within_runs(rows, runs, one), 2),
            "across all": with_interval(across_runs(rows, runs, one), 2),
        }
        for name, one in predictions.items()
    ]


def _column(key: str) -> Prediction:
    return lambda row: float(row[key])


def _means(rows: Sequence[Row], run: str, value: Prediction) -> list[float]:
    """Return the mean over pairs, for each seed of a run."""
    own = [row for row in rows if row["run"] == run]
    return [fmean(value(row) for row in own if row["seed"] == seed) for seed in sorted({row["seed"] for row in own})]
