"""Study `unlearning`, small: one book of ten chapters, few epochs; its rows are enough to judge and draw it."""

from pathlib import Path

import pandas as pd
import pytest
import torch

from mergeflow.modalities.causal.tokenizer import load_tokenizer
from studies.lab.rows import select
from studies.lab.study import ROWS, Result, read_rows
from studies.unlearning import BOOKS, FORGOTTEN, Corpus, Options, chosen, drop, rise, smallest_scale
from suites.books.pretraining import PretrainSettings, pretrain
from tests.card import card
from tests.studies.small_lab import ROOT, find_study, run_result, study_io

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
def result(base: str, tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run_result(ROOT, "unlearning", tmp_path_factory.mktemp("unlearning"), base=base, **SMALL)


@pytest.mark.nightly  # 20 processor seconds
def test_the_small_study_runs_and_subtracting_the_books_vector_makes_it_less_likely(result: Result) -> None:
    assert {finding.system for finding in result.findings} == {"P18", "P19", "P21"}
    assert (len(result.tables), len(result.notes), set(result.draw())) == (4, 3, {"perplexity"})
    for way in ("full", "adapters"):
        assert (rise(result.rows, way, FORGOTTEN, -1.0) > 0).all()
    shown = ["book", "test", "recall"]
    start, before = select(result.rows, way="full", scale=0.0), select(result.rows, way="together")
    assert start[shown].to_dict("list").__repr__() == before[shown].to_dict("list").__repr__()


@pytest.mark.nightly
def test_on_the_card_of_tests_it_leaves_nothing_on_the_processor(base: str, tmp_path: Path) -> None:
    """Figures are not compared: on that card a head tied to the embedding is a weight of its own once moved."""
    with card():
        io = study_io(ROOT, "unlearning", tmp_path, base=base, **SMALL)
        with io.holds:
            find_study("unlearning").run(io)
    assert len(read_rows(io.scratch / "building" / io.stage.outs[0] / ROWS)) > 0


def test_chapters_of_one_split_are_used_and_general_text_with_them() -> None:
    corpus = Corpus(0, Options.model_validate(SMALL), load_tokenizer("books", Path()), torch.device("cpu"))
    train, test = (corpus.texts("one", [FORGOTTEN], split) for split in ("train", "test"))
    assert int(train.blocks.lengths.sum()) == pytest.approx(8 / 0.8 * int(test.blocks.lengths.sum()), rel=0.15)
    assert set(corpus.facts) == set(BOOKS)


def row(seed: int, way: str, scale: float | None, value: float, recall: float = 0.0) -> dict[str, object]:
    figures = {"validation": value, "test": value, "recall": recall}
    return {"seed": seed, "way": way, "scale": scale, "book": FORGOTTEN, **figures}


def test_the_scale_nearest_to_zero_that_forgets_enough_is_chosen() -> None:
    made = [row(seed, "without", None, 2.0) for seed in (0, 1)]
    made += [
        row(0, "full", scale, value, recall) for scale, value, recall in [(0.0, 1, 40), (-0.5, 2, 30), (-1.0, 3, 10)]
    ]
    made += [
        row(1, "full", scale, value, recall) for scale, value, recall in [(0.0, 1, 0), (-0.5, 1.5, 0), (-1.0, 1.9, 2)]
    ]
    rows = pd.DataFrame(made)
    assert chosen(rows, "full", -1.0) == {0: -0.5, 1: -1.0}
    assert list(drop(rows, "full", FORGOTTEN, -1.0)) == [75.0, 0.0], "what was not recalled cannot be lost"
    assert list(rise(rows, "full", FORGOTTEN, -1.0)) == pytest.approx([2.0, 0.9])


def test_the_scale_is_searched_between_the_grid_s_neighbours() -> None:
    grid = [0.0, -0.5, -1.0]
    (found,) = smallest_scale(lambda scale: scale <= -0.63, grid, 0.02)
    assert -0.65 <= found <= -0.63
    assert smallest_scale(lambda scale: scale <= -0.5, grid, 0.5) == [-0.5]
    assert smallest_scale(lambda scale: True, grid, 0.02) == [0.0]
    assert smallest_scale(lambda scale: False, grid, 0.02) == []
