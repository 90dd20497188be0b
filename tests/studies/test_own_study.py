"""A study in a project's own folder: found, checked, written into the graph, run, and stale with its code alone."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import yaml

from mergeflow.errors import MergeflowError
from studies.commands.study import find_studies, run_studies
from studies.lab.records import changes, write_record
from studies.lab.study import ROWS, read_rows
from tasks.project.graph import load_graph
from tasks.project.new import new_study
from tasks.project.parameters import load_params, load_study_params
from tasks.project.study_graph import check_study_options, names_differ, study_graph, write_study_graph
from tasks.running.digests import code_of, stage_digests
from tasks.running.runner import run_stage
from tests.toy_project import ROOT, make_toy_project, run_pipeline

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs/extending.md").read_text().partition("## A study\n")[2]
PYTHON, CHOICES = (re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)[0] for language in ("python", "yaml"))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = make_toy_project(tmp_path / "project", steps=20)
    new_study(root, "how_far")
    return root


def run_all(root: Path) -> None:
    """Run all stages of the studies as DVC does, one after the other."""
    for address, stage in load_graph(root, studies=True).items():
        if address.startswith("studies/"):
            assert run_stage(root, stage), address


def rows_of(root: Path) -> pd.DataFrame:
    return read_rows(root / "outputs/studies/how_far" / ROWS)


@pytest.mark.parametrize(
    "world", [ROOT, *(file.parent for file in sorted(ROOT.glob("worlds/*/dvc.yaml")))], ids=lambda path: path.name
)
def test_the_graphs_are_the_roots_and_what_the_studies_declare(world: Path) -> None:
    assert (world / "dvc.yaml").read_bytes() == (ROOT / "dvc.yaml").read_bytes(), f"cp dvc.yaml {world}/"
    params = load_study_params(world / "studies/params.yaml", load_params(world / "params.yaml"))
    assert (world / "studies/dvc.yaml").read_text() == study_graph(world, params), "run `mergeflow study --all`"


def test_a_new_study_runs_as_it_is_and_so_does_the_pages(project: Path) -> None:
    run_pipeline(project, ("prepare", "base"))
    run_all(project)
    assert set(rows_of(project).model) == {"base", "average", "experts"}
    assert changed_since_its_record(project) == ["code: 1 file changed since: studies/how_far.py"]
    (project / "studies/how_far.py").write_text(PYTHON)
    (project / "studies/params.yaml").write_text(CHOICES)
    refused, made = run_afresh(project)
    assert "run `mergeflow study`, which writes it" in refused
    assert made
    assert set(rows_of(project).scale) == {0.1, 0.5, 1.0}
    assert (project / "outputs/studies/how_far/accuracy.svg").exists()


def changed_since_its_record(root: Path) -> list[str]:
    """Commit the project, keep the study's record, add a line to its file, and list what differs."""
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@y"]
    for command in (["init", "-q"], ["add", "studies"], ["commit", "-q", "-m", "A study"]):
        subprocess.run([*git, *command], cwd=root, check=True)
    study, file = find_studies(root)["how_far"], root / "studies/how_far.py"
    write_record(root, study)
    assert changes(root, study) == []
    file.write_text(file.read_text() + "\nMORE = 1\n")
    code_of.cache_clear()  # a process keeps what it has read
    return changes(root, study)


def run_afresh(root: Path) -> tuple[str, bool]:
    """Run the study with the graph as it was and as it is written now, in a process that imported none of it."""
    script = """if True:
        import json
        from pathlib import Path
        from mergeflow.errors import MergeflowError
        from tasks.project.graph import find_stage, load_graph
        from tasks.running.runner import run_stage
        from tasks.project.study_graph import write_study_graph
        run = lambda: run_stage(Path.cwd(), find_stage(load_graph(Path.cwd(), studies=True), "how_far", None))
        try:
            run()
        except MergeflowError as error:
            refused = str(error)
        write_study_graph(Path.cwd())
        print(json.dumps([refused, run()]))
    """
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    refused, made = json.loads(done.stdout)
    return refused, made


def test_it_is_listed_with_its_question_and_not_twice(project: Path) -> None:
    study = find_studies(project)["how_far"]
    assert study.question == "is the average of the experts better than the base?"
    assert study.stage.module == "studies/how_far.py"
    assert not names_differ(project)
    with pytest.raises(MergeflowError, match="'how_far' is taken"):
        new_study(project, "how_far")
    for name, why in (("mima", "taken"), ("sweep", "taken"), ("train", "taken"), ("New", "use a to z")):
        with pytest.raises(MergeflowError, match=why):
            new_study(project, name)
    assert [path.name for path in (project / "studies").glob("*.py")] == ["how_far.py"]


def test_a_second_study_joins_the_choices_and_papers_studies_can_be_chosen(project: Path) -> None:
    new_study(project, "other")
    choices = project / "studies/params.yaml"
    assert yaml.safe_load(choices.read_text())["studies"] == {
        "how_far": {"run": "experts"},
        "other": {"run": "experts"},
    }
    assert "# One repetition" in choices.read_text()
    values = yaml.safe_load(choices.read_text())
    values["studies"]["gradients"] = {"runs": {"paper": "converged"}, "images": 8, "steps": [0.1]}
    values["runs"]["converged"] = {"regime": "epochs", "epochs": 2, "keep_epochs": True}
    choices.write_text(yaml.safe_dump(values))
    assert names_differ(project)
    write_study_graph(project)
    assert set(find_studies(project)) == {"how_far", "other", "gradients"}


def test_all_that_is_wrong_is_told_before_anything_runs(project: Path) -> None:
    (project / "studies/broken.py").write_text("STUDY = 1\n")
    (project / "studies/lonely.py").write_text("")
    values = yaml.safe_load((project / "studies/params.yaml").read_text())
    values["studies"] = {"how_far": {"run": "expert"}, "broken": {}, "how_fra": {}}
    (project / "studies/params.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(MergeflowError) as raised:
        check_study_options(
            project, load_study_params(project / "studies/params.yaml", load_params(project / "params.yaml"))
        )
    for part in (
        "has 4 faults",
        "unknown run 'expert': did you mean 'experts'?",
        "'studies/broken.py' is not a study: it must have `STUDY",
        "unknown study 'how_fra': did you mean 'how_far'?",
        "the study in studies/lonely.py has no choices: add `lonely: {…}`",
    ):
        assert part in str(raised.value)
    with pytest.raises(MergeflowError, match="has no choices"):
        names_differ(project)
    before = sorted(project.rglob("*"))
    with pytest.raises(MergeflowError, match="4 faults"):
        run_studies(project, [find_studies(project)["how_far"]], False, None)  # type: ignore[arg-type]
    assert sorted(project.rglob("*")) == before


def test_its_code_makes_it_stale_alone_and_the_projects_methods_whoever_finds_them(project: Path) -> None:
    def digests() -> dict[str, str]:
        code_of.cache_clear()  # a process keeps what it has read
        return stage_digests(project)

    def changed(path: str, text: str) -> set[str]:
        before = digests()
        (project / path).parent.mkdir(exist_ok=True)
        (project / path).write_text(text)
        after = digests()
        return {name for name in after if after[name] != before[name]}

    study = "studies/how_far.py"
    assert changed(study, (project / study).read_text() + "# a comment\n") == set()
    assert changed(study, (project / study).read_text() + "WIDTH = 2\n") == {"how_far"}
    stale = changed("methods/mine.py", "SCALE = 1\n")
    assert {"select", "how_far"} <= stale  # evaluate judges the files that select writes
    assert "sweep" not in stale  # of other methods
    assert not {"prepare", "base"} & stale
    assert "select" in changed("methods/_help.py", "X = 1\n")
    (project / "studies/how_far.py").unlink()
    with pytest.raises(MergeflowError, match="is missing, which a stage runs"):
        digests()


def test_a_new_study_beside_choices_that_cannot_be_writes_nothing(project: Path) -> None:
    choices = project / "studies/params.yaml"
    written = yaml.safe_load(choices.read_text())
    choices.write_text(before := yaml.safe_dump({**written, "studies": {**written["studies"], "nosuch": {}}}))
    with pytest.raises(MergeflowError, match="nosuch"):
        new_study(project, "another")
    assert choices.read_text() == before
    assert not (project / "studies/another.py").exists()
