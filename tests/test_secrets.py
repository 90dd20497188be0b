"""Passwords and tokens stand in no message, log, report or metric, wherever they come from."""

import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flows.status import keep_traceback, own_traceback, reported
from mergeflow.errors import SECRETS, MergeflowError, without_passwords
from tasks.running.runner import _failure_noted
from tasks.running.stage_log import stage_log

PASSWORDS = st.text("abcXYZ0189-._~%!$*+,;/:@#?", min_size=8, max_size=20).map(lambda text: f"q{text}q")
ADDRESSES = (
    "http://ada:{}@mlflow.example.org:5000",
    "https://ada:{}@prefect.example.org/api",
    "postgresql://ada:{}@db.example.org/mlflow",
    "postgresql+psycopg2://ada:{}@/mlflow?host=/run",
    "ssh://ada:{}@store.example.org/dvc",
)
QUERIES = ("postgresql://db/mlflow?user=ada&password={}", "s3://bucket/dvc?aws_secret_access_key={}", "h?token={}")


def texts_of(error: Exception) -> list[str]:
    """Let a run fail by an error; everything that is written about it."""
    with TemporaryDirectory() as name:
        root = Path(name)
        for part in (reported(root, root / "report.json", root / "run.prom"), _failure_noted(root, "register")):
            with pytest.raises(type(error)), part:
                raise error
        with pytest.raises(type(error)), stage_log(root / "stage.log"):
            print_and_raise(error)
        files = [path.read_text() for path in root.rglob("*") if path.is_file()]
    assert len(files) == 4
    keep_traceback(error)
    return [*files, str(error), repr(error), own_traceback(error) or ""]


def print_and_raise(error: Exception) -> None:
    print(error)
    raise error


@settings(max_examples=25)
@given(password=PASSWORDS, form=st.sampled_from(ADDRESSES), kind=st.sampled_from([MergeflowError, RuntimeError]))
def test_no_password_of_an_address_is_written(password: str, form: str, kind: type[Exception]) -> None:
    for text in texts_of(kind(f"no answer from {form.format(password)}, try again")):
        assert password not in text


@settings(max_examples=10)
@given(password=PASSWORDS)
def test_no_password_of_a_query_is_written(password: str) -> None:
    for form in QUERIES:
        for text in texts_of(RuntimeError(f"no answer from {form.format(password)} yet")):
            assert password not in text


@pytest.mark.parametrize("name", SECRETS)
def test_no_secret_of_the_environment_is_written(name: str) -> None:
    value = "ada:q8 w'e&r" if name.endswith("AUTH_STRING") else "q8 w'e&r"
    with patch.dict(os.environ, {name: value}):
        for text in texts_of(RuntimeError(f"the server says: bad login {value}!")):
            assert "q8 w'e&r" not in text


def test_what_is_no_secret_stays() -> None:
    for text in (
        "http://127.0.0.1:5000/#/models/merged@champion",
        "postgresql://mergeflow@/mlflow",
        "12:30 a@b.org",
        json.dumps({"s3://bucket/key": "hf:tanganke/eurosat@main"}),
    ):
        assert without_passwords(text) == text
