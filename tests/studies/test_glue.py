"""Study `glue` on a small project of texts, and its verdicts on made-up rows."""

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
import yaml
from pydantic import ValidationError
from studies.old.judging.merging import of_glue
from studies.old.judging.notes import NOTES

from mergeflow.checkpoints import read_state
from mergeflow.errors import MergeflowError
from studies.lab.inputs import Laboratory
from studies.lab.sweeps import NAMES
from studies.old.papers.glue.compressed import compressed_findings
from studies.old.papers.glue.heads import left_heads, probed_heads
from studies.old.papers.glue.results import PRINTED, Results, findings, tables
from studies.old.papers.glue.study import DECLARED, Bench, Options
from studies.old.results import StudyResult
from studies.old.rows import Row, picked
from tasks.project.parameters import load_params, load_study_params
from tasks.project.study_options import check_study_options
from tests.project_folder import run_pipeline
from tests.studies.small_lab import ROOT, run_study, study_io, train_run
from tests.text.small_project import TASKS, make_text_project

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


def test_the_world_is_a_project_like_the_root() -> None:
    params = load_params(WORLD / "params.yaml")
    studies = load_study_params(WORLD / "studies/params.yaml", params)
    check_study_options(WORLD, studies)
    assert len(params.tasks) == 8
    assert len(studies.seeds) == 5
    assert set(studies.studies["glue"]["methods"]) == set(NAMES) - {
        "zero_shot",
        "individual",
        "adamerging_ta",
        "adamerging_cart",
    }
    assert (WORLD / "dvc.yaml").read_bytes() == (ROOT / "dvc.yaml").read_bytes(), "cp dvc.yaml worlds/sentences8/"


@pytest.mark.slow
def test_the_table_has_every_model_with_its_heads(lab: Path, tmp_path: Path) -> None:
    folder = run_study(lab, "glue", tmp_path, **SMALL)
    result = StudyResult.read(folder)
    whole, heads, embeddings, compressed, chosen, rates = result.tables
    merges = ["average", "task arithmetic", "TIES", "CART", "CART, wider grid", "AdaMerging + CART"]
    assert [row["model"] for row in whole.rows] == ["base", "individual", "joint training", "MIMA, N = 8", *merges]
    assert whole.rows[0].keys() == {"model", *TASKS, "mean", "normalised", "in the paper"}
    assert [row["model"] for row in heads.rows] == ["base", "average", "CART"]
    assert [row["model"] for row in embeddings.rows] == ["average"]
    assert [row["tried"] for row in chosen.rows] == [*(f"{n}; {n}" for n in (1, 1, 2, 2, 2)), "4; 4", None]
    assert [row["chosen"] for row in rates.rows] == ["×", ""]
    assert [row["method"] for row in compressed.rows] == ["EMR", "CART-Indexing"]
    assert compressed.rows[1]["mean"] == whole.rows[1]["mean"], "of full rank nothing is lost"
    stored = {row["model"]: row["stored"] for row in picked(result.rows, part="stored")}
    assert 1 / len(TASKS) < stored["emr"] / 100 < 1 < stored["cart_indexing"] / 100
    options = DECLARED.chosen(study_io(lab, "glue", tmp_path / "options", **SMALL))
    assert of_glue(result.rows) == result.findings, "the rows have all that the findings rest on"
    assert NOTES["glue"](result.rows, options) == result.notes
    assert {row["rank_ratio"] for row in picked(result.rows, part="choice", model="cart, wider grid")} <= {0.05, 0.1}
    assert {row["rate"] for row in picked(result.rows, part="rate")} == {0.01, 0.02}
    assert {row["heads"] for row in picked(result.rows, part="model") if row["model"] == "cart"} == {"fixed", "probed"}
    assert {row["embeddings"] for row in result.rows if row["model"] == "average"} == {"merged", "base"}
    assert len({(row["seed"], row["task"]) for row in picked(result.rows, part="model")}) == 6
    assert (folder / "heads.svg").exists()
    own = fmean(row["accuracy"] for row in picked(result.rows, part="model", model="individual"))
    assert str(whole.rows[1]["mean"]).startswith(f"{own:.1f}")
    kept = next(one for one in result.findings if one.claim.startswith("CART-Indexing keeps the figures"))
    assert kept.holds is True, "the one finding that a few steps leave decided"
    models, choices = (picked(result.rows, part=part) for part in ("model", "choice"))
    for seed in (0, 1):
        for model in ("average", "cart"):
            fixed, probed = (
                fmean(r["accuracy"] for r in picked(models, seed=seed, model=model, heads=heads, embeddings="merged"))
                for heads in ("fixed", "probed")
            )
            assert probed > fixed + 3, "heads fitted to a merge read more of it than those of the experts"
        narrow, wide = (
            picked(choices, seed=seed, model=model)[0]["validation"] for model in ("cart", "cart, wider grid")
        )
        assert wide > narrow, "the wider grid has all of the other and is searched for the best"


@pytest.fixture
def bench(lab: Path, tmp_path: Path) -> Bench:
    io = study_io(lab, "glue", tmp_path, **SMALL)
    return Bench.open(Laboratory(io), DECLARED.chosen(io), 0)


def test_an_expert_is_judged_with_its_own_head_and_a_joint_model_with_its_own(bench: Bench, lab: Path) -> None:
    runs = lab / "outputs/studies/runs"
    training = yaml.safe_load((runs / "experts/seed_0/experts/mood/training.json").read_text())
    found = bench.inputs.accuracy(bench.experts["mood"], "validation", ["mood"])
    assert found["mood"] == pytest.approx(training["validation_accuracy"], abs=1e-12)
    joint = yaml.safe_load((runs / "joint/seed_0/model/training.json").read_text())
    heads = left_heads(bench.inputs, "joint", 0)
    scores = bench.inputs.with_heads(heads).accuracy(bench.inputs.run("joint").model(0), "validation")
    assert fmean(scores.values()) == pytest.approx(joint["validation_accuracy"], abs=1e-12)
    last = read_state(runs / "mima/seed_0/experts/near/head.safetensors")
    assert torch.equal(left_heads(bench.inputs, "mima", 0)["near"]["weight"], last["weight"])


def test_heads_probed_on_the_base_are_those_that_training_starts_from(bench: Bench) -> None:
    """The warm start of the base itself: the same features, the same fit."""
    from tasks.training import Workbench

    found = probed_heads(bench.inputs, bench.inputs.base)
    start = Workbench(bench.inputs.io, bench.inputs.device).head("same")
    assert start is not None
    assert torch.equal(found["same"]["weight"], start.weight)
    assert not torch.equal(found["same"]["weight"], bench.inputs.heads["same"]["weight"])


@pytest.mark.slow
def test_choosing_cannot_read_test_and_embeddings_of_the_base_stay(bench: Bench) -> None:
    with pytest.raises(MergeflowError, match="where it must not"):
        bench.inputs.blind().accuracy(bench.inputs.base, "test")
    rows = {(row["model"], row["embeddings"]): row for row in bench.measure() if row["model"] == "average"}
    merged = {name: torch.stack([one[name] for one in bench.experts.values()]).mean(0) for name in bench.inputs.base}
    found = bench.inputs.accuracy(merged, "test")
    assert rows["average", "merged"]["fixed"] == pytest.approx(found, abs=1e-5)  # another order of the sum
    state = merged | {name: value for name, value in bench.inputs.base.items() if "embeddings." in name}
    found = bench.inputs.accuracy(state, "test")
    assert rows["average", "base"]["fixed"] == pytest.approx(found, abs=1e-5)


def test_test_is_looked_at_with_the_chosen_candidate_alone(bench: Bench) -> None:
    assert bench._merged("task_arithmetic", "")["tried"] == 2
    assert len({digest for digest, split, _ in bench.inputs._judged if split == "test"}) == 1


def made_up(**figures: float) -> list[Row]:
    return [
        {"seed": seed, "model": name, "embeddings": kind, "fixed": {"a": value}, "probed": {"a": value + 0.02}}
        for name, value in figures.items()
        for seed in range(3)
        for kind in ("merged", "base")
    ]


def test_findings_follow_the_numbers() -> None:
    paper = {name: value / 100 for name, value in PRINTED.items()}
    found = findings(made_up(**paper))
    assert [one.holds for one in found] == [True] * len(found)
    assert all(one.margin for one in found)
    behind = findings(made_up(**paper | {"cart": 0.5}))
    assert [one.holds for one in behind] == [False, False, False, False, False, True, True, False, True]
    wide = findings(made_up(**paper) + made_up(**{"cart, wider grid": paper["cart"] - 0.05}))
    assert [one.holds for one in wide] == [True] * len(found) + [False], "0.7 points behind task arithmetic"
    assert Results(made_up(**paper)).means("average", "probed") == pytest.approx([53.34] * 3)
    assert next(row["in the paper"] for row in tables(made_up(**paper), {})[0].rows) == "85.6"


def compressed_rows(figure: float) -> list[Row]:
    return [{"seed": s, "model": "cart_indexing", "embeddings": "own", "fixed": {"a": figure}} for s in range(3)]


@pytest.mark.parametrize(("figure", "emr", "verdicts"), [(0.793, 0.75, [True, True]), (0.79, 0.795, [False, False])])
def test_compressed_experts_are_held_against_the_experts_and_emr(
    figure: float, emr: float, verdicts: list[bool]
) -> None:
    rows = [
        *made_up(individual=0.8),
        *compressed_rows(figure),
        *(row | {"model": "emr"} for row in compressed_rows(emr)),
    ]
    found = compressed_findings(rows)
    assert [one.holds for one in found] == verdicts
    assert [one.system for one in found] == ["C5", "C5"]
    assert compressed_findings(made_up(individual=0.8)) == []


def test_an_unknown_compressor_is_refused() -> None:
    known = yaml.safe_load((WORLD / "studies/params.yaml").read_text())["studies"]["glue"]
    with pytest.raises(ValidationError, match="expected emr or cart_indexing, found zip"):
        Options.model_validate(known | {"compressed": {"zip": {}}})


def test_the_same_weights_are_judged_anew_with_other_heads(bench: Bench) -> None:
    inputs, state = bench.inputs, bench.experts["mood"]
    own = inputs.accuracy(state, "validation")
    turned = {task: {name: -value for name, value in head.items()} for task, head in inputs.heads.items()}
    assert inputs.with_heads(turned).accuracy(state, "validation") != own
    assert inputs.accuracy(state, "validation") == own


def test_a_study_that_names_no_heads_does_not_judge_with_those_of_the_base(lab: Path, tmp_path: Path) -> None:
    inputs = Laboratory(study_io(lab, "glue", tmp_path, **SMALL))
    with pytest.raises(MergeflowError, match="judges models with the base's heads, and the head of task 'mood' is"):
        inputs.accuracy(inputs.base, "validation")
