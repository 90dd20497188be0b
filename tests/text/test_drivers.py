"""Both drivers make the same bits of a project of texts, with heads and without."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.causal.small_project import make_causal_project
from tests.flows.small_project import registry_template, run_in
from tests.flows.test_pipeline import outputs
from tests.text.small_project import make_text_project


@pytest.mark.nightly
@pytest.mark.parametrize("make", [make_text_project, make_causal_project])
def test_dvc_repro_gives_the_bits_of_mergeflow_run(make: Callable[[Path], Path], tmp_path: Path) -> None:
    made: dict[str, dict[str, bytes]] = {}
    for driver in (("mergeflow", "run"), ("dvc", "repro")):
        folder = make(tmp_path / driver[0])
        shutil.copyfile(registry_template(), folder / "mlflow.db")
        assert run_in(folder, "dvc", "init", "--no-scm", "--quiet").returncode == 0
        done = run_in(folder, *driver, timeout=900)
        assert done.returncode == 0, done.stderr
        assert (folder / "outputs/registration.json").exists()
        made[driver[0]] = outputs(folder)
    assert made["mergeflow"].keys() == made["dvc"].keys()
    assert [name for name, content in made["dvc"].items() if made["mergeflow"][name] != content] == []
    again = run_in(tmp_path / "dvc", "mergeflow", "run", timeout=900)
    assert "Nothing changed" in again.stdout, again.stdout
