"""By which prediction `mergeflow linearity` answers: chosen on the record of `mergeability`, by a rule older than it.

The prediction with the highest mean rank correlation over seeds is taken, within ways of training. Where one that needs
the weights alone is at most 0.05 behind, the margin of the study, that one is taken: it needs no samples.

The command does not call this: what it chose stands in `answer.ANSWER`, and the tests choose again from the record.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean

import numpy as np

from tasks.studies.papers.mergeability.results import BETTER, PREDICTIONS, within_runs
from tasks.studies.rows import Row

OF_WEIGHTS = ("cosine of task vectors", "distance", "sign conflict")


def chosen(rows: Sequence[Row], runs: Mapping[str, str]) -> str:
    """Return the name of the prediction.

    Args:
        rows: the record's, a row for each run, seed and pair.
        runs: the ways of training that count.
    """
    ranks = {name: fmean(within_runs(rows, runs, one)) for name, one in PREDICTIONS.items()}
    best, cheap = max(ranks, key=ranks.__getitem__), max(OF_WEIGHTS, key=ranks.__getitem__)
    return cheap if ranks[cheap] >= ranks[best] - BETTER else best


def losses_by_thirds(
    rows: Sequence[Row], runs: Mapping[str, str], name: str
) -> list[tuple[float, tuple[float, float, float]]]:
    """Return what pairs lost whose prediction was low, middle and high.

    Args:
        rows: the record's.
        runs: the ways of training that count.
        name: of the prediction.

    Returns:
        For each third of all pairs, seeds and ways: its largest prediction, and the quartiles of the loss in points.
    """
    counted = sorted((PREDICTIONS[name](row), row["loss"]) for row in rows if row["run"] in runs)
    thirds = np.array_split(np.array(counted), 3)
    return [(float(one[-1, 0]), tuple(np.quantile(one[:, 1], [0.25, 0.5, 0.75]).tolist())) for one in thirds]
