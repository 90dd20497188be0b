"""Pre-training of the base of the suite `sentences8`, on a CPU: words that are hidden or exchanged have to be named.

`docs/data.md` has measurements and limits.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path

from pydantic import Field
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

from mergeflow.modalities.modules import own_generator
from suites.language_bases import Recipe, check_empty, train_base
from suites.pretraining import SHARDS, Progress
from suites.sentences.corruption import IGNORED, Batch, Corruption, CorruptionSettings
from suites.sentences.stream import passages
from suites.sentences.tokenizer import word_tokenizer

_POOL = 32  # batches whose passages are sorted by length together: padding is 12 % of the tokens


class PretrainSettings(Recipe):
    """The recipe of the base.

    Args:
        seed: of weights, passages and corruption.
        batch: passages a step.
        width: of the encoder, in heads of 32.
        hiding: share of the steps, at the beginning, in which words are hidden alone and none is exchanged.
    """

    steps: int = Field(default=1700, gt=0)
    batch: int = Field(default=64, gt=1)
    learning_rate: float = Field(default=3e-3, gt=0)
    width: int = Field(default=128, ge=32)
    corruption: CorruptionSettings = CorruptionSettings()
    hiding: float = Field(default=0.4, ge=0, le=1)


def make_model(settings: PretrainSettings, words: PreTrainedTokenizerFast) -> BertForMaskedLM:
    """Return a BERT of the recipe's size with random weights."""
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=settings.width,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.width // 32,
        intermediate_size=4 * settings.width,
        max_position_embeddings=words.model_max_length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=words.pad_token_id,
    )
    with own_generator(settings.seed):
        return BertForMaskedLM(config)


def batches(settings: PretrainSettings, words: PreTrainedTokenizerFast) -> Iterator[Batch]:
    """Yield the corrupted batches of the recipe; passages of about one length stand together."""
    stream, corruption = passages(settings.seed), Corruption(settings.corruption, words, settings.seed)
    for start in range(0, settings.steps, _POOL):
        pool = list(islice(stream, settings.batch * min(_POOL, settings.steps - start)))
        pool.sort(key=lambda text: len(text.text.split()) + len((text.text_pair or "").split()))
        groups = [pool[at : at + settings.batch] for at in range(0, len(pool), settings.batch)]
        for number, at in enumerate(corruption.random.permutation(len(groups)), start):
            yield corruption.batch(groups[at], exchange=number >= settings.hiding * settings.steps)


def _shards(model: BertForMaskedLM, batch: Batch) -> list[Callable[[], Tensor]]:
    """Return the functions that compute each shard's part of the mean loss over the words to be named."""
    total = int((batch.targets != IGNORED).sum())
    parts = map(Batch, *(tensor.chunk(SHARDS) for tensor in batch))
    return [partial(_loss, model, part, total) for part in parts]


def _loss(model: BertForMaskedLM, part: Batch, total: int) -> Tensor:
    hidden = model.bert(part.tokens, attention_mask=part.mask, token_type_ids=part.segments).last_hidden_state
    chosen = part.targets != IGNORED
    return nn.functional.cross_entropy(model.cls(hidden[chosen]), part.targets[chosen], reduction="sum") / total


def pretrain(settings: PretrainSettings, out: Path, progress: Progress | None = None) -> dict[str, str | float]:
    """Make the base of the suite again, as `train_base` does."""
    check_empty(out)
    words = word_tokenizer()
    model = make_model(settings, words)
    losses = (_shards(model, batch) for batch in batches(settings, words))
    return train_base(settings, out, model, words, losses, progress)
