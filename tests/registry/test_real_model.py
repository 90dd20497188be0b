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
from fastapi.testclient import TestClient
from mlflow.exceptions import MlflowException
from mlflow.pyfunc import scoring_server
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


def request(image: bytes, task: str) -> dict[str, object]:
    return {"dataframe_records": [{"image": base64.b64encode(image).decode(), "task": task}]}


def test_scoring_over_http_in_process(model):
    client = TestClient(scoring_server.init(model), raise_server_exceptions=False)
    answer = client.post("/invocations", json=request(picture(1), "digits"))
    assert answer.status_code == 200
    row = answer.json()["predictions"][0]
    expected = model.predict(rows((picture(1), "digits")))
    assert row["label"] == expected["label"][0]
    assert row["probabilities"] == pytest.approx(expected["probabilities"][0])
    unknown = client.post("/invocations", json=request(picture(1), "digit"))
    assert unknown.status_code == 400
    assert "did you mean 'digits'" in unknown.json()["message"]
    junk = client.post("/invocations", json=request(b"junk", "digits"))
    assert junk.status_code == 400
    assert "bytes are not an image of a known format" in junk.json()["message"]
    for text in ("@@", ""):
        empty = client.post("/invocations", json={"dataframe_records": [{"image": text, "task": "digits"}]})
        assert empty.status_code == 400
        assert "row 0: the image is empty, or text that is not base64" in empty.json()["message"]
    for answer in (junk, empty):
        assert " object at 0x" not in answer.text
        assert "Restore the file" not in answer.text
    null = {"dataframe_records": [{"image": None, "task": "digits"}]}  # refused by MLflow before the model is asked
    assert client.post("/invocations", json=null).status_code == 400
    assert client.post("/invocations", json={"dataframe_records": [{"task": "digits"}]}).status_code == 400
    assert client.post("/invocations", content=b"{", headers={"content-type": "application/json"}).status_code == 400


def test_it_loads_where_registry_is_not_installed_and_nobody_answers(real, tmp_path, monkeypatch, capfd):
    save_pyfunc(tmp_path / "saved", real.files)
    for name in [name for name in sys.modules if name.partition(".")[0] == "registry"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(socket.socket, "connect", None)
    answer = mlflow.pyfunc.load_model(str(tmp_path / "saved")).predict(rows((picture(1), "digits")))
    assert len(answer) == 1
    assert capfd.readouterr() == ("", "")
