"""One small base and one small project for the tests of causal models."""

from pathlib import Path

import pytest

from tests.causal.small_project import finished_project, make_base
from tests.once import once


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a Llama of 2 layers × 32 and a tokenizer of bytes."""
    return once(tmp_path_factory, "causal_base", make_base)


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project of three tasks that has run up to `evaluate`; nobody changes it."""
    return finished_project(tmp_path_factory)
