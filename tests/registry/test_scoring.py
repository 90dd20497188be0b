"""The server: requests have limits, bad ones get 4xx and one message, and no message repeats what was sent."""

import base64
import json
import re
from types import SimpleNamespace

import pytest
from fastapi.testclient import TestClient

from registry.pyfunc_model import as_pyfunc, save_pyfunc
from registry.serving import Limits, application

from .test_real_model import picture

MARK = "strangers-own-words"
ROW = {"image": base64.b64encode(picture(1)).decode(), "task": "digits"}
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def client(model_files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    save_pyfunc(folder / "saved", model_files)
    model = as_pyfunc(folder / "saved/artifacts/model")
    return TestClient(application(model, Limits(body=200_000, rows=5)), raise_server_exceptions=False)


def test_rows_in_every_form_are_answered(client):
    forms = {
        "dataframe_records": [ROW],
        "dataframe_split": {"columns": list(ROW), "data": [list(ROW.values())]},
        "inputs": {name: [value] for name, value in ROW.items()},
        "instances": [ROW],
    }
    answers = [client.post("/invocations", json={name: rows}) for name, rows in forms.items()]
    assert [answer.status_code for answer in answers] == [200] * 4, [answer.text for answer in answers]
    labels = {answer.json()["predictions"][0]["label"] for answer in answers}
    csv = f"image,task\n{ROW['image']},digits\n"
    answer = client.post("/invocations", content=csv, headers={"content-type": "text/csv; charset=utf-8"})
    assert {answer.json()["predictions"][0]["label"]} == labels
    assert client.get("/ping").status_code == client.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (json.dumps({"dataframe_records": [ROW] * 6}), 413, "more than 5 rows"),
        (json.dumps({"dataframe_split": {"columns": ["task"], "data": [["digits"]] * 6}}), 413, "more than 5 rows"),
        (json.dumps({"inputs": {"task": ["digits"] * 6}}), 413, "more than 5 rows"),
        ('{"dataframe_records": [' + "{}," * 50_000 + "{}]}", 413, "more than 5 rows"),
        (b" " * 200_001, 413, "larger than 200000 bytes"),
        ("[" * 99_999, 400, "nested too deep"),
        ('{"a":' * 30_000 + "1" + "}" * 30_000, 400, "nested too deep"),
        ('{"dataframe_records": [{"image": ' + "9" * 5000 + "}]}", 400, "cannot be read as rows"),
        (f'{{"{MARK}": ', 400, "cannot be read as rows"),
        (f'"{MARK}"', 400, "cannot be read as rows"),
        ("null", 400, "cannot be read as rows"),
        (b"\xff\xfe", 400, "cannot be read as rows"),
        (json.dumps({MARK: [ROW]}), 400, "the keys dataframe_records, dataframe_split, inputs, instances"),
        (json.dumps({"inputs": [ROW], "instances": [ROW]}), 400, "one of the keys"),
        (json.dumps({"dataframe_records": [{MARK: 1}]}), 400, r"The columns are image \(binary\), task \(string\)"),
        (json.dumps({"dataframe_records": [{**ROW, MARK: 1, "task": None}]}), 400, "row 0: unknown task"),
        (json.dumps({"dataframe_records": MARK}), 413, "rows"),
        (json.dumps({"dataframe_records": {"image": MARK}}), 400, "cannot be read as rows"),
        (json.dumps({"dataframe_records": [MARK]}), 400, "cannot be read as rows"),
        (json.dumps({"dataframe_records": [{**ROW, "task": MARK}]}), 400, "row 0: unknown task: Known: digits, signs"),
        (json.dumps({"dataframe_records": [{**ROW, "task": "digit"}]}), 400, "did you mean 'digits'"),
        (json.dumps({"dataframe_records": [{**ROW, "task": "\ud800" + MARK}]}), 400, "cannot be read as rows"),
        (json.dumps({"dataframe_records": [{**ROW, "image": MARK}]}), 400, "row 0: the image is text but not base64"),
    ],
)
def test_bad_requests(client, body, status, words):
    answer = client.post("/invocations", content=body, headers=JSON)
    assert answer.status_code == status, answer.text
    message = answer.json()["message"]
    assert re.search(words, message)
    assert MARK not in answer.text
    assert len(message) < 600


@pytest.mark.parametrize("kind", ["application/vnd.apache.parquet", "text/html", "text/csv; charset=latin-1", ""])
def test_other_content_types_are_refused(client, kind):
    answer = client.post("/invocations", content=b"{}", headers={"content-type": kind})
    assert (answer.status_code, "send application/json" in answer.json()["message"]) == (415, True)


def test_a_fault_of_the_model_is_in_the_log_and_not_in_the_answer(caplog):
    def fail(rows):
        raise RuntimeError(MARK)

    model = SimpleNamespace(metadata=SimpleNamespace(get_input_schema=lambda: None), predict=fail)
    answer = TestClient(application(model, Limits())).post("/invocations", json={"inputs": [[1.0]]})
    assert answer.status_code == 500
    assert MARK not in answer.text
    assert MARK in caplog.text
