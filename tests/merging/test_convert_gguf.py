"""GGUF files become plain weights: those of a model that llama.cpp's own package wrote."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from mergeflow.checkpoints import read_state
from mergeflow.errors import MergeflowError
from mergeflow.merging.files.convert import convert

gguf = pytest.importorskip("gguf")

HEADS, KEYS, WIDTH, LAYERS = 4, 2, 64, 2
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def llama(vocabulary: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=WIDTH, intermediate_size=128, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=KEYS, vocab_size=vocabulary, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """Order the rows of queries or keys as GGUF has them: the halves of each rotary pair side by side."""
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)


def write_gguf(path: Path, model: LlamaForCausalLM, kind: Any, without: str = "-") -> None:
    """Write a model with a byte-level tokenizer, its matrices quantised to a kind, without tensors of some names."""
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "on"]
    words += [f"<unused{at}>" for at in range(model.config.vocab_size - len(words))]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(128)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEYS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([1] * len(words))
    writer.add_token_merges(["o n"])
    writer.add_eos_token_id(0)
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    names |= {
        f"model.layers.{at}.{ours}": f"blk.{at}.{theirs}" for at in range(LAYERS) for ours, theirs in NAMES.items()
    }
    for name, weight in model.state_dict().items():
        stem = name.removesuffix(".weight")
        if without in name:
            continue
        if stem.endswith(("q_proj", "k_proj")):
            weight = interleaved(weight, HEADS if stem.endswith("q_proj") else KEYS)
        values = weight.numpy().astype(np.float32)
        if values.ndim == 2 and kind != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(f"{names[stem]}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{names[stem]}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "step"), [("F32", 0.0), ("Q8_0", 1 / 127), ("Q4_0", 1 / 8)])
def test_a_gguf_file_becomes_the_weights_that_it_was_made_of(kind: str, step: float, tmp_path: Path) -> None:
    model = llama(300)
    write_gguf(tmp_path / "model.gguf", model, getattr(gguf.GGMLQuantizationType, kind))
    made = convert(tmp_path / "model.gguf", tmp_path / "plain")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.gguf", "plain"]
    state, wanted = read_state(tmp_path / "plain"), model.state_dict()
    assert state.keys() == wanted.keys()
    for name, weight in wanted.items():
        largest = weight.abs().amax(-1, keepdim=True) if weight.ndim > 1 else weight.abs()
        assert ((state[name] - weight).abs() <= step * largest + 1e-12).all(), name
    assert "model.gguf" in (tmp_path / "plain/mergeflow.json").read_text()
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "plain")
    ids = torch.arange(8)[None]
    assert torch.allclose(loaded(ids).logits, model(ids).logits, atol=1e-5 if kind == "F32" else 0.5)
    assert AutoTokenizer.from_pretrained(tmp_path / "plain").encode("boat")
    assert convert(tmp_path / "model.gguf", tmp_path / "one.safetensors", "bfloat16").tensors == made.tensors


@pytest.mark.slow
def test_a_gguf_file_cut_short_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", llama(300), gguf.GGMLQuantizationType.F32)
    whole = (tmp_path / "model.gguf").read_bytes()
    for size in (4, 100, len(whole) - 1000):
        (tmp_path / "model.gguf").write_bytes(whole[:size])
        with pytest.raises(MergeflowError, match=r"model\.gguf': transformers cannot read this GGUF file"):
            convert(tmp_path / "model.gguf", tmp_path / "plain")
        assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


@pytest.mark.slow
def test_a_gguf_file_without_all_tensors_is_refused_since_transformers_draws_them(tmp_path: Path) -> None:
    """The first part of a split file, say."""
    write_gguf(tmp_path / "model-00001-of-00002.gguf", llama(300), gguf.GGMLQuantizationType.F32, "layers.1.mlp")
    with pytest.raises(MergeflowError, match=r"lacks 3 of the model's tensors.*layers\.1\.mlp.*gguf-split --merge"):
        convert(tmp_path / "model-00001-of-00002.gguf", tmp_path / "plain")
    assert not (tmp_path / "plain").exists()
