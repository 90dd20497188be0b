"""Files that the tests of merging share."""

import pytest
import torch

from mergeflow.checkpoints import write_checkpoint
from tests.merging.helpers import awkward


@pytest.fixture
def files(tmp_path):
    base, experts = awkward(torch.float32)
    write_checkpoint(tmp_path / "base.safetensors", base)
    for name, state in experts.items():
        write_checkpoint(tmp_path / f"{name}.safetensors", state)
    return tmp_path
