"""Causal language models as a modality: the whole model is merged, and no task has a head."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mergeflow.checkpoints import write_checkpoint
from mergeflow.data import load_manifest, load_split
from mergeflow.errors import MergeflowError
from mergeflow.modalities.catalog import SECTION
from mergeflow.modalities.causal.model import LanguageModel, build_model, check_vocabulary, draw_model, load_model
from mergeflow.modalities.causal.packed import Blocks, PackedText, cut, stream
from mergeflow.modalities.causal.questions import Questions
from mergeflow.modalities.causal.sections import DataSection, ModelSection
from mergeflow.modalities.causal.tokenizer import ASSETS, load_tokenizer
from mergeflow.modalities.heads import Head
from mergeflow.modalities.pretrained import check_folder, check_prepared, find_place
from mergeflow.modality import Base, Modality, Model


def build(section: ModelSection, record: Mapping[str, str]) -> LanguageModel:
    """Return the model whose configuration is in the base's record, its weights of no meaning."""
    if "config" not in record:
        raise MergeflowError("the base's weights have no record of a causal model: run the stage `base` again.")
    return build_model(record["config"])


def check_base(section: ModelSection, data: DataSection, root: Path) -> None:
    """Check the places of base and tokenizer, of which nothing is read."""
    find_place(data.tokenizer, root, ASSETS)
    if section.pretrained != "none":
        check_folder(section.pretrained, root, ASSETS)


def make_base(section: ModelSection, data: DataSection, manifests: Mapping[str, Any], base: Base) -> None:
    """Write the base with its configuration and tokenizer in the record."""
    tokenizer = load_tokenizer(data.tokenizer if section.pretrained == "none" else section.pretrained, base.root)
    check_prepared(manifests, tokenizer.digest, data.tokenizer, section.pretrained)
    if section.pretrained == "none":
        model, config = draw_model(section.config, section.seed, tokenizer.size)
    else:
        model, config = load_model(section.pretrained, base.root)
    check_vocabulary(model, tokenizer.size, data.block)
    record = {"role": "base", SECTION: section.model_dump_json(), "config": config, **tokenizer.record}
    state = {name: value.contiguous() for name, value in model.state().items()}
    write_checkpoint(base.model, state, record)


def open_examples(
    task: str, folder: Path, split: str, head: Head | None, device: torch.device
) -> PackedText | Questions:
    """Return one prepared split: texts as blocks, or questions."""
    if head is not None:
        raise MergeflowError(
            f"task '{task}' has a head, which a causal model has no use for: run the stage `base` again."
        )
    data, stored = load_split(folder, split), load_manifest(folder)["decoding"]
    if "ends" in data.arrays:
        answers = torch.from_numpy(np.array(data.answers))
        return Questions(task, data.ids, data.ends, answers, stored["end"], device)
    tokens = stream(data.ids, np.asarray(data.lengths), np.asarray(data.documents), np.asarray(data.places))
    least = stored["block"] if split == "train" else 2
    if len(tokens) < least:
        raise MergeflowError(
            f"task '{task}': {len(tokens)} tokens in its split {split}, end tokens included; expected at least {least} "
            f"(data.block is {stored['block']}). Give it more text, or lower data.block."
        )
    return PackedText(task, cut(tokens, stored["block"], stored["end"]), device)


def blank(model: Model, section: ModelSection, data: DataSection, count: int, classes: int) -> PackedText:
    """Return blocks without content."""
    ids, lengths = torch.zeros(count, data.block, dtype=torch.int32), torch.full((count,), data.block)
    return PackedText("blank", Blocks(ids, lengths), torch.device("cpu"))


MODALITY = Modality("causal", build, make_base, open_examples, blank=blank, check_base=check_base)
