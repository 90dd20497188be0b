"""What judging a causal model takes of a CUDA device, before it starts."""

from functools import partial

import torch

from mergeflow.memory.forecast import Forecast, Work, fewer, forecast_on
from mergeflow.memory.needs import Need, blank_model, work_need
from mergeflow.modalities.causal.blocks import Blocks
from mergeflow.modalities.causal.model import build_model
from mergeflow.modalities.causal.packed import PackedText
from mergeflow.modalities.causal.perplexity import perplexity


def foretell_perplexity(config: str, batch_size: int, block: int, device: str) -> Forecast:
    """Return what the perplexity of a split takes.

    Args:
        config: the model's config.json.
        batch_size: blocks at once.
        block: tokens of a block.
        device: cuda, cuda:1 …
    """

    def blank(count: int) -> PackedText:
        ids, lengths = torch.zeros(count, block, dtype=torch.int32), torch.full((count,), block)
        return PackedText("blank", Blocks(ids, lengths), torch.device("cpu"))

    def judging(rows: int) -> Need:
        return work_need(
            blank_model(lambda: build_model(config)), blank, partial(perplexity, batch_size=rows), rows=rows
        )

    smaller = partial(fewer, "--batch-size", batch_size, judging, "the result is the same but for rounding")
    return forecast_on(device, Work("perplexity", judging(batch_size), smaller))
