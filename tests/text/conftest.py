"""One small project and one small base for the tests of texts."""

from pathlib import Path

import pytest

from tests.once import once
from tests.project_folder import run_pipeline
from tests.text.small_project import make_base, make_text_project


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a RoBERTa of 2 layers × 32 and its tokenizer."""
    return once(tmp_path_factory, "text_base", make_base)


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project of three tasks that has run up to `evaluate`; nobody changes it."""
    return once(tmp_path_factory, "text_project", lambda folder: run_pipeline(make_text_project(folder)))
