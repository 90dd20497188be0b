"""The server: requests have limits, bad ones get 4xx and one message, and no message repeats what was sent."""

import base64
import json
import re
from types import SimpleNamespace

import pytest
from fastapi.testclient import TestClient
from mlflow.types import ColSpec, Schema
from prometheus_client.parser import text_string_to_metric_families

from registry.artifacts import as_pyfunc, save_pyfunc
from registry.serving import Limits, application

from .test_real_model import picture

MARK = "strangers-own-words"
ROW = {"image": base64.b64encode(picture(1)).decode(), "task": "digits"}
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def model(model_files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    save_pyfunc(folder / "saved", model_files)
    return as_pyfunc(folder / "saved/artifacts/model")


@pytest.fixture(scope="module")
def client(model):
    return TestClient(application(model, Limits(body=200_000, rows=5)), raise_server_exceptions=False)


def test_without_the_token_only_probes_are_answered(model):
    client = TestClient(application(model, Limits(), "s3cret"))
    for path in ("/ping", "/health", "/ready"):
        assert client.get(path).status_code == 200
    body = {"dataframe_records": [ROW]}
    for header in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic s3cret"}, {"authorization": "ü"}):
        answer = client.post("/invocations", json=body, headers={k: v.encode() for k, v in header.items()})
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert "MERGEFLOW_SERVE_TOKEN" in answer.json()["message"]
        assert "s3cret" not in answer.text
        assert client.get("/metrics").status_code == 401
    shown = {"authorization": "Bearer s3cret"}
    assert client.post("/invocations", json=body, headers=shown).status_code == 200
    assert client.get("/metrics", headers=shown).status_code == 200


def test_metrics_count_requests_and_the_log_has_a_line_for_each(model, capsys):
    client = TestClient(application(model, Limits(), name="birds", version="3"))
    client.post("/invocations", json={"dataframe_records": [ROW]})
    client.post("/invocations", content="{", headers=JSON)
    client.get("/%0A2026-01-01 forged?token=s3cret")
    families = text_string_to_metric_families(client.get("/metrics").text)
    samples = [sample for family in families for sample in family.samples]
    counts = {
        (sample.labels["path"], sample.labels["status"]): sample.value
        for sample in samples
        if sample.name == "mergeflow_serve_requests_total"
    }
    assert counts == {("/invocations", "200"): 1, ("/invocations", "400"): 1, ("other", "404"): 1}
    assert [sample.value for sample in samples if sample.name == "mergeflow_serve_seconds_count"] == [2]
    served = [sample.labels for sample in samples if sample.name == "mergeflow_serve_model_info"]
    assert served == [{"name": "birds", "version": "3"}]
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == ""
    assert [re.sub(r"[\d.]+ ms$", "", line).split(" ", 2)[2] for line in lines] == [
        "POST /invocations 200 ",
        "POST /invocations 400 ",
        "GET /%0A2026-01-01%20forged 404 ",
        "GET /metrics 200 ",
    ]


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
    for charset in ("utf-8", '"UTF-8"', "utf8"):
        answer = client.post("/invocations", content=csv, headers={"content-type": f"text/csv; charset={charset}"})
        assert {answer.json()["predictions"][0]["label"]} == labels
    assert client.get("/ping").status_code == client.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (json.dumps({"dataframe_records": [ROW] * 6}), 413, "more than 5 rows"),
        (json.dumps({"dataframe_split": {"columns": ["task"], "data": [["digits"]] * 6}}), 413, "more than 5 rows"),
        (json.dumps({"inputs": {"task": ["digits"] * 6}}), 413, "more than 5 rows"),
        (json.dumps({"inputs": {"task": dict.fromkeys(range(6), "digits")}}), 413, "more than 5 rows"),
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
        (json.dumps({"dataframe_records": [MARK]}), 400, "no column 'image' and no column 'task'. The columns are"),
        (json.dumps({"dataframe_records": [{"image": ROW["image"]}]}), 400, "no column 'task'. The columns are image"),
        (json.dumps({"dataframe_records": []}), 400, "has no rows"),
        (json.dumps({"dataframe_split": {"columns": ["image", "task"], "data": []}}), 400, "has no rows"),
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


@pytest.fixture(scope="module")
def numbers():
    """Give a client of a model that answers with what it was given: a number and a text."""
    columns = Schema([ColSpec("double", "x"), ColSpec("string", "text")])
    metadata = SimpleNamespace(get_input_schema=lambda: columns)
    echo = SimpleNamespace(metadata=metadata, predict=lambda rows: rows[["x", "text"]])
    return TestClient(application(echo, Limits()), raise_server_exceptions=False)


@pytest.mark.parametrize("text", ["NA", "null", "None", "nan", "007", "a,b"])
def test_a_text_in_csv_is_taken_as_it_is(numbers, text):
    answer = numbers.post("/invocations", content=f'x,text\n1.5,"{text}"\n', headers={"content-type": "text/csv"})
    assert answer.json()["predictions"] == [{"x": 1.5, "text": text}]


def test_a_row_of_more_cells_than_columns_is_refused(numbers):
    """Pandas took its first cells for names of rows, and the model answered what was left."""
    answer = numbers.post("/invocations", content="text,x\na day, or two,1.5\n", headers={"content-type": "text/csv"})
    assert answer.status_code == 400, answer.text
    assert "the body cannot be read as rows" in answer.json()["message"]


def test_a_column_that_comes_twice_and_a_number_without_bound_are_refused(numbers):
    csv = numbers.post("/invocations", content="x,x,text\n1,2,a\n", headers={"content-type": "text/csv"})
    whole = numbers.post("/invocations", content='{"inputs": [{"x": 1' + "0" * 400 + ', "text": "a"}]}', headers=JSON)
    assert (csv.status_code, whole.status_code) == (400, 400)
    assert "The columns are x (double), text (string)" in csv.json()["message"]
    assert "The columns are x (double), text (string)" in whole.json()["message"]


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
