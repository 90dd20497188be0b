"""Causal models of transformers by configuration: what they compute, what they are weights of, what they refuse."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM

from mergeflow.checkpoints import read_state
from mergeflow.errors import MergeflowError
from mergeflow.merging import make_recipe, merge
from mergeflow.modalities.catalog import MODALITIES, SECTION
from mergeflow.modalities.causal.generation import continued
from mergeflow.modalities.causal.modality import PackedText, Questions, cut, perplexity, total_loss
from mergeflow.modalities.causal.model import build_model, check_vocabulary, draw_model, load_model
from mergeflow.modalities.causal.sections import Generation, ModelSection
from mergeflow.modalities.causal.tokenizer import CausalTokenizer, load_tokenizer
from mergeflow.modalities.served import SERVED, Loaded
from mergeflow.training.linearised import LinearisedModel
from mergeflow.training.lora import LoraModel
from mergeflow.training.settings import LoraSettings
from tests.causal.small_project import FAMILIES, config_of, make_base, tale

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("family") / request.param, request.param)


def texts_of(place: Path, words: int = 40) -> PackedText:
    tokenizer = load_tokenizer(place.name, place.parent)
    ids = torch.tensor(tokenizer.encode(tale("ship", words, 0))[: 5 * 32 + 9])
    return PackedText("ships", cut(ids.numpy(), 32, tokenizer.end), CPU)


def test_loss_and_perplexity_are_those_of_transformers(family: Path) -> None:
    model, _ = load_model(family.name, family.parent)
    texts, plain = texts_of(family), AutoModelForCausalLM.from_pretrained(family).eval()
    whole = torch.arange(5)
    ids = texts.blocks.ids[whole].long()
    assert torch.equal(texts.loss(model, whole), plain(input_ids=ids, labels=ids).loss)
    last = texts.blocks.ids[5:, :9].long()
    torch.testing.assert_close(texts.loss(model, torch.tensor([5])), plain(input_ids=last, labels=last).loss)
    with torch.no_grad():
        total = 31 * 5 * plain(input_ids=ids, labels=ids).loss + 8 * plain(input_ids=last, labels=last).loss
    assert perplexity(model, texts, 4) == pytest.approx(float((total / (31 * 5 + 8)).exp()), rel=1e-6)


def test_a_model_whose_answers_are_nan_predicts_no_token(family: Path) -> None:
    """NaN counts as the largest logit, and so the token 0 as the likeliest."""
    model, _ = load_model(family.name, family.parent)
    blocks = texts_of(family).blocks
    texts = replace(texts_of(family), blocks=blocks._replace(ids=torch.zeros_like(blocks.ids)))
    model.load({name: torch.full_like(value, torch.nan) for name, value in model.state().items()})
    assert texts.scores(model, torch.arange(5)).tolist() == [0.0] * 5


def test_behind_a_start_token_every_token_of_a_block_is_predicted(family: Path) -> None:
    model, _ = load_model(family.name, family.parent)
    texts, plain = replace(texts_of(family), start=9), AutoModelForCausalLM.from_pretrained(family).eval()
    ids = torch.cat([torch.full((5, 1), 9), texts.blocks.ids[:5].long()], dim=1)
    whole, rest = torch.arange(5), torch.cat([torch.tensor([[9]]), texts.blocks.ids[5:, :9].long()], dim=1)
    with torch.no_grad():
        of_blocks, of_rest = (plain(input_ids=part, labels=part).loss for part in (ids, rest))
        torch.testing.assert_close(texts.loss(model, whole), of_blocks)
        assert texts.log_p(model, torch.tensor([5])).shape == (9, 257)
        right = plain(input_ids=rest).logits[0, :-1].argmax(dim=1) == rest[0, 1:]
        assert float(texts.scores(model, torch.tensor([5]))) == pytest.approx(float(right.float().mean()))
        tokens = [int(token) for row in (*ids[:, 1:], rest[0, 1:]) for token in row.flatten()]
        losses = []
        for place, token in enumerate(tokens):  # windows of 32 from 0 in steps of 8: each sees 24 tokens before, or all
            first = max(0, -(-(place + 1 - 32) // 8) * 8)
            seen = torch.tensor([[9, *tokens[first : place + 1]]])
            losses.append(-float(plain(input_ids=seen).logits[0, -2].log_softmax(0)[token]))
    total, count = total_loss(model, texts, 4)
    assert (count, total) == (169, pytest.approx(float(160 * of_blocks + 9 * of_rest), rel=1e-6))
    total, count = total_loss(model, texts, 4, stride=8)
    assert (count, total) == (169, pytest.approx(sum(losses), rel=1e-5))


def test_questions_are_asked_behind_the_start_token(base: Path) -> None:
    (model, _), plain = load_model(base.name, base.parent), AutoModelForCausalLM.from_pretrained(base).eval()
    ids = np.array([[5, 6, 7, 8, 11, 0, 0], [7, 5, 6, 6, 8, 9, 0]], np.int32)
    ends = np.array([[2, 3, 5], [1, 4, 6]], np.int32)
    asked = Questions("riddles", ids, ends, torch.tensor([1, 0]), 0, CPU, start=9)
    expected = torch.empty(2, 2)
    for row, choice in np.ndindex(2, 2):
        question = ids[row, : ends[row, 0]].tolist()
        answer = ids[row, ends[row, choice] : ends[row, choice + 1]].tolist()
        with torch.no_grad():
            logits = plain(input_ids=torch.tensor([[9, *question, *answer]])).logits[0].log_softmax(1)
        first = len(question)
        expected[row, choice] = sum(logits[first + place, token] for place, token in enumerate(answer))
    with torch.no_grad():
        torch.testing.assert_close(asked.likelihoods(model, torch.arange(2)), expected)
        right = -(expected[0, 1] + expected[1, 0]) / 5
        torch.testing.assert_close(asked.loss(model, torch.arange(2)), right)


@pytest.mark.parametrize("stride", [1, 7, 16, 31])
def test_with_a_stride_every_token_is_predicted_once_as_transformers_predicts_it(family: Path, stride: int) -> None:
    """Windows from 0 in steps of the stride; of each the labels of tokens that were predicted before are −100."""
    model, _ = load_model(family.name, family.parent)
    texts, plain = texts_of(family), AutoModelForCausalLM.from_pretrained(family).eval()
    ids = torch.cat([row[:length] for row, length in zip(*texts.blocks, strict=True)]).long()
    total, count, predicted_to = 0.0, 0, 1
    for start in range(0, len(ids), stride):
        window = ids[None, start : start + 32]
        labels = window.clone()
        labels[0, : predicted_to - start] = -100
        new = min(start + 32, len(ids)) - predicted_to
        with torch.no_grad():
            total, count = total + new * float(plain(input_ids=window, labels=labels).loss), count + new
        predicted_to += new
        if predicted_to == len(ids):
            break
    loss, predicted = total_loss(model, texts, 4, stride)
    assert predicted == count == len(ids) - 1
    assert loss == pytest.approx(total, rel=1e-5)
    assert perplexity(model, texts, 3, stride) == pytest.approx(math.exp(total / count), rel=1e-5)


def test_of_a_text_shorter_than_a_block_a_stride_changes_nothing(base: Path) -> None:
    model, _ = load_model(base.name, base.parent)
    texts = PackedText("ships", cut(texts_of(base).blocks.ids[0, :20].numpy(), 32, 0), CPU)
    assert total_loss(model, texts, stride=5) == total_loss(model, texts)
    for stride in (0, 32):
        with pytest.raises(MergeflowError, match=rf"the stride is {stride}; expected 1 to 31"):
            perplexity(model, texts, stride=stride)


def test_generation_is_that_of_transformers(family: Path) -> None:
    model, _ = load_model(family.name, family.parent)
    plain, tokenizer = AutoModelForCausalLM.from_pretrained(family).eval(), load_tokenizer(family.name, family.parent)
    prompts = [tokenizer.encode("the ship"), tokenizer.encode("a")]
    options: dict[str, Any] = {"max_new_tokens": 12, "pad_token_id": tokenizer.end, "eos_token_id": tokenizer.end}
    for how, asked in [
        (Generation(tokens=12), {"do_sample": False}),
        (Generation(tokens=12, temperature=0.8, seed=3), {"do_sample": True, "temperature": 0.8, "top_k": 0}),
    ]:
        continuations = continued(model.module, prompts, how, tokenizer.end)
        assert continuations == continued(model.module, prompts, how, tokenizer.end)
        for prompt, new in zip(prompts, continuations, strict=True):
            torch.manual_seed(how.seed)
            ids = torch.tensor([prompt])
            expected = plain.generate(ids, attention_mask=torch.ones_like(ids), **options, **asked)
            assert new == [token for token in expected[0, len(prompt) :].tolist() if token != tokenizer.end]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_model_whose_answers_are_nan_continues_nothing(family: Path, temperature: float) -> None:
    """It wrote the token 0, and such a merge was registered as champion."""
    model, _ = load_model(family.name, family.parent)
    model.load({name: torch.full_like(value, torch.nan) for name, value in model.state().items()})
    with pytest.raises(MergeflowError, match="the model's answer is no finite number"):
        continued(model.module, [[1, 2]], Generation(tokens=3, temperature=temperature), 0)


def test_a_served_text_begins_as_its_tokenizer_begins_texts_and_is_never_cut(base: Path) -> None:
    (model, _), tokenizer = load_model(base.name, base.parent), load_tokenizer(base.name, base.parent)
    backend = Tokenizer.from_str(tokenizer.content)
    first = backend.id_to_token(9)
    backend.post_processor = TemplateProcessing(single=f"{first} $A", special_tokens=[(first, 9)])
    tokenizer = CausalTokenizer(backend.to_str(), tokenizer.end, 9)
    section = ModelSection(modality="causal", pretrained="base", generation=Generation(tokens=6)).model_dump_json()
    record, heads = {**tokenizer.record, SECTION: section}, {"ships": None}
    loaded = Loaded(MODALITIES.get("causal"), model, heads, {"ships": ()}, {}, record, CPU)
    plain, room = AutoModelForCausalLM.from_pretrained(base).eval(), model.module.whole.config.max_position_embeddings
    for text in (*"abcdefgh", "the ship", "s" * (room - 4)):
        asked = tokenizer.encode(text)
        ids = torch.tensor([[9, *asked]])
        new = plain.generate(ids, max_new_tokens=min(6, room - ids.shape[1]), do_sample=False, eos_token_id=0)
        expected = tokenizer.decode_further(asked, [token for token in new[0, ids.shape[1] :].tolist() if token])
        assert SERVED.get("causal").answer(loaded, {"text": [text], "task": ["ships"]}) == {"continuation": [expected]}
    with pytest.raises(MergeflowError, match=f"row 0: its text has {room} tokens; the model takes at most"):
        SERVED.get("causal").answer(loaded, {"text": ["s" * room], "task": ["ships"]})


def test_a_tied_weight_is_one_weight_and_every_state_fits_again(family: Path) -> None:
    model, config = load_model(family.name, family.parent)
    state = model.state()
    tied = model.module.whole.config.tie_word_embeddings
    assert ("lm_head.weight" not in state) is tied
    again = build_model(config)
    again.load({name: value + 1 for name, value in state.items()})
    assert all(torch.equal(value, state[name] + 1) for name, value in again.state().items())
    if tied:
        embeddings = again.module.whole.get_input_embeddings().weight
        assert torch.equal(again.module.whole.get_output_embeddings().weight, embeddings)


def test_scores_are_shares_of_right_tokens_and_log_p_has_a_line_for_each(base: Path) -> None:
    model, _ = load_model(base.name, base.parent)
    texts = texts_of(base)
    rows = torch.tensor([5, 0])
    scores, lines = texts.scores(model, rows), texts.log_p(model, rows)
    assert lines.shape == (8 + 31, 257)
    wanted = torch.cat([texts.blocks.ids[5, 1:9], texts.blocks.ids[0, 1:]]).long()
    right = (lines.argmax(dim=1) == wanted).double()
    torch.testing.assert_close(scores.double(), torch.stack([right[:8].mean(), right[8:].mean()]))
    torch.testing.assert_close(-lines[torch.arange(39), wanted].mean(), texts.loss(model, rows))
    assert texts.features(model, rows, ["model.layers.1"])["model.layers.1"].shape == (2, 32, 32)


def learn(network: Any, texts: PackedText, steps: int) -> None:
    optimiser = torch.optim.Adam([p for p in network.module.parameters() if p.requires_grad], lr=0.01)
    for _ in range(steps):
        optimiser.zero_grad()
        texts.loss(network, torch.arange(4)).backward()
        optimiser.step()


def test_adapters_and_tangents_begin_as_the_base_and_learn(base: Path) -> None:
    texts, rows = texts_of(base), torch.arange(4)
    model, _ = load_model(base.name, base.parent)
    before = texts.loss(model, rows).item()
    adapted = LoraModel.of(model, LoraSettings(rank=4, alpha=8, targets=["q_proj", "down_proj"]))
    tangent = LinearisedModel.of(load_model(base.name, base.parent)[0])
    for network in (adapted, tangent):
        assert texts.loss(network, rows).item() == pytest.approx(before, abs=1e-5)
        learn(network, texts, 12)
        assert texts.loss(network, rows).item() < before - 0.05
    assert adapted.state().keys() == tangent.state().keys() == load_model(base.name, base.parent)[0].state().keys()
    plain = load_model(base.name, base.parent)[0]
    plain.load(adapted.state())
    assert texts.loss(plain, rows).item() == pytest.approx(texts.loss(adapted, rows).item(), abs=1e-5)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers and PEFT
def test_adapters_of_gpt2_whose_matrices_store_inputs_first_are_those_of_peft(tmp_path: Path) -> None:
    from peft import PeftModel

    make_base(tmp_path / "gpt2", "gpt2")
    texts, rows = texts_of(tmp_path / "gpt2"), torch.arange(4)
    model, _ = load_model("gpt2", tmp_path)
    before = {name: value.clone() for name, value in model.state().items()}
    adapted = LoraModel.of(model, LoraSettings(rank=4, alpha=8, targets=["c_attn", "c_proj", "c_fc"]), seed=3)
    learn(adapted, texts, 6)
    state, loss = adapted.state(), texts.loss(adapted, rows)
    changed = {name.split(".")[-2] for name in state if not torch.equal(state[name], before[name])}
    assert changed == {"c_attn", "c_proj", "c_fc"}
    adapted.module.save(tmp_path / "adapter")
    adapter_config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert adapter_config["fan_in_fan_out"] is True
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "gpt2")
    plain = PeftModel.from_pretrained(whole, tmp_path / "adapter").eval()
    ids = texts.blocks.ids[rows].long()
    torch.testing.assert_close(plain(input_ids=ids, labels=ids).loss, loss, rtol=1e-5, atol=1e-6)
    # As an expert of a recipe the adapter is the model that was trained.
    recipe = {"method": "task_arithmetic", "args": {"scale": 1.0}, "base": str(tmp_path / "gpt2")}
    recipe |= {"experts": {"one": str(tmp_path / "adapter")}, "out": str(tmp_path / "merged.safetensors")}
    merged = read_state(merge(make_recipe(recipe)).path)
    for name, value in merged.items():
        torch.testing.assert_close(value, state[name])


def test_adapters_of_layers_that_are_stored_in_both_ways_are_refused(tmp_path: Path) -> None:
    make_base(tmp_path / "gpt2", "gpt2")
    model, _ = load_model("gpt2", tmp_path)
    settings = LoraSettings(rank=4, alpha=8, targets=["c_attn", "lm_head"])
    with pytest.raises(MergeflowError, match=r"c_attn.weight is stored \[inputs, outputs\] and lm_head.weight the"):
        LoraModel.of(model, settings)


def test_weights_are_drawn_from_a_configuration_and_a_seed() -> None:
    (first, config), (second, _), (other, _) = (draw_model(config_of("qwen2"), seed, 300) for seed in (1, 1, 2))
    assert '"vocab_size": 300' in config
    weight = "model.embed_tokens.weight"
    assert torch.equal(first.state()[weight], second.state()[weight])
    assert not torch.equal(first.state()[weight], other.state()[weight])


@pytest.mark.slow
def test_configurations_of_no_causal_model_are_refused() -> None:
    with pytest.raises(MergeflowError, match=r"model.config says no model_type; expected one such as gpt2, llama"):
        draw_model({"hidden_size": 8}, 0, 300)
    for values in ({"model_type": "bertt"}, {"model_type": "t5"}, {**config_of("llama"), "num_attention_heads": 3}):
        with pytest.raises(MergeflowError, match=r"model.config does not describe a causal model"):
            draw_model(values, 0, 300)


def test_another_vocabulary_or_too_long_a_block_is_refused(base: Path) -> None:
    model, _ = load_model(base.name, base.parent)
    check_vocabulary(model, 257, 64)
    with pytest.raises(MergeflowError, match=r"has 300 tokens and the model 257: it is the tokenizer of another base"):
        check_vocabulary(model, 300, 64)
    with pytest.raises(MergeflowError, match=r"data.block is 128, .*max_position_embeddings: 64"):
        check_vocabulary(model, 257, 128)


def test_an_encoder_is_not_a_causal_model(tmp_path: Path) -> None:
    from tests.text.small_project import make_base as make_encoder

    make_encoder(tmp_path / "encoder", "distilbert")
    with pytest.raises(MergeflowError, match=r"the causal model of 'encoder' cannot be read"):
        load_model("encoder", tmp_path)
