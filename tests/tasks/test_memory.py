"""A project's device memory: every stage that uses a device is foretold, and a batch that cannot fit is refused."""

import shutil
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from mergeflow.errors import MergeflowError
from mergeflow.memory import Need, largest
from mergeflow.merging.execution.device import with_torch
from mergeflow.training.settings import TOGETHER
from tasks.memory import check_project, forecast, print_device_memory
from tasks.project.graph import load_graph
from tasks.project.parameters import Params, load_params
from tests.card import driver
from tests.toy_project import make_toy_project

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
WIDE = {"widths": [8, 8192, 6], "dtype": "float32"}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Batches of 2^18 rows through 8192 hidden numbers: 17 GB of activations and more."""
    folder = make_toy_project(tmp_path / "project", WIDE, batch_size=2**18)
    return changed(folder, run={"device": "cuda"})


def changed(folder: Path, **sections: dict[str, object]) -> Path:
    values = yaml.safe_load((folder / "params.yaml").read_text())
    for name, changes in sections.items():
        values[name] |= changes
    (folder / "params.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    return folder


def read(folder: Path) -> Params:
    return load_params(folder / "params.yaml")


def users() -> set[str]:
    """The stages whose module uses a device, read from their source."""
    words = ("choose_device", "Workbench", "train_in_stage")
    paths = {stage.name: ROOT / f"tasks/{stage.name}.py" for stage in load_graph(ROOT).values()}
    texts = {name: path.read_text() for name, path in paths.items() if path.exists()}
    return {name for name, text in texts.items() if any(word in text for word in words)}


def test_every_stage_that_uses_a_device_is_foretold(tmp_path: Path) -> None:
    named = set()
    for number, regime in enumerate(("steps", "joint", "iterative")):
        folder = make_toy_project(tmp_path / str(number), regime=regime, iterative={"rounds": 2})
        works = forecast(folder, read(folder)).works
        named |= {stage for work in works for stage in work.name.partition(":")[0].split(", ")}
        assert ("multitask: a step" in [work.name for work in works]) == (regime in TOGETHER)
    assert named == users()


def test_a_batch_that_cannot_fit_is_refused_with_the_setting_that_fits(project: Path) -> None:
    quiet, stages = Console(quiet=True), ["finetune@left", "evaluate"]
    with driver(memory=12 * 10**9):
        with pytest.raises(
            MergeflowError, match=r"(?s)^finetune: a step needs about .*Set finetune.accumulate to \d+:[^\n]*$"
        ) as raised:
            print_device_memory(project, read(project), stages, quiet)
        value = int(str(raised.value).partition("accumulate to ")[2].partition(":")[0])
        print_device_memory(changed(project, finetune={"accumulate": value}), read(project), stages, quiet)
        if value > 2:
            with pytest.raises(MergeflowError):
                print_device_memory(changed(project, finetune={"accumulate": value // 2}), read(project), stages, quiet)


def test_an_evaluation_that_cannot_fit_and_a_full_batch(project: Path) -> None:
    changed(project, finetune={"batch_size": 16}, evaluation={"batch_size": 2**20})
    with driver(memory=12 * 10**9), pytest.raises(MergeflowError) as raised:
        check_project(project, None, Console(quiet=True))
    lines = str(raised.value).splitlines()
    assert [line.partition(" needs")[0] for line in lines] == [
        "finetune: validation",
        "sweep, select, evaluate",
    ]
    assert all("Set evaluation.batch_size to " in line for line in lines)
    changed(project, finetune={"regime": "full_batch_gd", "batch_size": 2**19}, evaluation={"batch_size": 16})
    with driver(memory=12 * 10**9), pytest.raises(MergeflowError, match=r"Set finetune\.batch_size to "):
        check_project(project, None, Console(quiet=True))


def test_a_model_that_fits_in_no_way(project: Path) -> None:
    with driver(memory=7 * 10**8), pytest.raises(MergeflowError, match="Not even one example at a time fits"):
        check_project(project, None, Console(quiet=True))


def test_the_processor_is_told_about_on_request_alone(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = Console(width=80)
    check_project(project, "cpu", shown)
    text = capsys.readouterr().out
    assert all(word in text for word in ("Memory of cpu", "sums", "examples at once", "finetune: a step"))
    print_device_memory(changed(project, run={"device": "cpu"}), read(project), ["finetune@left"], shown)
    assert capsys.readouterr().out == ""


def test_the_neediest_run_of_the_studies_is_foretold_and_each_that_does_not_fit_is_refused(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "studies").mkdir()
    runs = {
        "slow": {"batch_size": 2**10, "learning_rate": 0.01},
        "fast": {"batch_size": 2**10, "learning_rate": 0.5},
        "wide": {"batch_size": 2**16},
        "taken": {"checkpoints": "inputs/{task}.safetensors", "batch_size": 2**20},
    }
    studies = {"one_epoch": {"epochs": [1], "further": {}}}
    (project / "studies/params.yaml").write_text(yaml.safe_dump({"seeds": [0], "runs": runs, "studies": studies}))
    shutil.copy(ROOT / "studies/dvc.yaml", project / "studies")
    addresses = [*(f"studies/dvc.yaml:train@{name}" for name in runs), "studies/dvc.yaml:mima"]
    with driver(memory=12 * 10**9):
        print_device_memory(project, read(project), addresses, Console(width=120))
    printed = capsys.readouterr().out
    assert "train@wide: a step" in printed
    assert "studies" in printed
    assert not {"slow", "fast", "taken"} & {*printed.replace("@", " ").replace(":", " ").split()}
    with driver(memory=8 * 10**8), pytest.raises(MergeflowError) as refused:
        print_device_memory(project, read(project), addresses, Console(quiet=True))
    named = [line.partition(" needs")[0] for line in str(refused.value).splitlines()]
    assert {"train@wide: a step", "train@slow: a step"} <= {*named}
    assert not [name for name in named if "fast" in name]  # it needs what `slow` needs
    assert "Set runs.wide.accumulate to" in str(refused.value)


def test_largest() -> None:
    def need(rows: int) -> Need:
        return Need(weights=10**9, activations=10**6 * rows)

    free = int(with_torch(need(37).total))
    assert (largest(1000, need, free + 1), largest(20, need, free), largest(1000, need, 10**9)) == (37, 20, 0)
