"""Texts as a modality: the encoder is what is merged; every task has a trained head, which is never merged."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mergeflow.checkpoints import write_checkpoint
from mergeflow.data import load_manifest, load_split
from mergeflow.errors import MergeflowError
from mergeflow.modalities.catalog import SECTION
from mergeflow.modalities.classification import Classification, Regression, check_classes
from mergeflow.modalities.heads import Head, drawn_head, save_head
from mergeflow.modalities.metrics import find_metric, metric_of
from mergeflow.modalities.pretrained import check_folder, check_prepared, find_place
from mergeflow.modalities.probing import warm
from mergeflow.modalities.text.batches import BlankTokens, Tokens
from mergeflow.modalities.text.encoder import (
    TextEncoder,
    build_encoder,
    check_length,
    check_padding,
    load_encoder,
    watched,
)
from mergeflow.modalities.text.sections import DataSection, ModelSection
from mergeflow.modalities.text.tokenizer import ASSETS, load_tokenizer
from mergeflow.modality import Base, Modality, Model, Network


def build(section: ModelSection, record: Mapping[str, str]) -> Model:
    """Return the encoder whose configuration is in the base's record, its weights of no meaning."""
    if "config" not in record:
        raise MergeflowError("the base's weights have no record of an encoder: run the stage `base` again.")
    return Network(build_encoder(record["config"], section.pooling))


def check_base(section: ModelSection, data: DataSection, root: Path) -> None:
    """Check the places of base and tokenizer, of which nothing is read."""
    find_place(data.tokenizer, root, ASSETS)
    check_folder(section.pretrained, root, ASSETS)


def make_base(section: ModelSection, data: DataSection, manifests: Mapping[str, Any], base: Base) -> None:
    """Write the encoder with its configuration and tokenizer in the record, and a drawn head for each task."""
    tokenizer = load_tokenizer(section.pretrained, base.root, data.max_length)
    check_prepared(manifests, tokenizer.digest, data.tokenizer, section.pretrained)
    encoder, config = load_encoder(section.pretrained, base.root, section.pooling)
    check_length(encoder, tokenizer.pad, data.max_length)
    check_padding(encoder, tokenizer.pad, data.max_length, section.pretrained)
    record = {"role": "base", SECTION: section.model_dump_json(), "config": config, "tokenizer": tokenizer.content}
    write_checkpoint(base.model, Network(encoder).state(), record)
    for done, (task, manifest) in enumerate(manifests.items(), start=1):
        save_head(drawn_head(task, manifest["class_names"], encoder.width), base.head(task))
        base.report("heads", done, len(manifests))


def open_examples(
    task: str, folder: Path, split: str, head: Head | None, device: torch.device
) -> Classification | Regression:
    """Return one prepared split; tokens stay on disk."""
    data = load_split(folder, split)
    check_classes(task, head, data.class_names)
    segments = data.arrays.get("segments")
    tokens = Tokens(data.ids, np.array(data.lengths, np.int64), segments, device)
    wanted = torch.from_numpy(np.array(data.labels if data.class_names else data.targets)).to(device)
    metric = find_metric(metric_of(load_manifest(folder)))
    plain = Classification(task, tokens, wanted, head, observe=watched, metric=metric if data.class_names else None)
    return plain if data.class_names else Regression(plain, metric)


def blank(model: Model, section: ModelSection, data: DataSection, count: int, classes: int) -> Classification:
    """Return texts without content, as long as they may be, with a trained head."""
    encoder = model.module
    assert isinstance(encoder, TextEncoder)
    head = drawn_head("blank", [""] * classes, encoder.width)
    return Classification("blank", BlankTokens(data.max_length), torch.zeros(count, dtype=torch.int64), head)


MODALITY = Modality("text", build, make_base, open_examples, warm=warm, blank=blank, check_base=check_base)
