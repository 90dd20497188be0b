"""Study `unlearning`, small: one book of ten chapters, few epochs; its rows are enough to judge and draw it."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from mergeflow.modalities.causal.tokenizer import load_tokenizer
from studies.lab.claims import UNTESTED
from studies.lab.rows import select
from studies.lab.study import ROWS, Result, read_rows
from studies.unlearning import SUITE, Corpus, Options, chosen, drop, rise, smallest_scale
from suites.books.pretraining import PretrainSettings, pretrain
from tests.card import card
from tests.causal.small_project import tale
from tests.studies.small_lab import ROOT, find_study, run_result, study_io

SMALL: dict[str, Any] = {
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
    assert (len(result.tables), len(result.notes), set(result.draw())) == (3, 0, {"perplexity", "recall"})
    for way in ("full", "adapters"):
        assert (rise(result.rows, way, SUITE.forgotten, -1.0) > 0).all()
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
    train, test = (corpus.texts("one", [SUITE.forgotten], split) for split in ("train", "test"))
    assert int(train.blocks.lengths.sum()) == pytest.approx(8 / 0.8 * int(test.blocks.lengths.sum()), rel=0.15)
    assert set(corpus.facts) == set(SUITE)


def row(seed: int, way: str, scale: float | None, value: float, recall: float = 0.0) -> dict[str, object]:
    figures = {"validation": value, "test": value, "recall": recall}
    return {"seed": seed, "way": way, "scale": scale, "book": SUITE.forgotten, **figures}


def test_the_scale_nearest_to_zero_that_forgets_enough_is_chosen() -> None:
    made = [row(seed, "without", None, 2.0) for seed in (0, 1)]
    made += [
        row(0, "full", scale, value, recall) for scale, value, recall in [(0.0, 1, 40), (-0.5, 2, 30), (-1.0, 3, 10)]
    ]
    made += [
        row(1, "full", scale, value, recall) for scale, value, recall in [(0.0, 1, 0), (-0.5, 1.5, 0), (-1.0, 1.9, 2)]
    ]
    rows = pd.DataFrame(made)
    assert chosen(rows, "full", SUITE.forgotten, -1.0) == {0: -0.5, 1: -1.0}
    assert list(drop(rows, "full", SUITE.forgotten, -1.0)) == [75.0, 0.0], "what was not recalled cannot be lost"
    assert list(rise(rows, "full", SUITE.forgotten, -1.0)) == pytest.approx([2.0, 0.9])


def test_the_scale_is_searched_between_the_grid_s_neighbours() -> None:
    grid = [0.0, -0.5, -1.0]
    (smallest,) = smallest_scale(lambda scale: scale <= -0.63, grid, 0.02)
    assert -0.65 <= smallest <= -0.63
    assert smallest_scale(lambda scale: scale <= -0.5, grid, 0.5) == [-0.5]
    assert smallest_scale(lambda scale: True, grid, 0.02) == [0.0]
    assert smallest_scale(lambda scale: False, grid, 0.02) == []


@pytest.mark.slow
def test_books_of_ones_own_are_forgotten_as_the_generated_ones_are(base: str, tmp_path: Path) -> None:
    for number, name in enumerate(("mine", "kin", "other", "rest")):
        for seed, split in enumerate(("train", "validation", "test")):
            (tmp_path / name / split).mkdir(parents=True)
            for at in range(3):
                (tmp_path / name / split / f"{at}.txt").write_text(tale("harp", 150, 10 * number + 3 * seed + at))
    books = {name: f"folder:{tmp_path / name}" for name in ("mine", "kin", "other")}
    folders = {"books": books, "general": f"folder:{tmp_path / 'rest'}"}
    options = SMALL | {"folders": folders, "chapters": 2, "together": 2, "alone": 2}
    result = run_result(ROOT, "unlearning", tmp_path / "study", base=base, **options)
    assert set(result.rows.book) == {*books, "general"}
    assert "facts" not in result.rows
    assert (rise(result.rows, "full", "mine", -1.0) > 0).all()
    assert {finding.verdict for finding in result.findings if "Rouge-L" in finding.claim} <= {UNTESTED}, (
        "nothing is learnt by heart in two epochs"
    )
    assert set(result.draw()) == {"perplexity", "recall"}
    assert result.tables
    corpus = Corpus(0, Options.model_validate(options), load_tokenizer("books", Path()), torch.device("cpu"))
    train = corpus.texts("one", ["mine"], "train")
    with_general = [(tmp_path / "mine/train" / f"{at}.txt").read_text() for at in (0, 1)]
    with_general.append((tmp_path / "rest/train/0.txt").read_text())
    tokens = sum(len(corpus.tokenizer.encode(text)) + 1 for text in with_general)
    assert int(train.blocks.lengths.sum()) == tokens
