"""Fingerprints: pinned values, every element counts, and recorded ones are recognised or refused by name."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mergeflow.checkpoints import fingerprint, infos_of, matches, write_checkpoint
from mergeflow.checkpoints.fingerprint import BLOCK, short
from mergeflow.checkpoints.writer import StreamWriter
from mergeflow.errors import MergeflowError
from mergeflow.merging import merge
from registry.stage import replay


@pytest.mark.parametrize(
    ("dtype", "recorded"), [(torch.float32, "blake3:858d45f1e975"), (torch.int32, "blake3:8886e62bece3")]
)
def test_recorded_fingerprints_stay_true(dtype: torch.dtype, recorded: str) -> None:
    state = {"long": torch.arange(300_000).to(dtype), "flag": torch.tensor([True, False]), "empty": torch.zeros(0, 3)}
    now = fingerprint(state)
    assert now[:19] == recorded
    assert short(now) == recorded[7:]
    assert matches(state, now)
    assert matches(state, now, current=now)
    assert not matches({**state, "more": torch.ones(1)}, now)


@given(at=st.integers(0, 2 * BLOCK))
def test_every_element_counts(at: int) -> None:
    state = {"w": torch.zeros(2 * BLOCK + 1, dtype=torch.uint8)}
    recorded = fingerprint(state)
    state["w"][at] = 1
    assert not matches(state, recorded)


@pytest.mark.parametrize("recorded", ["blake9:" + "0" * 64, "0" * 64])
def test_a_scheme_of_another_version_is_refused(recorded: str) -> None:
    with pytest.raises(MergeflowError, match=r"0000…' is of another scheme than .* knows \(blake3\): use the version"):
        matches({}, recorded)


def test_a_writer_takes_the_fingerprint_of_what_it_writes(tmp_path: Path) -> None:
    state = {"a": torch.arange(BLOCK + 3.0), "b": torch.empty(0)}
    with StreamWriter(tmp_path / "x.safetensors", infos_of(state), {}) as writer:
        for at in (BLOCK, 0):
            writer.write("a", at, state["a"][at : at + BLOCK])
        assert writer.commit() == fingerprint(state)


def test_a_replayed_recipe_names_inputs_that_are_not_those_recorded(tmp_path: Path) -> None:
    for name, value in (("base", 0.0), ("expert", 1.0)):
        write_checkpoint(tmp_path / f"{name}.safetensors", {"w": torch.full((3, 3), value)})
    values = {"method": "ties", "base": "base.safetensors", "experts": {"a": "expert.safetensors"}}
    paths = {"base": str(tmp_path / "base.safetensors"), "experts": {"a": str(tmp_path / "expert.safetensors")}}
    before = merge({**values, **paths}, tmp_path / "before.safetensors")
    record = {**values, "base_fingerprint": before.inputs["base"], "fingerprints": {"a": before.inputs["a"]}}
    made, other_inputs = replay(record, tmp_path, tmp_path / "again.safetensors")
    assert (made.fingerprint, other_inputs) == (before.fingerprint, ())
    record["fingerprints"]["a"] = before.inputs["base"]
    assert replay(record, tmp_path, tmp_path / "again.safetensors")[1] == ("a",)
