"""docs/registry.md: its Python runs, in its order, against a registry with two versions."""

import re
from pathlib import Path

import pytest

from registry.gates import GateSettings
from registry.promotion import promote, register
from registry.versions import history

from .test_real_model import picture

PAGE = Path(__file__).parents[2] / "docs/registry.md"


@pytest.mark.slow
def test_the_page_runs(store, make_candidate, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("digit.png").write_bytes(picture(1))
    for seed, accuracy in ((1, 0.8), (2, 0.7)):
        register(store, "merged", make_candidate(seed, accuracy))
    promote(store, "merged", 1, GateSettings())
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.S):
        exec(block, names)
    assert names["answer"].changed is False
    assert names["now"].champion.version == "1"
    assert [event.action for event in history(store, "merged")] == ["promote", "force", "rollback"]
    assert (tmp_path / "got/model/model.safetensors").is_file()


def test_every_gate_is_on_the_page():
    text = PAGE.read_text()
    for name in GateSettings.model_fields:
        assert f"`{name}`" in text, name
