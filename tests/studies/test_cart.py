"""The studies of CART's tables and curves, on a small laboratory and on small nets that really learn."""

from dataclasses import replace
from math import comb
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from mergeflow.checkpoints import open_checkpoint
from mergeflow.errors import MergeflowError
from mergeflow.merging import load_recipe, merge
from mergeflow.modalities.classification import Subset
from studies import adaptation, cart_landscape, compression, interference, many_tasks, rank_curve, subset_scaling
from studies.lab import Laboratory, Row
from studies.lab.claims import UNTESTED
from studies.lab.methods import Adaptation, adapt, choose_rate
from studies.lab.rows import select
from tasks.project.stage import StageIO
from tests.studies.small_lab import run_result, study_io
from tests.studies.toy_lab import SEEDS, WrongTest

pytestmark = pytest.mark.slow

SCALE = {"low": 0.5, "high": 1.0, "step": 0.5, "start": 0.5}
MANY: dict[str, Any] = {
    "counts": [2, 3],
    "together": {"joint": {"label": "joint training", "counts": [2, 3]}},
    "adapted": {"directions": ["cart"], "counts": [3], "rates": [0.01, 0.02], "steps": 4},
    "methods": {
        "average": {},
        "task_arithmetic": {"scale": SCALE},
        "cart": {"scale": SCALE, "args": {"rank_ratio": [0.04, 0.16]}},
    },
}
CURVE: dict[str, Any] = {
    "suites": [{"tasks": 3, "ratios": [0.0, 0.08, 1.0], "tuned": [0.08]}],
    "scales": {"centred": [1.0, 2.0], "original": [0.3, 0.6]},
}
SUBSETS: dict[str, Any] = {
    "sizes": [2, 3],
    "starts": [2],
    "margin": 0.01,
    "pilot": 3,
    "most": 3,
    "validation": 6,
    "test": 6,
    "grids": {
        "average": {},
        "task_arithmetic": {"scale": [0.3]},
        "ties": {"keep": [0.2], "scale": [1.0]},
        "cart": {"rank_ratio": [0.08], "scale": [1.0]},
    },
    "wider": {"task_arithmetic": [0.5]},
}
FILES: dict[str, Any] = {"counts": [2, 3], "ratios": [0.05, 1.0], "thresholds": [0.4]}
ADAPT: dict[str, Any] = {
    "tasks": 3,
    "counts": [2, 3],
    "steps": 2,
    "batch_size": 2,
    "rates": [0.02],
    "every": 2,
    "factors": [1.0],
}
PLAN = Adaptation("cart", "layer", "test", init=1.0, lr=0.05, steps=3, batch_size=4)
LAYERS: dict[str, Any] = {
    "counts": [2, 3],
    "shown": [3],
    "compared": {"mima_3": 3},
    "ratios": [0.02, 0.08, 1.0],
    "draws": 1,
}
PLANES: dict[str, Any] = {
    "tasks": 3,
    "images": 6,
    "ranks": [0.02, 0.04, 0.16],
    "scales": [1.0, 2.0],
    "additions": [0.3, 1.0],
    "size": 3,
    "near": 3,
}


@pytest.mark.nightly
def test_many_tasks_measures_every_model_at_every_count(many_lab: Path, tmp_path: Path) -> None:
    result = run_result(many_lab, "many_tasks", tmp_path, **MANY)
    absolute = result.tables["Mean test accuracy, %"]
    models = ["zero-shot", "individual", "joint training", "average", "task arithmetic", "CART", "AdaMerging + CART"]
    assert list(absolute.index) == models
    assert list(absolute.columns) == ["2 tasks", "3 tasks", "2 → 3"]
    assert absolute.loc["AdaMerging + CART", "2 tasks"] == "", "a model that a count lacks leaves its cell empty"
    assert set(select(result.rows, model="cart").rank_ratio) <= {0.04, 0.16}
    assert set(select(result.rows, model="cart").tried) == {4}
    courses = result.rows[result.rows.rate.notna()]
    assert set(courses.groupby(["rate", "step"]).groups) == {(rate, step) for rate in (0.01, 0.02) for step in range(5)}
    assert {finding.holds for finding in result.findings if "AdaMerging + TA" in finding.claim} == {None}
    assert any("an end of its grid" in note and "scale of task arithmetic" in note for note in result.notes)


def test_test_is_looked_at_with_the_chosen_candidate_alone(many_lab: Path, tmp_path: Path) -> None:
    lab = Laboratory(study_io(many_lab, "many_tasks", tmp_path, **MANY))
    scorer = lab.blind().scorer(lab.run("experts").experts(0))
    sweep = many_tasks.Sweep.model_validate(MANY["methods"]["cart"])
    assert {row["tried"] for row in many_tasks.measure_method(lab, scorer, "cart", sweep)} == {4}
    assert len({digest for digest, split, _ in lab._judged if split == "test"}) == 1


def test_cart_leads_the_baselines_and_the_experts_all_merges_on_small_nets(toy_experts: Path, tmp_path: Path) -> None:
    scale = {"low": 0.2, "high": 2.0, "step": 0.2, "start": 1.0}
    choices: dict[str, Any] = {
        "counts": [3],
        "together": {},
        "adapted": {"directions": [], "counts": [], "rates": [0.01], "steps": 1},
        "methods": {
            "average": {},
            "task_arithmetic": {"scale": scale},
            "ties": {"scale": scale},
            "cart": {"scale": scale, "args": {"rank_ratio": [0.04, 0.1, 0.2]}},
        },
    }
    rows = run_result(toy_experts, "many_tasks", tmp_path, **choices).rows
    mean = select(rows, split="test").groupby("model").accuracy.mean()
    assert mean["zero_shot"] + 5 < mean["average"] < mean["cart"] < mean["individual"] - 5
    assert mean["cart"] > max(mean["task_arithmetic"], mean["ties"])


def test_the_curves_ends_are_the_average_and_task_arithmetic(many_lab: Path, tmp_path: Path) -> None:
    lab = Laboratory(study_io(many_lab, "rank_curve", tmp_path, **CURVE))
    scorer = lab.scorer(lab.run("experts").experts(0))
    walk = rank_curve.Walk(lab, scorer, {})
    average = scorer.merge("average")
    addition = scorer.merge("task_arithmetic", scale=0.3)
    none, whole = (walk.merged("centred", ratio, 2.0) for ratio in (0.0, 1.0))
    base, all_of_it = (walk.merged("original", ratio, 0.3) for ratio in (0.0, 1.0))
    for name, tensor in average.items():
        assert tensor.equal(none[name])
        assert (tensor - whole[name]).abs().max() < 1e-5
        assert (addition[name] - all_of_it[name]).abs().max() < 1e-5
        treated = ("attn" in name or "mlp" in name) and tensor.ndim == 2
        assert base[name].equal(lab.base[name] if treated else all_of_it[name])


def test_the_centred_curve_is_a_bell_between_two_averages_on_small_nets(toy_experts: Path, tmp_path: Path) -> None:
    suites = [{"tasks": 3, "ratios": [0.0, 0.02, 0.08, 0.4, 1.0], "tuned": [0.08]}]
    result = run_result(toy_experts, "rank_curve", tmp_path, suites=suites)
    centred = rank_curve.over(result.rows, "centred").mean(axis=1)
    assert centred[0.0] == pytest.approx(centred[1.0], abs=0.1)
    assert max(centred[0.02], centred[0.08]) > centred[0.0] + 2
    original, alone = (rank_curve.over(result.rows, kind).mean(axis=1) for kind in ("original", rank_curve.ALONE))
    assert original[1.0] > alone[0.0] + 5
    (per_rank,) = (finding for finding in result.findings if finding.claim.startswith("With λ chosen for each rank"))
    assert per_rank.verdict == UNTESTED, "of one rank there is no peak"
    assert result.notes
    assert result.tables


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ratios": [0.0, 0.5, 0.2, 1.0]}, "must ascend"),
        ({"ratios": [0.1, 0.5, 1.0]}, "from 0 to 1"),
        ({"tuned": [0.0, 0.08]}, r"lie in \(0, 1\]"),
        ({"ratios": [0.0, 0.1, 1.0]}, "ratios need 0.08"),
    ],
)
def test_ratios_that_draw_no_curve_are_refused(change: dict[str, list[float]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        rank_curve.Suite.model_validate({"tasks": 3, "ratios": [0.0, 0.08, 1.0], "tuned": [0.08], **change})


@pytest.fixture(scope="module")
def subsets_io(many_lab: Path, tmp_path_factory: pytest.TempPathFactory) -> StageIO:
    return study_io(many_lab, "subset_scaling", tmp_path_factory.mktemp("subset_scaling"), **SUBSETS)


def test_a_subset_is_merged_from_its_own_experts_alone(subsets_io: StageIO) -> None:
    lab, options = Laboratory(subsets_io), subset_scaling.STUDY.chosen(subsets_io)
    splits = [lab.examples(split) for split in ("validation", "test")]
    experts = lab.run("experts").experts(0)
    few = {task: experts[task] for task in ("red", "grey")}
    rows = pd.DataFrame(subset_scaling.measure_subset(lab, options, splits, few, ["red", "grey"]))
    halfway = {name: (few["red"][name] + few["grey"][name]) / 2 for name in few["red"]}
    average = select(rows, method="average").set_index("task").accuracy / 100
    assert dict(average) == pytest.approx(lab.accuracy(halfway, "test", ["red", "grey"]))
    assert subset_scaling.methods_of(rows) == [
        "average", "task_arithmetic", "task_arithmetic, wider λ", "ties", "cart",
    ]  # fmt: skip


def test_a_sample_is_as_large_as_the_spread_of_its_pilot_asks(subsets_io: StageIO) -> None:
    options = subset_scaling.STUDY.chosen(subsets_io).model_copy(update={"margin": 0.02, "pilot": 4, "most": 18})
    tasks = [str(number) for number in range(6)]
    references = {"zero_shot": dict.fromkeys(tasks, 0.5), "expert": dict.fromkeys(tasks, 0.9)}
    seen: list[tuple[str, ...]] = []

    def work(spread: float, size: int, number: int, subset: tuple[str, ...]) -> list[Row]:
        seen.append(subset)
        return [{"method": m, "validation": 70 + spread * (number % 2)} for m in (*options.grids, "more")]

    few = subset_scaling.plan_sample(tasks, references, options, 3, lambda *piece: work(1, *piece))
    assert (few["population"], few["a"], few["b"]) == (comb(6, 3), 50, pytest.approx(90))
    assert list(few["subsets"]) == seen, "of so small a spread the pilot is enough: (3.18 · 0.0058 / 0.02)² < 1"
    more = subset_scaling.plan_sample(tasks, references, options, 3, lambda *piece: work(5, *piece))
    assert list(more["subsets"])[:4] == seen[:4], "the pilot belongs to the sample"
    assert len(more["subsets"]) == 18 < subset_scaling.two_stage_size(0.05 * (1 / 3) ** 0.5, 0.02, 4) == 22
    assert subset_scaling.two_stage_size(0.05, 0.02, 4) == 64


NETS: dict[str, Any] = {
    **SUBSETS,
    "validation": 100,
    "test": 200,
    "grids": {**SUBSETS["grids"], "task_arithmetic": {"scale": [0.1, 0.3]}, "cart": {"rank_ratio": [0.08, 0.3]}},
    "wider": {"task_arithmetic": [0.5, 0.7]},
}


def test_a_third_task_costs_every_merge_of_small_nets_and_cart_the_least(toy_experts: Path, tmp_path: Path) -> None:
    result = run_result(toy_experts, "subset_scaling", tmp_path, **NETS)
    rows = result.rows.assign(share=100 * result.rows.accuracy / result.rows.expert)
    reached = rows.groupby(["method", "size", "seed"]).share.mean()
    for seed in SEEDS:
        lost = {m: reached[m, 2, seed] - reached[m, 3, seed] for m in subset_scaling.methods_of(rows)}
        assert lost["average"] > 3
        assert lost["cart"] < lost["average"] - 1
        assert abs(reached["cart", 2, seed] - reached["average", 2, seed]) < 0.5
        assert reached["cart", 3, seed] > reached["average", 3, seed] + 1
    losses = result.tables["What more tasks cost, normalised accuracy in points"]["lost from N = 2 to 3"]
    assert float(losses["CART"].split()[0]) == pytest.approx(reached["cart", 2, 0] - reached["cart", 3, 0], abs=0.06)
    lead = (reached["cart"] - reached["average"])[3].mean()
    assert f"less average, N = 3: {lead:.1f} ±" in result.findings[0].measured


def test_what_is_chosen_does_not_depend_on_test(toy_experts: Path, tmp_path: Path) -> None:
    """With every test label wrong the same candidates are taken, and their accuracy is the rest to 1."""
    io = study_io(toy_experts, "subset_scaling", tmp_path, **NETS)
    options, measured = subset_scaling.STUDY.chosen(io), []
    for lab in (Laboratory(io), WrongTest(io)):
        splits = [lab.examples(split) for split in ("validation", "test")]
        experts = lab.run("experts").experts(0)
        rows = subset_scaling.measure_subset(lab, options, splits, experts, list(experts))
        measured.append(pd.DataFrame(rows).set_index(["method", "task"]))
    right, wrong = measured
    pd.testing.assert_frame_equal(right.drop(columns="accuracy"), wrong.drop(columns="accuracy"))
    assert list(100 - wrong.accuracy) == pytest.approx(list(right.accuracy))


@pytest.mark.nightly
def test_counted_bytes_are_those_of_the_formula_and_of_the_file(many_lab: Path, tmp_path: Path) -> None:
    result = run_result(many_lab, "compression", tmp_path, **FILES)
    assert len(next(iter(result.tables.values()))) == 2 * 6
    rows = select(result.rows, part="suites", seed=0, tasks=3, split="test").drop_duplicates(["kind", "rank_ratio"])
    lab = Laboratory(study_io(many_lab, "compression", tmp_path / "lab"))
    sizes = {name: list(tensor.shape) for name, tensor in lab.base.items()}
    model = sum(tensor.nbytes for tensor in lab.base.values())
    (cart,) = select(rows, kind="cart", rank_ratio=0.08).itertuples()
    (emr,) = select(rows, kind="emr").itertuples()
    assert cart.own * 8 == compression.low_rank_bits(sizes, 0.08) == cart.formula_bits
    assert cart.shared == emr.shared == model
    assert emr.own == pytest.approx(model / 32, rel=0.01)
    parts = rows.shared + rows.tasks * rows.own
    assert set(rows.all_experts) == {3 * model}
    assert ((parts <= rows.file) & (rows.file < parts + 120_000)).all(), "the header names every part"
    assert (rows.one_task < rows.file).all()
    assert set(select(result.rows, part="thresholds", chosen=True).threshold) == {0.4}


def test_the_smallest_rank_is_that_of_the_mean_on_validation() -> None:
    accuracies = {0.08: (99.5, 98.5, 98.5), 0.16: (98.0, 99.5, 99.6), 0.32: (99.5, 99.5, 99.5)}
    about = {"part": "suites", "kind": "cart", "tasks": 8, "split": "validation", "task": "a", "expert": 100.0}
    sizes = dict.fromkeys(("file", "own", "one_task", "all_experts", "file_share", "formula_bits", "threshold"), 1)
    rows = pd.DataFrame(
        {**about, **sizes, "needs_base": False, "rank_ratio": ratio, "seed": seed, "accuracy": value}
        for ratio, values in accuracies.items()
        for seed, value in enumerate(values)
    )
    assert compression.smallest(rows, 8, 0.99) == 0.16
    assert compression.smallest(rows, 8, 0.997) is None


@pytest.mark.nightly
def test_adaptation_covers_every_variant_and_a_recipe_replays_one(
    many_lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run_result(many_lab, "adaptation", tmp_path, **ADAPT)
    assert [len(table) for table in result.tables.values()] == [2 + 8 + 1, 4, 2]
    (labels,) = [finding for finding in result.findings if "Labels have no part" in finding.claim]
    assert labels.holds
    by_labels = select(result.rows, part="labels").groupby("labels").accuracy.mean()
    assert by_labels["moved"] < by_labels["true"]
    assert set(select(result.rows, part="rates").step) == {0, 2}
    monkeypatch.chdir(many_lab)
    folder = tmp_path / "building/outputs/studies/adaptation/recipes/cart_layer_test"
    recipe = load_recipe(folder / "recipe.yaml")
    (_, paths) = recipe.data[0]
    assert all(path.startswith("outputs/studies/adaptation/recipes/cart_layer_test/") for _, path in paths)
    here = tuple((name, str(folder / Path(path).name)) for name, path in paths)
    replayed = merge(recipe.model_copy(update={"data": (("coefficients", here),)}), out=tmp_path / "out.safetensors")
    variant = {"on": "cart", "granularity": "layer", "images": "test", "seed": 0}
    accuracy = select(result.rows, part="merges", **variant).set_index("task").accuracy / 100
    lab = Laboratory(study_io(many_lab, "adaptation", tmp_path / "lab", **ADAPT))
    with open_checkpoint(replayed.path) as state:
        assert lab.accuracy(dict(state), "test") == pytest.approx(dict(accuracy))
    assert set(select(result.rows, part="coefficients", **variant).coefficient) != {1.0}


def test_the_rate_is_chosen_without_test(many_lab: Path, tmp_path: Path) -> None:
    """The rule reads validation alone: with the test split away it chooses the same, and the best comes first."""
    lab = Laboratory(study_io(many_lab, "adaptation", tmp_path))
    tried = choose_rate(lab, lab.run("experts").experts(0), PLAN, [1e-6, 0.05], 2)
    assert tried[0]["accuracy"] >= tried[1]["accuracy"]
    assert [set(row["course"]) for row in tried] == [{0, 2, 3}] * 2
    assert not any(split == "test" for split, _ in lab._examples)


def test_labels_play_no_part_in_adapting_and_images_do(many_lab: Path, tmp_path: Path) -> None:
    lab = Laboratory(study_io(many_lab, "adaptation", tmp_path))
    experts = lab.run("experts").experts(0)
    first = adapt(lab, experts, PLAN)
    lab._examples.update(
        {key: replace(examples, labels=2 - examples.labels) for key, examples in lab._examples.items()}
    )
    second = adapt(lab, experts, PLAN)
    assert first.learned == second.learned
    assert all(torch.equal(first.state[name], second.state[name]) for name in first.state)
    assert adapt(lab, experts, replace(PLAN, images="validation")).learned != first.learned


def test_adaptation_needs_images(many_lab: Path, tmp_path: Path) -> None:
    lab = Laboratory(study_io(many_lab, "adaptation", tmp_path))
    lab._examples["test", "red"] = Subset.first(lab.examples("test")["red"], 0)
    with pytest.raises(MergeflowError, match="needs examples of every task: task 'red' has none"):
        adapt(lab, lab.run("experts").experts(0), PLAN)


def test_a_rate_at_an_end_of_those_tried_is_named() -> None:
    def note(chosen: float) -> list[str]:
        about = {"part": "rates", "on": "cart", "granularity": "layer"}
        rates = (0.01, 0.003, 0.03)
        return list(adaptation.rates_at_ends(pd.DataFrame([{**about, "lr": r, "chosen": r == chosen} for r in rates])))

    assert note(0.03) == ["learning rate 0.03 (CART, per layer)"]
    assert note(0.003) == ["learning rate 0.003 (CART, per layer)"]
    assert note(0.01) == []


@pytest.mark.nightly
def test_interference_covers_experts_layers_and_kinds(many_lab: Path, tmp_path: Path) -> None:
    result = run_result(many_lab, "interference", tmp_path, **LAYERS)
    lower, course, _ = result.tables.values()
    assert list(lower.index) == [("experts", "2 tasks"), ("experts", "3 tasks"), ("mima_3", "3 tasks")]
    assert lower["I(k)"].iloc[0] == "0.0 ± 0.0", "two centred tasks interfere as much as can be"
    assert list(course.index) == ["0.02", "0.08", "1"]
    assert list(select(result.rows, part="layer").kind.unique()) == [
        "patch embedding", "positions", "projection", "attention in", "attention out", "MLP in", "MLP out",
    ]  # fmt: skip
    verdicts = {finding.claim: finding.holds for finding in result.findings if not finding.setting}
    assert [holds for claim, holds in verdicts.items() if "as printed" in claim] == [False]
    assert sum(verdicts.values()) == len(verdicts) - 1, "the bound holds as it must be read, and not as printed"
    constants = interference.constants(result.rows).iloc[2:]
    course = {name: interference.log_log_slope(list(constants.index), list(constants[name])) for name in constants}
    assert course["L"] < course["derived"] + 0.1, "the smallest singular value is needed once"
    assert course["printed"] - course["derived"] == pytest.approx(2, abs=0.01)


def test_the_landscape_covers_paths_tasks_and_fits(many_lab: Path, tmp_path: Path) -> None:
    result = run_result(many_lab, "cart_landscape", tmp_path, **PLANES)
    models, fits = result.tables.values()
    assert len(models) == 7
    measured = select(result.rows, part="models", kind="cart")
    assert sorted(measured["rank"].unique()) == [0, 0.02, 0.04, 0.08, 0.16, 1]
    assert list(measured.task.unique()) == ["red", "blue", "grey"]
    assert len(fits) == 3
    sizes = select(result.rows, seed=0).groupby("part").size()
    assert [sizes[part] for part in ("test", "fits", "basins")] == [6 * 3, 3 * 4, 3 * 5]
    drawn = select(result.rows, part="grid").groupby(["plane", "task"]).size()
    assert len(drawn) == 3 + 3
    assert set(drawn) == {3 * 3}


def test_paths_over_the_rank_start_and_end_where_they_should(many_lab: Path, tmp_path: Path) -> None:
    io = study_io(many_lab, "cart_landscape", tmp_path, **PLANES)
    site = cart_landscape.Site(Laboratory(io).first(3), "experts", 0, cart_landscape.STUDY.chosen(io))
    model = cart_landscape.Model
    average, base = site.state(model("average")), site.lab.base
    for ends, meant in (
        ((model("cart", 2.0, 0.0), model("cart", 2.0, 1.0), model("task_arithmetic", 1 / 3)), average),
        ((model("low_rank", 0.3, 0.0),), base),
        ((model("low_rank", 0.3, 1.0),), site.state(model("task_arithmetic", 0.3))),
    ):
        for end in ends:
            for name, tensor in site.state(end).items():
                np.testing.assert_allclose(tensor, meant[name], atol=2e-5)
    middle = site.state(model("cart", 1.0, 0.08))
    assert max(float((middle[name] - average[name]).abs().max()) for name in average) > 1e-4
