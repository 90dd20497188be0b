"""Encoders of transformers by configuration: any class of `AutoModel`, computed in groups of like length."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer, FNetConfig, FNetModel, T5Config, T5EncoderModel

from mergeflow.errors import MergeflowError
from mergeflow.modalities.text.modality import Tokens, build_encoder, check_length, groups, load_encoder, stack, watched
from mergeflow.modalities.text.tokenizer import load_tokenizer
from tests.text.small_project import make_base

CPU = torch.device("cpu")
TEXTS = [("the red cat is nice", None), ("the dog", "is very very very very very very very sad"), ("emu", "red")] * 2


@pytest.mark.parametrize("kind", ["roberta", "bert", "deberta-v2", "modernbert", "distilbert", "electra"])
def test_a_class_of_transformers_gives_what_it_gives_by_itself(kind: str, tmp_path: Path) -> None:
    place = make_base(tmp_path / kind, kind)
    tokenizer = load_tokenizer(kind, tmp_path, 36)
    encoder, config = load_encoder(kind, tmp_path, "mean")
    encoded = [tokenizer.encode(*texts) for texts in TEXTS]
    segments = [sentence.segments for sentence in encoded] if tokenizer.segments else None
    features = encoder(stack([sentence.ids for sentence in encoded], segments, tokenizer.pad)[:]).detach()
    plain, reference = AutoModel.from_pretrained(place).eval(), AutoTokenizer.from_pretrained(place)
    for row, (text, pair) in enumerate(TEXTS):
        batch = reference(text, pair, return_tensors="pt") if pair else reference(text, return_tensors="pt")
        expected = plain(**batch).last_hidden_state.detach().mean(dim=1)[0]
        torch.testing.assert_close(features[row], expected, atol=2e-5, rtol=1e-4)
    again = build_encoder(config, "first")
    assert again.state_dict().keys() == encoder.state_dict().keys()
    assert not again.training


def test_an_encoder_without_a_mask_or_with_a_decoder_is_refused(tmp_path: Path) -> None:
    config = FNetConfig(vocab_size=30, hidden_size=16, num_hidden_layers=1, intermediate_size=16)
    FNetModel(config).save_pretrained(tmp_path / "fnet")
    with pytest.raises(MergeflowError, match=r"'fnet' is a fnet, whose features .* takes no attention mask"):
        load_encoder("fnet", tmp_path, "mean")
    small = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2, "vocab_size": 40}
    T5EncoderModel(T5Config(**small)).save_pretrained(tmp_path / "t5")  # type: ignore[arg-type]
    with pytest.raises(MergeflowError, match=r"'t5' is a t5 with a decoder; expected an encoder"):
        load_encoder("t5", tmp_path, "mean")


def tokens_of(lengths: list[int], width: int) -> Tokens:
    chance = np.random.default_rng(0)
    ids = np.where(np.arange(width) < np.array(lengths)[:, None], chance.integers(4, 19, (len(lengths), width)), 1)
    return Tokens(ids.astype(np.int32), np.array(lengths), None, CPU)


def test_groups_change_nothing_but_the_padding(base: Path) -> None:
    encoder, _ = load_encoder(base.name, base.parent, "mean")
    lengths = [int(length) for length in np.random.default_rng(1).integers(2, 37, 150)]
    tokens, rows = tokens_of(lengths, 36), torch.randperm(150, generator=torch.Generator().manual_seed(0))
    batch = tokens[rows]
    assert len(batch.groups) > 1
    computed = sum(group.ids.numel() for group in batch.groups)
    assert sum(lengths) < computed < 1.3 * sum(lengths) < 0.75 * 36 * 150
    features = encoder(batch)
    for place in (0, 40, 149):
        alone = encoder(tokens[rows[place : place + 1]])
        torch.testing.assert_close(features[place : place + 1], alone, atol=1e-5, rtol=1e-4)


def test_every_example_is_in_one_group() -> None:
    lengths = np.random.default_rng(2).integers(1, 500, 300)
    parts = list(groups(lengths))
    assert sorted(np.concatenate(parts)) == list(range(300))
    assert all((lengths[part].max() - lengths[part]).sum() <= 64 for part in parts)


def test_layers_are_watched_in_the_order_of_the_rows(base: Path) -> None:
    encoder, _ = load_encoder(base.name, base.parent, "mean")
    tokens = tokens_of([36, 3, 36, 5, 4, 36] * 8, 36)
    assert len(tokens[:].groups) > 1
    last = "roberta.encoder.layer.1"
    features = watched(encoder, tokens[:], [last, ""])
    torch.testing.assert_close(features[last], encoder(tokens[:]))  # the last layer's tokens are what is pooled
    torch.testing.assert_close(features[""], encoder(tokens[:]))


def test_texts_that_are_too_long_are_refused_by_positions(base: Path) -> None:
    encoder, _ = load_encoder(base.name, base.parent, "mean")
    check_length(encoder, 1, 38)
    with pytest.raises(MergeflowError, match=r"data.max_length is 64, .*max_position_embeddings: 40"):
        check_length(encoder, 1, 64)


def test_what_is_no_base_is_refused(base: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for place, message in (
        ("robrta", "unknown base 'robrta'"),
        ("inputs/gone", "there is no folder 'inputs/gone'"),
        ("empty", "the model of 'empty' cannot be read"),
    ):
        with pytest.raises(MergeflowError, match=message):
            load_encoder(place, tmp_path, "mean")
    with pytest.raises(MergeflowError, match="the tokenizer of 'empty' cannot be read"):
        load_tokenizer("empty", tmp_path, 16)


def test_a_base_that_lacks_weights_is_refused(base: Path, tmp_path: Path) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(base, tmp_path / "half")
    state = load_file(folder / "model.safetensors")
    shortened = {name: value for name, value in state.items() if "layer.1.attention" not in name}
    save_file(shortened, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(MergeflowError, match=r"lacks the weights encoder\.layer\.1\.attention.* and 7 more"):
        load_encoder("half", tmp_path, "mean")
