"""One small world for all tests of evaluation."""

from pathlib import Path

import pytest
import torch

from tests.evaluation.small import make_world


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    make_world(folder)
    torch.set_num_threads(before)
    return folder
