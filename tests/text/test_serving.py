"""A registered version of texts answers with a label and probabilities or a number, and names rows it cannot read."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd  # type: ignore[import-untyped]
import pytest
import torch
from safetensors import safe_open

from mergeflow.data import load_manifest
from mergeflow.errors import MergeflowError
from mergeflow.modalities.heads import Head
from mergeflow.modalities.served import SERVED, Loaded
from mergeflow.modalities.serving import read_model
from registry.artifacts import ModelFiles, check_pyfunc, save_pyfunc
from tests.text.small_project import TASKS


@pytest.fixture(scope="module")
def files(project: Path) -> ModelFiles:
    with safe_open(project / "outputs/base/model.safetensors", framework="pt") as file:
        record = file.metadata()
    return ModelFiles(
        weights=project / "outputs/merged/average.safetensors",
        heads={task: project / f"outputs/experts/{task}/head.safetensors" for task in TASKS},
        model={"modality": "text", "pretrained": "inputs/base"},
        decoding=load_manifest(project / "outputs/data/manifests/mood")["decoding"],
        record=record,
        transforms={task: load_manifest(project / f"outputs/data/manifests/{task}")["transforms"] for task in TASKS},
    )


@pytest.fixture(scope="module")
def folder(files: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow model folder, as a registered version has it."""
    place = tmp_path_factory.mktemp("served") / "model"
    save_pyfunc(place, files)
    return place


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Loaded:
    return read_model(folder / "artifacts/model", torch.device("cpu"))


def ask(loaded: Loaded, **columns: list[Any]) -> dict[str, list[Any]]:
    return SERVED.get("text").answer(loaded, columns)


def test_classes_pairs_and_numbers_are_answered(loaded: Loaded) -> None:
    texts = ["the red cat is nice", "the blue dog is very sad", "the cat is red", "red cat"]
    pairs = [None, None, "the cat is blue and red", "blue cat"]
    answers = ask(loaded, task=["mood", "mood", "same", "near"], text=texts, text_pair=pairs)
    assert answers["label"][:2] == ["good", "bad"]
    assert set(answers["probabilities"][2]) == {"0", "1"}
    assert sum(answers["probabilities"][2].values()) == pytest.approx(1)
    assert answers["probabilities"][3] == {}
    assert abs(float(answers["label"][3])) < 10


def test_a_number_is_told_as_exactly_as_the_head_gives_it(loaded: Loaded) -> None:
    far = Head(torch.zeros(1, 32), 1.0, [], torch.tensor([1234567.125]), trained=True)
    answers = ask(replace(loaded, heads={**loaded.heads, "near": far}), task=["near"], text=["a cat"], text_pair=["a"])
    assert answers["label"] == ["1234567.12"]


def test_a_row_is_answered_the_same_alone_and_without_the_column_of_pairs(loaded: Loaded) -> None:
    many = ask(loaded, task=["mood"] * 40, text=["the emu is " + "very " * (k % 9) + "fine" for k in range(40)])
    alone = ask(loaded, task=["mood"], text=["the emu is fine"])
    assert many["probabilities"][0] == pytest.approx(alone["probabilities"][0], abs=1e-5)


def test_a_question_with_too_few_or_too_many_texts_is_refused(loaded: Loaded) -> None:
    texts, nothing = ["the cat is red"] * 3, float("nan")  # as a table says that a cell is empty
    message = "3 of 3 rows .*row 0: task 'same' is about two .* row 1: task 'near' .* row 2: task 'mood' is about one"
    with pytest.raises(MergeflowError, match=message):
        ask(loaded, task=["same", "near", "mood"], text=texts, text_pair=[None, nothing, "dog"])
    with pytest.raises(MergeflowError, match="task 'same' is about two texts"):
        ask(loaded, task=["same"], text=["the cat is red"])


def test_texts_are_asked_over_http(folder: Path) -> None:
    from mlflow.pyfunc import load_model, scoring_server
    from starlette.testclient import TestClient

    check_pyfunc(folder, SERVED.get("text"))  # it answers its own example
    model = load_model(str(folder))
    client = TestClient(scoring_server.init(model), raise_server_exceptions=False)

    def post(*rows: dict[str, Any]) -> Any:
        return client.post("/invocations", json={"dataframe_records": list(rows)})

    single = {"task": "mood", "text": "the red cat is nice"}
    two = {"task": "same", "text": "the cat is red", "text_pair": "the cat is blue"}
    for rows in ([single], [two], [single, two], [{**single, "text_pair": None}, two]):
        answer = post(*rows)
        assert answer.status_code == 200, answer.text
        expected: Any = model.predict(pd.DataFrame(rows))
        assert [row["label"] for row in answer.json()["predictions"]] == list(expected["label"])
    refused = post({"task": "same", "text": "the cat is red"}, {**two, "text": ""})
    assert refused.status_code == 400
    assert "2 of 2 rows" in refused.json()["message"]


def test_all_rows_that_cannot_be_read_are_named(loaded: Loaded) -> None:
    message = "3 of 3 rows .*row 0: its text is empty.* row 1: .*did you mean 'mood'.* row 2: .* the type int"
    with pytest.raises(MergeflowError, match=message):
        ask(loaded, task=["mood", "moood", "same"], text=["", "cat", 7], text_pair=[None, None, "dog"])
    with pytest.raises(MergeflowError, match=r"lacks the column\(s\) text; expected text, task"):
        ask(loaded, task=["mood"])
