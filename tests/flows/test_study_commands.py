"""`mergeflow study` prints what a study says, finds studies by name and by system, and hands its rows over whole."""

import json
from io import StringIO
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from flows.study_commands import _print, check_rows_file, find_named, find_studies, show_list, write_rows
from mergeflow.errors import MergeflowError
from tasks.project.stage import Stage
from tasks.project.studies import Study
from tasks.studies.results import ROWS, Finding, StudyResult, Table
from tests.studies.small_lab import ROOT

STUDIES = find_studies(ROOT)


def printed(result: StudyResult, title: str = "A title") -> str:
    console = Console(file=StringIO(), width=200)
    _print(title, result, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_cell_stands_below_its_own_heading_in_whatever_order_a_row_has_them() -> None:
    table = Table("Accuracy", [{"method": "ties", "acc": 1}, {"acc": 2, "method": "average"}])
    last = printed(StudyResult([table], [], [])).rstrip().splitlines()[-1]
    assert last.split() == ["average", "2"]


def test_square_brackets_are_words_like_others() -> None:
    claim = Finding("X1", "Accuracy on [pets, cars] rises.", "by 2 [1, 3]", True)
    table = Table("Of [both]", [{"task [mean]": "[a]"}])
    text = printed(StudyResult([table], [claim], ["See [/b]."]), "Title [mean over tasks]")
    for words in ("on [pets, cars] rises", "by 2 [1, 3]", "Of [both]", "task [mean]", "[a]", "See [/b].", "[mean over"):
        assert words in text


def test_a_table_without_rows_says_so() -> None:
    assert "Nothing: no rows" in printed(StudyResult([Table("Nothing", [])], [], []))


def test_a_system_is_all_studies_that_cover_it() -> None:
    assert {study.stage.name for study in find_named("c1", STUDIES, ROOT)} == {"bases", "many_tasks"}
    assert [study.stage.name for study in find_named("mima", STUDIES, ROOT)] == ["mima"]
    with pytest.raises(MergeflowError, match="did you mean 'mima'"):
        find_named("mimma", STUDIES, ROOT)


def test_a_study_that_ships_and_is_not_chosen_is_told_apart_from_an_unknown_one() -> None:
    with pytest.raises(MergeflowError, match=r"studies/params\.yaml does not choose study 'analogy'"):
        find_named("analogy", {}, ROOT)
    console = Console(file=StringIO(), width=200)
    show_list({}, console)
    assert "mergeflow study new NAME" in console.file.getvalue()  # type: ignore[attr-defined]


def test_rows_that_no_table_of_text_has_leave_no_file(tmp_path: Path) -> None:
    stage = Stage("made_up", None, "", (), (), ("outputs/studies/made_up",))
    study = Study(tmp_path, stage)
    study.folder.mkdir(parents=True)
    (study.folder / "result.json").write_text(json.dumps({}))
    pq.write_table(pa.Table.from_pylist([{"seed": 0, "shape": [3, 4]}]), study.folder / ROWS)
    target = tmp_path / "out"
    target.mkdir()
    with pytest.raises(MergeflowError, match=r"Name a file that ends in \.parquet"):
        write_rows(study, target / "rows.csv")
    assert not list(target.iterdir())
    write_rows(study, target / "rows.parquet")
    assert pq.read_table(target / "rows.parquet").to_pylist() == [{"seed": 0, "shape": [3, 4]}]


def test_a_folder_where_nothing_may_be_written_is_refused_before_the_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(MergeflowError, match="nothing may be written"):
        check_rows_file(tmp_path / "rows.csv", [STUDIES["mima"]])
    with pytest.raises(MergeflowError, match="takes one study, found bases, many_tasks"):
        check_rows_file(tmp_path / "rows.csv", find_named("C1", STUDIES, ROOT))
