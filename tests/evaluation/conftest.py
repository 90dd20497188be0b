"""One small world for all tests of evaluation."""

from pathlib import Path

import pytest

from tests.evaluation.small import shared_world


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_world(tmp_path_factory)
