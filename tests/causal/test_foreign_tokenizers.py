"""Tokenizers that put something before a text, and questions that end in a blank: tokens are those of the whole."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from mergeflow.commands.texts import read_texts
from mergeflow.data.address import open_source
from mergeflow.data.prepare import prepare_task
from mergeflow.data.task import Example
from mergeflow.modalities.causal.modality import PackedText, Questions, open_examples
from mergeflow.modalities.causal.preparation import TRANSFORMS, causal_decoding
from mergeflow.modalities.causal.tokenizer import CausalTokenizer
from mergeflow.modalities.preparing import find_preparation


def of_llama() -> Tokenizer:
    """Return a tokenizer as Llama 2, Mistral and Phi-3 have it: every text gets a blank in front."""
    letters = "▁abcdefghijklmnopqrstuvwxyz\n.é"
    words = ["▁▁", "▁o", "▁on", "▁one", "▁t", "▁tw", "▁two"]
    merges = [("▁", "▁"), ("▁", "o"), ("▁o", "n"), ("▁on", "e"), ("▁", "t"), ("▁t", "w"), ("▁tw", "o")]
    vocabulary = {token: number for number, token in enumerate(["</s>", *letters, *words])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return tokenizer


def of_gpt2() -> Tokenizer:
    """Return a tokenizer that keeps a blank with the word behind it."""
    letters = ["</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġy", "Ġn"]
    vocabulary = {token: number for number, token in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("Ġ", "y"), ("Ġ", "n")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def of_qwen() -> Tokenizer:
    """Return a tokenizer as Qwen and Llama 3 have it: line breaks belong to the punctuation before them."""
    letters = ["</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "on", "one", "wo", "ewo", ".Ċ"]
    merges = [("o", "n"), ("on", "e"), ("w", "o"), ("e", "wo"), (".", "Ċ")]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(letters)}, merges))
    words = pre_tokenizers.Split(Regex(r" ?[a-z]+| ?[^\sa-z]+[\r\n]*|\s+"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.mark.parametrize("make", [of_llama, of_gpt2, of_qwen])
@pytest.mark.parametrize("between", [" ", "\n", ".\n", "", "é"])
def test_the_tokens_of_a_long_text_are_those_of_the_whole(tmp_path: Path, make, between: str) -> None:  # type: ignore[no-untyped-def]
    text = between.join(["one two" if between else "onewo"] * 5000)
    (tmp_path / "text.txt").write_text(text)
    tokenizer = CausalTokenizer(make().to_str(), 0)
    blocks = read_texts("folder:text.txt", None, tokenizer, 32, torch.device("cpu"), tmp_path).blocks
    inside = torch.arange(blocks.ids.shape[1]) < blocks.lengths[:, None]
    assert blocks.ids[inside].tolist() == [*tokenizer.encode(text), 0]


def test_prepared_texts_and_questions_begin_as_their_tokenizer_begins_texts(tmp_path: Path) -> None:
    """Llama and Gemma do; Gemma's loss is useless without its start token."""
    backend = of_gpt2()
    backend.post_processor = TemplateProcessing(single="Ġy $A", special_tokens=[("Ġy", backend.token_to_id("Ġy"))])
    tokenizer = CausalTokenizer(backend.to_str(), 0, backend.token_to_id("Ġy"))
    (tmp_path / "text.txt").write_text("one two " * 400)
    rows = [json.dumps({"question": f"is {n} so", "choices": ["yes", "no"], "answer": n % 2}) for n in range(60)]
    (tmp_path / "asked.jsonl").write_text("\n".join(rows))
    for place in ("folder:text.txt", "jsonl:asked.jsonl"):
        raw = open_source("task", place, find_preparation("causal").sources, TRANSFORMS, root=tmp_path)
        prepare_task(raw, tmp_path / "task", causal_decoding(tokenizer, 32))
        examples = open_examples("task", tmp_path / "task", "train", None, torch.device("cpu"))
        assert isinstance(examples, PackedText | Questions)
        assert examples.start == tokenizer.prefix is not None
        shutil.rmtree(tmp_path / "task")


@pytest.mark.parametrize("question", ["is it so: ", "is it so:", "is it so:\n"])
def test_a_question_and_its_choice_have_the_tokens_of_the_whole(question: str) -> None:
    tokenizer, choices = CausalTokenizer(of_gpt2().to_str(), 0), ["yes", "no"]
    content = {"text": question, "choices": choices, "answer": 0}
    arrays = causal_decoding(tokenizer, 64).decode(Example(content, "here"), "rows").arrays
    asked, ends = int(arrays["ends"][0]), arrays["ends"]
    for number, choice in enumerate(choices):
        ids = np.append(arrays["ids"][:asked], arrays["ids"][ends[number] : ends[number + 1]])
        blank = "" if question[-1].isspace() else " "
        assert ids.tolist() == tokenizer.encode(question + blank + choice)


@pytest.mark.parametrize("make", [of_llama, of_gpt2])
def test_what_goes_on_keeps_its_blank(make) -> None:  # type: ignore[no-untyped-def]
    tokenizer = CausalTokenizer(make().to_str(), 0)
    before = tokenizer.encode("one two")
    assert tokenizer.decode_further(before, tokenizer.encode("one two one")[len(before) :]) == " one"


def test_a_character_that_lies_in_both_parts_is_decoded_alone() -> None:
    tokenizer = CausalTokenizer(of_gpt2().to_str(), 0)
    ids = tokenizer.encode("é no")
    assert tokenizer.decode(ids[:1]) != "é"
    assert tokenizer.decode_further(ids[:1], ids[1:]).endswith(" no")
