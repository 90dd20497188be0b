"""Study `bases` with bases of a few steps."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mergeflow.errors import MergeflowError
from mergeflow.modalities.vision.models import POCKET, load_clip
from studies import bases
from studies.lab import Laboratory
from studies.lab.rows import samples, select
from studies.lab.study import Result, read_rows
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
    short = {method: ([0.5, 1.0], 1.0) for method in bases.SCALES}
    monkeymodule.setattr(bases, "SCALES", short)
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


@pytest.mark.nightly
def test_the_study_measures_every_base_from_its_pretraining_on(io: StageIO, monkeypatch: pytest.MonkeyPatch) -> None:
    with io.holds:
        bases.STUDY.run(io)
    options = bases.STUDY.chosen(io)
    rows = read_rows(io.scratch / "building/outputs/studies/bases/rows.parquet")
    result = Result(bases.STUDY, options, rows)
    accuracy, ranks, chosen = result.tables.values()
    columns = ["confused names", "right names, another style"]
    assert [list(table.columns) for table in result.tables.values()] == [columns] * 3
    assert list(accuracy.index) == [*bases.NAMES.values(), "experts less average"]
    assert list(bases.curve_of(rows, "confused").index) == [0.08, 1]
    assert len(ranks) == 3
    assert "rank_ratio" in chosen.loc["CART", columns[0]]
    full, average = (select(rows, part="model", model=model).accuracy for model in ("cart 1", "average"))
    assert list(full) == list(average), "at full rank CART is the average"
    assert [finding.holds for finding in result.findings] == [None] * 5, "one seed decides nothing"
    assert "no base without a planted error" in result.notes[0]
    means = {model: samples(rows, base="confused", model=model)[0] for model in bases.NAMES}
    assert means["individual"] > means["average"] + 10, "experts know their tasks better than their average does"
    assert means["average"] > means["zero_shot"] + 5, "the average learnt something of what the base does not know"

    def never(*args: Any) -> Any:
        raise AssertionError("trained twice")

    monkeypatch.setattr(bases, "pretrain", never)
    reopened, start = bases.open_base(Laboratory(io), options, "style"), load_clip(POCKET, None)
    moved = {
        name: float((reopened.model.state_dict()[name] - value).abs().max())
        for name, value in start.model.state_dict().items()
    }
    assert moved["visual.proj"] > 1e-4, "the pre-training moved the random start, and was kept"


@pytest.mark.nightly
def test_the_study_on_a_card(lab: Path, tmp_path: Path) -> None:
    with card():
        io = opened(lab, tmp_path)
        with io.holds:
            bases.STUDY.run(io)
    assert (tmp_path / "building/outputs/studies/bases/rows.parquet").exists()


def test_what_chooses_cannot_open_test(io: StageIO) -> None:
    blind, clip = Laboratory(io).blind(), load_clip(POCKET, "pocket8")
    assert bases.opened(blind, clip, "validation").keys() == {"red", "blue", "grey"}
    with pytest.raises(MergeflowError, match="where it must not"):
        bases.opened(blind, clip, "test")


def test_the_rank_of_a_permutation_of_class_means() -> None:
    """Exchanging two of C means changes one direction; a cycle of k changes k − 1."""
    means = torch.eye(8, dtype=torch.float64)
    for order, rank in (([1, 0, 2, 3, 4, 5, 6, 7], 1), ([1, 2, 3, 0, 4, 5, 6, 7], 3)):
        squares = torch.linalg.svdvals(means[order] - means).square()
        assert bases.rank_share(squares, 1 - 1e-9) == rank / 8


def test_a_matrix_counts_by_what_it_changed() -> None:
    """One entry of 3 has rank 1; an identity spreads over 50 directions, of which 8 % are 4 and 90 % are 45."""
    names = [f"transformer.resblocks.0.{part}.weight" for part in ("attn.in_proj", "mlp.c_fc", "ln_1")]
    base = {name: torch.zeros(50, 50) for name in names}
    changes = [torch.diag(torch.eye(50)[0] * 3), torch.eye(50), torch.ones(50, 50)]
    ranks = bases.weight_ranks(base, dict(zip(names, changes, strict=True)))
    assert ranks == pytest.approx({"kept": (9 + 4) / 59, "weights": (9 * 1 / 50 + 50 * 45 / 50) / 59})
