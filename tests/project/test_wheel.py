"""The wheel holds the application: installed elsewhere, it makes projects that run, side by side."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.project_folder import change_params

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
# Nothing of the repository or of who runs the tests may help.
FOREIGN = ("PYTHONPATH", "PREFECT_API_URL", "PREFECT_HOME", "MLFLOW_TRACKING_URI")
SWEEP = {"average": {"scale": [1.0]}, "task_arithmetic": {"scale": [0.3, 0.5]}}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=120)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's files in a folder of their own, as an installer puts them."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as files:
        files.extractall(folder)
    return folder


def in_wheel(site: Path, folder: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command that finds the installed wheel before anything else."""
    inherited = {key: value for key, value in os.environ.items() if key not in FOREIGN}
    quiet = {"DO_NOT_TRACK": "true", "DVC_NO_ANALYTICS": "1", "NO_COLOR": "1", "COLUMNS": "160", "OMP_NUM_THREADS": "1"}
    env = {
        **inherited,
        **quiet,
        "PYTHONPATH": str(site),
        "PATH": f"{Path(sys.executable).parent}:{inherited['PATH']}",
        **variables,
    }
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done


def test_the_sdist_has_what_git_tracks(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", "--depth=1", ROOT.as_uri(), clone], check=True)
    shutil.copy(ROOT / "pyproject.toml", clone)
    tracked = subprocess.run(["git", "ls-files"], cwd=clone, check=True, capture_output=True, text=True).stdout
    made = (".dvc/cache/files/md5/ab/c", ".dvc/tmp/lock", ".dvc/config.local", "outputs/a", "mlflow.db", "dist/a")
    in_worlds = (".mergeflow/a", "outputs/a", "mlflow.db", "mlartifacts/a", "inputs/packages/a")
    for name in (*made, *(f"worlds/real-texts/{name}" for name in in_worlds)):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).touch()
    build = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path)]
    subprocess.run(build, cwd=clone, check=True, capture_output=True, timeout=120)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as files:
        names = {file.name.partition("/")[2] for file in files if not file.isdir()}
    assert names == {*tracked.split("\n"), "PKG-INFO"} - {""}


def test_site_packages_gets_one_name(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"mergeflow"}
    for needed in (
        "py.typed",
        "application/flows/commands.py",
        "application/suites/pocket/source.py",
        "application/template/worlds/real-texts/inputs/make.py",
        "application/template/worlds/real-ocr/sweep.yaml",
        "application/template/worlds/real-pictures/params.yaml",
        "application/template/worlds/real-books/studies/params.yaml",
        "application/template/.dvc/config",
        "application/docs/training.md",
        "application/studies/theory/__init__.py",
    ):
        assert f"mergeflow/{needed}" in names
    assert not [name for name in names if name.startswith("mergeflow/application/docs/research")]
    assert not [name for name in names if "__pycache__" in name or "/tests/" in name or "studies/dvc." in name]


def test_the_image_of_a_worker_copies_what_the_wheel_is_made_of(wheel: Path, tmp_path: Path) -> None:
    """Without Docker: what the Dockerfile copies is copied here, and a wheel is built of it."""
    source = tmp_path / "src"
    for line in re.findall(r"^COPY (.*) /src", (ROOT / "deploy/Dockerfile").read_text(), re.MULTILINE):
        for name in line.split():
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(ROOT / name, target)
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")]
    subprocess.run(build, cwd=source, check=True, capture_output=True, timeout=120)
    built = next((tmp_path / "dist").glob("*.whl"))
    assert sorted(zipfile.ZipFile(built).namelist()) == sorted(zipfile.ZipFile(wheel).namelist())


def test_the_image_has_the_uv_of_the_makefile() -> None:
    of_make, of_image = (
        re.search(r"UV_VERSION ?:?= ?(\S+)", (ROOT / name).read_text()) for name in ("Makefile", "deploy/Dockerfile")
    )
    assert of_make
    assert of_image
    assert of_make[1] == of_image[1]


def test_a_project_of_the_wheel_runs_its_first_stage(site: Path, tmp_path: Path) -> None:
    in_wheel(site, tmp_path, "mergeflow", "new", "birds")
    birds = tmp_path / "birds"
    in_wheel(site, birds, "dvc", "repro", "prepare@signs")
    assert (birds / "outputs/data/train/signs/manifest.json").exists()
    flow = (
        "from prefect.flows import load_flow_from_entrypoint as load; import mergeflow\n"
        "print(mergeflow.__file__, load('mergeflow.deployments.nightly').fn)"
    )
    where, _, what = in_wheel(site, birds, sys.executable, "-c", flow).stdout.partition(" ")
    assert Path(where).is_relative_to(site)
    assert "nightly" in what


@pytest.mark.nightly
def test_two_projects_run_side_by_side_by_either_driver(site: Path, tmp_path: Path) -> None:
    server = f"sqlite:///{tmp_path / 'shared.db'}"
    for name, driver in (("birds", ("mergeflow", "run")), ("fish", ("dvc", "repro"))):
        in_wheel(site, tmp_path, "mergeflow", "new", name)
        project = tmp_path / name
        change_params(project, {"sweep": SWEEP, "finetune.steps": 12, "finetune.save_every": 4})
        in_wheel(site, project, *driver, MLFLOW_TRACKING_URI=server)
    birds, fish = (tmp_path / name for name in ("birds", "fish"))
    results = "outputs/results/test.json"
    assert json.loads((birds / results).read_text()) == json.loads((fish / results).read_text())
    for project in (birds, fish):
        registered = json.loads((project / "outputs/registration.json").read_text())
        assert (registered["model"], registered["version"]) == (project.name, "1")
        listed = in_wheel(site, project, "mergeflow", "registry", "list", MLFLOW_TRACKING_URI=server).stdout
        assert len(re.findall("@champion", listed)) == 1
        again = in_wheel(site, project, "mergeflow", "run", MLFLOW_TRACKING_URI=server).stdout
        assert "Nothing changed" in again
        assert (project / "outputs/report.html").exists()
