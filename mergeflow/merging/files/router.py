"""Routers of a mixture made of dense models: rows that prompts give, or random ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from mergeflow.checkpoints.folders import folder_of
from mergeflow.checkpoints.header import DType
from mergeflow.checkpoints.reader import LazyStateDict
from mergeflow.errors import MergeflowError
from mergeflow.late import torch

if TYPE_CHECKING:
    from torch import Tensor

Prompts = Sequence[tuple[Sequence[str], Sequence[str]]]
"""Of each expert, texts it should answer and texts it should not."""
_EMBEDDING = "model.embed_tokens.weight"
_ROUNDING = 1e-5  # of a prompt's own row: what float32 leaves where prompts cancel out


class Router:
    """The routers of all blocks, found when the first is read.

    Args:
        base: The model whose hidden states or embeddings count.
        config: Its config.json.
        gate: hidden, cheap_embed or random.
        prompts: Of each expert.
        seed: Of random ones.
        width: Length of a row.
        blocks: Number of blocks.
    """

    def __init__(
        self,
        base: LazyStateDict,
        config: Mapping[str, Any],
        gate: str,
        prompts: Prompts,
        seed: int,
        width: int,
        blocks: int,
    ) -> None:
        self.base, self.config, self.gate, self.prompts, self.seed = base, config, gate, prompts, seed
        self.width, self.blocks = width, blocks
        self._lock = Lock()
        self._rows: Tensor | None = None

    def rows(self, block: int) -> Tensor:
        """Return the router of a block, [experts, width] in float32."""
        with self._lock:
            if self._rows is None:
                self._rows = self._random() if self.gate == "random" else self._prompted()
        return self._rows[block]

    def _random(self) -> Tensor:
        """Normal numbers of the deviation that the model was initialised with."""
        generator = torch.Generator().manual_seed(self.seed)
        deviation = float(self.config.get("initializer_range", 0.02))
        return deviation * torch.randn(self.blocks, len(self.prompts), self.width, generator=generator)

    def _prompted(self) -> Tensor:
        """Unit vectors of the means over prompts, less those over negative ones."""
        folder = folder_of(self.base)
        texts = sorted({text for pair in self.prompts for side in pair for text in side})
        tokens = _tokens(folder, texts, self.gate)
        if self.gate == "hidden":
            seen = _mlp_inputs(folder, tokens)
        else:
            embedding = self.base[_EMBEDDING].float()
            seen = [embedding[ids].mean(0).expand(self.blocks, -1) for ids in tokens]
        by_text = dict(zip(texts, seen, strict=True))

        def mean(side: Sequence[str]) -> Tensor:
            return torch.stack([by_text[text] for text in side]).mean(0) if side else torch.zeros(1)

        wanted = torch.stack([mean(good) for good, _ in self.prompts], 1)
        found = torch.stack([mean(good) - mean(bad) for good, bad in self.prompts], 1)
        lengths = found.norm(dim=-1, keepdim=True)
        if not bool((lengths > _ROUNDING * wanted.norm(dim=-1, keepdim=True)).all()):
            raise MergeflowError(
                "the prompts of an expert cancel out, so that its row of the router is 0: change them."
            )
        return found / lengths


@dataclass(frozen=True)
class RouterEntry:
    """The router of one block."""

    router: Router
    block: int
    dtype: DType

    def read(self, start: int, stop: int) -> Tensor:
        """Return elements start..stop of the flattened router, [stop − start]."""
        return self.router.rows(self.block).reshape(-1)[start:stop].to(self.dtype.torch)


def _tokens(folder: Path | None, texts: Sequence[str], gate: str) -> list[Tensor]:
    """Return the tokens of each text."""
    tokenizer = _transformers(gate).AutoTokenizer
    try:
        found = tokenizer.from_pretrained(str(folder), local_files_only=True)
        return [torch.tensor(found(text)["input_ids"]) for text in texts]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise MergeflowError(
            f"gate {gate}: no tokenizer can be opened in '{folder}' ({str(error).splitlines()[0]:.120}). Put the "
            "base's tokenizer files there, or choose gate: random."
        ) from None


def _mlp_inputs(folder: Path | None, tokens: Sequence[Tensor]) -> list[Tensor]:
    """Return, of each text, the mean over tokens of what the MLP of each block gets, [blocks, width]."""
    model = _transformers("hidden").AutoModelForCausalLM.from_pretrained(str(folder), local_files_only=True).eval()
    held: list[Tensor] = []
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda _, given: held.append(given[0][0].float().mean(0)))
    found = []
    with torch.no_grad():
        for ids in tokens:
            held.clear()
            model(ids[None], use_cache=False)
            found.append(torch.stack(held))
    return found


def _transformers(gate: str) -> Any:
    try:
        import transformers
    except ImportError:
        raise MergeflowError(
            f"gate {gate} needs the package 'transformers' to read prompts: pip install transformers, or choose "
            "gate: random."
        ) from None
    return transformers
