"""Study `mergeability` on small nets, its predictions on vectors worked out by hand, its verdicts on made-up rows."""

from pathlib import Path
from typing import Any

import pytest
import torch

from studies.lab.inputs import Laboratory
from studies.lab.ranks import rank_correlation
from studies.old.papers.mergeability.results import LAST, PREDICTIONS, findings
from studies.old.papers.mergeability.study import ctl_errors, of_weights
from studies.old.results import StudyResult
from tests.studies.small_lab import run_study, study_io

RUNS = {"mima_1": "one shot", "converged": "converged"}
SMALL: dict[str, Any] = {"runs": RUNS, "rounds": [1, 4, 16], "images": 64}


def test_linearised_experts_are_linear_and_lose_what_the_expansion_loses(toy_lab: Path, tmp_path: Path) -> None:
    runs = {"linearised": "linearised", "mima_1": "one shot"}
    result = StudyResult.read(run_study(toy_lab, "mergeability", tmp_path, **{**SMALL, "runs": runs, "rounds": [1, 4]}))
    linear = [row for row in result.rows if row["run"] == "linearised"]
    nets = [row for row in result.rows if row["run"] == "linearised as ordinary nets"]
    assert {row["block_1"] for row in linear} == {0.0}
    assert min(row["block_1"] for row in nets) > 0
    assert [row["cosine"] for row in linear] == [row["cosine"] for row in nets]
    assert [row["loss"] for row in linear] != [row["loss"] for row in nets]
    assert [row["experts"] for row in result.tables[2].rows][-1] == "linearised as ordinary nets"
    assert "linearised as ordinary nets" not in result.tables[0].rows[0], "they are judged as what they are"
    inputs = Laboratory(study_io(toy_lab, "mergeability", tmp_path / "again", **SMALL))
    run, first = inputs.run("linearised"), linear[0]
    i, j = first["pair"].split(" – ")
    one, other = run.expert(first["seed"], i), run.expert(first["seed"], j)
    data, lost = inputs.examples("test"), 0.0
    for task, own in ((i, one), (j, other)):
        middle = {name: (one[name] + other[name]) / 2 for name in one}
        lost += 50 * (
            accuracy_of_expansion(inputs, data[task], own) - accuracy_of_expansion(inputs, data[task], middle)
        )
    assert first["loss"] == pytest.approx(lost, abs=0.3), "one of 200 images more or less is rounding"


def accuracy_of_expansion(inputs: Laboratory, data: Any, state: Any) -> float:
    """By the derivative of one function of all weights, in float64."""
    module = inputs.model.module.double()
    inputs.model.load(inputs.base)
    origin = {name: value.double() for name, value in inputs.base.items()}
    change = {name: state[name].double() - value for name, value in origin.items()}

    def logits(weights: Any) -> torch.Tensor:
        out: torch.Tensor = torch.func.functional_call(module, weights, data.inputs.double())
        return out

    value, slope = torch.func.jvp(logits, (origin,), (change,))
    return float(((value + slope).argmax(1) == data.labels).double().mean())


def test_experts_that_somebody_published_are_judged_without_any_rounds(toy_lab: Path, tmp_path: Path) -> None:
    known = {"runs": {"published": "theirs", "mima_1": "ours"}, "rounds": []}
    folder = run_study(toy_lab, "mergeability", tmp_path, **{**SMALL, **known})
    result = StudyResult.read(folder)
    theirs, ours = ([row for row in result.rows if (row["run"], row["seed"]) == (run, 0)] for run in known["runs"])
    assert [row | {"run": "mima_1"} for row in theirs] == ours, "they are the same files"
    assert (result.findings[-1].holds, result.findings[-1].measured) == (None, "not measured with these choices")
    assert {path.stem for path in folder.glob("*.svg")} == {"predictions"}


@pytest.mark.slow
def test_rounds_make_small_nets_more_linear_and_their_merges_lose_less(toy_lab: Path, tmp_path: Path) -> None:
    folder = run_study(toy_lab, "mergeability", tmp_path, **SMALL)
    result = StudyResult.read(folder)
    assert {path.stem for path in folder.glob("*.svg")} == {"predictions", "rounds"}
    assert [list(row)[1:3] for row in result.tables[0].rows] == [["one shot", "converged"]] * len(PREDICTIONS)
    assert {(row["run"], row["seed"]) for row in result.rows} == {
        (run, seed) for run in ("mima_1", "converged", "mima_4", "mima_16") for seed in (0, 1)
    }

    def mean(run: str, key: str) -> float:
        values = [row[key] for row in result.rows if row["run"] == run]
        return float(sum(values) / len(values))

    assert mean("mima_16", "block_1") < 0.3 * mean("mima_1", "block_1")
    assert mean("mima_16", "loss") < mean("mima_1", "loss")


def test_the_error_is_that_of_the_definition(toy_lab: Path, tmp_path: Path) -> None:
    inputs = Laboratory(study_io(toy_lab, "mergeability", tmp_path, **SMALL))
    experts = {task: inputs.run("mima_1").expert(0, task) for task in ("north", "east")}
    found = ctl_errors(inputs, experts, 8)["north", "east"]
    errors = []
    for task in experts:
        images = inputs.examples("validation")[task].inputs[:8]  # type: ignore[attr-defined]

        def hidden(state: Any, x: torch.Tensor = images) -> torch.Tensor:
            weight: torch.Tensor = next(iter(state.values()))
            return torch.relu(x.double() @ weight.double().T)

        one, other = experts.values()
        middle = {name: (one[name].double() + other[name].double()) / 2 for name in one}
        mixed = (hidden(one) + hidden(other)) / 2
        errors += ((hidden(middle) - mixed).square().sum(1) / mixed.square().sum(1)).tolist()
    assert found["block_1"] == pytest.approx(sum(errors) / len(errors), rel=1e-4)


def test_parallel_vectors_have_no_conflict_and_opposite_ones_nothing_else() -> None:
    one = {"w": torch.tensor([1.0, -2.0, 3.0])}
    same, opposite = of_weights(one, {"w": 2 * one["w"]}), of_weights(one, {"w": -one["w"]})
    assert (same["sign_conflict"], opposite["sign_conflict"]) == (0.0, 1.0)
    assert (same["cosine"], opposite["cosine"]) == pytest.approx((1.0, -1.0))


def made_up(sign: int) -> list[dict[str, Any]]:
    """Rows of six pairs whose loss rises (or falls) with the CTL error, and not with anything of the weights."""
    return [
        {
            "seed": seed,
            "run": run,
            "pair": str(pair),
            "loss": float(sign * pair + 10 * level),
            "cosine": 0.1 * (pair % 2),
            "distance": float(pair % 3),
            "sign_conflict": 0.5 - 0.1 * (pair % 2),
            "block_1": 1.0,
            "block_2": (pair + 10 * level) / 100,
        }
        for seed in range(3)
        for level, run in ((2, "mima_1"), (1, "mima_4"))
        for pair in range(6)
    ]


def test_findings_follow_the_numbers() -> None:
    runs, iterative = {"mima_1": "one shot", "mima_4": "four"}, {1: "mima_1", 4: "mima_4"}
    good = findings(made_up(1), runs, iterative)
    assert [one.holds for one in good] == [True] * 6
    assert all(one.ours and one.margin for one in good)
    bad = findings(made_up(-1), runs, iterative)
    assert [one.holds for one in bad[:1]] == [False]
    assert bad[-1].holds is True, "rounds are judged by the error alone"
    assert findings(made_up(1), runs, {1: "mima_4", 4: "mima_1"})[-1].holds is False


def test_a_constant_prediction_ranks_nothing() -> None:
    rows = made_up(1)[:6]
    assert rank_correlation(rows, PREDICTIONS[LAST]) == pytest.approx(1.0)
    assert rank_correlation(rows, lambda row: float(row["block_1"])) == 0.0
