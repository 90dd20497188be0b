"""Search with Optuna: deterministic ask and tell, so that a search replays from the scores it has seen."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mergeflow.search.candidates import Space, Strategy, is_whole
from mergeflow.search.sweep_file import SearchPart


def optuna_search(method: str, space: Space, wanted: SearchPart, seed: int) -> Strategy:
    """Ask for the arguments that a sampler proposes from the objectives of those before.

    Proposals depend on the space, the sampler, its seed and the objectives told, and on nothing else.

    Args:
        space: Argument → range, choices, list of choices, or a fixed value.
    """
    import optuna

    samplers = optuna.samplers
    kinds = {"tpe": samplers.TPESampler, "random": samplers.RandomSampler, "gp": samplers.GPSampler}
    box = _Box.of(method, space)
    seed = seed if wanted.seed is None else wanted.seed
    with _quiet():
        search = optuna.create_study(direction="maximize", sampler=kinds[wanted.sampler](seed=seed))
    for _ in range(trial_count(space, wanted)):
        with _quiet():
            trial = search.ask(box.searched)
        value = yield box.arguments(trial.params)
        with _quiet():
            search.tell(trial, value)


def trial_count(space: Space, wanted: SearchPart) -> int:
    """Return how many candidates a method gets: one where nothing is searched.

    Example:
        >>> wanted = SearchPart(trials=9)
        >>> trial_count({"keep": 0.1}, wanted), trial_count({"keep": [0.1, 0.2]}, wanted)
        (1, 9)
    """
    return wanted.trials if any(isinstance(values, list | Mapping) for values in (space or {}).values()) else 1


@dataclass(frozen=True)
class _Box:
    """A space as Optuna takes it: what is searched, what is fixed, and choices by position.

    By position, because Optuna takes plain values only, and a choice may be a list of patterns.
    """

    searched: dict[str, Any]
    fixed: dict[str, Any]
    choices: dict[str, list[Any]]

    @classmethod
    def of(cls, method: str, space: Space) -> "_Box":
        from optuna.distributions import CategoricalDistribution

        box = cls({}, {}, {})
        for name, values in (space or {}).items():
            listed = values["choices"] if isinstance(values, Mapping) and "choices" in values else values
            if isinstance(listed, list):
                box.choices[name] = list(listed)
                box.searched[name] = CategoricalDistribution(range(len(listed)))
            elif isinstance(values, Mapping):
                box.searched[name] = _range(values, is_whole(method, name))
            else:
                box.fixed[name] = values
        return box

    def arguments(self, params: Mapping[str, Any]) -> dict[str, Any]:
        chosen = {name: self.choices[name][v] if name in self.choices else v for name, v in params.items()}
        return {**self.fixed, **chosen}


def _range(bounds: Mapping[str, Any], whole: bool) -> Any:
    from optuna.distributions import FloatDistribution, IntDistribution

    low, high, log = float(bounds["low"]), float(bounds["high"]), bool(bounds.get("log"))
    step = None if bounds.get("step") is None else float(bounds["step"])
    if whole:
        return IntDistribution(int(low), int(high), log=log, step=int(step or 1))
    return FloatDistribution(low, high, log=log, step=step)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Optuna's messages off the terminal while it works; afterwards its level is as before."""
    logger = logging.getLogger("optuna")
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)
