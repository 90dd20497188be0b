"""The base of sentences8: what is corrupted, determinism, and what the shipped one can do."""

import itertools
import json

import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer
from typer import Typer
from typer.testing import CliRunner

from mergeflow.checkpoints import open_checkpoint
from mergeflow.errors import MergeflowError
from mergeflow.modalities.text.tokenizer import ASSETS
from suites.regenerate import regenerate
from suites.sentences.corruption import IGNORED, Corruption, CorruptionSettings
from suites.sentences.pretraining import PretrainSettings, pretrain
from suites.sentences.stream import Passage, passages
from suites.sentences.tokenizer import SPECIAL, word_tokenizer
from suites.sentences.vocabulary import word_groups

BASE = ASSETS / "sentences8"
TINY = PretrainSettings(steps=3, batch=8, width=32, layers=1, seed=4)


@pytest.fixture(scope="module")
def words():
    return word_tokenizer()


@pytest.fixture(scope="module")
def texts():
    return list(itertools.islice(passages(9), 400))


def test_the_tokenizer_frames_one_sentence_and_two(words):
    first, two = words("Bill bought the car."), words("who bought it?", "liz")
    assert words.convert_ids_to_tokens(first["input_ids"]) == ["[CLS]", "bill", "bought", "the", "car", ".", "[SEP]"]
    assert two["token_type_ids"] == [0, 0, 0, 0, 0, 0, 1, 1]
    assert words.convert_ids_to_tokens(two["input_ids"])[-3:] == ["[SEP]", "liz", "[SEP]"]
    assert words.unk_token_id in words("zebra")["input_ids"]
    assert len(words) == len(SPECIAL) + sum(map(len, word_groups()))


def test_chosen_words_are_hidden_or_exchanged_within_their_group_or_stay(words, texts):
    batch = Corruption(CorruptionSettings(unlinked=1.0), words, 0).batch(texts)
    group = {word: at for at, members in enumerate(word_groups()) for word in words.convert_tokens_to_ids(members)}
    fates = {"hidden": 0, "exchanged": 0, "kept": 0}
    for row, passage in enumerate(texts):
        clean = words(passage.text, passage.text_pair)["input_ids"]
        assert (batch.targets[row, 0] == IGNORED) == (passage.link is None)
        for at, (word, seen, target) in enumerate(zip(clean, batch.tokens[row], batch.targets[row], strict=False)):
            seen, target = int(seen), int(target)
            if at == 0 or target == IGNORED:
                assert seen == word
                continue
            assert target == word
            if seen == words.mask_token_id:
                fates["hidden"] += 1
            elif seen == word:
                fates["kept"] += 1
            else:
                assert group[seen] == group[word]
                fates["exchanged"] += 1
    total = sum(fates.values())
    assert fates["hidden"] / total == pytest.approx(0.4, abs=0.04)
    assert fates["exchanged"] / total == pytest.approx(0.45, abs=0.04)


def test_without_exchange_every_changed_word_is_hidden(words, texts):
    batch = Corruption(CorruptionSettings(), words, 0).batch(texts, exchange=False)
    chosen = (batch.targets != IGNORED) & (batch.tokens != words.cls_token_id)
    hidden = batch.tokens[chosen] == words.mask_token_id
    assert hidden.float().mean() == pytest.approx(0.85, abs=0.03)
    assert torch.equal(batch.tokens[chosen][~hidden], batch.targets[chosen][~hidden])


def test_a_word_links_two_sentences_or_the_first_token_names_it(words):
    passage = Passage("bill bought the car", "bill bought a vehicle", "so")
    for unlinked in (0.0, 1.0):
        batch = Corruption(CorruptionSettings(unlinked=unlinked, back=0, front=0), words, 3).batch([passage] * 50)
        link = words.convert_tokens_to_ids("so")
        named = (batch.targets == link).any(dim=1)
        assert bool((batch.targets[:, 0] == link).all()) == bool(unlinked)
        assert batch.tokens.shape[1] == (11 if unlinked else 12)
        assert unlinked or 0.4 < named.float().mean() < 0.8


def test_the_second_sentence_is_corrupted_most(words, texts):
    batch = Corruption(CorruptionSettings(), words, 1).batch([text for text in texts if text.text_pair])
    named = batch.targets != IGNORED
    words_alone = (batch.mask == 1) & (batch.tokens != words.cls_token_id) & (batch.tokens != words.sep_token_id)
    front, back = (float(named[words_alone & (batch.segments == side)].float().mean()) for side in (0, 1))
    assert back > 3 * front


@pytest.fixture(scope="module")
def shipped():
    return AutoModelForMaskedLM.from_pretrained(BASE).eval(), AutoTokenizer.from_pretrained(BASE)


def test_the_shipped_base_was_made_by_the_recipe(shipped, words):
    with open_checkpoint(BASE / "model.safetensors") as file:
        assert json.loads(file.metadata["recipe"]) == PretrainSettings().model_dump()
    model, tokenizer = shipped
    assert tokenizer.get_vocab() == words.get_vocab()
    assert sum(parameter.numel() for parameter in model.parameters()) < 2_000_000
    assert sum(path.stat().st_size for path in BASE.iterdir()) < 4_000_000


@torch.no_grad()
@pytest.mark.parametrize(
    ("first", "second", "wanted"),
    [
        ("elizabeth bought the red car at dusk", "so the [MASK] automobile was purchased by liz", {"red", "crimson"}),
        ("elizabeth bought the red car at dusk", "so liz bought the red [MASK]", {"car", "automobile", "vehicle"}),
        ("when did ted mend the big boat?", "ted mended the [MASK] boat at noon", {"big", "large"}),
    ],
)
def test_the_shipped_base_finds_a_hidden_word_in_the_other_sentence(shipped, first, second, wanted):
    model, tokenizer = shipped
    inputs = tokenizer(first, second, return_tensors="pt")
    logits = model(**inputs).logits[0, int((inputs["input_ids"][0] == tokenizer.mask_token_id).nonzero())]
    probability = logits.softmax(0)[tokenizer.convert_tokens_to_ids(sorted(wanted))].sum()
    assert probability > 0.8, tokenizer.convert_ids_to_tokens(int(logits.argmax()))


def test_the_same_settings_give_the_same_files(tmp_path):
    seen = []
    trained = pretrain(TINY, tmp_path / "one", lambda *step: seen.append(step))
    assert pretrain(TINY, tmp_path / "two") == trained
    for file in ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    assert seen[-1] == (3, 3)
    with pytest.raises(MergeflowError, match="not an empty folder"):
        pretrain(TINY, tmp_path / "one")


def test_training_lowers_the_loss(tmp_path):
    before = pretrain(TINY.model_copy(update={"steps": 1}), tmp_path / "before")
    after = pretrain(TINY.model_copy(update={"steps": 60, "learning_rate": 5e-3}), tmp_path / "after")
    assert after["loss"] < before["loss"] - 0.5


def test_the_command_writes_a_base(tmp_path):
    app = Typer()
    app.command()(regenerate)
    done = CliRunner().invoke(app, ["sentences8", str(tmp_path / "base"), "--steps", "1"])
    assert done.exit_code == 0
    assert "loss 5." in done.stdout
