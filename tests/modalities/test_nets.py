"""Small nets refuse what they cannot be built from."""

import pytest

from mergeflow.modalities.nets import SmallResNet


def test_a_residual_net_needs_eight_channels() -> None:
    with pytest.raises(ValueError, match="7 channels wide; give at least 8"):
        SmallResNet(5, width=7)
