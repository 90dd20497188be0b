"""DVC as its users expect it: plots, experiments and metrics of the project, and remotes that take and give back."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.dvc_commands import push_outputs
from mergeflow.errors import MergeflowError
from tasks.project.graph import load_graph
from tasks.project.recorded import md5_of
from tests.flows.small_project import commit, run_in
from tests.tasks.test_recorded import flip_a_bit

pytestmark = pytest.mark.slow
STALE = [["figures", "its", "code", "modified"], ["register", "after", "figures"]]
PLOTS = {"scale", "arguments", "accuracy", "loss", "learning", "cosines"}


def dvc(folder: Path, *arguments: str) -> str:
    done = run_in(folder, "dvc", *arguments, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def committed(finished: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("committed") / "project"
    shutil.copytree(finished[0], folder, symlinks=True)
    commit(folder)
    return folder


@pytest.fixture
def clone(committed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(committed, tmp_path / "project", symlinks=True))


@pytest.mark.nightly
def test_an_experiment_shows_in_metrics_and_plots_and_can_be_left_again(clone: Path) -> None:
    dvc(clone, "exp", "run", "--set-param", "sweep.task_arithmetic.scale=[0.02,0.5]", "figures")
    change = json.loads(dvc(clone, "metrics", "diff", "--all", "--json", "HEAD"))["outputs/results/metrics.json"]
    assert change["cart.mean"]["diff"] == 0.0
    assert "task_arithmetic.accuracy.red" in change
    params = json.loads(dvc(clone, "params", "diff", "--json", "HEAD"))["params.yaml"]
    assert params["sweep.task_arithmetic.scale"]["new"] == "[0.02, 0.5]"
    check_plots(json.loads(dvc(clone, "plots", "diff", "--json", "HEAD"))["data"])
    done = run_in(clone, "dvc", "plots", "show")
    assert "failed" not in done.stdout + done.stderr
    assert "vegaEmbed" in (clone / "dvc_plots/index.html").read_text()
    assert run_in(clone, "git", "checkout", "--quiet", ".").returncode == 0
    dvc(clone, "checkout", "--quiet")
    done = run_in(clone, "mergeflow", "run")
    assert "Nothing changed" in done.stdout, done.stdout + done.stderr
    assert run_in(clone, "git", "status", "--porcelain").stdout == ""


def check_plots(plots: dict[str, Any]) -> None:
    drawn = {name for name, pictures in plots.items() if pictures}
    assert PLOTS - {"arguments"} <= drawn  # one value of each argument was tried
    assert "outputs/results/figures/accuracy.svg" in drawn
    for name in PLOTS & drawn:
        (picture,) = plots[name]
        assert picture["revisions"] == ["workspace", "HEAD"]
        assert "<DVC_METRIC" not in json.dumps(picture["content"])
    points = plots["scale"][0]["content"]["data"]["values"]
    tried = [(point["rev"], point["scale"]) for point in points if point["method"] == "task_arithmetic"]
    assert sorted(tried) == [("HEAD", 0.3), ("HEAD", 0.5), ("workspace", 0.02), ("workspace", 0.5)]


@pytest.mark.nightly
def test_an_experiment_aside_gives_the_bits_of_one_in_the_workspace(clone: Path) -> None:
    """In the workspace lies the state of earlier runs, in DVC's temporary folder lies none."""
    shorter = ("--set-param", "finetune.steps=8", "finetune@red")
    dvc(clone, "exp", "run", "--temp", "--name", "aside", *shorter)
    assert run_in(clone, "git", "status", "--porcelain").stdout == ""
    dvc(clone, "exp", "run", "--name", "here", "--force", "--single-item", *shorter)
    table = json.loads(dvc(clone, "exp", "show", "--json"))
    made = {
        revision["name"]: revision["data"]["outs"]["outputs/experts/red"]["hash"]
        for row in table
        for experiment in row["experiments"] or []
        for revision in experiment["revs"]
    }
    assert made["aside"] == made["here"]
    lock = yaml.safe_load(run_in(clone, "git", "show", "HEAD:dvc.lock").stdout)
    assert made["here"] not in [out["md5"] for out in lock["stages"]["finetune@red"]["outs"]]


def test_push_needs_a_remote_that_answers_and_then_keeps_every_output(clone: Path, tmp_path: Path) -> None:
    dvc(clone, "remote", "modify", "--local", "storage", "url", "/proc/nowhere")
    with pytest.raises(MergeflowError, match="dvc push"):
        push_outputs(clone)
    dvc(clone, "remote", "modify", "--local", "--unset", "storage", "url")
    done = run_in(clone, "mergeflow", "run", "--push")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Nothing changed" in done.stdout
    assert (tmp_path / "mergeflow-remote/files").is_dir()
    assert json.loads(dvc(clone, "status", "--cloud", "--json")) == {}


def test_a_clone_whose_cache_lacks_the_digests_of_code_pushes_them_and_is_restored(clone: Path) -> None:
    shutil.rmtree(clone / ".dvc/cache/files/md5" / md5_of(clone / "outputs/code.yaml")[:2])
    dvc(clone, "commit", "--force", "--quiet", *load_graph(clone))
    push_outputs(clone)
    for folder in ("outputs", ".dvc/cache"):
        shutil.rmtree(clone / folder)
    dvc(clone, "pull", "dvc.yaml")
    assert json.loads(dvc(clone, "status", "--cloud", "--json", "dvc.yaml")) == {}
    assert json.loads(dvc(clone, "status", "--json")) == {"code": ["always changed"]}


def test_a_damaged_remote_is_not_pulled_from(clone: Path, tmp_path: Path) -> None:
    push_outputs(clone)
    weights = clone / "outputs/experts/red/model.safetensors"
    md5 = md5_of(weights)
    copy = tmp_path / "mergeflow-remote/files/md5" / md5[:2] / md5[2:]
    copy.chmod(0o644)
    flip_a_bit(copy)
    for folder in ("outputs", ".dvc/cache"):
        shutil.rmtree(clone / folder)
    assert run_in(clone, "dvc", "pull", "dvc.yaml").returncode
    assert not weights.exists()


def test_s3_takes_the_outputs_and_gives_them_back(clone: Path, s3: str) -> None:
    dvc(clone, "remote", "modify", "--local", "storage", "url", "s3://bucket/mergeflow")
    dvc(clone, "remote", "modify", "--local", "storage", "endpointurl", s3)
    folders = ("experts", "vectors", "merged")
    before = {path: path.read_bytes() for name in folders for path in (clone / "outputs" / name).rglob("*.safetensors")}
    assert len(before) == 2 * 2 + 2 + 3  # an expert is a model and its head
    dvc(clone, "push")
    shutil.rmtree(clone / "outputs")
    shutil.rmtree(clone / ".dvc/cache")
    dvc(clone, "pull")
    assert {path: path.read_bytes() for path in before} == before
    assert json.loads(dvc(clone, "status", "--json")) == {"code": ["always changed"]}


def test_an_edit_of_code_is_said_and_runs_what_uses_it_and_a_comment_nothing(clone: Path) -> None:
    page = clone / "tasks/figures.py"
    for added, again in (("_EDITED = 1\n", True), ("# a comment\n", False)):
        page.write_text(page.read_text() + added)
        assert "up to date" not in dvc(clone, "status")
        said = run_in(clone, "mergeflow", "status").stdout.splitlines()
        assert [line.split() for line in said[1:]] == (STALE if again else [])
        assert ("figures" in json.loads(dvc(clone, "status", "--json"))) is again
        assert ("Running stage 'figures'" in dvc(clone, "repro")) is again
    done = run_in(clone, "mergeflow", "run")
    assert "Nothing changed" in done.stdout, done.stdout + done.stderr
