"""One small base and one small project for the tests of causal models."""

from pathlib import Path

import pytest

from tests.causal.small_project import make_base, make_causal_project
from tests.once import once
from tests.project_folder import run_pipeline


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a Llama of 2 layers × 32 and a tokenizer of bytes."""
    return once(tmp_path_factory, "causal_base", make_base)


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project of three tasks that has run up to `evaluate`; nobody changes it."""
    return once(tmp_path_factory, "causal_project", lambda folder: run_pipeline(make_causal_project(folder)))
