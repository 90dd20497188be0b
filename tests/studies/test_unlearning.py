"""Study `unlearning`, small: one book of ten chapters, few epochs; its rows are enough to judge and draw it."""

from pathlib import Path

import pytest
import torch

from mergeflow.modalities.causal.tokenizer import load_tokenizer
from studies.old.papers.unlearning import study
from studies.old.papers.unlearning.corpus import Corpus
from studies.old.papers.unlearning.figures import figures
from studies.old.papers.unlearning.measuring import smallest_scale
from studies.old.papers.unlearning.options import ALIGNED, BOOKS, FORGOTTEN, Options
from studies.old.papers.unlearning.results import _forgets, chosen, drops, rises, study_result
from studies.old.results import StudyResult
from studies.old.rows import Row
from suites.books.pretraining import PretrainSettings, pretrain
from tasks.plotting.drawing import to_svg
from tests.card import card
from tests.studies.small_lab import ROOT, run_study, study_io

SMALL = {
    "seeds": [0, 1],
    "block": 64,
    "chapters": 10,
    "passages": 4,
    "general": 4,
    "together": 1,
    "alone": 1,
    "rank": 4,
    "scales": [0.0, -1.0],
    "ascent_steps": 2,
    "written": 8,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A base of one layer that was hardly trained."""
    folder = tmp_path_factory.mktemp("bases") / "base"
    pretrain(PretrainSettings(steps=20, batch=8, block=64, width=48, layers=1, vocabulary=600), folder)
    return str(folder)


@pytest.fixture(scope="module")
def folder(base: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_study(ROOT, "unlearning", tmp_path_factory.mktemp("unlearning"), base=base, **SMALL)


@pytest.mark.nightly  # 20 processor seconds
def test_the_small_study_runs_and_its_rows_give_its_result(folder: Path) -> None:
    found = StudyResult.read(folder)
    options = Options.model_validate(SMALL)
    again = study_result(found.rows, options)
    assert (again.findings, again.tables, again.notes) == (found.findings, found.tables, found.notes)
    assert {finding.system for finding in found.findings} == {"P18", "P19", "P21"}
    for name, figure in figures(found.rows, options).items():
        assert to_svg(figure, name) == (folder / f"{name}.svg").read_bytes()


@pytest.mark.nightly
def test_on_the_card_of_tests_it_leaves_nothing_on_the_processor(base: str, tmp_path: Path) -> None:
    """Figures are not compared: on that card a head tied to the embedding is a weight of its own once moved."""
    with card():
        io = study_io(ROOT, "unlearning", tmp_path, base=base, **SMALL)
        with io.holds:
            study.run(io)
    assert len(StudyResult.read(io.scratch / "building" / io.stage.outs[0]).rows) > 0


@pytest.mark.nightly
def test_subtracting_the_books_vector_makes_it_less_likely(folder: Path) -> None:
    rows = StudyResult.read(folder).rows
    for way in ("full", "adapters"):
        assert all(rise > 0 for rise in rises(rows, way, FORGOTTEN, -1.0))
    start = [row for row in rows if row["way"] == "full" and row["scale"] == 0.0]
    before = [row for row in rows if row["way"] == "together"]
    for one, other in zip(start, before, strict=True):
        assert {name: one[name] for name in ("book", "test", "recall")} == {
            name: other[name] for name in ("book", "test", "recall")
        }


def test_chapters_of_one_split_are_used_and_general_text_with_them() -> None:
    corpus = Corpus(0, Options.model_validate(SMALL), load_tokenizer("books", Path()), torch.device("cpu"))
    train, test = (corpus.texts("one", [FORGOTTEN], split) for split in ("train", "test"))
    assert int(train.blocks.lengths.sum()) == pytest.approx(8 / 0.8 * int(test.blocks.lengths.sum()), rel=0.15)
    assert set(corpus.facts) == set(BOOKS)


def row(seed: int, way: str, scale: float | None, value: float, recall: float = 0.0) -> Row:
    figures = {"validation": value, "test": value, "recall": recall}
    return {"seed": seed, "way": way, "scale": scale, "book": FORGOTTEN, **figures}


def test_the_scale_nearest_to_zero_that_forgets_enough_is_chosen() -> None:
    options = Options.model_validate({"seeds": [0, 1], "scales": [0.0, -0.5, -1.0]})
    made = [row(seed, "without", None, 2.0) for seed in (0, 1)]
    made += [
        row(0, "full", scale, value, recall)
        for scale, value, recall in [(0.0, 1.0, 40), (-0.5, 2.0, 30), (-1.0, 3.0, 10)]
    ]
    made += [
        row(1, "full", scale, value, recall)
        for scale, value, recall in [(0.0, 1.0, 40), (-0.5, 1.5, 40), (-1.0, 1.9, 20)]
    ]
    assert chosen(made, "full", options) == {0: -0.5, 1: -1.0}
    assert drops(made, "full", FORGOTTEN, -1.0) == [75.0, 50.0]
    assert rises(made, "full", FORGOTTEN, -1.0) == pytest.approx([2.0, 0.9])


def test_the_scale_is_searched_between_the_grid_s_neighbours() -> None:
    grid = [0.0, -0.5, -1.0]
    (found,) = smallest_scale(lambda scale: scale <= -0.63, grid, 0.02)
    assert -0.65 <= found <= -0.63
    assert smallest_scale(lambda scale: scale <= -0.5, grid, 0.5) == [-0.5]
    assert smallest_scale(lambda scale: True, grid, 0.02) == [0.0]
    assert smallest_scale(lambda scale: False, grid, 0.02) == []


def test_a_scale_between_those_of_the_table_is_chosen_and_stays_out_of_the_table() -> None:
    options = Options.model_validate({"seeds": [0, 1], "scales": [0.0, -1.0]})
    made = [row(seed, "without", None, 2.0) for seed in (0, 1)]
    for seed in (0, 1):
        made += [row(seed, "full", scale, 1 - 2 * scale) for scale in (0.0, -0.5 - seed / 10, -1.0)]
    assert chosen(made, "full", options) == {0: -0.5, 1: -0.6}


@pytest.mark.parametrize(
    ("recall", "verdicts"),
    [
        ({FORGOTTEN: (40, 30, 10), ALIGNED: (40, 30, 20)}, [True, True, True]),
        ({FORGOTTEN: (40, 38, 34), ALIGNED: (40, 38, 36)}, [False, False, True]),  # 15 and 10 % are too little
        ({FORGOTTEN: (40, 5, 10), ALIGNED: (40, 30, 20)}, [True, True, False]),
    ],
)
def test_a_negative_scale_is_held_against_what_the_paper_says_of_rouge(
    recall: dict[str, tuple[float, ...]], verdicts: list[bool]
) -> None:
    scales = [0.0, -0.5, -1.0]
    options = Options.model_validate({"seeds": [0, 1, 2], "scales": scales})
    made = [
        {**row(seed, "full", scale, 1.0, value), "book": book}
        for seed in options.seeds
        for book, values in recall.items()
        for scale, value in zip(scales, values, strict=True)
    ]
    assert [finding.holds for finding in _forgets(made, "full", options)] == verdicts
