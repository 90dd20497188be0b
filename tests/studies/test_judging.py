"""`mergeflow study NAME --judge`: a record judged again from its rows."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import typer
import yaml
from typer.testing import CliRunner

from flows import study_commands
from flows.study_commands import find_studies
from mergeflow.errors import MergeflowError
from tasks.project.studies import Study
from tasks.studies.judging import rules
from tasks.studies.judging.again import judge_again
from tasks.studies.page import read_days, write_page
from tests.studies.documented import RESULTS
from tests.studies.small_lab import ROOT

STUDIES = find_studies(ROOT)
DAY = "2030-01-31"
DAYS = read_days(ROOT / "docs/studies")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose docs have the records of two studies, of which the second is not one that mergeflow can judge."""
    monkeypatch.delitem(rules.RULES, "laboratory")
    results = tmp_path / "docs/studies/results"
    results.mkdir(parents=True)
    for study in ("one_epoch", "laboratory"):
        for ending in ("json", "parquet"):
            shutil.copy(RESULTS / f"{study}.{ending}", results)
    for name in ("judged.json", "remarks.yaml"):
        shutil.copy(RESULTS / name, results)
    return tmp_path


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def with_another_verdict(root: Path) -> None:
    path = root / "docs/studies/results/one_epoch.json"
    content = json.loads(path.read_text())
    content["findings"][0] |= {"holds": None, "margin": "a rule of yesterday"}
    content["notes"] = ["What was said yesterday."]
    path.write_text(json.dumps(content))


def test_the_same_rules_leave_the_record_as_it_was(root: Path) -> None:
    before = files(root)
    page = judge_again(root, STUDIES["one_epoch"], DAY)
    after = files(root)
    assert page.read_bytes() == (ROOT / "docs/studies/one_epoch.md").read_bytes()
    assert {name: content for name, content in after.items() if name in before} == before
    assert read_days(root / "docs/studies") == DAYS


def test_younger_rules_give_other_verdicts_of_the_same_rows_and_the_page_says_so(root: Path) -> None:
    with_another_verdict(root)
    page = judge_again(root, STUDIES["one_epoch"], DAY)
    results = root / "docs/studies/results"
    assert json.loads((results / "one_epoch.json").read_text()) == json.loads((RESULTS / "one_epoch.json").read_text())
    assert read_days(root / "docs/studies") == DAYS | {"one_epoch": DAY}
    assert (
        f"**Judged again.** These verdicts are of {DAY}, by rules that are younger than the record" in page.read_text()
    )
    judge_again(root, STUDIES["one_epoch"], "2031-01-31")
    assert read_days(root / "docs/studies") == DAYS | {"one_epoch": DAY}, "nothing changed since"


def test_a_new_record_is_as_old_as_its_verdicts(root: Path) -> None:
    with_another_verdict(root)
    judge_again(root, STUDIES["one_epoch"], DAY)
    made = Study(root, STUDIES["one_epoch"].stage)
    made.folder.mkdir(parents=True)
    result = json.loads((RESULTS / "one_epoch.json").read_text()) | {"figures": []}
    (made.folder / "result.json").write_text(json.dumps(result))
    assert "Judged again" not in write_page(root, made).read_text()
    assert "one_epoch" not in read_days(root / "docs/studies")


@pytest.mark.parametrize("name", ["laboratory", "gradients"])
def test_a_study_of_somebody_s_own_and_a_missing_record_are_refused(root: Path, name: str) -> None:
    before = files(root)
    with pytest.raises(MergeflowError, match=rf"study {name} .*measure it, `mergeflow study {name}"):
        judge_again(root, STUDIES[name], DAY)
    assert files(root) == before


def test_the_command_judges_and_runs_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = typer.Typer()
    app.callback()(lambda: None)
    study_commands.add_commands(app, root)
    monkeypatch.setattr(study_commands, "write_graphs", lambda _: None)
    monkeypatch.setattr(study_commands, "find_studies", lambda _: STUDIES)
    monkeypatch.setattr(study_commands, "run_studies", lambda *_: pytest.fail("a study was run"))
    found = CliRunner().invoke(app, ["study", "one_epoch", "--judge"])
    assert found.output == "Judged one_epoch; page docs/studies/one_epoch.md\n"
    assert "[one_epoch](one_epoch.md)" in (root / "docs/studies/README.md").read_text()
    refused = CliRunner().invoke(app, ["study", "--judge"])
    assert isinstance(refused.exception, MergeflowError)
    assert "--judge` takes studies" in str(refused.exception)


def test_rows_that_were_made_with_other_choices_are_not_judged(root: Path) -> None:
    (root / "studies").mkdir()
    shutil.copy(ROOT / "studies/dvc.lock", root / "studies")
    choices = yaml.safe_load((ROOT / "studies/params.yaml").read_text())
    choices["studies"]["one_epoch"]["epochs"] = [1, 2]
    (root / "studies/params.yaml").write_text(yaml.safe_dump(choices))
    before = files(root)
    with pytest.raises(MergeflowError, match="is not what the record of study one_epoch was made with"):
        judge_again(root, replace(STUDIES["one_epoch"], root=root), DAY)
    assert files(root) == before
