"""`mergeflow study` prints what a study says, finds studies by name and by system; each has a page of its own."""

import re
import shutil
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from rich.console import Console

from mergeflow.errors import MergeflowError
from studies.commands.study import _print, _show_records, check_options, find_named, find_studies, home_of, show_list
from studies.lab import Claim, Section, Study
from studies.lab.records import recorded
from studies.lab.study import Result, write_rows
from tests.studies.small_lab import ROOT

STUDIES = find_studies(ROOT)


def printed(
    tables: dict[str, pd.DataFrame], claims: list[Claim], title: str = "A title", notes: Any = (), width: int = 200
) -> str:
    console = Console(file=StringIO(), width=width)
    study = Study(
        options=Section,
        measure=lambda lab, options: [],
        claims=claims,
        tables={name: (lambda rows, made=made: made) for name, made in tables.items()},
        notes=lambda rows, options: notes,
    )
    _print(title, Result(study, Section(), pd.DataFrame()), console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_square_brackets_are_words_like_others() -> None:
    claim = Claim("X1", "Accuracy on [pets, cars] rises.", decide=lambda rows: (True, "by 2 [1, 3]"))
    table = pd.DataFrame({"task [mean]": ["[a]"]})
    text = printed({"Of [both]": table}, [claim], "Title [mean over tasks]", ["See [/b]."])
    for words in ("on [pets, cars] rises", "by 2 [1, 3]", "Of [both]", "task [mean]", "[a]", "See [/b].", "[mean over"):
        assert words in text


def test_a_table_wider_than_the_terminal_keeps_every_cell_whole() -> None:
    runs = pd.Index(["per_round_2_4", "per_round_2_16"], name="run")
    wide = pd.DataFrame({f"cosine of round {n}": [f"0.{n}11 ± 0.001", f"0.{n}22 ± 0.002"] for n in range(9)}, runs)
    text = printed({"Cosines": wide}, [], width=80)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert all(cell in text for cell in wide.to_numpy().ravel())
    assert text.count("per_round_2_16") > 1, "each part has the index"
    assert "cosine of round 8" in printed({"Cosines": wide}, []), "a wide terminal has headings in one line"


def test_every_claim_that_fails_on_the_rows_is_named_with_its_place() -> None:
    claims = [Claim("X1", "It rises.", lambda rows: {"a": rows.gain}), Claim("X2", "It falls.", lambda rows: 1 / 0)]
    with pytest.raises(MergeflowError) as raised:
        printed({}, claims)
    first, second = str(raised.value).splitlines()[1:]
    assert re.match(r"X1 'It rises\.': AttributeError: .*gain", first)
    assert re.match(r"X2 'It falls\.': ZeroDivisionError: .*test_study_commands\.py, line \d+", second)


def test_a_record_whose_choices_are_refused_today_says_which(tmp_path: Path) -> None:
    (tmp_path / "studies/records").mkdir(parents=True)
    for file in (ROOT / "studies/records").glob("mima.*"):
        shutil.copy(file, tmp_path / "studies/records")
    facts = tmp_path / "studies/records/mima.json"
    facts.write_text(facts.read_text().replace('"keep":', '"keeps":'))
    with pytest.raises(MergeflowError, match=r"(?s)mima\.parquet: mergeflow refuses today .*keep.*with a remark"):
        recorded(tmp_path, STUDIES["mima"])


def test_a_study_of_a_file_of_several_has_its_own_name_above_its_verdicts() -> None:
    assert STUDIES["texts_alignment"].text[0].startswith("Study `texts_alignment` (M3): do task vectors align")
    assert STUDIES["coloured_clip"].text[0].startswith("Study `coloured_clip` (P1, P2, ")


def test_one_thing_at_a_time() -> None:
    with pytest.raises(MergeflowError, match="mergeflow study --pages --figures"):
        check_options(list(STUDIES.values())[:1], figures=True)  # ran the study
    with pytest.raises(MergeflowError, match="--judge and --rows: give one"):
        check_options(list(STUDIES.values())[:1], judge=True, rows=True)
    with pytest.raises(MergeflowError, match="takes studies: mergeflow study NAME --changed"):
        check_options([], changed=True)
    with pytest.raises(MergeflowError, match="takes no study, found "):
        check_options(list(STUDIES.values())[:1], pages=True)  # wrote all pages, whatever the name


def test_a_system_is_all_studies_that_cover_it() -> None:
    assert {study.stage.name for study in find_named("c1", STUDIES, ROOT)} == {
        "bases",
        "many_tasks",
        "texts_many_tasks",
    }
    assert [study.stage.name for study in find_named("mima", STUDIES, ROOT)] == ["mima"]
    assert [study.stage.name for study in find_named("*rank_curve", STUDIES, ROOT)] == [
        "rank_curve",
        "texts_rank_curve",
    ]
    with pytest.raises(MergeflowError, match="did you mean 'mima'"):
        find_named("mimma", STUDIES, ROOT)
    with pytest.raises(MergeflowError) as raised:
        find_named("C1x", STUDIES, ROOT)
    assert str(raised.value).count("C1,") == 1, "a system that two studies cover is named once"


def test_a_study_that_ships_and_is_not_chosen_is_told_apart_from_an_unknown_one() -> None:
    with pytest.raises(MergeflowError, match=r"studies/params\.yaml does not choose study 'analogy'"):
        find_named("analogy", {}, ROOT)
    console = Console(file=StringIO(), width=200)
    show_list({}, console)
    assert "mergeflow study new NAME" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_study_of_another_world_with_a_name_that_is_taken_has_its_page_there(tmp_path: Path) -> None:
    """The record of the embedded suite is not overwritten by that of a world beside it, whatever that world's name."""
    for world in ("pocket20", "a_real_one"):
        for file in ("params.yaml", "dvc.yaml", "studies/dvc.yaml", "studies/params.yaml"):
            (tmp_path / "worlds" / world / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / "worlds/pocket20" / file, tmp_path / "worlds" / world / file)
    for file in ("params.yaml", "dvc.yaml"):
        shutil.copy(ROOT / file, tmp_path / file)
    real = tmp_path / "worlds/a_real_one"
    (real / "params.yaml").write_text((real / "params.yaml").read_text().replace("suite:pocket20", "folder:images"))
    studies = find_studies(tmp_path)
    assert studies["many_tasks"].root == tmp_path / "worlds/pocket20"
    assert (studies["many_tasks"].is_embedded, studies["a_real_one/many_tasks"].is_embedded) == (True, False)
    assert home_of(tmp_path, studies["many_tasks"], studies) == tmp_path
    assert home_of(tmp_path, studies["a_real_one/many_tasks"], studies) == real
    rewritten = replace(studies["many_tasks"], stage=replace(studies["many_tasks"].stage, deps=("another",)))
    assert home_of(tmp_path, rewritten, studies) == tmp_path, "whose graph was written anew since it was found"


@pytest.mark.parametrize("judge", [True, False])
def test_a_study_without_a_record_does_not_keep_others_from_being_judged(
    judge: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "studies/records").mkdir(parents=True)
    for file in (ROOT / "studies/records").glob("cart_landscape.*"):
        shutil.copy(file, tmp_path / "studies/records")
    chosen = [STUDIES[name] for name in ("mima", "cart_landscape", "gradients")]
    with pytest.raises(MergeflowError) as raised:
        _show_records(tmp_path, chosen, STUDIES, judge)
    assert [line.split()[1] for line in str(raised.value).splitlines()] == ["mima", "gradients"]
    printed = capsys.readouterr().out
    assert ("Study `cart_landscape` (C8)" if judge else "cart_landscape: measured") in printed
    assert [word in printed for word in ("    here", "    rule")] == [judge, judge]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "no rows"),
        ([{"scale": 1.0, "accuracy": 50.0}], "scale, accuracy alone: it yields rows with the column `seed`"),
        ([{"seed": 0, "length": 1.0}, {"seed": 1, "length": "long"}], "column 'length' values of several types"),
        ([{"seed": 0, "accuracy": 50.0}, {"seed": 1, "accuracy": float("nan")}], "NaN in column 'accuracy'"),
    ],
)
def test_rows_that_cannot_be_judged_are_refused_in_a_sentence(
    rows: list[dict[str, Any]], words: str, tmp_path: Path
) -> None:
    with pytest.raises(MergeflowError, match=words):
        write_rows(rows, tmp_path / "rows.parquet")
    assert not list(tmp_path.iterdir())
