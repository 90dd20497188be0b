"""The base of the corpus books: made the same again, loaded by transformers, and how it writes books it never saw."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mergeflow.checkpoints import open_checkpoint
from mergeflow.data.address import open_source
from mergeflow.data.prepare import prepare_task
from mergeflow.errors import MergeflowError
from mergeflow.modalities.causal.modality import PackedText, cut, perplexity
from mergeflow.modalities.causal.model import load_model
from mergeflow.modalities.causal.preparation import SOURCES, TRANSFORMS, decoding
from mergeflow.modalities.causal.sections import DataSection
from mergeflow.modalities.causal.tokenizer import ASSETS, load_tokenizer
from suites.books.book import TITLES, find_book, general
from suites.books.pretraining import PretrainSettings, batches, make_tokenizer, pretrain

TINY = PretrainSettings(steps=2, batch=4, block=32, width=48, layers=1, vocabulary=300, seed=4)


@pytest.mark.slow
def test_the_same_settings_make_the_same_base(tmp_path: Path) -> None:
    first, second = (pretrain(TINY, tmp_path / name) for name in ("one", "two"))
    assert first == second
    assert (tmp_path / "one/tokenizer.json").read_bytes() == (tmp_path / "two/tokenizer.json").read_bytes()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "one").config.vocab_size == 300
    with pytest.raises(MergeflowError, match="is there already and is not an empty folder"):
        pretrain(TINY, tmp_path / "one")


def test_the_shipped_base_has_its_recipe_and_its_tokenizer() -> None:
    with open_checkpoint(ASSETS / "books/model.safetensors") as state:
        recipe = PretrainSettings.model_validate_json(state.metadata["recipe"])
    assert recipe == PretrainSettings()
    words = AutoTokenizer.from_pretrained(ASSETS / "books")
    assert words.backend_tokenizer.get_vocab() == make_tokenizer(recipe.vocabulary).backend_tokenizer.get_vocab()
    text = "Zebra? Naïve – 20 %\n\tof it."
    assert words.decode(words(text)["input_ids"]) == text
    assert sum(path.stat().st_size for path in (ASSETS / "books").iterdir()) < 4e6


@pytest.mark.slow
def test_batches_are_texts_one_after_the_other() -> None:
    words = make_tokenizer(300)
    tokens = torch.cat(list(batches(TINY, words))).flatten()
    texts = (words(general(number, part="pre-training"))["input_ids"] for number in range(6))
    wanted = [token for text in texts for token in (*text, 299)]
    assert tokens.tolist() == wanted[: len(tokens)]


def test_every_book_has_sixty_thousand_tokens() -> None:
    tokenizer = load_tokenizer("books", Path())
    for title in TITLES:
        assert sum(len(tokenizer.encode(chapter)) for chapter in find_book(title).chapters()) >= 60_000


def test_the_base_writes_like_other_authors_but_not_like_these() -> None:
    model, _ = load_model("books", Path())
    tokenizer = load_tokenizer("books", Path())

    def surprise(texts: list[str]) -> float:
        ids = [token for text in texts for token in (*tokenizer.encode(text), tokenizer.end)]
        return perplexity(model, PackedText("tales", cut(np.array(ids), 128, tokenizer.end), torch.device("cpu")))

    other = surprise([general(number, part="general/test") for number in range(30)])
    assert other < 7
    assert surprise([find_book("harbour").chapter(9)]) > 1.2 * other


@pytest.mark.slow
def test_a_book_is_prepared_as_a_task(tmp_path: Path) -> None:
    raw = open_source("tale", "suite:books/orchard", SOURCES, TRANSFORMS)
    manifest = prepare_task(raw, tmp_path, decoding(DataSection(tokenizer="books"), tmp_path))
    assert manifest["splits"]["train"]["count"] > 8 * manifest["splits"]["test"]["count"] > 8 * 6 * 6
    assert manifest["splits"]["validation"]["carved_from"] is None
    with pytest.raises(MergeflowError, match="unknown suite of causal models 'bocks'"):
        open_source("tale", "suite:bocks", SOURCES, TRANSFORMS)
    with pytest.raises(MergeflowError, match="task of suite books 'tale'"):
        open_source("tale", "suite:books", SOURCES, TRANSFORMS)
