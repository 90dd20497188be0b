"""The limits that a verdict is judged by are those that its rule prints, of every claim of the studies of merging."""

import math
import re
import sys

import pytest

from tasks.studies import claims
from tasks.studies.judging.rules import judge_rows
from tasks.studies.results import Finding
from tests.studies.documented import documented_rows, projects

STUDIES = [
    *("adaptation", "alignment", "bases", "cart_landscape", "compression", "cost", "glue", "gradients", "interference"),
    *("landscape", "many_tasks", "merge_frequency", "mima", "one_epoch", "projection", "rank_curve", "subset_scaling"),
]
LOWEST, HIGHEST = -math.inf, math.inf
NUMBER = r"([−-]?\d+(?:\.\d+)?)"
WITHOUT_NUMBER = {
    "half of the tasks or more (the paper prints no number)": (50.0, HIGHEST),
    "farther from every one-shot merge than ends of different seeds are from each other": (0.0, HIGHEST),
}


def printed(rule: str) -> tuple[float, float]:
    """Return the lowest and the highest value with which a claim holds, as its rule says in words."""
    for words, limits in (
        (f"falls by ≥ {NUMBER}", lambda fall: (LOWEST, -fall)),
        (f"falls by at most {NUMBER}", lambda fall: (-fall, HIGHEST)),
        (f"no fall .* more than {NUMBER}", lambda fall: (-fall, HIGHEST)),
        (f"at most {NUMBER} points above or below", lambda half: (-half, half)),
        (f"between {NUMBER} % and {NUMBER} %, a factor", lambda low, high: (low / 100, high / 100)),
        (f"of {NUMBER} % of the tasks and more", lambda low: (low, HIGHEST)),
        (f"≤ ε = {NUMBER}", lambda high: (LOWEST, high)),
        (f"within ± {NUMBER}", lambda half: (-half, half)),
        (f"between {NUMBER} and {NUMBER}", lambda low, high: (low, high)),
        (f"≥ {NUMBER} − {NUMBER} %", lambda low, slack: (round(low - slack, 9), HIGHEST)),
        (f"≥ {NUMBER}", lambda low: (low, HIGHEST)),
        (f"≤ {NUMBER}", lambda high: (LOWEST, high)),
        (f"at {NUMBER} % of", lambda low: (low, HIGHEST)),
    ):
        if found := re.search(words, rule):
            return limits(*(float(one.replace("−", "-")) for one in found.groups()))
    return WITHOUT_NUMBER[rule]


@pytest.mark.parametrize("study", STUDIES)
def test_the_limits_of_a_verdict_are_those_that_its_rule_prints(study: str, monkeypatch: pytest.MonkeyPatch) -> None:
    judged: dict[str, tuple[float, float]] = {}

    def judge(*told: object, low: float = LOWEST, high: float = HIGHEST, **more: object) -> Finding:
        judged[str(told[3])] = (low, high)
        return own(*told, low=low, high=high, **more)  # type: ignore[arg-type]

    own = claims.judge
    for module in [one for one in sys.modules.values() if getattr(one, "judge", None) is own]:
        monkeypatch.setattr(module, "judge", judge)
    judge_rows(projects()[study], study, documented_rows(study))
    assert judged == {rule: printed(rule) for rule in judged}
    assert judged
