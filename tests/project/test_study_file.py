"""What people get wrong in the shape of studies/params.yaml is told in one message that names the file."""

from pathlib import Path

import pytest

from mergeflow.errors import MergeflowError
from tasks.project.studies import study_text
from tasks.project.study_graph import read_study_file
from tests.studies.small_lab import ROOT

WHOLE = "seeds: [0, 1]\nruns:\n  experts: {}\nstudies: {}\n"


def written(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "studies/params.yaml"
    path.parent.mkdir()
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must be a mapping of seeds, runs and studies, found nothing"),
        ("[1, 2]\n", "must be a mapping of seeds, runs and studies, found a list"),
        ("seeds: [0\n", "studies/params.yaml is not valid YAML"),
        (WHOLE.encode() + b"# caf\xe9\n", "studies/params.yaml is not UTF-8"),
        (
            WHOLE.replace("  experts: {}", ""),
            "runs: must be a mapping of training runs, such as `experts: {}`, or .*, found nothing",
        ),
        (WHOLE.replace("runs:\n  experts: {}", "runs: [experts]"), "runs: must be a mapping .*, found a list"),
        (WHOLE.replace("experts: {}", "experts:"), "runs.experts: must be a mapping, `{}` where it changes nothing"),
        (WHOLE.replace("experts: {}", "experts: lora"), "runs.experts: must be a mapping, .* found 'lora'"),
        (WHOLE.replace("experts", "lr0.1"), "run 'lr0.1': use letters, digits, '-' and '_'"),
        (WHOLE.replace("experts", "a/b"), "run 'a/b': use letters"),
        (WHOLE.replace("[0, 1]", "[0, 0]"), "seeds: 0 is given twice"),
        (WHOLE.replace("[0, 1]", "[-1]"), r"seeds: must be from 0 to 2\^63 - 1, found -1"),
        (WHOLE.replace("[0, 1]", f"[{10**30}]"), r"seeds: must be from 0 to 2\^63 - 1, found 1000"),
        (WHOLE.replace("[0, 1]", "3"), "seeds: must be a list of whole numbers, found 3"),
        (
            WHOLE.replace("experts: {}", "experts: {checkpoints: 'a/{task}/b_{step}.pt'}"),
            r"runs.experts.checkpoints: \{task\} and \{seed\} are put in, found \{step\}",
        ),
        (WHOLE.replace("experts: {}", "experts: {checkpoints: 'a/{task}/{b.pt'}"), "must be a path with {task}, found"),
        (WHOLE.replace("experts: {}", "experts: {checkpoints: [a]}"), "runs.experts.checkpoints: must be a path"),
        (
            WHOLE.replace("{}\n", "{}\nx: {}\n", 1).replace("studies: {}", "studies: {a: {seeds: [3, 3]}}"),
            "studies.a.seeds: 3",
        ),
        (WHOLE.replace("experts: {}", "experts: {seeds: 3}"), "runs.experts.seeds: there are 2 seeds, found 3"),
    ],
)
def test_a_slip_is_one_message_that_names_the_place(tmp_path: Path, text: str | bytes, words: str) -> None:
    with pytest.raises(MergeflowError, match=words):
        read_study_file(written(tmp_path, text))


def test_faults_are_told_together(tmp_path: Path) -> None:
    with pytest.raises(MergeflowError, match=r"studies/params\.yaml has 2 faults"):
        read_study_file(written(tmp_path, WHOLE.replace("[0, 1]", "[0, 0]").replace("experts: {}", "experts:")))


CHOICES = [path for place in ("studies", "worlds", "examples") for path in sorted((ROOT / place).rglob("*.yaml"))]


@pytest.mark.parametrize(
    "path",
    [path for path in CHOICES if path.match("studies/params.yaml") or "\nruns:" in path.read_text("utf-8")],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_the_files_of_the_repository_have_none(path: Path) -> None:
    read_study_file(path)


def test_a_study_that_is_not_python_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "study.py").write_text('"""How far."""\nimport\n')
    with pytest.raises(MergeflowError, match=r"study\.py, line 2 is not Python: invalid syntax"):
        study_text(tmp_path, "study.py")
