"""One merged model of the real vision library: registered, loaded by alias, served over HTTP."""

import base64
import io
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from mergeflow.checkpoints import write_checkpoint
from mergeflow.vision.heads import Head, save_head
from mergeflow.vision.models import ImageEncoder, load_clip
from registry.gates import GateSettings
from registry.lookup import current
from registry.promotion import promote, register
from registry.pyfunc_model import ModelFiles
from registry.quiet import mlflow
from registry.versions import Candidate

from .conftest import make_evidence

NAMES = {"digits": ["zero", "one", "two"], "signs": ["stop", "go"]}


@pytest.fixture
def real(tmp_path: Path) -> Candidate:
    encoder = ImageEncoder(load_clip("pocket-clip", seed=3))
    write_checkpoint(tmp_path / "merged.safetensors", encoder.encoder_state())
    heads = {}
    for task, names in NAMES.items():
        weight = torch.nn.functional.normalize(torch.randn(len(names), 128, generator=torch.Generator().manual_seed(1)))
        heads[task] = tmp_path / f"{task}.safetensors"
        save_head(Head(weight, 20.0, names), heads[task])
    files = ModelFiles(
        tmp_path / "merged.safetensors", heads, "pocket-clip", 32, documents={"recipe": {"name": "ties"}}
    )
    return Candidate(files, make_evidence(0.8), "real", {"normalised": 0.8})


def picture(seed: int, size: tuple[int, int] = (40, 32)) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def rows(*pairs: tuple[object, object]) -> pd.DataFrame:
    return pd.DataFrame({"image": [image for image, _ in pairs], "task": [task for _, task in pairs]})


def test_load_by_alias_and_classify(store, real, tmp_path):
    version = register(store, "merged", real).version
    promote(store, "merged", version, GateSettings())
    with store.active():
        model = mlflow.pyfunc.load_model("models:/merged@champion")
    answer = model.predict(rows((picture(1), "digits"), (picture(2), "signs"), (picture(1), "digits")))
    assert list(answer["label"].isin(NAMES["digits"])) == [True, False, True]
    assert [list(row) for row in answer["probabilities"]] == [NAMES["digits"], NAMES["signs"], NAMES["digits"]]
    assert all(sum(row.values()) == pytest.approx(1.0) for row in answer["probabilities"])
    for label, row in zip(answer["label"], answer["probabilities"], strict=True):
        assert row[label] == max(row.values())
    as_text = model.predict(rows((base64.b64encode(picture(1)).decode(), "digits")))
    assert as_text["probabilities"][0] == pytest.approx(answer["probabilities"][0])
    assert model.metadata.signature.inputs.input_names() == ["image", "task"]
    assert current(store, "merged").champion.aliases == ("champion",)
