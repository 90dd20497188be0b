"""Pre-training of the base of the corpus `books`, on a CPU: a small Llama learns to write like ever new authors.

`docs/data.md` has measurements and limits.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from pydantic import Field
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from mergeflow.modalities.modules import own_generator
from suites.books.book import general
from suites.language_bases import Recipe, check_empty, train_base
from suites.pretraining import SHARDS, Progress

END = "<end>"
_POOL = 64  # texts that are written and packed at once
_VOCABULARY_TEXTS = 3000


class PretrainSettings(Recipe):
    """The recipe of the base.

    Args:
        seed: of weights; the texts are those of the corpus that ships, of a part of its own.
        batch: blocks a step.
        block: tokens of a block.
        vocabulary: tokens of the byte-level BPE.
        width: of the model, in heads of 24; keys and values have half as many heads.
    """

    steps: int = Field(default=560, gt=0)
    batch: int = Field(default=48, gt=1)
    block: int = Field(default=128, ge=8)
    vocabulary: int = Field(default=1024, ge=300)
    learning_rate: float = Field(default=4e-3, gt=0)
    width: int = Field(default=96, ge=48)


def make_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE of general text, which takes any text; the last token ends a document."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary - 1, initial_alphabet=letters, show_progress=False)
    texts = (general(number, part="pre-training") for number in range(_VOCABULARY_TEXTS))
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)


def make_model(settings: PretrainSettings, words: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return a Llama of the recipe's size with random weights."""
    heads = settings.width // 24
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=settings.width,
        intermediate_size=settings.width * 8 // 3,
        num_hidden_layers=settings.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=2 * settings.block,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=words.eos_token_id,
    )
    with own_generator(settings.seed):
        return LlamaForCausalLM(config)


def batches(settings: PretrainSettings, words: PreTrainedTokenizerFast) -> Iterator[Tensor]:
    """Yield int64 [batch, block]: texts one after the other, the end token behind each."""
    wanted, waiting, number = settings.batch * settings.block, np.zeros(0, np.int64), 0
    for _ in range(settings.steps):
        while len(waiting) < wanted:
            texts = [general(at, part="pre-training") for at in range(number, number + _POOL)]
            encodings = words.backend_tokenizer.encode_batch(texts)
            ends = np.array([words.eos_token_id])
            waiting = np.concatenate([waiting, *(part for encoding in encodings for part in (encoding.ids, ends))])
            number += _POOL
        yield torch.from_numpy(waiting[:wanted].reshape(settings.batch, settings.block))
        waiting = waiting[wanted:]


def _shards(model: LlamaForCausalLM, batch: Tensor) -> list[Callable[[], Tensor]]:
    """Return the functions that compute each shard's part of the mean loss over a batch."""
    return [partial(_loss, model, part) for part in batch.chunk(SHARDS)]


def _loss(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss / SHARDS
    return loss


def pretrain(settings: PretrainSettings, out: Path, progress: Progress | None = None) -> dict[str, str | float]:
    """Make the base of the corpus again, as `train_base` does."""
    check_empty(out)
    words = make_tokenizer(settings.vocabulary)
    model = make_model(settings, words)
    losses = (_shards(model, batch) for batch in batches(settings, words))
    return train_base(settings, out, model, words, losses, progress)
