"""Study `glue` on a small project of texts."""

import shutil
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd
import pytest
import torch
import yaml
from pydantic import ValidationError

from mergeflow.checkpoints import read_state
from mergeflow.errors import MergeflowError
from studies import merge_frequency, mima, rank_curve
from studies.glue import STUDY, Bench, Options, probed_heads
from studies.lab import Laboratory
from studies.lab.rows import select
from tests.project_folder import change_params, run_pipeline
from tests.studies.small_lab import ROOT, run_result, study_io, train_run
from tests.text.small_project import TASKS, make_text_project

pytestmark = pytest.mark.slow

WORLD = ROOT / "worlds/sentences8"
SCALE = {"low": 0.5, "high": 1.0, "step": 0.5, "start": 0.5}
SMALL: dict[str, Any] = {
    "methods": {
        "average": {},
        "task_arithmetic": {"scale": SCALE},
        "ties": {"scale": SCALE, "args": {"keep": [0.2]}},
        "cart": {"scale": SCALE, "args": {"rank_ratio": [0.1]}},
    },
    "wider": {"cart": {"scale": SCALE, "args": {"rank_ratio": [0.05, 0.1]}}},
    "adapted": {"directions": ["cart"], "rates": [0.01, 0.02], "steps": 1},
    "probed": ["base", "average", "cart"],
    "embeddings": {"embeddings.": ["average"]},
    "compressed": {"emr": {}, "cart_indexing": {"rank_ratio": 1.0, "non_matrices": "own"}},
}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project of three tasks on texts with the study's training runs, of a few steps."""
    torch.set_num_threads(1)
    root = make_text_project(tmp_path_factory.mktemp("glue") / "lab", steps=8)
    run_pipeline(root, ("prepare", "base"))
    (root / "studies").mkdir()
    whole = yaml.safe_load((WORLD / "studies/params.yaml").read_text())
    whole |= {"seeds": [0, 1], "runs": {**whole["runs"], "mima": {"regime": "iterative", "iterative": {"rounds": 2}}}}
    (root / "studies/params.yaml").write_text(yaml.safe_dump(whole, sort_keys=False))
    for name in whole["runs"]:
        train_run(root, name)
    return root


@pytest.mark.nightly
def test_the_table_has_every_model_with_its_heads(lab: Path, tmp_path: Path) -> None:
    result = run_result(lab, "glue", tmp_path, **SMALL)
    rows = result.rows
    whole, chosen = result.tables.values()
    merges = ["average", "task arithmetic", "TIES", "CART", "CART, wider grid", "AdaMerging + CART"]
    compressed = ["EMR", "CART-Indexing"]
    assert list(whole.index) == ["base", "individual", "joint training", "MIMA, N = 8", *merges, *compressed]
    assert list(whole.index[whole["heads probed"] != ""]) == ["base", "average", "CART"]
    assert list(whole.index[whole["embeddings of the base"] != ""]) == ["average"]
    assert list(whole.index[whole["stored, % of all experts"] != ""]) == compressed
    assert sorted(chosen.tried) == sorted([*(f"{n}; {n}" for n in (1, 1, 2, 2, 2)), "4; 4", "; "])
    assert whole["mean"]["CART-Indexing"] == whole["mean"]["individual"], "of full rank nothing is lost"
    stored = select(rows, part="stored").groupby("model").stored.first() / 100
    assert 1 / len(TASKS) < stored["emr"] < 1 < stored["cart_indexing"]
    assert set(select(rows, part="choice", model="cart, wider grid").rank_ratio) <= {0.05, 0.1}
    assert set(select(rows, part="rate").rate) == {0.01, 0.02}
    indexing = next(
        finding for finding in result.findings if finding.claim.startswith("CART-Indexing keeps the figures")
    )
    assert indexing.holds is True, "the one finding that a few steps leave decided"
    means = select(rows, part="model", embeddings="merged").groupby(["seed", "model", "heads"]).accuracy.mean()
    choices = select(rows, part="choice").set_index(["seed", "model", "embeddings"]).validation
    for seed in (0, 1):
        for model in ("average", "cart"):
            better = means[seed, model, "probed"] > means[seed, model, "fixed"] + 3
            assert better, "heads fitted to a merge read more of it than those of the experts"
        wide, narrow = (choices[seed, model, "merged"] for model in ("cart, wider grid", "cart"))
        assert wide > narrow, "the wider grid has all of the other and is searched for the best"
    assert result.notes


@pytest.fixture
def bench(lab: Path, tmp_path: Path) -> Bench:
    io = study_io(lab, "glue", tmp_path, **SMALL)
    return Bench.open(with_heads_of("experts", Laboratory(io)), STUDY.chosen(io), 0)


def with_heads_of(run: str, lab: Laboratory) -> Laboratory:
    """Return the laboratory that pieces of the run's first seed get."""
    return lab.of_run(run, 0, lambda lab, run, seed: lab)()


def test_an_expert_is_judged_with_its_own_head_and_a_joint_model_with_its_own(bench: Bench, lab: Path) -> None:
    runs = lab / "outputs/studies/runs"
    training = yaml.safe_load((runs / "experts/seed_0/experts/mood/training.json").read_text())
    accuracy = bench.lab.accuracy(bench.experts["mood"], "validation", ["mood"])
    assert accuracy["mood"] == pytest.approx(training["validation_accuracy"], abs=1e-12)
    joint = yaml.safe_load((runs / "joint/seed_0/model/training.json").read_text())
    scores = with_heads_of("joint", bench.lab).accuracy(bench.lab.run("joint").model(0), "validation")
    assert fmean(scores.values()) == pytest.approx(joint["validation_accuracy"], abs=1e-12)
    last = read_state(runs / "mima/seed_0/experts/near/head.safetensors")
    assert torch.equal(with_heads_of("mima", bench.lab).heads["near"]["weight"], last["weight"])


def test_other_studies_judge_every_expert_with_its_head(lab: Path, tmp_path: Path) -> None:
    """Of runs trained at once and in rounds; the figure that training recorded comes out again."""
    inputs = Laboratory(study_io(lab, "glue", tmp_path, **SMALL))
    recorded = inputs.run("mima").training(0, "mood")["validation_accuracy"]
    suite = rank_curve.Suite(tasks=3, ratios=[0, 0.08, 1], tuned=[0.08])
    measure = partial(rank_curve.measure_suite, suite=suite, scales={"centred": [1.0], "original": [1.0]})
    curve = pd.DataFrame(inputs.of_run("experts", 0, measure)())
    rounds = pd.DataFrame(mima.measure_merges(with_heads_of("mima", inputs), "mima", 0, 0.2))
    for run, rows in (("experts", select(curve, curve="experts")), ("mima", select(rounds, model="experts"))):
        judge = with_heads_of(run, inputs)
        for row in rows.itertuples():
            state = inputs.run(run).expert(0, row.task)
            assert row.accuracy == 100 * judge.accuracy(state, "test", [row.task])[row.task]
    mood = with_heads_of("mima", inputs).accuracy(inputs.run("mima").expert(0, "mood"), "validation", ["mood"])
    assert mood["mood"] == pytest.approx(recorded, abs=1e-12)
    assert {"average", "zero_shot", "original", "centred"} < set(curve.curve)
    course = inputs.by_run(["mima"], merge_frequency.measure_course, seeds=[0])
    merged = inputs.run("mima").merged(0, 1)
    expected = with_heads_of("mima", inputs).accuracy(merged, "validation")
    assert course[0]["accuracy"] == 100 * fmean(expected.values())


def test_a_seed_starts_from_the_same_heads_whichever_seeds_ran_before_it(lab: Path, tmp_path: Path) -> None:
    alone = shutil.copytree(lab, tmp_path / "lab", ignore=shutil.ignore_patterns("runs", ".mergeflow"))
    change_params(alone, {"seeds": [1]}, "studies/params.yaml")
    for run, model in {"experts": "experts/mood", "mima": "experts/near", "joint": "model"}.items():
        train_run(alone, run)
        states = [
            read_state(root / f"outputs/studies/runs/{run}/seed_1/{model}/model.safetensors") for root in (lab, alone)
        ]
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0]), run


def test_heads_probed_on_the_base_are_those_that_training_starts_from(bench: Bench) -> None:
    """The warm start of the base itself: the same features, the same fit."""
    from tasks.training import Workbench

    heads = probed_heads(bench.lab, bench.lab.base)
    start = Workbench(bench.lab.io, bench.lab.device).head("same")
    assert start is not None
    assert torch.equal(heads["same"]["weight"], start.weight)
    assert not torch.equal(heads["same"]["weight"], bench.lab.heads["same"]["weight"])


def test_choosing_cannot_read_test_and_embeddings_of_the_base_stay(bench: Bench) -> None:
    with pytest.raises(MergeflowError, match="where it must not"):
        bench.lab.blind().accuracy(bench.lab.base, "test")
    rows = select(pd.DataFrame(bench.measure()), part="model", model="average", heads="fixed")
    rows = (rows.set_index(["embeddings", "task"]).accuracy / 100).unstack("task")
    merged = {name: torch.stack([expert[name] for expert in bench.experts.values()]).mean(0) for name in bench.lab.base}
    accuracy = bench.lab.accuracy(merged, "test")
    assert dict(rows.loc["merged"]) == pytest.approx(accuracy, abs=1e-5)  # another order of the sum
    state = merged | {name: value for name, value in bench.lab.base.items() if "embeddings." in name}
    accuracy = bench.lab.accuracy(state, "test")
    assert dict(rows.loc["base"]) == pytest.approx(accuracy, abs=1e-5)


def test_an_unknown_compressor_is_refused() -> None:
    options = yaml.safe_load((WORLD / "studies/params.yaml").read_text())["studies"]["glue"]
    with pytest.raises(ValidationError, match="expected emr or cart_indexing, found zip"):
        Options.model_validate(options | {"compressed": {"zip": {}}})


def test_the_same_weights_are_judged_anew_with_other_heads(bench: Bench) -> None:
    inputs, state = bench.lab, bench.experts["mood"]
    before = inputs.accuracy(state, "validation")
    turned = {task: {name: -value for name, value in head.items()} for task, head in inputs.heads.items()}
    assert inputs.with_heads(turned).accuracy(state, "validation") != before
    assert inputs.accuracy(state, "validation") == before


def test_a_study_that_names_no_heads_does_not_judge_with_those_of_the_base(lab: Path, tmp_path: Path) -> None:
    inputs = Laboratory(study_io(lab, "glue", tmp_path, **SMALL))
    with pytest.raises(MergeflowError, match="judges models with the base's heads, and the head of task 'mood' is"):
        inputs.accuracy(inputs.base, "validation")
