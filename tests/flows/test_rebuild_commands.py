"""What the commands say that register a version made from another one's lineage."""

import io

import pytest
from rich.console import Console

from flows.rebuild.commands import _print_rebuilt
from registry.commands import split_address
from registry.gates import Decision
from registry.stage import Rebuilt


@pytest.mark.parametrize("promoted", [False, True])
def test_the_way_to_promote_names_the_model(promoted: bool) -> None:
    console = Console(file=io.StringIO(), soft_wrap=True)
    decision = Decision(True, (), {})
    done = Rebuilt("other", "3", True, "ties", {"scale": 1.0}, 4, 0.9, decision, "3" if promoted else "1")
    _print_rebuilt(console, done, promote=False)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "Registered  other version 3" in said
    assert ("champion is version 1: `mergeflow registry promote other/3`" in said) is not promoted
    assert split_address("other/3") == ("other", "3")  # as `promote` reads it
