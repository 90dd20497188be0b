"""Checkpoints of transformers' classes with random weights, a tokenizer of a few words, and texts of these."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

WORDS = "the a cat dog sat ran on mat hill and then it was very small far away".split()  # noqa: SIM905


def noisy(state: dict[str, Tensor], seed: int, by: float = 0.3) -> dict[str, Tensor]:
    """Return weights whose matrices have noise of `by` of their spread."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: value + by * value.std() * torch.randn(value.shape, generator=generator)
        if value.ndim > 1 and value.is_floating_point()
        else value.clone()
        for name, value in state.items()
    }


def word_tokenizer() -> Any:
    """Return a tokenizer that knows WORDS."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.WordLevel({word: n for n, word in enumerate(["[PAD]", "[UNK]", *WORDS])}, "[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="[PAD]", unk_token="[UNK]", eos_token="far")


def texts(folder: Path, count: int = 40) -> Path:
    """Write a file of texts of 2 to 11 words."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 12, (count,), generator=generator).tolist()
    lines = [" ".join(WORDS[n % len(WORDS)] for n in range(row, row + size)) for row, size in enumerate(lengths)]
    (folder / "lines.txt").write_text("\n".join(lines))
    return folder / "lines.txt"
