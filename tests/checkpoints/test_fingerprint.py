"""Fingerprints name their scheme, and what was recorded before schemes had names stays verifiable."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mergeflow.checkpoints import fingerprint, infos_of, matches, open_checkpoint, write_checkpoint
from mergeflow.checkpoints.fingerprint import BLOCK, short
from mergeflow.checkpoints.writer import StreamWriter
from mergeflow.errors import MergeflowError
from mergeflow.merging import check_recipe, make_recipe, merge
from mergeflow.merging.compression.compressor import configure_compressor
from mergeflow.merging.compression.suite_file import compress, extract_task
from mergeflow.merging.files.vectors import add, extract
from registry.stage import replay
from tests.merging.helpers import State, awkward, recipe
from tests.merging.test_folder import stop, written

# Taken by the code of before the schemes.
RECORDED = {
    "awkward": "4debc0d706d084f3f8ccd07127cf6006a3b3a0a39c83c70b736d5b41686f5f4d",
    "long": "c2fd5bfa37d3391e681d7adbd893741fcc4ce30ac4a815070f14e874374f8734",
}


def recorded() -> tuple[State, dict[str, State]]:
    """The states whose fingerprint was recorded: their integers and flags were rows."""
    base, experts = awkward(torch.float32)
    rows = {"steps": torch.arange(4), "flag": torch.tensor([True, False])}
    return {**base, **rows}, {name: {**state, **rows} for name, state in experts.items()}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    base, experts = recorded()
    write_checkpoint(tmp_path / "base.safetensors", base)
    for name, state in experts.items():
        write_checkpoint(tmp_path / f"{name}.safetensors", state)
    return tmp_path


def older(path: Path, base: str) -> Path:
    """Write a task vector again as it was before schemes had names."""
    with open_checkpoint(path) as state:
        notes = {**state.metadata, "mergeflow.base": base}
        target = path.with_name(f"older-{path.name}")
        write_checkpoint(target, dict(state), notes)
    return target


def test_recorded_fingerprints_stay_true() -> None:
    states = {"awkward": recorded()[0], "long": {"long": torch.arange(300_000, dtype=torch.float32)}}
    for name, state in states.items():
        assert fingerprint(state, "sha256") == RECORDED[name]
        assert matches(state, RECORDED[name])
        assert matches(state, fingerprint(state))
        assert matches(state, RECORDED[name], current=fingerprint(state))
        assert not matches({**state, "more": torch.ones(1)}, RECORDED[name])
    assert fingerprint(states["long"]).startswith("blake3:")
    assert len(short(fingerprint(states["long"]))) == len(short(RECORDED["long"])) == 12


@given(at=st.integers(0, 2 * BLOCK), scheme=st.sampled_from(["sha256", "blake3"]))
def test_every_element_counts(at: int, scheme: str) -> None:
    state = {"w": torch.zeros(2 * BLOCK + 1, dtype=torch.uint8)}
    recorded = fingerprint(state, scheme)
    state["w"][at] = 1
    assert not matches(state, recorded)


def test_a_scheme_of_another_version_is_named() -> None:
    with pytest.raises(MergeflowError, match=r"scheme 'blake9', but this version of mergeflow knows sha256 and blake3"):
        matches({}, "blake9:" + "0" * 64)


@pytest.mark.parametrize("scheme", ["sha256", "blake3"])
def test_a_writer_takes_the_fingerprint_of_what_it_writes(scheme: str, tmp_path: Path) -> None:
    state = {"a": torch.arange(BLOCK + 3.0), "b": torch.empty(0)}
    with StreamWriter(tmp_path / "x.safetensors", infos_of(state), {}, scheme) as writer:
        for at in (BLOCK, 0):
            writer.write("a", at, state["a"][at : at + BLOCK])
        assert writer.commit() == fingerprint(state, scheme)


def test_a_merge_stopped_before_the_schemes_goes_on(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = merge(recipe(files, out=str(files / "whole")), scheme="sha256")
    with monkeypatch.context() as patch:
        patch.setattr("tests.merging.test_folder.merge", partial(merge, scheme="sha256"))
        stop(files, monkeypatch, after=2)
    journal = files / ".out.journal"
    entries = json.loads(journal.read_text())
    assert entries.pop("scheme") == "sha256"
    journal.write_text(json.dumps(entries))  # as it was written before
    result, made = written(files, monkeypatch)
    assert made
    assert not set(entries["shards"]) & set(made)
    assert (result.fingerprint, result.inputs) == (whole.fingerprint, whole.inputs)
    assert result.inputs["base"] == RECORDED["awkward"]


def test_task_vectors_of_before_know_their_base(files: Path) -> None:
    paths = []
    for name in ("expert0", "expert1"):
        extract(files / "base.safetensors", files / f"{name}.safetensors", files / f"{name}-tau.safetensors")
        paths.append(older(files / f"{name}-tau.safetensors", RECORDED["awkward"]))
    values = {"method": "task_arithmetic", "base": str(files / "base.safetensors"), "out": str(files / "m.safetensors")}
    merge(make_recipe({**values, "task_vectors": dict(zip("ab", map(str, paths), strict=True))}))
    add(paths, files / "sum.safetensors")
    with pytest.raises(MergeflowError, match="two schemes"):
        add([paths[0], files / "expert1-tau.safetensors"], files / "no.safetensors")

    foreign = {"a": str(older(paths[0], RECORDED["long"]))}
    with pytest.raises(MergeflowError, match="was taken from the base c2fd5bfa37d3…, but this base is dce42c36c03d"):
        merge(make_recipe({**values, "out": str(files / "no.safetensors"), "task_vectors": foreign}))
    assert not (files / "no.safetensors").exists()


def test_a_header_that_names_the_base_in_another_scheme_does_not_refuse_it(files: Path) -> None:
    state = recorded()[0]
    write_checkpoint(files / "merged.safetensors", state, {"mergeflow.fingerprint": RECORDED["awkward"]})
    extract(files / "merged.safetensors", files / "expert0.safetensors", files / "tau.safetensors")
    values = {"method": "task_arithmetic", "base": str(files / "merged.safetensors")}
    check_recipe({**values, "task_vectors": {"a": str(files / "tau.safetensors")}})


def test_a_compressed_suite_of_before_opens(files: Path) -> None:
    base, experts = recorded()
    compressed = compress(configure_compressor("tall_mask"), base, experts)
    compressed.write(files / "new.safetensors")
    replace(compressed, base=RECORDED["awkward"]).write(files / "old.safetensors")
    for name in ("new", "old"):
        extract_task(files / f"{name}.safetensors", "expert0", files / "base.safetensors")
    with pytest.raises(MergeflowError, match=r"is not the base .*…, not dce42c36c03d…"):
        extract_task(files / "new.safetensors", "expert0", files / "expert0.safetensors")


def test_a_recorded_recipe_replays_in_its_scheme(files: Path) -> None:
    values = {"method": "ties", "base": "base.safetensors", "experts": {"a": "expert0.safetensors"}}
    paths = {"base": str(files / "base.safetensors"), "experts": {"a": str(files / "expert0.safetensors")}}
    before = merge({**values, **paths}, files / "before.safetensors", scheme="sha256")
    record = {**values, "base_fingerprint": before.inputs["base"], "fingerprints": {"a": before.inputs["a"]}}
    made = replay(record, files, files / "again.safetensors")
    assert (made.fingerprint, made.other_inputs) == (before.fingerprint, ())
    record["fingerprints"]["a"] = RECORDED["long"]
    assert replay(record, files, files / "again.safetensors").other_inputs == ("a",)
