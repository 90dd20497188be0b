"""`mergeflow study NAME --rows FILE` hands over whole the rows of the last run or of the record, and runs nothing."""

from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mergeflow.errors import MergeflowError
from studies.commands.study import add_commands, check_rows_file, find_named, find_studies, write_rows
from studies.lab.study import ROWS
from tasks.project.stage import Stage
from tasks.project.studies import Study
from tests.command import invoke
from tests.studies.small_lab import ROOT

STUDIES = find_studies(ROOT)
RECORD = "studies/records/made_up.parquet"


def made_up(root: Path, rows: list[dict[str, Any]] | None) -> Study:
    """A study of the project in `root`, which has run there if it has rows."""
    study = Study(root, Stage("made_up", None, "", (), (), ("outputs/studies/made_up",)))
    if rows is not None:
        study.folder.mkdir(parents=True)
        if rows:
            pq.write_table(pa.Table.from_pylist(rows), study.folder / ROWS)
    return study


def recorded(home: Path, rows: list[dict[str, Any]]) -> None:
    (home / RECORD).parent.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), home / RECORD)
    (home / RECORD).with_suffix(".json").write_text("{}")


def test_rows_are_those_of_the_last_run_and_where_none_ran_those_of_the_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, file = tmp_path / "project", tmp_path / "rows.csv"
    recorded(root, [{"seed": 0, "task": "a", "accuracy": 0.5}])
    write_rows(made_up(root, None), root, file)
    assert file.read_text() == '"seed","task","accuracy"\n0,"a",0.5\n'
    assert "Wrote 1 rows of the record in studies/records to" in capsys.readouterr().out
    file.unlink()
    write_rows(made_up(root, [{"seed": 0, "task": "a", "accuracy": 0.5}, {"seed": 1, "task": "b"}]), root, file)
    assert file.read_text() == '"seed","task","accuracy"\n0,"a",0.5\n1,"b",\n'
    assert "Wrote 2 rows of the last run to" in capsys.readouterr().out


def test_a_list_is_one_in_parquet_and_a_text_of_json_in_csv(tmp_path: Path) -> None:
    study = made_up(tmp_path, [{"seed": 0, "shape": [3, 4]}, {"seed": 1}])
    target = tmp_path / "out"
    target.mkdir()
    write_rows(study, tmp_path, target / "rows.csv")
    assert (target / "rows.csv").read_text() == '"seed","shape"\n0,"[3, 4]"\n1,\n'
    write_rows(study, tmp_path, target / "rows.parquet")
    assert pq.read_table(target / "rows.parquet").to_pylist()[0] == {"seed": 0, "shape": [3, 4]}


@pytest.mark.parametrize("name", [name for name, study in STUDIES.items() if study.is_embedded])
def test_every_record_has_its_rows_in_csv(name: str, tmp_path: Path) -> None:
    write_rows(STUDIES[name], ROOT, tmp_path / "rows.csv")
    assert (tmp_path / "rows.csv").read_text().count("\n") > 1


def test_files_that_cannot_be_written_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there.csv").touch()
    mima = [STUDIES["mima"]]
    for path, studies, message in [
        (tmp_path / "rows.xlsx", mima, r"\.csv or \.parquet"),
        (tmp_path / "there.csv", mima, "exists already"),
        (tmp_path / "no/rows.csv", mima, "there is no folder"),
        (tmp_path / "rows.csv", [], "takes one study, found none"),
        (tmp_path / "rows.csv", find_named("C1", STUDIES, ROOT), "takes one study, found bases, many_tasks"),
    ]:
        with pytest.raises(MergeflowError, match=message):
            check_rows_file(path, studies)
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(MergeflowError, match="nothing may be written"):
        check_rows_file(tmp_path / "rows.csv", mima)


def test_the_command_hands_a_record_over_and_takes_no_other_wish_beside_it(tmp_path: Path) -> None:
    study = partial(invoke, lambda app: add_commands(app, ROOT), "study", "mima", "--rows", tmp_path / "rows.csv")
    result = study("--record")
    assert isinstance(result.exception, MergeflowError)
    assert "does one thing at a time, found --record and --rows" in str(result.exception)
    assert not list(tmp_path.iterdir())
    result = study()
    assert result.exit_code == 0, result.output
    assert (tmp_path / "rows.csv").read_text().count("\n") > 100
