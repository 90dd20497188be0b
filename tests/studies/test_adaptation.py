"""Study `adaptation` on a small laboratory, and its verdicts on made-up rows."""

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from studies.old.judging.cart import of_adaptation

from mergeflow.checkpoints import open_checkpoint
from mergeflow.errors import MergeflowError
from mergeflow.merging import load_recipe, merge
from mergeflow.modalities.subset import Subset
from studies.lab.adapting import Adaptation, adapt, choose_rate
from studies.lab.inputs import Laboratory
from studies.old.papers.adaptation import study as adaptation
from studies.old.papers.adaptation.results import _rate_note, findings
from studies.old.papers.adaptation.variants import Variant
from studies.old.results import StudyResult
from studies.old.rows import picked
from tests.studies.small_lab import run_study, study_io

slow = pytest.mark.slow

SMALL: dict[str, Any] = {
    "tasks": 3,
    "counts": [2, 3],
    "steps": 2,
    "batch_size": 2,
    "rates": [0.02],
    "every": 2,
    "factors": [1.0],
}
PLAN = Adaptation("cart", "layer", "test", init=1.0, lr=0.05, steps=3, batch_size=4)


@pytest.fixture(scope="module")
def made(many_lab: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_study(many_lab, "adaptation", tmp_path_factory.mktemp("adaptation"), **SMALL)


@slow
def test_the_study_covers_every_variant(made: Path) -> None:
    result = StudyResult.read(made)
    assert {path.stem for path in made.glob("*.svg")} == {"accuracy", "coefficients", "course", "memory"}
    accuracy, tasks, rates, levels, memory = result.tables
    assert len(accuracy.rows) == 2 + 8 + 1
    assert [row["task"] for row in tasks.rows] == ["red", "blue", "grey"]
    assert [row["chosen"] for row in rates.rows] == ["×"] * 4
    assert len(levels.rows) == 2
    assert [row["tasks"] for row in memory.rows] == [2, 2, 3, 3]
    assert {finding.system for finding in result.findings} == {"C4"}
    (labels,) = [finding for finding in result.findings if "Labels have no part" in finding.claim]
    assert labels.holds
    assert {row["granularity"] for row in picked(result.rows, part="merges")} == {"static", "task", "layer"}


@slow
def test_the_findings_come_out_of_the_rows_alone(made: Path) -> None:
    result = StudyResult.read(made)
    assert of_adaptation(result.rows) == result.findings
    rates = picked(result.rows, part="rates")
    assert {row["step"] for row in rates} == {0, 2}
    assert all(row["chosen"] for row in rates)
    with (made / "coefficients.csv").open() as file:
        written = [list(line.values()) for line in csv.DictReader(file)]
    named = ("on", "granularity", "images", "seed", "task", "tensor", "coefficient")
    assert [[str(row[name]) for name in named] for row in picked(result.rows, part="coefficients")] == written
    assert {row["step"] for row in picked(result.rows, part="course", seed=0)} == {0, 2}


@slow
def test_memory_is_counted_alike_every_time(many_lab: Path, tmp_path: Path) -> None:
    io = study_io(many_lab, "adaptation", tmp_path, **SMALL)
    options = adaptation.DECLARED.chosen(io)
    one, two = (adaptation.weigh(Laboratory(io).first(2), options, "cart")["peak"] for _ in range(2))
    assert one == two


@slow
def test_the_rate_is_chosen_without_test(many_lab: Path, tmp_path: Path) -> None:
    """The rule reads validation alone: with the test split away it chooses the same, and the best comes first."""
    inputs = Laboratory(study_io(many_lab, "adaptation", tmp_path))
    experts = inputs.run("experts").experts(0)
    found = choose_rate(inputs, experts, replace(PLAN, images="test"), [1e-6, 0.05], 2)
    assert found[0]["accuracy"] >= found[1]["accuracy"]
    assert [set(row["course"]) for row in found] == [{0, 2, 3}] * 2
    assert not any(split == "test" for split, _ in inputs._examples)


@slow
def test_a_recipe_replays_the_adapted_merge(made: Path, many_lab: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(many_lab)
    folder = made / "recipes/cart_layer_test"
    recipe = load_recipe(folder / "recipe.yaml")
    (_, paths) = recipe.data[0]
    assert all(path.startswith("outputs/studies/adaptation/recipes/cart_layer_test/") for _, path in paths)
    here = tuple((name, str(folder / Path(path).name)) for name, path in paths)
    replayed = merge(recipe.model_copy(update={"data": (("coefficients", here),)}), out=tmp_path / "out.safetensors")
    io = study_io(many_lab, "adaptation", tmp_path / "scratch", **SMALL)
    inputs, options = Laboratory(io), adaptation.DECLARED.chosen(io)
    found = adaptation.start(inputs, options, 0)
    row = adaptation.measure(inputs, options, Variant("cart", "layer", "test"), found, 0.02)
    with open_checkpoint(replayed.path) as state:
        assert inputs.accuracy(dict(state), "test") == row["test"]
    lines = (made / "coefficients.csv").read_text().splitlines()
    learned = row["coefficients"]["red"]
    name, value = max(learned.items(), key=lambda item: abs(item[1] - row["init"]))
    assert f"cart,layer,test,0,red,{name},{value}" in lines
    assert value != row["init"]


@slow
def test_labels_play_no_part(many_lab: Path, tmp_path: Path) -> None:
    """Other labels, the same bits; and images that labels could be told from are the only ones that count."""
    inputs = Laboratory(study_io(many_lab, "adaptation", tmp_path))
    experts = inputs.run("experts").experts(0)
    one = adapt(inputs, experts, PLAN)
    wrong = {key: replace(found, labels=2 - found.labels) for key, found in inputs._examples.items()}
    inputs._examples.update(wrong)
    two = adapt(inputs, experts, PLAN)
    assert one.learned == two.learned
    assert all(torch.equal(one.state[name], two.state[name]) for name in one.state)
    other = adapt(inputs, experts, replace(PLAN, images="validation"))
    assert other.learned != one.learned


@slow
def test_adaptation_needs_images(many_lab: Path, tmp_path: Path) -> None:
    inputs = Laboratory(study_io(many_lab, "adaptation", tmp_path))
    found = inputs.examples("test")["red"]
    inputs._examples["test", "red"] = Subset.first(found, 0)
    with pytest.raises(MergeflowError, match="needs examples of every task: task 'red' has none"):
        adapt(inputs, inputs.run("experts").experts(0), PLAN)
    with pytest.raises(MergeflowError, match="rank_ratio"):
        adapt(inputs, {}, replace(PLAN, rank_ratio=1.5))


def test_findings_follow_the_numbers() -> None:
    def rows(gain: float) -> list[dict[str, Any]]:
        made_up = {("task", "task_vectors"): 0.7, ("layer", "task_vectors"): 0.78, ("task", "cart"): 0.8}
        return [
            {**vars(v), "seed": seed, "test": {"a": made_up.get((v.granularity, v.on), 0.9) + gain}}
            for v in Variant.all()
            for seed in range(3)
        ]

    static = {"task_vectors": {"test": {"a": 0.69}}, "cart": {"test": {"a": 0.75}}, "cart_tuned": {"test": {"a": 0.79}}}
    starts = [{"seed": n, **static} for n in range(3)]
    memory = [{"tasks": t, "on": on, "peak": 100 + t, "model": 50} for t in (8, 20) for on in ("task_vectors", "cart")]
    learned = {"coefficients": {"a": {"w": 0.3}}, "losses": [1.0, 0.9]}
    blind = {"runs": {labels: learned | {"accuracy": {"a": 0.9}} for labels in ("true", "moved")}}
    assert all(finding.holds is True for finding in findings(rows(0), starts, memory, blind))
    blind["runs"]["moved"] = blind["runs"]["moved"] | {"losses": [1.0, 0.8]}
    worse = findings(rows(-0.3), starts, [row | {"peak": 50 * row["tasks"]} for row in memory], blind)
    assert [finding.holds for finding in worse] == [False] * 6 + [True, True, True, False, False]


def verdicts(
    start: float = 0.0,
    tuned: float = 0.0,
    layer: float = 0.0,
    cart: float = 0.0,
    grown: float = 0.0,
    moved: tuple[float, float] = (0.3, 1.0),
) -> list[bool | None]:
    """Return the verdicts where all is as good as all, but for what these points of accuracy (the models of memory on
    CART; the coefficient and the loss with other labels) change."""
    more = {"layer": layer, "cart": cart}
    rows = [
        {**vars(v), "seed": n, "test": {"a": (80 + more.get(v.granularity, 0) + more.get(v.on, 0)) / 100}}
        for v in Variant.all()
        for n in range(3)
    ]
    levels = {"task_vectors": start, "cart": start, "cart_tuned": tuned}
    starts = [{"seed": n, **{on: {"test": {"a": (80 + at) / 100}} for on, at in levels.items()}} for n in range(3)]
    memory: list[dict[str, Any]] = [
        {"tasks": t, "on": on, "peak": 100 + 50 * (more_of if t == 20 else 0), "model": 50}
        for t in (20, 8)
        for on, more_of in (("task_vectors", 0), ("cart", grown))
    ]
    labels = {
        name: {"coefficients": {"a": {"w": value}}, "losses": [loss], "accuracy": {"a": 0.8}}
        for name, (value, loss) in {"true": (0.3, 1.0), "moved": moved}.items()
    }
    return [finding.holds for finding in findings(rows, starts, memory, {"runs": labels})]


def test_every_margin_is_the_one_that_is_written() -> None:
    assert verdicts() == [True] * 11
    assert verdicts(start=0.19)[:4] == [True] * 4
    assert verdicts(start=0.21) == [False] * 4 + [True] * 7
    assert verdicts(tuned=0.19)[4:6] == [True] * 2
    assert verdicts(tuned=0.21) == [True] * 4 + [False] * 2 + [True] * 5
    assert verdicts(tuned=-0.01)[8] is False
    assert verdicts(layer=-0.19)[6] is True
    assert verdicts(layer=-0.21)[6] is False
    assert verdicts(cart=-0.01)[7] is False
    assert [verdicts(grown=grown)[10] for grown in (0.49, 0.51)] == [True, False]
    assert [verdicts(moved=moved)[9] for moved in ((0.3, 1.1), (0.4, 1.0))] == [False, False]


def test_a_rate_at_an_end_of_those_tried_is_told() -> None:
    tried = [{"lr": rate} for rate in (0.01, 0.003, 0.03)]
    own = {"on": "cart", "granularity": "layer"}
    assert "0.03 (CART, per layer)" in _rate_note([own | {"lr": 0.03}], tried)
    assert "0.003 (CART, per layer)" in _rate_note([own | {"lr": 0.003}], tried)
    assert "lies inside those tried, 0.003 to 0.03" in _rate_note([own | {"lr": 0.01}], tried)
