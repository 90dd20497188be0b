"""One merged model of the real vision library: registered, loaded by alias, served over HTTP."""

import base64
import io
import json
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from mlflow.exceptions import MlflowException
from PIL import Image

from mergeflow.checkpoints import write_checkpoint
from mergeflow.errors import MergeflowError
from mergeflow.modalities.vision.models import image_model, load_clip
from registry.artifacts import save_pyfunc
from registry.gates import GateSettings
from registry.promotion import Candidate, promote, register
from registry.store import mlflow
from registry.versions import current

from .conftest import CLASSES


@pytest.fixture
def real(make_candidate: Callable[..., Candidate]) -> Candidate:
    return make_candidate(1)


def picture(seed: int, size: tuple[int, int] = (40, 32)) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def rows(*pairs: tuple[object, object]) -> pd.DataFrame:
    return pd.DataFrame({"image": [image for image, _ in pairs], "task": [task for _, task in pairs]})


def test_load_by_alias_and_classify(store, real):
    version = register(store, "merged", real).version
    promote(store, "merged", version, GateSettings())
    with store.active():
        model = mlflow.pyfunc.load_model("models:/merged@champion")
    answer = model.predict(rows((picture(1), "digits"), (picture(2), "signs"), (picture(1), "digits")))
    assert list(answer["label"].isin(CLASSES["digits"])) == [True, False, True]
    assert [list(row) for row in answer["probabilities"]] == [CLASSES["digits"], CLASSES["signs"], CLASSES["digits"]]
    assert all(sum(row.values()) == pytest.approx(1.0) for row in answer["probabilities"])
    for label, row in zip(answer["label"], answer["probabilities"], strict=True):
        assert row[label] == max(row.values())
    as_text = model.predict(rows((base64.b64encode(picture(1)).decode(), "digits")))
    assert as_text["probabilities"][0] == pytest.approx(answer["probabilities"][0])
    assert model.metadata.signature.inputs.input_names() == ["image", "task"]
    assert current(store, "merged").champion.aliases == ("champion",)


@pytest.fixture
def model(real: Candidate, tmp_path: Path):
    save_pyfunc(tmp_path / "saved", real.files)
    return mlflow.pyfunc.load_model(str(tmp_path / "saved"))


def test_nothing_inside_is_a_pickle(real, tmp_path):
    save_pyfunc(tmp_path / "saved", real.files)
    files = {path.suffix for path in (tmp_path / "saved").rglob("*") if path.is_file()}
    assert files <= {".safetensors", ".json", ".py", ".yaml", ".txt", ""}
    assert str(tmp_path.parent) not in (tmp_path / "saved/MLmodel").read_text()
    assert str(Path(__file__).parents[2]) not in (tmp_path / "saved/MLmodel").read_text()
    assert json.loads((tmp_path / "saved/artifacts/model/recipe.json").read_text()) == {"method": "ties"}


def test_all_bad_rows_are_named_at_once(model):
    bad = rows((picture(1), "digit"), (picture(1), "signs"), (b"not an image", "signs"), (picture(1)[:100], "digits"))
    with pytest.raises(MlflowException) as error:
        model.predict(bad)
    text = str(error.value)
    assert "3 of 4 rows cannot be classified" in text
    assert "row 0: unknown task: did you mean 'digits'?" in text
    assert "row 2: the image cannot be decoded" in text
    assert "row 3: the image cannot be decoded" in text
    with pytest.raises(MlflowException, match="text but not base64"):
        model.predict(rows(("%%%", "digits")))
    with pytest.raises(MlflowException, match="row 0: the image is empty, or text that is not base64"):
        model.predict(rows(("", "digits")))


def test_base64_as_programs_write_it(model):
    """With line breaks as of `base64 FILE`, and a browser's data URL."""
    plain = base64.b64encode(picture(1)).decode()
    forms = (plain, base64.encodebytes(picture(1)).decode(), f"data:image/png;base64,{plain}")
    answer = model.predict(rows(*[(form, "digits") for form in forms]))
    assert answer["probabilities"][0] == answer["probabilities"][1] == answer["probabilities"][2]


def test_more_rows_than_one_batch(model):
    many = rows(*[(picture(k % 3), "digits") for k in range(300)])
    answer = model.predict(many)
    assert len(answer) == 300
    alone = model.predict(rows((picture(2), "digits")))["probabilities"][0]
    assert answer["probabilities"][299] == pytest.approx(alone, abs=1e-5)


def test_a_broken_model_is_not_registered(store, real, tmp_path):
    state = image_model(load_clip("pocket-clip", seed=3)).state()
    name = next(iter(state))
    write_checkpoint(tmp_path / "nan.safetensors", state | {name: torch.full_like(state[name], float("nan"))})
    with pytest.raises(MergeflowError, match="not registered"):
        register(store, "merged", replace(real, files=replace(real.files, weights=tmp_path / "nan.safetensors")))
    assert current(store, "merged").candidate is None
    with pytest.raises(MergeflowError, match="missing"):
        replace(real.files, weights=tmp_path / "nowhere.safetensors")


def test_it_loads_where_registry_is_not_installed_and_nobody_answers(real, tmp_path, monkeypatch, capfd):
    save_pyfunc(tmp_path / "saved", real.files)
    for name in [name for name in sys.modules if name.partition(".")[0] == "registry"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(socket.socket, "connect", None)
    answer = mlflow.pyfunc.load_model(str(tmp_path / "saved")).predict(rows((picture(1), "digits")))
    assert len(answer) == 1
    assert capfd.readouterr() == ("", "")
