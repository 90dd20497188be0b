"""A sweep's search with Optuna: deterministic ask and tell, so that a search replays from the scores it has seen."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from mergeflow.search.sweep_file import StudyPart
from mergeflow.search.sweep_space import Space, is_whole


class MethodStudy:
    """Proposes arguments of one method from the scores of those before.

    Proposals depend on the space, the sampler, its seed and the scores told, and on nothing else.

    Args:
        method: A name of the catalog.
        space: Argument → range, choices, list of choices, or a fixed value.
        study: Number of trials and sampler.
        seed: Of the sampler, where the study gives none.
    """

    def __init__(self, method: str, space: Space, study: StudyPart, seed: int) -> None:
        import optuna

        samplers = optuna.samplers
        kinds = {"tpe": samplers.TPESampler, "random": samplers.RandomSampler, "gp": samplers.GPSampler}
        self._choices: dict[str, list[Any]] = {}
        self._fixed: dict[str, Any] = {}
        self._searched: dict[str, Any] = {}
        for name, found in (space or {}).items():
            self._add(method, name, {"choices": found} if isinstance(found, list) else found)
        self.trials = study.trials if self._searched else 1
        seed = seed if study.seed is None else study.seed
        with _quiet():
            self._study = optuna.create_study(direction="maximize", sampler=kinds[study.sampler](seed=seed))

    def _add(self, method: str, name: str, found: Any) -> None:
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        if not isinstance(found, Mapping):
            self._fixed[name] = found
        elif "choices" in found:
            # By position: Optuna takes plain values only, and a choice may be a list of patterns.
            self._choices[name] = list(found["choices"])
            self._searched[name] = CategoricalDistribution(range(len(found["choices"])))
        else:
            low, high, log = float(found["low"]), float(found["high"]), bool(found.get("log"))
            step = None if found.get("step") is None else float(found["step"])
            if is_whole(method, name):
                self._searched[name] = IntDistribution(int(low), int(high), log=log, step=int(step or 1))
            else:
                self._searched[name] = FloatDistribution(low, high, log=log, step=step)

    def ask(self) -> tuple[Any, dict[str, Any]]:
        """Return a trial's token and the arguments to try."""
        with _quiet():
            trial = self._study.ask(self._searched)
        chosen = {name: self._choices[name][v] if name in self._choices else v for name, v in trial.params.items()}
        return trial, {**self._fixed, **chosen}

    def tell(self, trial: Any, value: float) -> None:
        """Report the objective of a trial."""
        with _quiet():
            self._study.tell(trial, value)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Optuna's remarks off the terminal while it works; its level is as before afterwards."""
    logger = logging.getLogger("optuna")
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)
