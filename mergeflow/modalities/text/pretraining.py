"""Pre-training of the base of the suite `sentences8`, on a CPU: words that are hidden or exchanged have to be named.

`docs/sentences-suite.md` has the recipe, the measurements and the limits.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import torch
import transformers
from pydantic import Field
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

from mergeflow.checkpoints import write_checkpoint
from mergeflow.errors import MergeflowError
from mergeflow.modalities.pretraining import SHARDS, descend, one_thread, rate_factor
from mergeflow.modalities.text.corruption import IGNORED, Batch, Corruption, CorruptionSettings
from mergeflow.modalities.text.words import word_tokenizer
from mergeflow.schema import Frozen
from mergeflow.suites.sentences.stream import passages

_POOL = 32  # batches whose passages are sorted by length together: padding is 12 % of the tokens

Progress = Callable[[int, int], None]


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
    """Return a BERT of the recipe's size with random weights.

    Args:
        settings: the recipe.
        words: the tokenizer, whose size is the vocabulary's.
    """
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
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        return BertForMaskedLM(config)


def batches(settings: PretrainSettings, words: PreTrainedTokenizerFast) -> Iterator[Batch]:
    """Yield the corrupted batches of the recipe; passages of about one length stand together.

    Args:
        settings: the recipe.
        words: the tokenizer.
    """
    stream, corruption = passages(settings.seed), Corruption(settings.corruption, words, settings.seed)
    for start in range(0, settings.steps, _POOL):
        pool = list(islice(stream, settings.batch * min(_POOL, settings.steps - start)))
        pool.sort(key=lambda text: len(text.text.split()) + len((text.text_pair or "").split()))
        groups = [pool[at : at + settings.batch] for at in range(0, len(pool), settings.batch)]
        for number, at in enumerate(corruption.random.permutation(len(groups)), start):
            yield corruption.batch(groups[at], exchange=number >= settings.hiding * settings.steps)


def _shard(model: BertForMaskedLM, parameters: Sequence[nn.Parameter], part: Batch, total: int) -> tuple[Tensor, ...]:
    """Return (loss, *gradients) of a shard's part of the mean over the `total` words to be named."""
    found = model.bert(part.tokens, attention_mask=part.mask, token_type_ids=part.segments).last_hidden_state
    chosen = part.targets != IGNORED
    loss = nn.functional.cross_entropy(model.cls(found[chosen]), part.targets[chosen], reduction="sum") / total
    return (loss.detach(), *torch.autograd.grad(loss, parameters))


def _optimizers(model: nn.Module, settings: PretrainSettings) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices and AdamW for the rest.

    With AdamW alone a word hidden in the second sentence was not found in the first after 2600 steps; with Muon it is
    after a hundred.
    """
    matrices: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (rest if parameter.ndim < 2 or "embedding" in name else matrices).append(parameter)
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=settings.matrix_rate, weight_decay=settings.weight_decay),
        torch.optim.AdamW(rest, lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["initial_lr"] = group["lr"]
    return optimizers


def train_base(
    settings: PretrainSettings, words: PreTrainedTokenizerFast, progress: Progress | None = None
) -> tuple[BertForMaskedLM, float]:
    """Train the base; return it and the mean loss of the last fiftieth of the steps.

    Args:
        settings: the recipe.
        words: the tokenizer.
        progress: called with the steps done and in all.
    """
    model = make_model(settings, words).train()
    parameters = list(model.parameters())
    optimizers = _optimizers(model, settings)
    steps, tail = settings.steps, list[float]()
    with one_thread(), ThreadPoolExecutor(SHARDS) as pool:
        for step, batch in enumerate(batches(settings, words)):
            for group in (group for optimizer in optimizers for group in optimizer.param_groups):
                group["lr"] = group["initial_lr"] * rate_factor(step, steps, settings.warmup)
            total = int((batch.targets != IGNORED).sum())
            parts = map(Batch, *(tensor.chunk(SHARDS) for tensor in batch))
            shards = [pool.submit(_shard, model, parameters, part, total) for part in parts]
            tail = [*tail[-max(1, steps // 50) + 1 :], descend(shards, parameters, optimizers)]
            if progress and (step % 20 == 0 or step + 1 == steps):
                progress(step + 1, steps)
    return model.eval(), sum(tail) / len(tail)


def pretrain(settings: PretrainSettings, out: Path, progress: Progress | None = None) -> dict[str, str | float]:
    """Make the base of the suite again: a folder in the layout of Hugging Face.

    On one machine the same settings give the same bytes.

    Args:
        settings: the recipe, which goes into the record of the weights.
        out: the folder; the weights are written last.
        progress: called with the steps done and in all.

    Returns:
        The fingerprint of the weights and the last training loss.

    Raises:
        MergeflowError: the folder is there already and is not empty.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise MergeflowError(f"{out} is there already and is not an empty folder: name another one.")
    words = word_tokenizer()
    model, loss = train_base(settings, words, progress)
    words.save_pretrained(out)
    model.config.architectures = ["BertForMaskedLM"]
    model.config.save_pretrained(out)
    record = {
        "format": "pt",  # transformers refuses a file that does not say so
        "kind": "base",
        "recipe": json.dumps(settings.model_dump(), sort_keys=True),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    tied = set(model.all_tied_weights_keys)
    state = {name: value.contiguous() for name, value in model.state_dict().items() if name not in tied}
    return {"fingerprint": write_checkpoint(out / "model.safetensors", state, record), "loss": loss}
