"""The scorer of domains.yaml: minus the log-perplexity of each domain of a project of causal models."""

import math
from functools import cache
from pathlib import Path

import torch

from mergeflow import layout
from mergeflow.commands.texts import project_texts, read_texts
from mergeflow.modalities.causal.modality import PackedText, perplexity
from mergeflow.modalities.causal.model import Opened, open_language


def score(state, candidate):
    """Return minus the log-perplexity of each task of texts: larger is better, 0 would be certainty.

    Args:
        state: The candidate's state dict.
        candidate: What it is; `candidate.split` says whose texts are asked for.
    """
    model = _opened().model
    model.load(state)
    return {name: -math.log(perplexity(model, texts)) for name, texts in _texts(candidate.split).items()}


@cache
def _opened() -> Opened:
    return open_language(layout.BASE_MODEL, Path())


@cache
def _texts(split: str) -> dict[str, PackedText]:
    tokenizer, cpu = _opened().tokenizer, torch.device("cpu")
    folders = project_texts(split)
    # A prepared folder has blocks of a length of its own; the one that is named here plays no part.
    return {Path(folder).name: read_texts(folder, split, tokenizer, 128, cpu, Path()) for folder in folders}
