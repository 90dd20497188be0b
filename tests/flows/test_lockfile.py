"""dvc.lock cut off, as kill -9 of DVC leaves it: the next run mends it and loses nothing."""

from pathlib import Path

import pytest
from dvc.schema import COMPILED_LOCKFILE_SCHEMA
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML, YAMLError
from voluptuous import Invalid

from flows.dvc_commands import changes, is_whole, record_outputs, remove_stale_outputs
from tasks.project.graph import load_graph
from tasks.project.recorded import locked_stages
from tasks.running.runner import run_stage
from tests.flows.kill_driver import make_toy_repository
from tests.flows.small_project import ROOT, commit

pytestmark = pytest.mark.slow

WHOLE = (ROOT / "dvc.lock").read_text()


def dvc_reads(text: str) -> bool:
    try:
        COMPILED_LOCKFILE_SCHEMA(YAML(typ="safe").load(text))
    except (YAMLError, Invalid):
        return False
    return True


def test_a_whole_file_is_whole() -> None:
    assert is_whole(WHOLE)
    assert dvc_reads(WHOLE)


@example(WHOLE.index("md5: ") + len("md5: 1"))  # the beginning of a digest may read as a number
@settings(max_examples=40)
@given(st.integers(0, 4000))
def test_what_dvc_cannot_read_is_known_to_be_cut_off(length: int) -> None:
    assert dvc_reads(WHOLE[:length]) or not is_whole(WHOLE[:length])


@pytest.mark.parametrize("committed", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_a_run_mends_it_and_finds_everything_up_to_date(
    committed: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = make_toy_repository(tmp_path / "project")
    stages = load_graph(folder)
    prepare = [address for address in stages if address.startswith("prepare")]
    for address in prepare:
        assert run_stage(folder, stages[address])
    record_outputs(folder, prepare)
    lock = folder / "dvc.lock"
    before = lock.read_text()
    if committed:
        commit(folder, "dvc.lock")
    lock.write_text("")
    (folder / ".dvc/tmp/rwlock").write_text('{"read": {"')
    assert locked_stages(folder) == {}
    remove_stale_outputs(folder, pytest.fail)
    assert set(changes(folder, stages)).isdisjoint(prepare) is committed
    assert capfd.readouterr().err.startswith("dvc.lock was cut off when DVC was killed: ")
    assert not any(run_stage(folder, stages[address]) for address in prepare)
    record_outputs(folder, prepare)
    assert lock.read_text() == before
