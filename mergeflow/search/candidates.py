"""The one loop of every search: a strategy asks for a candidate, the scorer scores it, the strategy is told."""

import json
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from mergeflow.merging import MethodCall, configure
from mergeflow.search.journal import Journal

Args = dict[str, Any]

Strategy = Generator[Args, float, None]
"""Yields the arguments of one candidate after the other and is sent the objective of each; larger is better."""

Scorer = Callable[[MethodCall], Mapping[str, float]]
"""Merges one candidate and returns its score per task."""

Objective = Callable[[Mapping[str, float]], float]
"""Scores per task to the one number that a search maximises."""


@dataclass(frozen=True)
class Scored:
    """One candidate that was tried.

    Attributes:
        call: The method with all its arguments.
        varied: The arguments that the strategy named.
        scores: Per task.
        value: Its objective.
    """

    call: MethodCall
    varied: Args
    scores: dict[str, float]
    value: float


def score_all(method: str, strategy: Strategy, score: Scorer, objective: Objective) -> Iterator[Scored]:
    """Yield every candidate that a strategy asks for, scored.

    Args:
        method: A name of the catalog.
        strategy: What to try; it is told each objective before it asks again.
        score: Called once for each candidate.
        objective: What is maximised.

    Raises:
        MergeflowError: Arguments that the method does not take, or what the scorer raises.

    Example:
        >>> from mergeflow.search.grid import grid
        >>> halves = grid("ties", {"scale": [0.5, 1.0]})
        >>> found = score_all("ties", halves, lambda call: {"cars": call.scale / 2}, lambda scores: scores["cars"])
        >>> [(one.varied, one.value) for one in found]
        [({'scale': 0.5}, 0.25), ({'scale': 1.0}, 0.5)]
    """
    with closing(strategy):
        args = next(strategy, None)
        while args is not None:
            call = configure(method, args)
            scores = dict(score(call))
            found = Scored(call, args, scores, objective(scores))
            yield found
            try:
                args = strategy.send(found.value)
            except StopIteration:
                return


def remembered(score: Scorer, journal: Journal) -> Scorer:
    """Return a scorer with a memory: a candidate that the journal knows is not scored again."""
    return lambda call: journal.known(candidate_key(call), lambda: dict(score(call)))


def candidate_key(call: MethodCall) -> str:
    """Return what a journal calls a candidate: the method and all its arguments."""
    return json.dumps(["candidate", call.name, call.args], sort_keys=True)
