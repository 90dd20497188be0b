"""One small world for all tests of evaluation."""

from pathlib import Path

import pytest
import torch

from tests.evaluation.small import make_world
from tests.once import once


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = once(tmp_path_factory, "evaluation_world", make_world)
    torch.set_num_threads(before)
    return folder
