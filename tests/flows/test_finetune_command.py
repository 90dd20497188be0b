"""`mergeflow finetune`: any regime beside the pipeline, on the project's own base and data."""

import io
import json
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from flows.finetune_command import changed_params, train_experts
from mergeflow.errors import MergeflowError
from tests.training.projects import make_project, outputs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_project(tmp_path_factory.mktemp("finetune"))


def run(folder: Path, *tasks: str, regime: str, seed: int | None = None, out: str = "made", **changes: str) -> str:
    console = Console(width=160, record=True, file=io.StringIO())
    values = changed_params(
        folder, list(tasks), regime, {key.replace("__", "."): v for key, v in changes.items()}, seed
    )
    console.print(train_experts(folder, values, folder / "outputs" / out, console))
    return console.export_text()


@pytest.mark.slow
def test_lora_experts_of_one_task(folder: Path) -> None:
    before = (folder / "params.yaml").read_bytes()
    shown = run(
        folder, "red", regime="lora", seed=7, out="finetuned/lora", steps="3", lora__rank="2", learning_rate="1e-3"
    )
    made = folder / "outputs/finetuned/lora/red"
    assert {path.name for path in made.iterdir()} == {
        "model.safetensors",
        "head.safetensors",
        "training.json",
        "adapter",
    }
    training = json.loads((made / "training.json").read_text())
    assert (training["seed"], training["steps"], training["settings"]["lora"]["rank"]) == (7, 3, 2)
    assert training["settings"]["learning_rate"] == 1e-3
    for word in ("red", "lora", "examples/s", "outputs/finetuned/lora"):
        assert word in shown
    assert not (folder / "outputs/finetuned/lora/blue").exists()
    assert not (folder / "outputs/experts").exists()
    assert (folder / "params.yaml").read_bytes() == before
    assert not list((folder / ".mergeflow/finetune").iterdir())


@pytest.mark.slow
def test_rounds_on_all_tasks_the_same_every_time(folder: Path) -> None:
    for out in ("first", "again", "first"):  # the second time into a folder that is there
        shown = run(folder, regime="iterative", out=out, steps="4", iterative__rounds="2")
    assert "all tasks" in shown
    assert outputs(folder, "outputs/first") == outputs(folder, "outputs/again")
    assert {path.name for path in (folder / "outputs/first").iterdir()} == {"red", "blue"}


def test_a_failing_task_does_not_stop_the_others_and_the_rest_continues(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tasks import training

    train = training.fine_tune

    def refuse_red(encoder, data, *rest, **named):  # type: ignore[no-untyped-def]
        if data[0].task == "red":
            raise MergeflowError("task 'red': the loss became nan at step 1 of 3.")
        return train(encoder, data, *rest, **named)

    monkeypatch.setattr(training, "fine_tune", refuse_red)
    with pytest.raises(MergeflowError, match="task 'red': the loss became nan"):
        run(folder, regime="steps", out="some", steps="3")
    assert (folder / "outputs/some/blue/training.json").exists()
    assert not (folder / "outputs/some/red").exists()
    monkeypatch.undo()
    assert list((folder / ".mergeflow/finetune").glob("*/outputs/experts/blue/training.json"))
    run(folder, regime="steps", out="some", steps="3")
    assert (folder / "outputs/some/red/training.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tasks", "regime", "changes", "expected"),
    [
        (["rad"], "steps", {}, "unknown task 'rad': did you mean 'red'"),
        ([], "stps", {}, "unknown regime 'stps': did you mean 'steps'"),
        ([], "iterative", {"steps": "5", "iterative.rounds": "2"}, "5 steps cannot be shared equally by 2 rounds"),
        ([], "steps", {"steeps": "5"}, "'steeps': did you mean 'steps'"),
        ([], "steps", {"steps.x": "5"}, "finetune.steps holds no settings of its own"),
        ([], "steps", {"steps": "0"}, "at least 1"),
        ([], "lora", {"steps": "1", "lora.targets": "[atn]"}, "'atn': did you mean 'attn'"),
    ],
)
def test_bad_input(folder: Path, tasks: list[str], regime: str, changes: dict[str, str], expected: str) -> None:
    with pytest.raises(MergeflowError) as caught:
        train_experts(folder, changed_params(folder, tasks, regime, changes, None), folder / "no", Console())
    assert expected in str(caught.value)
    assert not (folder / "no").exists()


@pytest.mark.slow
def test_missing_data_are_prepared_first(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder / "outputs/base")
    shutil.rmtree(folder / "outputs/data/train/red")
    run(folder, "red", regime="one_epoch", out="afresh")
    assert (folder / "outputs/afresh/red/training.json").exists()
    assert yaml.safe_load((folder / "params.yaml").read_text())["tasks"].keys() == {"red", "blue"}
