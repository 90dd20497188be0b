"""The whole pipeline on a small project of its own, through both drivers, with everything real."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file, save_file

from mergeflow.errors import MergeflowError
from tasks.project.graph import find_stage, load_graph
from tasks.running.runner import run_stage
from tests.flows.small_project import make_project, run_in
from tests.project_folder import change_params

pytestmark = pytest.mark.slow

BASE = "mergeflow/modalities/vision/assets/pocket8-base.safetensors"


def outputs(folder: Path) -> dict[str, bytes]:
    """Everything that a run makes and whose bits must not depend on how it ran."""
    made = folder / "outputs"
    return {
        str(path.relative_to(made)): path.read_bytes()
        for path in sorted(made.rglob("*"))
        if path.is_file() and path.name not in ("report.html", "registration.json")
    }


def ran(done: subprocess.CompletedProcess[str]) -> set[str]:
    return {line.split()[1] for line in done.stdout.splitlines() if "✓" in line}


def test_it_ends_with_table_registry_and_report(finished: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, done = finished
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "Traceback" not in done.stdout
    for word in ("zero", "shot", "individual", "average", "task_arithmetic scale", "cart", "normalised", "red", "blue"):
        assert word in done.stdout
    assert "mergeflow-pocket8 version 1 as @champion" in done.stdout
    assert "outputs/report.html" in done.stdout
    assert (folder / "outputs/report.html").stat().st_size > 10_000
    assert not (folder / ".mergeflow/scratch").exists() or not any((folder / ".mergeflow/scratch").iterdir())


def test_afterwards_neither_driver_has_anything_to_do(project: Path) -> None:
    before = outputs(project)
    again = run_in(project, "mergeflow", "run")
    assert "Nothing changed" in again.stdout
    assert json.loads(run_in(project, "dvc", "status", "--json").stdout) == {"code": ["always changed"]}
    repro = run_in(project, "dvc", "repro")
    assert repro.returncode == 0, repro.stderr
    assert re.findall(r"Running stage '([^']+)'", repro.stdout) == [
        "code"
    ]  # it looks at the code, and finds it as it was
    assert outputs(project) == before


def test_a_changed_image_retrains_one_expert(project: Path) -> None:
    picture = next((project / "inputs/red/train/red_centre").glob("*.png"))
    Image.open(picture).transpose(Image.Transpose.ROTATE_90).save(picture)
    before = outputs(project)
    done = run_in(project, "mergeflow", "run")
    assert done.returncode == 0, done.stderr
    assert "finetune@red" in ran(done)
    assert "finetune@blue" not in ran(done)
    after = outputs(project)
    expert = "experts/{}/model.safetensors"
    assert after[expert.format("blue")] == before[expert.format("blue")]
    assert after[expert.format("red")] != before[expert.format("red")]


@pytest.mark.nightly
def test_dvc_repro_alone_gives_the_same_bits(finished: tuple[Path, Any], tmp_path: Path) -> None:
    folder = make_project(tmp_path)
    done = run_in(folder, "dvc", "repro")
    assert done.returncode == 0, done.stderr
    assert outputs(folder) == outputs(finished[0])
    again = run_in(folder, "mergeflow", "run")
    assert "Nothing changed" in again.stdout, again.stdout
    assert json.loads((folder / "outputs/registration.json").read_text())["aliases"] == ["champion"]


@pytest.mark.nightly
@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "killed-before-dvc-recorded-it"])
def test_a_lost_registry_is_filled_again(project: Path, recorded: bool) -> None:
    lock = project / "dvc.lock"
    stages = yaml.safe_load(lock.read_text())
    if not recorded:
        del stages["stages"]["register"]
    lock.write_text(yaml.safe_dump(stages, sort_keys=False))
    for path in project.glob("mlflow.db*"):
        path.unlink()
    shutil.rmtree(project / "mlartifacts")
    done = run_in(project, "mergeflow", "run")
    assert done.returncode == 0, done.stderr
    assert ran(done) == {"register"}
    assert "version 1 as @champion" in done.stdout


@pytest.mark.nightly
def test_lost_files_are_registered_again_and_put_in_service_by_force(project: Path) -> None:
    assert run_in(project, "mergeflow", "registry", "show").returncode == 0  # from here on the copy's own files count
    shutil.rmtree(project / "mlartifacts")
    done = run_in(project, "mergeflow", "run")
    assert done.returncode == 0, done.stderr
    assert ran(done) == {"register"}
    assert "version 2 as @candidate" in done.stdout
    assert "mergeflow registry promote mergeflow-pocket8/2 --force" in done.stdout
    forced = run_in(project, "mergeflow", "registry", "promote", "2", "--force", "--who", "ada", "--why", "disk died")
    assert forced.returncode == 0, forced.stderr
    shown = json.loads(run_in(project, "mergeflow", "registry", "show", "--json").stdout)
    assert (shown["version"], shown["tasks"]) == ("2", ["blue", "red"])
    assert ran(run_in(project, "mergeflow", "run")) == set()


@pytest.mark.nightly
def test_a_worse_candidate_is_registered_and_not_promoted(project: Path) -> None:
    change_params(project, {"finetune.learning_rate": 0.3})
    done = run_in(project, "mergeflow", "run")
    assert done.returncode == 0, done.stderr
    record = json.loads((project / "outputs/registration.json").read_text())
    assert record["version"] == "2"
    assert record["champion"] == "1"
    assert "did not promote it" in done.stdout


def test_a_fault_of_ours_is_one_traceback_and_finished_work_counts(project: Path) -> None:
    figures = project / "tasks/figures.py"
    head = "def run(io: StageIO) -> None:\n"
    figures.write_text(figures.read_text().replace(head, f"{head}    raise AssertionError('a fault of ours')\n"))
    change_params(project, {"sweep.cart.scale": [1.0, 1.2]})
    assert run_stage(project, load_graph(project)["sweep@cart"])
    done = run_in(project, "mergeflow", "run")
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert "a fault of ours" in done.stderr
    assert "prefect" not in done.stderr
    assert "= sweep@cart" in done.stdout
    assert "select" in ran(done)


def record_on_purpose(project: Path, address: str) -> None:
    """Record an output that a person has changed, as the message about it says."""
    done = run_in(project, "dvc", "commit", "--force", address)
    assert done.returncode == 0, done.stderr


class TestBadInput:
    """One clear error, a status other than 0, nothing promoted, nothing half-written."""

    def failing(self, folder: Path, stage: str, item: str | None = None) -> str:
        """What a stage says that must fail; it is run in this process, which has torch already."""
        before = outputs(folder)
        with pytest.raises(MergeflowError) as caught:
            run_stage(folder, find_stage(load_graph(folder), stage, item))
        assert outputs(folder) == before
        return str(caught.value)

    def failing_command(self, folder: Path, *command: str) -> str:
        before = outputs(folder)
        registration = (folder / "outputs/registration.json").read_bytes()
        done = run_in(folder, "mergeflow", *command)
        assert done.returncode == 2, done.stdout + done.stderr
        assert "Traceback" not in done.stdout + done.stderr
        assert done.stderr.startswith("error:")
        assert (folder / "outputs/registration.json").read_bytes() == registration
        changed = {name for name, content in outputs(folder).items() if before.get(name) != content}
        assert not any(name.startswith(("merged", "results")) for name in changed)
        return done.stderr

    def test_an_unknown_parameter(self, project: Path) -> None:
        change_params(project, {"finetune.step": 3})
        assert "did you mean 'steps'" in self.failing_command(project, "run")

    def test_a_missing_checkpoint(self, project: Path) -> None:
        change_params(project, {"model.pretrained": "inputs/none.safetensors"})
        assert "none.safetensors" in self.failing(project, "base")

    def test_a_truncated_checkpoint(self, project: Path) -> None:
        whole = (project / BASE).read_bytes()
        (project / "inputs/half.safetensors").write_bytes(whole[: len(whole) // 2])
        change_params(project, {"model.pretrained": "inputs/half.safetensors"})
        assert "half.safetensors" in self.failing(project, "base")

    def test_a_base_of_another_shape(self, project: Path) -> None:
        state = load_file(project / BASE)
        state["visual.proj"] = torch.zeros(7, 5)
        save_file(state, project / "inputs/other.safetensors")
        change_params(project, {"model.pretrained": "inputs/other.safetensors"})
        message = self.failing(project, "base")
        assert "visual.proj" in message
        assert "(7, 5)" in message

    def test_an_expert_with_nan_or_of_another_shape(self, project: Path) -> None:
        path = project / "outputs/experts/red/model.safetensors"
        state = load_file(path)
        for values, method in (
            (torch.full_like(state["visual.proj"], float("nan")), "average"),
            (torch.zeros(7, 5), "cart"),
        ):
            save_file({**state, "visual.proj": values}, path)
            assert "outputs/experts/red/model.safetensors" in self.failing(project, "sweep", method)
            record_on_purpose(project, "finetune@red")
            message = self.failing(project, "sweep", method)
            assert "red" in message
            assert "visual.proj" in message

    def test_an_empty_task(self, project: Path) -> None:
        for path in (project / "inputs/blue/train").rglob("*.png"):
            path.unlink()
        assert "blue" in self.failing(project, "prepare", "blue")

    def test_an_unknown_stage_and_an_unknown_item(self, project: Path) -> None:
        assert "did you mean 'finetune'" in self.failing(project, "finetun")
        assert "Known: blue, red" in self.failing(project, "finetune", "green")

    @pytest.mark.nightly
    def test_a_diverging_run_keeps_what_was_there(self, project: Path) -> None:
        change_params(project, {"finetune.learning_rate": 1e30})
        message = self.failing_command(project, "run")
        assert "task 'red'" in message
        assert "task 'blue'" in message
        assert "learning_rate" in message
