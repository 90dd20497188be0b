"""`mergeflow finetune`: any regime beside the pipeline, on the project's own base and data."""

import io
import json
import os
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from mergeflow.errors import MergeflowError
from tasks.commands.finetune import _place, changed_params, check_places, train_experts
from tests.training.projects import make_project, outputs, set_finetune


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


@pytest.mark.slow
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


@pytest.fixture
def choices(tmp_path: Path) -> Path:
    """A project of which nothing was made: its params.yaml, and images of one task."""
    project = tmp_path / "project"
    (project / "inputs/red/train/one").mkdir(parents=True)
    (project / "inputs/red/train/one/0.png").write_text("kept")
    (project / "linked").symlink_to("inputs")
    set_finetune(project)
    return project


@pytest.mark.parametrize(
    ("out", "there", "expected"),
    [
        ("inputs", None, r"'red' would go to '.*/inputs/red', and '.*/inputs/red' holds examples of the task 'red'"),
        ("inputs/blue", None, r"'.*/inputs/blue' holds examples of the task 'blue'"),
        ("linked", None, r"'red' would go to '.*/inputs/red', and"),
        ("outputs/experts", None, r"'red' would go to .*, and '.*/outputs/experts' holds what the pipeline makes"),
        ("../other/outputs/experts", "../other/dvc.yaml", r"'.*/other/outputs/experts' holds what the pipeline makes"),
        ("outputs/data/train", None, r"'.*/outputs/data' holds what the pipeline makes"),
        ("mine", "mine/red/photo.png", r"'.*/mine/red' holds photo\.png, and only an earlier result"),
        ("mine", "mine/red/model.safetensors", r"'.*/mine/red' holds model\.safetensors, and only"),
        ("mine", "mine/red", r"'.*/mine/red' is a file, and experts go into folders"),
        ("mine", "mine", r"'.*/mine' is a file, and experts go into folders"),
    ],
)
def test_a_place_that_is_not_free_is_refused_before_any_training(
    choices: Path, out: str, there: str | None, expected: str
) -> None:
    if there is not None:
        (choices / there).parent.mkdir(parents=True, exist_ok=True)
        (choices / there).write_text("kept")
    before = outputs(choices, "..")
    with pytest.raises(MergeflowError, match=f"{expected}.*choose another folder with --out"):
        train_experts(choices, changed_params(choices, ["red"], None, {}, None), choices / out, Console())
    assert outputs(choices, "..") == before


def test_an_earlier_result_is_replaced_but_not_what_was_put_beside_it(choices: Path) -> None:
    made = choices / "outputs/finetuned/steps/red"
    check_places(choices, made.parent, ["red", "blue"])
    (made / "adapter").mkdir(parents=True)
    for name in ("training.json", "model.safetensors", "head.safetensors", "adapter/adapter_model.safetensors"):
        (made / name).write_text("made")
    check_places(choices, made.parent, ["red", "blue"])
    (made / "notes.txt").write_text("mine")
    with pytest.raises(MergeflowError, match=r"'.*/steps/red' holds notes\.txt, and only an earlier result"):
        check_places(choices, made.parent, ["red", "blue"])


def test_a_source_around_the_project_leaves_places_in_it(choices: Path) -> None:
    text = (choices / "params.yaml").read_text()
    (choices / "params.yaml").write_text(text.replace("folder:inputs/blue", "parquet:*.parquet"))
    check_places(choices, choices / "outputs/finetuned/steps", ["red", "blue"])


@pytest.mark.parametrize("killed_at", ["copied", "taken away", "in place"])
def test_a_call_that_was_killed_while_it_places_leaves_nothing_for_good(
    tmp_path: Path, killed_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, place = tmp_path / "made", tmp_path / "out/red"
    for folder, text in ((made, "new"), (place, "old")):
        folder.mkdir(parents=True)
        (folder / "training.json").write_text(text)
    (tmp_path / ".mergeflow/locks").mkdir(parents=True)
    rename, renamed = Path.rename, list[Path]()

    def killed(path: Path, to: Path) -> None:
        if (killed_at, len(renamed)) in {("copied", 0), ("taken away", 1)}:
            os._exit(9)
        rename(path, to)
        renamed.append(path)
        if (killed_at, len(renamed)) == ("in place", 2):
            os._exit(9)

    child = os.fork()
    if not child:
        monkeypatch.setattr(Path, "rename", killed)
        _place(tmp_path, made, place)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert len(list(place.parent.iterdir())) == 2
    _place(tmp_path, made, place)
    assert [path.name for path in place.parent.iterdir()] == ["red"]
    assert (place / "training.json").read_text() == "new"
