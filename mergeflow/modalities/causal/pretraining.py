"""Pre-training of the base of the corpus `books`, on a CPU: a small Llama learns to write like ever new authors.

`docs/books.md` has the recipe, the measurements and the limits.
"""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import transformers
from pydantic import Field
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from mergeflow.checkpoints import write_checkpoint
from mergeflow.errors import MergeflowError
from mergeflow.modalities.pretraining import SHARDS, descend, one_thread, rate_factor
from mergeflow.schema import Frozen
from mergeflow.suites.books.book import general

END = "<end>"
_POOL = 64  # texts that are written and packed at once
_VOCABULARY_TEXTS = 3000

Progress = Callable[[int, int], None]


class PretrainSettings(Frozen):
    """The recipe of the base.

    Args:
        seed: of weights; the texts are those of the corpus that ships, of a part of its own.
        steps: number of batches.
        batch: blocks a step.
        block: tokens of a block.
        vocabulary: tokens of the byte-level BPE.
        matrix_rate: peak learning rate of matrices, which Muon trains; linear warm-up, then cosine to 0.
        learning_rate: of embeddings and vectors, which AdamW trains; likewise.
        warmup: share of the steps with rising learning rates.
        weight_decay: on matrices.
        width: of the model, in heads of 24; keys and values have half as many heads.
        layers: of the model.
    """

    seed: int = 0
    steps: int = Field(default=560, gt=0)
    batch: int = Field(default=48, gt=1)
    block: int = Field(default=128, ge=8)
    vocabulary: int = Field(default=1024, ge=300)
    matrix_rate: float = Field(default=0.02, gt=0)
    learning_rate: float = Field(default=4e-3, gt=0)
    warmup: float = Field(default=0.03, ge=0, lt=1)
    weight_decay: float = Field(default=0.01, ge=0)
    width: int = Field(default=96, ge=48)
    layers: int = Field(default=4, ge=1)


def make_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE of general text, which takes any text; the last token ends a document.

    Args:
        vocabulary: its tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary - 1, initial_alphabet=letters, show_progress=False)
    texts = (general(number, part="pre-training") for number in range(_VOCABULARY_TEXTS))
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)


def make_model(settings: PretrainSettings, words: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return a Llama of the recipe's size with random weights.

    Args:
        settings: the recipe.
        words: the tokenizer.
    """
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
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        return LlamaForCausalLM(config)


def batches(settings: PretrainSettings, words: PreTrainedTokenizerFast) -> Iterator[Tensor]:
    """Yield int64 [batch, block]: texts one after the other, the end token behind each.

    Args:
        settings: the recipe.
        words: the tokenizer.
    """
    wanted, waiting, number = settings.batch * settings.block, np.zeros(0, np.int64), 0
    for _ in range(settings.steps):
        while len(waiting) < wanted:
            texts = [general(at, part="pre-training") for at in range(number, number + _POOL)]
            found = words.backend_tokenizer.encode_batch(texts)
            ends = np.array([words.eos_token_id])
            waiting = np.concatenate([waiting, *(part for one in found for part in (one.ids, ends))])
            number += _POOL
        yield torch.from_numpy(waiting[:wanted].reshape(settings.batch, settings.block))
        waiting = waiting[wanted:]


def _optimizers(model: nn.Module, settings: PretrainSettings) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices and AdamW for embeddings and vectors."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    rest = [p for name, p in model.named_parameters() if p.ndim < 2 or "embed" in name]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=settings.matrix_rate, weight_decay=settings.weight_decay),
        torch.optim.AdamW(rest, lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["initial_lr"] = group["lr"]
    return optimizers


def _shard(model: LlamaForCausalLM, parameters: list[nn.Parameter], ids: Tensor) -> tuple[Tensor, ...]:
    """Return (loss, *gradients) of a shard's part of the mean over a batch."""
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss / SHARDS
    return (loss.detach(), *torch.autograd.grad(loss, parameters))


def train_base(
    settings: PretrainSettings, words: PreTrainedTokenizerFast, progress: Progress | None = None
) -> tuple[LlamaForCausalLM, float]:
    """Train the base; return it and the mean loss of the last fiftieth of the steps, in nats a token.

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
            shards = [pool.submit(_shard, model, parameters, part) for part in batch.chunk(SHARDS)]
            tail = [*tail[-max(1, steps // 50) + 1 :], descend(shards, parameters, optimizers)]
            if progress and (step % 20 == 0 or step + 1 == steps):
                progress(step + 1, steps)
    return model.eval(), sum(tail) / len(tail)


def pretrain(settings: PretrainSettings, out: Path, progress: Progress | None = None) -> dict[str, str | float]:
    """Make the base of the corpus again: a folder in the layout of Hugging Face.

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
    words = make_tokenizer(settings.vocabulary)
    model, loss = train_base(settings, words, progress)
    words.save_pretrained(out)
    model.config.architectures = ["LlamaForCausalLM"]
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
