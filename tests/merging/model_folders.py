"""Model folders as transformers and tokenizers write them: tiny, with a tokenizer of their own."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import nn
from transformers import PreTrainedTokenizerFast

# Trainers break ties by chance: each tokenizer is trained once a process, and handed out as a copy.
TEXT = ("the cat sat on the mat", "a merge of models keeps what each has learned", "tokens are rows of a table") * 3
OTHER = ("die Katze saß auf der Matte", "ein Modell aus vielen Modellen", "Tabellen haben Zeilen und Spalten") * 3


def _bpe(text: Sequence[str], size: int = 300) -> Tokenizer:
    """A byte-level BPE tokenizer, as GPT-2, Llama 3 and Qwen have."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(text, trainer)
    return made


def _wordpiece(text: Sequence[str], size: int = 90) -> Tokenizer:
    """A WordPiece tokenizer, as BERT has."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=special, show_progress=False)
    made.train_from_iterator(text, trainer)
    pair = [("[CLS]", made.token_to_id("[CLS]")), ("[SEP]", made.token_to_id("[SEP]"))]
    made.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=pair)
    return made


def _unigram(text: Sequence[str], size: int = 60) -> Tokenizer:
    """A SentencePiece-like Unigram tokenizer, as T5 and XLM-R have."""
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=size, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    made.train_from_iterator(text, trainer)
    return made


_TRAINED = {"BPE": _bpe, "WordPiece": _wordpiece, "Unigram": _unigram}
KINDS = tuple(_TRAINED)


@cache
def _trained(kind: str, text: tuple[str, ...]) -> str:
    return str(_TRAINED[kind](text).to_str())


def tokenizer(kind: str = "BPE", text: tuple[str, ...] = TEXT, *tokens: str) -> Tokenizer:
    """A trained tokenizer, with special tokens added behind its own."""
    made = Tokenizer.from_str(_trained(kind, text))
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    return made


def permuted(made: Tokenizer, order: Sequence[int]) -> Tokenizer:
    """The same tokenizer with the token of row i in row order[i]; `order` counts the model's own tokens."""
    content = json.loads(made.to_str())
    model = content["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {token: order[row] for token, row in model["vocab"].items()}
    else:
        pieces = dict(zip(order, model["vocab"], strict=True))
        model["vocab"] = [pieces[row] for row in range(len(order))]
        model["unk_id"] = order[model["unk_id"]]
    for added in content["added_tokens"]:
        added["id"] = order[added["id"]] if added["id"] < len(order) else added["id"]
    for part in (content["post_processor"] or {}).get("special_tokens", {}).values():
        part["ids"] = [order[row] for row in part["ids"]]
    return Tokenizer.from_str(json.dumps(content))


def llama(rows: int, seed: int, tied: bool = False, **changes: Any) -> nn.Module:
    """A small Llama with so many rows of tokens."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(
        vocab_size=rows, num_key_value_heads=1, tie_word_embeddings=tied, **{**sizes, **changes}
    )
    return transformers.LlamaForCausalLM(config).eval()


def save(folder: Path, model: nn.Module, words: Tokenizer | None = None, **settings: Any) -> Path:
    """Write a model folder as transformers does."""
    model.save_pretrained(folder)
    if words is not None:
        template = settings.pop("chat_template", None)
        made = PreTrainedTokenizerFast(tokenizer_object=words, **settings)
        made.chat_template = template
        made.save_pretrained(folder)
    return folder
