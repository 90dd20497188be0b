"""The studies of mergeability on small nets, their predictions on vectors worked out by hand, the command's answer."""

from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd
import pytest
import torch

from studies.commands.study import find_studies
from studies.lab.inputs import Laboratory
from studies.lab.records import recorded
from studies.lab.rows import select
from studies.lab.tuning import task_vector
from studies.mergeability import (
    BETTER,
    DISTANCE,
    LAST,
    OF_WEIGHTS,
    PREDICTIONS,
    TangentFeatures,
    ctl_errors,
    in_tangent_space,
    of_weights,
    ranks,
    within_suite,
)
from tasks.commands.linearity import ANSWER, merge_sentence
from tasks.commands.linearity import predicted as predicted_by_weights
from tests.studies.small_lab import ROOT, run_result, study_io

pytestmark = pytest.mark.slow

RUNS = {"mima_1": "one shot", "converged": "converged"}
SMALL: dict[str, Any] = {"runs": RUNS, "rounds": [1, 4, 16], "images": 64}


def test_linearised_experts_are_linear_and_lose_what_the_expansion_loses(toy_lab: Path, tmp_path: Path) -> None:
    runs = {"linearised": "linearised", "mima_1": "one shot"}
    result = run_result(toy_lab, "mergeability", tmp_path, **{**SMALL, "runs": runs, "rounds": [1, 4]})
    linear, nets = (select(result.rows, run=run) for run in ("linearised", "linearised as ordinary nets"))
    assert set(linear.block_1) == {0.0}
    assert nets.block_1.min() > 0
    assert list(linear.cosine) == list(nets.cosine)
    assert list(linear.loss) != list(nets.loss)
    judged, _, pairs = result.tables.values()
    assert "linearised as ordinary nets" in pairs.index
    assert "linearised as ordinary nets" not in judged, "they are judged as what they are"
    inputs = Laboratory(study_io(toy_lab, "mergeability", tmp_path / "again", **SMALL))
    run, first = inputs.run("linearised"), linear.iloc[0]
    i, j = first.pair.split(" – ")
    left, other = run.expert(first.seed, i), run.expert(first.seed, j)
    data, lost = inputs.examples("test"), 0.0
    for task, expert in ((i, left), (j, other)):
        middle = {name: (left[name] + other[name]) / 2 for name in left}
        lost += 50 * (
            accuracy_of_expansion(inputs, data[task], expert) - accuracy_of_expansion(inputs, data[task], middle)
        )
    assert first.loss == pytest.approx(lost, abs=0.3), "one of 200 images more or less is rounding"


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
    settings = {"runs": {"published": "theirs", "mima_1": "ours"}, "rounds": []}
    result = run_result(toy_lab, "mergeability", tmp_path, **{**SMALL, **settings})
    theirs, ours = (select(result.rows, run=run, seed=0).drop(columns="run") for run in settings["runs"])
    assert theirs.to_dict("list") == ours.to_dict("list"), "they are the same files"
    assert (result.findings[-1].holds, result.findings[-1].measured) == (None, "not measured with these choices")
    assert set(result.draw()) == {"predictions"}


def test_rounds_make_small_nets_more_linear_and_their_merges_lose_less(toy_lab: Path, tmp_path: Path) -> None:
    result = run_result(toy_lab, "mergeability", tmp_path, **SMALL)
    assert set(result.draw()) == {"predictions", "rounds"}
    judged = next(iter(result.tables.values()))
    assert list(judged)[:2] == ["one shot", "converged"]
    assert list(judged.index) == list(PREDICTIONS)
    means = result.rows.groupby("run")[["block_1", "loss"]].mean()
    assert set(means.index) == {"mima_1", "converged", "mima_4", "mima_16"}
    assert means.block_1["mima_16"] < 0.3 * means.block_1["mima_1"]
    assert means.loss["mima_16"] < means.loss["mima_1"]


def test_every_pair_of_the_largest_suite_is_merged_once(many_lab: Path, tmp_path: Path) -> None:
    runs = {"experts": "200 steps", "mima_3": "MIMA, N = 2"}
    result = run_result(many_lab, "mergeability_suites", tmp_path, runs=runs, counts=[2, 3], images=32)
    assert len(result.rows) == 2 * 2 * 3, "runs, seeds, pairs of three tasks"
    assert {f"block_{n}" for n in range(1, 5)} < set(result.rows)
    _, pairs = result.tables.values()
    assert set(pairs.index) == {(label, *suite) for label in runs.values() for suite in ((2, 1), (3, 3))}
    assert len(result.findings) == 5
    assert set(result.draw()) == {"predictions"}


def test_the_error_is_that_of_the_definition(toy_lab: Path, tmp_path: Path) -> None:
    inputs = Laboratory(study_io(toy_lab, "mergeability", tmp_path, **SMALL))
    experts = {task: inputs.run("mima_1").expert(0, task) for task in ("north", "east")}
    errors_by_layer = ctl_errors(inputs, experts, 8)["north", "east"]
    errors = []
    for task in experts:
        images = inputs.examples("validation")[task].inputs[:8]  # type: ignore[attr-defined]

        def hidden(state: Any, x: torch.Tensor = images) -> torch.Tensor:
            weight: torch.Tensor = next(iter(state.values()))
            return torch.relu(x.double() @ weight.double().T)

        first, other = experts.values()
        middle = {name: (first[name].double() + other[name].double()) / 2 for name in first}
        mixed = (hidden(first) + hidden(other)) / 2
        errors += ((hidden(middle) - mixed).square().sum(1) / mixed.square().sum(1)).tolist()
    assert errors_by_layer["block_1"] == pytest.approx(sum(errors) / len(errors), rel=1e-4)


def test_parallel_vectors_have_no_conflict_and_opposite_ones_nothing_else() -> None:
    vector = {"w": torch.tensor([1.0, -2.0, 3.0])}
    same, opposite = of_weights(vector, {"w": 2 * vector["w"]}), of_weights(vector, {"w": -vector["w"]})
    assert (same["sign_conflict"], opposite["sign_conflict"]) == (0.0, 1.0)
    assert (same["cosine"], opposite["cosine"]) == pytest.approx((1.0, -1.0))


def made_up(sign: int) -> pd.DataFrame:
    """Rows whose loss rises with the CTL error; the cosine follows it (sign 1) or has nothing to do with it (0)."""
    pairs = [f"{a} – {b}" for n, a in enumerate("abcde") for b in "abcde"[n + 1 :]]
    return pd.DataFrame(
        {"seed": seed, "run": "experts", "pair": pair, "loss": float(number), "distance": 1.0}
        | {"cosine": -sign * number / 10, "sign_conflict": number % 3, "block_1": number % 2, "block_2": number / 100}
        for seed in range(3)
        for number, pair in enumerate(pairs)
    )


def test_ranks_are_of_each_suite_and_of_the_seeds_that_all_runs_have() -> None:
    rows = made_up(0)
    few = within_suite(3, rows)
    assert set(few.pair) == {"a – b", "a – c", "b – c"}
    for table in (few, rows, rows.assign(loss=-rows.loss)):
        assert ranks(table, ["experts"], LAST) == pytest.approx([table.loss.iloc[-1] / abs(table.loss.iloc[-1])] * 3)
    assert ranks(rows, ["experts"], DISTANCE) == [0.0] * 3, "a constant prediction ranks nothing"
    longer = pd.concat([rows, rows[rows.seed < 2].assign(run="more")])
    assert len(ranks(longer, ["experts", "more"], LAST)) == 2


def test_the_commands_answer_is_what_the_record_chose() -> None:
    record = recorded(ROOT, find_studies(ROOT)["mergeability"])
    runs = list(record.options.runs)
    means = {name: fmean(ranks(record.rows, runs, name)) for name in PREDICTIONS}
    assert max(OF_WEIGHTS, key=means.__getitem__) == ANSWER.prediction
    assert means[ANSWER.prediction] >= max(means.values()) - BETTER
    assert round(fmean(ranks(record.rows, runs, ANSWER.prediction)), 2) == ANSWER.within
    assert round(fmean(ranks(record.rows, runs, ANSWER.prediction, None)), 2) == ANSWER.across
    page = (ROOT / "docs/sweep.md").read_text()
    assert f"the {ANSWER.prediction}" in page
    assert f"{ANSWER.within:.2f}" in page
    assert f"{ANSWER.across:.2f}" in page


def test_the_prediction_is_the_one_of_the_study() -> None:
    base, first, second = ({"w": torch.tensor(values)} for values in ([0.0, 1.0], [3.0, 2.0], [0.0, 5.0]))
    vectors = [{"w": expert["w"] - base["w"]} for expert in (first, second)]
    assert predicted_by_weights(first, second) == pytest.approx(of_weights(*vectors)["distance"])


def test_one_pair_is_not_told_that_it_loses_most() -> None:
    assert merge_sentence({"a – b": 1.0, "a – c": 2.0}).startswith("a – c will lose most")
    assert "will lose most" not in merge_sentence({"a – b": 1.0})


# Linearised experts in the tangent space of the base


@pytest.fixture
def inputs(toy_lab: Path, tmp_path: Path) -> Laboratory:
    return Laboratory(study_io(toy_lab, "mergeability", tmp_path, **SMALL))


def test_an_expert_reaches_the_accuracy_that_its_training_ended_with(inputs: Laboratory) -> None:
    linear, run = in_tangent_space(inputs), inputs.run("linearised")
    for task in inputs.tasks:
        trained = run.training(0, task)
        state = run.expert(0, task)
        assert linear.accuracy(state, "validation", [task])[task] == pytest.approx(trained["validation_accuracy"])
        assert inputs.accuracy(state, "validation", [task])[task] == pytest.approx(
            trained["validation_accuracy_nonlinear"]
        )


def test_features_are_those_of_the_first_order_expansion(inputs: Laboratory) -> None:
    linear, rows, step = in_tangent_space(inputs), torch.arange(5), 1e-3
    data, expert = inputs.examples("validation")["north"], inputs.run("linearised").expert(0, "north")
    linear.model.load(expert)
    layers = [name for name, part in inputs.model.module.named_modules() if isinstance(part, torch.nn.ReLU)]
    features = TangentFeatures(data).features(linear.model, rows, layers)
    tau = task_vector(expert, inputs.base)
    near = []
    for sign in (1, -1):
        inputs.model.load({name: value + sign * step * tau[name] for name, value in inputs.base.items()})
        near.append(data.features(inputs.model, rows, layers))
    inputs.model.load(inputs.base)
    origin = data.features(inputs.model, rows, layers)
    for layer in layers:
        expected = origin[layer] + (near[0][layer] - near[1][layer]) / (2 * step)
        torch.testing.assert_close(features[layer], expected.flatten(1), atol=2e-3, rtol=2e-3)


def test_what_was_opened_before_is_left_alone(inputs: Laboratory) -> None:
    state = inputs.run("linearised").expert(0, "north")
    before = inputs.accuracy(state, "test")
    linear = in_tangent_space(inputs)
    assert linear.accuracy(state, "test") != before
    assert inputs.accuracy(state, "test") == before
    assert all(part.requires_grad for part in inputs.model.module.parameters())
