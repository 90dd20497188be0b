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
from mergeflow.schema import Frozen
from suites.language_bases import check_empty, muon_and_adamw, write_base
from suites.pretraining import SHARDS, Progress, descend_all
from suites.sentences.corruption import IGNORED, Batch, Corruption, CorruptionSettings
from suites.sentences.stream import passages
from suites.sentences.tokenizer import word_tokenizer

_POOL = 32  # batches whose passages are sorted by length together: padding is 12 % of the tokens


class PretrainSettings(Frozen):
    """The recipe of the base.

    Args:
        seed: of weights, passages and corruption.
        steps: number of batches.
        batch: passages a step.
        matrix_rate: peak learning rate of matrices, which Muon trains; linear warm-up, then cosine to 0.
        learning_rate: of embeddings and vectors, which AdamW trains; likewise.
        warmup: share of the steps with rising learning rates.
        weight_decay: on matrices.
        width: of the encoder, in heads of 32.
        layers: of the encoder.
        corruption: which words have to be named.
        hiding: share of the steps, at the beginning, in which words are hidden alone and none is exchanged.
    """

    seed: int = 0
    steps: int = Field(default=1700, gt=0)
    batch: int = Field(default=64, gt=1)
    matrix_rate: float = Field(default=0.02, gt=0)
    learning_rate: float = Field(default=3e-3, gt=0)
    warmup: float = Field(default=0.03, ge=0, lt=1)
    weight_decay: float = Field(default=0.01, ge=0)
    width: int = Field(default=128, ge=32)
    layers: int = Field(default=4, ge=1)
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


def train_base(
    settings: PretrainSettings, words: PreTrainedTokenizerFast, progress: Progress | None = None
) -> tuple[BertForMaskedLM, float]:
    """Train the base; return it and the mean loss of the last fiftieth of the steps."""
    model = make_model(settings, words).train()
    optimizers = muon_and_adamw(model, settings.matrix_rate, settings.learning_rate, settings.weight_decay)
    losses = (_shards(model, batch) for batch in batches(settings, words))
    loss = descend_all(model, optimizers, losses, settings.steps, settings.warmup, progress)
    return model.eval(), loss


def pretrain(settings: PretrainSettings, out: Path, progress: Progress | None = None) -> dict[str, str | float]:
    """Make the base of the suite again: a folder in the layout of Hugging Face.

    On one machine the same settings give the same bytes.

    Args:
        settings: the recipe, which goes into the record of the weights.
        out: the folder; the weights are written last.
        progress: called with the steps done and in all.

    Returns:
        The fingerprint of the weights and the last training loss.
    """
    check_empty(out)
    words = word_tokenizer()
    model, loss = train_base(settings, words, progress)
    return {"fingerprint": write_base(out, model, words, settings), "loss": loss}
