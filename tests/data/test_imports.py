"""What trains and measures depends on neither a drawing nor a reader: a change of one re-trains nothing."""

from pathlib import Path

import pytest

from tasks.running.digests import Code
from tests.flows.small_project import made_once
from tests.project_folder import read_code

ROOT = Path(__file__).parents[2]
STAGES = ("base", "finetune", "multitask", "vectors", "sweep", "select", "evaluate", "figures")
READERS = ("suites", "mergeflow.modalities.vision.sources", "mergeflow.data.prepare")


@pytest.fixture(scope="module")
def code() -> Code:
    return Code(made_once("code", read_code))


@pytest.mark.parametrize("stage", STAGES)
def test_what_reads_a_split_reaches_no_reader(code: Code, stage: str) -> None:
    modules = code.closure(f"tasks.{stage}")
    assert len(modules) > 3
    assert not [module for module in modules if module.startswith(READERS)]


@pytest.mark.slow
def test_what_prepares_reaches_every_reader_and_drawing_and_they_form_no_circle(code: Code) -> None:
    # `prepare` finds the modality's package by name; that its digest counts it is tested with the digests.
    modules = {*code.closure("tasks.prepare"), *code.closure("mergeflow.modalities.vision.preparation")}
    drawings = {f"suites.pocket.drawn.{path.stem}" for path in (ROOT / "suites/pocket/drawn").glob("[a-z]*.py")}
    assert len(drawings) >= 20
    assert drawings | {"mergeflow.modalities.vision.sources.files"} <= modules
    for start, other in (("mergeflow.data.prepare", ("suites", "mergeflow.modalities")),
                         ("suites.pocket.source", ("mergeflow.modalities",))):  # fmt: skip
        assert not [module for module in code.closure(start) if module.startswith(other)]
