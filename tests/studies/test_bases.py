"""Study `bases` with bases of a few steps and its rule on made-up rows."""

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
import yaml
from studies.old.judging.merging import of_bases
from studies.old.judging.notes import NOTES

from mergeflow.errors import MergeflowError
from mergeflow.modalities.vision.models import POCKET, load_clip
from studies.lab.inputs import Laboratory
from studies.old.papers.bases import arms, study
from studies.old.papers.bases.arms import Arm, make_base
from studies.old.papers.bases.ranks import rank_share
from studies.old.papers.bases.results import METHODS, NAMES, ends_note, findings, rule_note
from studies.old.results import StudyResult
from studies.old.rows import Row, picked
from tasks.project.graph import load_graph
from tasks.project.stage import StageIO
from tasks.project.study_graph import write_study_graph
from tests.card import card
from tests.studies.small_lab import ROOT, make_lab, open_lab

CHOSEN = yaml.safe_load((ROOT / "studies/params.yaml").read_text())["studies"]["bases"]
DRAWN = CHOSEN["arms"]["style"] | {"pretrained": None, "images": 150}
SMALL: dict[str, Any] = CHOSEN | {
    "seeds": [0],
    "arms": {"confused": CHOSEN["arms"]["confused"], "style": DRAWN},
    "passes": 300,
    "steps": 16,
    "batch_size": 12,
    "rounds": 2,
    "ratios": [0.08, 1],
}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, monkeymodule: pytest.MonkeyPatch) -> Path:
    """A project of three tasks with this study alone; the grids of scales are short."""
    root = make_lab(tmp_path_factory.mktemp("bases") / "project", {})
    (root / "dvc.yaml").symlink_to(ROOT / "dvc.yaml")
    (root / "studies/params.yaml").write_text(
        yaml.safe_dump({"seeds": [0], "runs": {"plain": {}}, "studies": {"bases": SMALL}})
    )
    write_study_graph(root)
    short = {method: ([0.5, 1.0], 1.0) for method in study.SCALES}
    monkeymodule.setattr(study, "SCALES", short)
    return root


def opened(root: Path, scratch: Path) -> StageIO:
    stage = next(stage for stage in load_graph(root, studies=True).values() if stage.name == "bases")
    return open_lab(root, stage, scratch, {})


@pytest.fixture(scope="module")
def io(lab: Path, tmp_path_factory: pytest.TempPathFactory) -> StageIO:
    return opened(lab, tmp_path_factory.mktemp("scratch"))


@pytest.fixture(scope="module")
def monkeymodule():  # type: ignore[no-untyped-def]
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.mark.slow
def test_the_study_measures_every_base_from_its_pretraining_on(io: StageIO, monkeypatch: pytest.MonkeyPatch) -> None:
    with io.holds:
        study.run(io)
    result = StudyResult.read(io.scratch / "building/outputs/studies/bases")
    accuracy, over_rank, ranks, chosen = result.tables
    columns = ["confused names", "right names, another style"]
    assert [list(table.rows[0])[1:] for table in result.tables] == [columns] * 4
    assert [row["model"] for row in accuracy.rows] == [*NAMES.values(), "experts less average"]
    assert [row["k / r"] for row in over_rank.rows] == ["0.08", "1"]
    assert len(ranks.rows) == 3
    assert "rank_ratio" in str(chosen.rows[2][columns[0]])
    assert {(row["base"], row["model"]) for row in result.rows} >= {(arm, "mima") for arm in SMALL["arms"]}
    options = study.DECLARED.chosen(io)
    assert of_bases(result.rows, options) == result.findings, "the rows have all that the findings rest on"
    assert NOTES["bases"](result.rows, options) == result.notes
    assert {row["model"] for row in picked(result.rows, part="choice")} >= {"ties", "cart", "cart 0.08"}
    held = picked(result.rows, part="rank", base="confused")
    assert f"{100 * fmean(row['kept'] for row in held):.1f}" == ranks.rows[0][columns[0]]
    rows = picked(result.rows, part="model", base="confused")
    by_model = {name: [row["accuracy"] for row in rows if row["model"] == name] for name in ("cart 1", "average")}
    assert by_model["cart 1"] == by_model["average"], "at full rank CART is the average"
    assert [finding.holds for finding in result.findings] == [None] * 5, "one seed decides nothing"
    means = {row["model"]: float(str(row["confused names"])) for row in accuracy.rows}
    assert means["experts"] > means["average"] + 10, "experts know their tasks better than their average does"
    assert means["average"] > means["zero-shot"] + 5, "the average learnt something of what the base does not know"
    assert means["experts less average"] == pytest.approx(means["experts"] - means["average"], abs=0.11)

    def never(*args: Any) -> Any:
        raise AssertionError("trained twice")

    for module, name in ((arms, "pretrain"), (study, "merged_in_rounds")):
        monkeypatch.setattr(module, name, never)
    arm = Arm.model_validate(SMALL["arms"]["style"])
    kept = make_base(arm, "pocket8", 300, io.scratch / "bases/style/base.safetensors", 1, lambda *told: None)
    start = load_clip(POCKET, None)
    moved = {
        name: float((kept.model.state_dict()[name] - value).abs().max())
        for name, value in start.model.state_dict().items()
    }
    assert moved["visual.proj"] > 1e-4, "the pre-training moved the random start, and was kept"


@pytest.mark.nightly
def test_the_study_on_a_card(lab: Path, tmp_path: Path) -> None:
    with card():
        io = opened(lab, tmp_path)
        with io.holds:
            study.run(io)
    assert (tmp_path / "building/outputs/studies/bases/result.json").exists()


def test_what_chooses_cannot_open_test(io: StageIO) -> None:
    blind, clip = Laboratory(io).blind(), load_clip(POCKET, "pocket8")
    assert study.opened(blind, clip, "validation").keys() == {"red", "blue", "grey"}
    with pytest.raises(MergeflowError, match="where it must not"):
        study.opened(blind, clip, "test")


def test_the_rank_of_a_permutation_of_class_means_is_told() -> None:
    """Exchanging two of C means changes one direction; a cycle of k changes k − 1."""
    means = torch.eye(8, dtype=torch.float64)
    for order, rank in (([1, 0, 2, 3, 4, 5, 6, 7], 1), ([1, 2, 3, 0, 4, 5, 6, 7], 3)):
        squares = torch.linalg.svdvals(means[order] - means).square()
        assert rank_share(squares, 1 - 1e-9) == rank / 8


def made_up(arm: str, levels: dict[str, float]) -> list[Row]:
    known = dict.fromkeys(NAMES, 0.7) | levels
    test = {model: {"a": value} for model, value in known.items()}
    test |= {"cart 0.08": test["cart"], "cart 0.64": test["average"], "cart 1": test["average"]}
    return [{"arm": arm, "seed": seed, "test": test, "args": {}, "ranks": {}} for seed in range(3)]


def test_the_rule_follows_the_numbers() -> None:
    labels = {"confused": "confused names", "style": "another style"}
    field = {"individual": 0.95, "average": 0.7, "task_arithmetic": 0.75, "cart": 0.85, "tsv": 0.86}
    flat = field | {"average": 0.85, "task_arithmetic": 0.86, "cart": 0.855, "tsv": 0.87}
    good = [*made_up("confused", field), *made_up("style", field)]
    assert [finding.holds for finding in findings(good, labels, ["style"])] == [True] * 5
    assert "should be: another style" in rule_note(good, labels, ["style"])
    bad = [*made_up("confused", field), *made_up("style", flat)]
    assert [finding.holds for finding in findings(bad, labels, ["style"])] == [False, False, True, False, False]
    assert "no base without a planted error" in rule_note(bad, labels, ["style"])
    assert "confused names 10.0 ± 0.0; another style -0.5 ± 0.0" in rule_note(bad, labels, ["style"])


def test_a_choice_at_an_end_is_told() -> None:
    args = {model: {"scale": 1.0} for model in METHODS} | {"cart": {"rank_ratio": 0.08, "scale": 6.0}}
    rows = [row | {"args": args} for row in made_up("confused", {})]
    rows[0]["args"] = args | {"cart": {"rank_ratio": 0.08, "scale": 1.0}}
    tried = {model: {"scale": [0.5, 1.0, 6.0]} for model in METHODS} | {
        "cart": {"scale": [0.5, 1.0, 6.0], "rank_ratio": [0.04, 0.08, 1]}
    }
    (told,) = ends_note(rows, {"confused": "confused names"}, tried)
    assert told.endswith("may do better: CART's scale with confused names (2 of 3 seeds).")
    assert ends_note(rows[:1], {"confused": "confused names"}, tried) == []
