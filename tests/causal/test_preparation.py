"""How texts become tokens: pieces, blocks, questions, tokenizers that begin texts, and sources."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from mergeflow.commands.texts import read_texts
from mergeflow.data.address import open_source
from mergeflow.data.prepare import prepare_task
from mergeflow.data.task import Example
from mergeflow.errors import MergeflowError
from mergeflow.modalities.causal.modality import PackedText, Questions, cut, open_examples, stream
from mergeflow.modalities.causal.preparation import SOURCES, TRANSFORMS, causal_decoding, open_folder, pieces
from mergeflow.modalities.causal.tokenizer import CausalTokenizer
from mergeflow.modalities.preparing import find_preparation

END = 9


@given(st.text(alphabet="ab é\n😀", max_size=80), st.integers(4, 40))
def test_pieces_are_the_text_and_small(text: str, limit: int) -> None:
    parts = list(pieces(text, limit))
    assert "".join(parts) == text
    assert all(0 < len(piece.encode()) <= limit for piece in parts)


def test_pieces_end_before_white_space() -> None:
    parts = list(pieces("one two  three\nfour " * 40, 16))
    assert all(piece[0].isspace() and not piece[-1].isspace() for piece in parts[1:-1])
    assert list(pieces("x" * 9, 4)) == ["xxxx", "xxxx", "x"]


@settings(max_examples=60)
@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=5), min_size=1, max_size=6), st.data())
def test_an_end_token_marks_a_texts_end_or_a_missing_piece(documents: list[list[int]], data: st.DataObject) -> None:
    """Each document is a list of its pieces' lengths; some pieces went to another split."""
    rows = [(d, p, length) for d, lengths in enumerate(documents) for p, length in enumerate(lengths)]
    chosen = [row for row in rows if data.draw(st.booleans())] or rows
    ids = np.full((len(chosen), 6), END)
    for at, (d, p, length) in enumerate(chosen):
        ids[at, :length] = [100 * d + 10 * p + k for k in range(length)]
    tokens = stream(ids, *(np.array([row[k] for row in chosen]) for k in (2, 0, 1))).tolist()
    expected: list[int] = []
    for at, (d, p, length) in enumerate(chosen):
        expected += [100 * d + 10 * p + k for k in range(length)]
        if at + 1 == len(chosen) or chosen[at + 1][:2] != (d, p + 1):
            expected.append(END)
    assert tokens == expected


@given(st.integers(2, 200), st.integers(3, 20))
def test_every_token_is_in_one_block_once(count: int, block: int) -> None:
    blocks = cut(np.arange(1, count + 1), block, 0)
    whole = [row[:length] for row, length in zip(blocks.ids, blocks.lengths, strict=True)]
    assert torch.cat(whole).tolist() == list(range(1, count + 1))
    assert all(2 <= length <= block for length in blocks.lengths.tolist())
    assert all(int(row[length:].sum()) == 0 for row, length in zip(blocks.ids, blocks.lengths, strict=True))
    assert (blocks.lengths[:-2] == block).all()


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


def question(number: int, answer: Any, choices: Sequence[str] = ("a cat", "a dog")) -> dict[str, Any]:
    return {"ctx": f"number {number} is", "endings": list(choices), "label": answer}


def write(folder: Path, **splits: list[dict[str, Any]]) -> Path:
    folder.mkdir()
    for split, rows in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize("secret", ["", "-1", -1, None])
def test_a_test_split_whose_answers_are_secret_is_not_used(secret: Any, tmp_path: Path) -> None:
    """As HellaSwag has it: the answers of test are empty, and validation stands for it."""
    questions = [question(k, str(k % 2)) for k in range(4)]
    write(tmp_path / "rows", train=questions, validation=questions[:2], test=[question(k, secret) for k in range(3)])
    raw = SOURCES["jsonl"]("swag", "rows", 0, tmp_path)
    assert raw.ignored_splits == ("test (its answers are secret), for which validation stands",)
    assert {split: len(list(examples())) for split, examples in raw.splits.items()} == {"train": 4, "test": 2}
    write(tmp_path / "two", train=questions, test=[question(9, secret)])
    raw = SOURCES["jsonl"]("swag", "two", 0, tmp_path)
    assert (raw.ignored_splits, list(raw.splits)) == (("test (its answers are secret)",), ["train"])


def test_one_missing_answer_is_still_refused(tmp_path: Path) -> None:
    write(tmp_path / "rows", train=[question(0, "0")], test=[question(1, "1"), question(2, "")])
    with pytest.raises(MergeflowError, match="label is ''; expected the number of a choice"):
        list(SOURCES["jsonl"]("swag", "rows", 0, tmp_path).splits["test"]())


def test_choices_that_look_like_dates_are_texts(tmp_path: Path) -> None:
    dates = ["1914-07-28", "1939-09-01"]
    write(tmp_path / "rows", train=[question(0, 1, dates), question(1, 0, dates)])
    first = next(iter(SOURCES["jsonl"]("wars", "rows", 0, tmp_path).splits["train"]()))
    assert first.content["choices"] == dates


def test_a_folder_reads_endings_in_capitals_and_tells_what_it_does_not_read(tmp_path: Path) -> None:
    (tmp_path / "one.TXT").write_text("some words")
    (tmp_path / "two.Md").write_text("other words")
    for about in ("LICENSE", "metadata.json"):
        (tmp_path / about).write_text("about them")
    source = open_folder("task", str(tmp_path), 0, tmp_path)
    assert len(list(source.splits["train"]())) == 2
    (tmp_path / "three.rst").write_text("more words")
    with pytest.raises(MergeflowError, match=r"holds 'three.rst', which is not read as text"):
        open_folder("task", str(tmp_path), 0, tmp_path)


def test_blank_rows_of_texts_are_left_out_and_counted(tmp_path: Path) -> None:
    """As WikiText has them between paragraphs."""
    write(tmp_path / "rows", train=[{"text": text} for text in ("", " = A title = \n", " \n", "Words.\n")])
    split = SOURCES["jsonl"]("wiki", "rows", 0, tmp_path).splits["train"]
    with pytest.warns(UserWarning, match=r"train.jsonl: 2 of 4 rows are blank and left out"):
        examples = list(split())
    assert [example.content["text"] for example in examples] == [" = A title = \n", "Words.\n"]
    assert [example.content["document"] for example in examples] == [0, 1]
