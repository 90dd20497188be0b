"""What shortcuts score on the suite: linear models of which words occur, without their order."""

import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from suites.sentences.suite import SEED, Row, SentenceTask
from suites.sentences.vocabulary import word_groups

Features = Callable[[Sequence[Row]], NDArray[np.float64]]

_COLUMN = {word: column for column, word in enumerate(word for group in word_groups() for word in group)}
_PENALTIES = (1.0, 10.0, 100.0)


def count_words(texts: Sequence[str]) -> NDArray[np.float64]:
    """Return how often each word of the vocabulary occurs, float64 [N, V].

    Example:
        >>> count_words(["bill and liz", ""]).sum(axis=1).tolist()
        [3.0, 0.0]
    """
    counts = np.zeros((len(texts), len(_COLUMN)))
    for row, text in enumerate(texts):
        for word in re.findall(r"\w+|[^\w\s]", text):
            counts[row, _COLUMN[word]] += 1
    return counts


def _first(rows: Sequence[Row]) -> NDArray[np.float64]:
    return count_words([row.text for row in rows])


def _second(rows: Sequence[Row]) -> NDArray[np.float64]:
    return count_words([row.text_pair or "" for row in rows])


def _both(rows: Sequence[Row]) -> NDArray[np.float64]:
    return np.hstack([_first(rows), _second(rows)])


def _overlap(rows: Sequence[Row]) -> NDArray[np.float64]:
    first, second = _first(rows), _second(rows)
    return np.hstack([first, second, np.abs(first - second), np.minimum(first, second)])


SHORTCUTS: dict[str, tuple[Features, ...]] = {
    "bag of words": (_both,),
    "one sentence": (_first, _second),
    "overlap": (_overlap,),
}
"""Name to features; of several the one that is best on validation counts. Overlap also sees, word by word, whether both
sentences have it."""


def baselines(task: SentenceTask, seed: int = SEED) -> dict[str, float]:
    """Return the test score of a linear model of each shortcut, by the task's metric.

    It is a logistic regression, or ridge regression for scores; the penalty is chosen on validation.
    """
    splits = tuple(task.rows(split, seed) for split in ("train", "validation", "test"))
    return {name: max(_trials(task, kinds, splits))[1] for name, kinds in SHORTCUTS.items()}


def _trials(
    task: SentenceTask, kinds: Sequence[Features], splits: Sequence[Sequence[Row]]
) -> Iterator[tuple[float, float]]:
    """Yield the scores on validation and test of each kind of features and each penalty."""
    train, *others = splits
    labels = np.array([row.label for row in train])
    for features in kinds:
        inputs = features(train)
        for penalty in _PENALTIES:
            predict = _fit(task, inputs, labels, penalty)
            validation, test = (_score(task, rows, predict(features(rows))) for rows in others)
            yield validation, test


def _fit(
    task: SentenceTask, inputs: NDArray[np.float64], labels: NDArray[np.int64], penalty: float
) -> Callable[[NDArray[np.float64]], NDArray[np.float64]]:
    from scipy.sparse import csr_array
    from sklearn.linear_model import LogisticRegression, Ridge

    model = Ridge(alpha=10 * penalty) if task.class_names is None else LogisticRegression(C=1 / penalty, max_iter=1000)
    fitted = model.fit(csr_array(inputs), labels)
    return lambda rows: np.asarray(fitted.predict(csr_array(rows)), np.float64)


def _score(task: SentenceTask, rows: Sequence[Row], predicted: NDArray[np.float64]) -> float:
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    labels = np.array([row.label for row in rows])
    if task.metric == "pearson":
        return float(np.corrcoef(predicted, labels)[0, 1]) if predicted.std() > 0 else 0.0
    by_name = {"accuracy": accuracy_score, "f1": f1_score, "matthews": matthews_corrcoef}
    return float(by_name[task.metric](labels, predicted))
