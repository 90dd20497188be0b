"""What `add-task` writes into params.yaml goes again when the task is refused, and only then."""

from pathlib import Path

import pytest

from flows.rebuild.add_task import _line_in_params
from mergeflow.errors import MergeflowError
from tasks.project.graph import load_graph
from tasks.running.runner import DiskFull, run_stage
from tests.toy_project import make_toy_project

SOURCE = "toy:clouds"
MADE = "outputs/data/train/third"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return make_toy_project(tmp_path / "project")


def add(project: Path, error: Exception | None, prepare: bool = True) -> None:
    """Write the line, prepare the task, and end with an error as a stage would."""
    with _line_in_params(project, "third", SOURCE):
        if prepare:
            run_stage(project, load_graph(project)["prepare@third"])
        if error is not None:
            raise error


def params(project: Path) -> str:
    return (project / "params.yaml").read_text("utf-8")


def test_a_full_disk_refuses_nothing_and_what_was_made_stays(project: Path) -> None:
    before = params(project)
    with pytest.raises(DiskFull):
        add(project, DiskFull("stage finetune@third: the disk is full."))
    assert f"third: {SOURCE}" in params(project)
    assert (project / MADE).exists()
    with pytest.raises(MergeflowError, match="one class only"):  # found by the next call, which wrote no line itself
        add(project, MergeflowError("one class only"), prepare=False)
    assert params(project) == before
    assert not (project / MADE).exists()


def test_a_line_that_was_there_before_stays_with_what_was_made_of_it(project: Path) -> None:
    text = params(project).replace("tasks:\n", f"tasks:\n  third: {SOURCE}\n")
    (project / "params.yaml").write_text(text)
    with pytest.raises(MergeflowError, match="one class only"):
        add(project, MergeflowError("one class only"))
    assert params(project) == text
    assert (project / MADE).exists()


def test_a_line_of_a_task_that_was_taken_is_no_longer_taken_out(project: Path) -> None:
    add(project, None)
    text = params(project)
    with pytest.raises(MergeflowError, match="one class only"):
        add(project, MergeflowError("one class only"))
    assert params(project) == text


def write_on_one_line(project: Path) -> str:
    text = params(project)
    end = text.index("data:")
    text = f"{text[: text.index('tasks:')]}tasks: {{left: toy:clouds, right: 'toy:clouds,classes=4'}}\n{text[end:]}"
    (project / "params.yaml").write_text(text)
    return text


def test_a_refused_task_goes_where_all_tasks_stand_on_one_line(project: Path) -> None:
    text = write_on_one_line(project)
    with pytest.raises(MergeflowError, match="one class only"):
        add(project, MergeflowError("one class only"))
    assert params(project) == text
    assert not (project / MADE).exists()


def test_where_the_line_cannot_be_taken_out_the_refusal_is_told_too(project: Path) -> None:
    write_on_one_line(project)

    def refused() -> None:
        with _line_in_params(project, "third", SOURCE):
            (project / "params.yaml").write_text(f"# edited meanwhile\n{params(project)}")
            raise MergeflowError("one class only")

    with pytest.raises(MergeflowError, match=r"one class only\nparams\.yaml: remove the task 'third' by hand"):
        refused()


def test_a_line_that_was_taken_out_meanwhile_hides_no_refusal(project: Path) -> None:
    before = params(project)

    def refused() -> None:
        with _line_in_params(project, "third", SOURCE):
            (project / "params.yaml").write_text(f"# edited meanwhile\n{before}")
            raise MergeflowError("one class only")

    with pytest.raises(MergeflowError, match="one class only"):
        refused()
    assert params(project) == f"# edited meanwhile\n{before}"
