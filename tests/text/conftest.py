"""One small project and one small base for the tests of texts."""

from pathlib import Path

import pytest

from tests.once import once
from tests.text.small_project import finished_project, make_base


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a RoBERTa of 2 layers × 32 and its tokenizer."""
    return once(tmp_path_factory, "text_base", make_base)


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project of three tasks that has run up to `evaluate`; nobody changes it."""
    return finished_project(tmp_path_factory)
