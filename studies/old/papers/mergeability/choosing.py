"""By which prediction `mergeflow linearity` answers: chosen on the record of `mergeability`, by a rule older than it.

The prediction with the highest mean rank correlation over seeds is taken, within ways of training. Where one that needs
the weights alone is at most 0.05 behind, the margin of the study, that one is taken: it needs no samples.

The command does not call this: what it chose stands in `answer.ANSWER`, and the tests choose again from the record.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean

from studies.old.papers.mergeability.results import BETTER, PREDICTIONS, within_runs
from studies.old.rows import Row

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
