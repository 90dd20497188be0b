"""Zero-shot heads against the plain formula, their files and their errors."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from mergeflow.checkpoints import open_checkpoint, write_checkpoint
from mergeflow.errors import MergeflowError
from mergeflow.modalities.classification import Classification
from mergeflow.modalities.heads import Head, load_head, save_head
from mergeflow.modalities.vision.modality import MODALITY
from mergeflow.modalities.vision.models import ImageEncoder, build_head, load_clip
from mergeflow.modalities.vision.sections import DataSection, ModelSection
from mergeflow.modality import Base
from suites.pocket import get_suite

NAMES, TEMPLATES = ["beach", "red round sign", "river"], ["a photo of {}", "{}"]


@pytest.fixture(scope="module")
def clip():
    return load_clip("pocket-clip", seed=3)


@pytest.fixture(scope="module")
def head(clip):
    return build_head(clip, NAMES, TEMPLATES)


def test_head_is_the_normalised_mean_of_normalised_prompts(clip, head):
    with torch.no_grad():
        for row, name in zip(head.weight, NAMES, strict=True):
            features = [clip.model.encode_text(clip.tokenizer([t.replace("{}", name)]))[0] for t in TEMPLATES]
            mean = sum(f / f.norm() for f in features) / len(features)
            torch.testing.assert_close(row, mean / mean.norm())
    assert head.logit_scale == pytest.approx(1 / 0.07, rel=1e-4)
    assert not head.weight.requires_grad


def test_logits_are_scaled_cosines(clip, head):
    images = torch.randint(0, 256, (4, 32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        features = ImageEncoder(clip)(images)
    expected = head.logit_scale * torch.einsum("bd,cd->bc", features, head.weight)
    torch.testing.assert_close(head(features), expected)
    assert head(features).abs().max() <= head.logit_scale * (1 + 1e-6)


def test_building_is_deterministic_and_per_class(clip, head):
    again = build_head(clip, NAMES[::-1], TEMPLATES)
    assert torch.equal(again.weight.flip(0), head.weight)


@pytest.mark.parametrize(
    ("names", "templates", "message"),
    [
        ([], TEMPLATES, "at least one class"),
        (NAMES, [], "at least one class and one template"),
        (["river", "river"], TEMPLATES, "more than once: river"),
        (NAMES, ["a photo"], "without a place for the class name"),
    ],
)
def test_bad_prompts_are_refused(clip, names, templates, message):
    with pytest.raises(MergeflowError, match=message):
        build_head(clip, names, templates)


def test_a_file_keeps_everything_and_missing_truncated_and_foreign_ones_are_refused(head, tmp_path):
    path = tmp_path / "head.safetensors"
    with pytest.raises(MergeflowError, match="cannot read the head"):
        load_head(path)
    save_head(head, path)
    read = load_head(path)
    assert torch.equal(read.weight, head.weight)
    assert (read.logit_scale, read.class_names) == (head.logit_scale, head.class_names)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(MergeflowError, match="cannot read the head"):
        load_head(path)
    write_checkpoint(path, {"weight": torch.eye(2)})
    with pytest.raises(MergeflowError, match="is not a head"):
        load_head(path)


def test_logits_follow_the_features_dtype():
    head = Head(torch.eye(3), math.e, ["a", "b", "c"])
    assert head(torch.ones(2, 3, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_a_probed_head_reads_classes_of_which_the_text_tower_knows_nothing(tmp_path: Path) -> None:
    samples = [get_suite("pocket8").tasks["digits"].sample("train", row) for row in range(200)]
    pixels, digits = zip(*samples, strict=True)
    images, labels = torch.from_numpy(np.stack(pixels)), torch.tensor(digits)
    section = ModelSection(architecture="pocket-clip", pretrained="pocket8-prints", head="probed")
    manifest = {"class_names": [f"zz{label}" for label in range(10)], "templates": []}
    base = Base(tmp_path, tmp_path / "base.safetensors", tmp_path, lambda *_: None)
    MODALITY.make_base(section, DataSection(), {"digits": manifest}, base)
    head, model = load_head(base.head("digits")), MODALITY.build(section, {})
    assert head.trained
    with open_checkpoint(base.model) as state:
        model.load(state)
    examples = Classification("digits", images, labels, head)
    assert MODALITY.warm is not None
    MODALITY.warm(section, model, examples)
    assert examples.scores(model, torch.arange(200)).mean() > 0.6
