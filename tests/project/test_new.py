"""`mergeflow new`: a folder of choices like the repository's root, made whole or not at all."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from mergeflow.application import find_project
from mergeflow.data.address import parse_address
from mergeflow.errors import MergeflowError
from mergeflow.search.sweep_file import load_sweep
from tasks.project import new
from tasks.project.new import AS_THEY_ARE, deployments, modalities, new_project, worlds
from tasks.project.parameters import load_params

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("modality", modalities())
def test_a_new_project_is_one_like_the_repositorys_root(modality: str, tmp_path: Path) -> None:
    folder = new_project(tmp_path / "birds", modality)
    for name in AS_THEY_ARE:
        for path in [ROOT / name] if (ROOT / name).is_file() else (ROOT / name).iterdir():
            assert (folder / path.relative_to(ROOT)).read_bytes() == path.read_bytes(), path
    assert (ROOT / "prefect.yaml").read_text() == deployments("mergeflow")
    params = load_params(folder / "params.yaml")
    assert params.registry.model == "birds"
    assert len(params.tasks) == 3  # with two CART is the average
    assert "$NAME" not in "".join(path.read_text() for path in folder.iterdir() if path.is_file())
    assert find_project(folder / "inputs") == folder
    assert (folder / ".git").is_dir()
    assert [path.name for path in tmp_path.iterdir()] == ["birds"]


def test_a_new_project_has_the_sections_of_the_root() -> None:
    vision, root = (yaml.safe_load(path.read_text()) for path in (modalities()["vision"], ROOT / "params.yaml"))
    assert list(vision) == list(root)
    assert {key: list(value) for key, value in vision.items() if key in ("finetune", "sweep", "registry", "run")} == {
        key: list(root[key]) for key in ("finetune", "sweep", "registry", "run")
    }


def test_two_projects_share_no_name_on_a_server() -> None:
    first, other = (yaml.safe_load(deployments(name)) for name in ("birds", "fish"))
    for key in ("name", "work_pool"):
        assert first["deployments"][0][key] != other["deployments"][0][key]
    assert {deployment["work_pool"]["name"] for deployment in first["deployments"]} == {"birds"}
    assert not {each["name"] for each in first["deployments"]} & {each["name"] for each in other["deployments"]}


def test_what_cannot_be_made_is_told_in_one_message_and_leaves_nothing(tmp_path: Path) -> None:
    taken = tmp_path / "Birds"
    taken.mkdir()
    (taken / "notes.txt").write_text("mine")
    with pytest.raises(MergeflowError) as refused:
        new_project(taken, "vison")
    assert "'Birds' cannot name a project" in str(refused.value)
    assert "not an empty folder" in str(refused.value)
    assert "did you mean 'vision'" in str(refused.value)
    assert [path.name for path in tmp_path.rglob("*")] == ["Birds", "notes.txt"]
    with pytest.raises(MergeflowError, match="not an empty folder"):
        new_project(tmp_path / "Birds/notes.txt", "vision")


def test_an_empty_folder_may_become_a_project(tmp_path: Path) -> None:
    (tmp_path / "birds").mkdir()
    assert find_project(new_project(tmp_path / "birds", "vision"))


def test_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(new, "AS_THEY_ARE", (*AS_THEY_ARE, "missing"))
    with pytest.raises(FileNotFoundError):
        new_project(tmp_path / "birds", "vision")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_outside_a_project_its_commands_say_so(tmp_path: Path) -> None:
    for words in (["run"], ["registry", "list"], ["stage", "list"]):
        done = _mergeflow(tmp_path, *words)
        assert done.returncode == 2
        assert f"`mergeflow {words[0]}` works inside a project" in done.stderr
        assert "`mergeflow new NAME`" in done.stderr
    assert _mergeflow(tmp_path, "run", "--help").returncode == 0
    assert _mergeflow(tmp_path, "methods", "ties").returncode == 0
    assert _mergeflow(tmp_path, "new", "fish").returncode == 0
    assert "prepare@digits" in _mergeflow(tmp_path / "fish/inputs", "stage", "list").stdout


def test_the_folder_of_the_studies_belongs_to_its_project() -> None:
    assert find_project(ROOT / "studies") == ROOT


def _mergeflow(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "mergeflow.cli", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


def test_a_project_in_the_shells_own_empty_folder_leaves_the_shell_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = tmp_path / "birds"
    made.mkdir()
    monkeypatch.chdir(made)
    assert new_project(Path.cwd(), "vision") == made
    assert Path.cwd() == made
    assert load_params(Path("params.yaml")).registry.model == "birds"
    assert (made / ".git").is_dir()
    assert [path.name for path in tmp_path.iterdir()] == ["birds"]


def test_a_project_in_a_folder_that_git_ignores_has_a_repository_of_its_own(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    (tmp_path / ".gitignore").write_text("/trial\n")
    assert (new_project(tmp_path / "trial/birds", "vision") / ".git").is_dir()
    assert not (new_project(tmp_path / "fish", "vision") / ".git").exists()


@pytest.mark.parametrize("world", worlds())
def test_a_new_project_starts_from_a_world(world: str, tmp_path: Path) -> None:
    folder = new_project(tmp_path / "birds", "vision", world)
    if (folder / "params.yaml").exists():
        params = load_params(folder / "params.yaml")
        assert params.registry.model == "birds"
        assert all(parse_address(str(source)).paths[-1].startswith("inputs") for source in params.tasks.values())
    else:
        sweep = load_sweep(folder / "sweep.yaml")
        assert all(str(path).startswith("inputs/") for path in (sweep.base, *dict(sweep.experts).values()))


@pytest.mark.slow
@pytest.mark.parametrize(
    "world", [pytest.param(name, marks=() if name == "real-ocr" else pytest.mark.nightly) for name in worlds()]
)
def test_the_inputs_of_a_world_can_be_made(world: str, tmp_path: Path) -> None:
    make = new_project(tmp_path / "birds", "vision", world) / "inputs/make.py"
    done = subprocess.run([sys.executable, make, "--help"], capture_output=True, text=True, check=True)
    assert "--out" in done.stdout


def test_an_unknown_world_is_told_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(MergeflowError, match="unknown world 'real-text': did you mean 'real-texts'"):
        new_project(tmp_path / "birds", "vision", "real-text")
