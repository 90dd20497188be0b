"""The studies' pages say what the recorded results say, and nothing else."""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import yaml

from flows.study_commands import find_studies
from tasks.project.digests import code_digest
from tasks.project.graph import load_graph
from tasks.project.stage import Stage, StageIO
from tasks.studies.page import Study, figure_file, index_text, page_text, read_days, read_remarks, systems_text
from tasks.studies.results import ROWS, Finding, StudyResult, Table
from tasks.studies.times import hardware, read_times, write_times
from tasks.studies.verdicts import all_hold, within
from tests.studies.documented import read_documented
from tests.studies.small_lab import ROOT

PAGES = ROOT / "docs" / "studies"
STUDIES = {study.stage.name: study for study in find_studies(ROOT).values()}
RECORDED = sorted(
    path.stem for path in (PAGES / "results").glob("*.json") if path.stem not in ("costs", "judged", "runs")
)


# Studies that have not run yet; remove a name when `mergeflow study NAME --document` has recorded it.
NOT_RUN: set[str] = set()


# Systems without a claim of their own: the tasks of coloured digits, and the figures by which unlearning is judged.
SILENT = {"P1", "P20"}


def test_every_study_has_a_recorded_result_and_every_result_a_study() -> None:
    assert set(RECORDED) == set(STUDIES) - NOT_RUN


@pytest.mark.parametrize("name", RECORDED)
def test_a_page_is_what_its_recorded_result_renders(name: str) -> None:
    """`mergeflow study NAME --document` writes it."""
    assert (PAGES / f"{name}.md").read_text() == page_text(
        STUDIES[name],
        read_documented(name),
        read_times(PAGES, name),
        read_days(PAGES).get(name, ""),
        read_remarks(PAGES).get(name, ""),
    )


def test_remarks_are_on_records_that_there_are() -> None:
    assert set(read_remarks(PAGES)) <= set(RECORDED)
    assert list(read_remarks(PAGES)) == sorted(read_remarks(PAGES))


def test_the_index_is_what_the_recorded_results_render() -> None:
    assert (PAGES / "README.md").read_text() == index_text(PAGES, STUDIES.values())


def test_the_table_of_systems_is_what_the_recorded_results_render() -> None:
    text = (PAGES / "systems.md").read_text()
    assert text == systems_text(PAGES, STUDIES.values())
    listed = [line.split(" | ")[0].removeprefix("| ") for line in text.splitlines() if line.startswith("| ")][1:]
    assert set(listed) >= {system for study in STUDIES.values() for system in study.stage.systems} - SILENT


def rows_of(table: str) -> dict[str, list[str]]:
    """The systems of a row, as `P2, P5–P8` → the studies that the row links."""
    return {
        cells[0]: re.findall(r"\(studies/(\w+)\.md\)", cells[-1])
        for line in table.splitlines()
        if re.match(r"\| [LP]\d", line)
        for cells in [line.strip("| ").split(" | ")]
    }


def systems_in(cell: str) -> Iterator[str]:
    for part in cell.split(", "):
        first, _, last = part.partition("–")
        yield from (f"{part[0]}{number}" for number in range(int(first[1:]), int((last or first)[1:]) + 1))


@pytest.mark.parametrize(("page", "paper", "last"), [("advising", "P", 24), ("linearity", "L", 20)])
def test_every_row_of_a_paper_links_the_studies_that_judge_it_and_no_other(page: str, paper: str, last: int) -> None:
    rows = rows_of((ROOT / f"docs/{page}.md").read_text())
    assert sorted(chain(*map(systems_in, rows))) == sorted(f"{paper}{number}" for number in range(1, last + 1))
    judged = {name: {one.system for one in read_documented(name).findings} for name in RECORDED}
    for cell, linked in rows.items():
        asked = set(systems_in(cell)) - SILENT
        assert not asked or set(linked) == {name for name, systems in judged.items() if systems & asked}, cell


def test_there_is_a_figure_for_each_that_a_result_names_and_no_other() -> None:
    named = {figure_file(name, figure) for name in RECORDED for figure in read_documented(name).figures}
    assert {path.name for path in (PAGES / "figures").iterdir()} == named


def test_the_page_of_costs_names_figures_that_are_there() -> None:
    named = re.findall(r"`([a-z0-9_]+)\.svg`", (ROOT / "docs/study-costs.md").read_text())
    assert len(named) > 20
    assert set(named) <= {path.stem for path in (PAGES / "figures").iterdir()}


def test_what_is_not_defined_is_a_dash_with_a_word_on_it() -> None:
    known = Table("Known", [{"layer": "1", "share": "0.1 ± 0.0"}])
    table = Table("Shares", [{"layer": "1", "share": "nan ± nan"}, {"layer": "2", "share": "0.1 ± 0.0"}])
    page = page_text(STUDIES["bases"], StudyResult([known, table], [], [], []))
    assert "| 1 | – |" in page
    assert "nan" not in page.partition("## Measured")[2]
    assert page.count("–: not defined") == 1


def test_tables_of_times_keep_the_order_of_their_columns() -> None:
    """The first one names what a row is of; sorted keys would put `GPU-seconds` there."""
    tables = [table for name in RECORDED for table in read_times(PAGES, name)]
    assert tables
    assert all(next(iter(row)) in {"model", "method", "directions", "tasks"} for table in tables for row in table.rows)


def test_an_interval_that_straddles_the_margin_is_undecided() -> None:
    assert within([2.0, 2.0, 2.0], low=2.0) is True
    assert within([1.0, 2.0, 3.5], low=2.0) is None
    assert within([0.0, 0.1, -0.1], low=2.0) is False
    assert within([5.0], low=2.0) is None
    assert within([0.9, 1.0, 1.1], 0.5, 1.5) is True
    assert within([1.9, 2.0, 2.1], 0.5, 1.5) is False
    assert all_hold([True, None]) is None
    assert all_hold([None, False, True]) is False


def made(folder: Path, rows: list[dict[str, object]]) -> Study:
    """A study `made_up` of a project in `folder` that has run."""
    found = [
        Finding("X1", "It rises.", "by 2.0 ± 0.1", True, "rise ≥ 1", ours=True),
        Finding("X1", "It falls.", "by 0.1 ± 1.0", None),
    ]
    result = StudyResult([Table("Rise", [{"seed": 0, "rise": 2.0}])], found, ["The size decides."], rows)
    io = StageIO(Stage("made_up", None, "", (), (), ("outputs/studies/made_up",)), folder, folder, params=None)  # type: ignore[arg-type]
    assert StudyResult.read(result.write(io, {})) == result
    return Study(io.building, io.stage)


def test_rows_without_a_seed_are_no_seed(tmp_path: Path) -> None:
    """Such as what a step of training takes, which is the same for every seed."""
    study = made(tmp_path, [{"seed": 0, "memory": None}, {"seed": 1, "memory": None}, {"seed": None, "memory": 4.2}])
    (tmp_path / "results").mkdir()
    for file, name in (("result.json", "made_up.json"), (ROWS, "made_up.parquet")):
        shutil.copy(study.folder / file, tmp_path / "results" / name)
    assert "| X1 | It rises. (Ours.) | holds | by 2.0 ± 0.1 | 2 | [made_up](made_up.md) |" in systems_text(
        tmp_path, [study]
    )


@pytest.mark.parametrize(
    ("model", "seeds", "told"),
    [("right", [0, 1], "today's"), ("confused", [0, 1], "other choices"), ("right", [0], "other choices")],
)
def test_the_index_tells_a_record_of_other_choices(tmp_path: Path, model: str, seeds: list[int], told: str) -> None:
    study = replace(STUDIES["mima"], root=tmp_path)
    shutil.copytree(PAGES / "results", tmp_path / "pages/results")
    (tmp_path / "studies").mkdir()
    (tmp_path / "params.yaml").write_text("model: {pretrained: right}\n")
    (tmp_path / "studies/params.yaml").write_text("seeds: [0, 1]\nstudies: {mima: {keep: 0.2}}\n")
    locked = {
        "params.yaml": {"model": {"pretrained": model}},
        "studies/params.yaml": {"seeds": seeds, "studies.mima": {"keep": 0.2}},
        "outputs/code.yaml": {"mima": code_digest(tmp_path, study.stage)},
    }
    (tmp_path / "studies/dvc.lock").write_text(yaml.safe_dump({"stages": {"mima": {"params": locked}}}))
    assert row_of("mima", index_text(tmp_path / "pages", [study]))[6] == told


def test_the_index_tells_a_record_of_older_code(tmp_path: Path) -> None:
    study = replace(STUDIES["mima"], root=tmp_path)
    shutil.copytree(PAGES / "results", tmp_path / "pages/results")
    (tmp_path / "studies").mkdir()
    locked = {"params": {"outputs/code.yaml": {"mima": "0" * 16}}}
    (tmp_path / "studies/dvc.lock").write_text(yaml.safe_dump({"stages": {"mima": locked}}))
    assert row_of("mima", index_text(tmp_path / "pages", [study]))[6] == "older code"


def test_the_index_tells_a_record_of_other_training_runs_or_another_base(tmp_path: Path) -> None:
    shutil.copytree(PAGES / "results", tmp_path / "pages/results")
    run = load_graph(ROOT, studies=True)["studies/dvc.yaml:train@mima_4"]
    today = code_digest(ROOT, run)
    for base, trained, code, told in [
        ("c.dir", "a.dir", today, "today's"),
        ("c.dir", "b.dir", today, "other runs"),
        ("d.dir", "a.dir", today, "other runs"),
        ("c.dir", "a.dir", "0" * 16, "other runs"),
    ]:
        study = replace(STUDIES["mima"], root=tmp_path / f"{base}{trained}{code}")
        (study.root / "studies").mkdir(parents=True)
        for file in ("dvc.yaml", "params.yaml", "studies/dvc.yaml", "studies/params.yaml"):
            shutil.copy(ROOT / file, study.root / file)
        stages = {
            "train@mima_4": {
                "params": {"outputs/code.yaml": {"train.mima_4": code}},
                "outs": [{"path": "outputs/studies/runs/mima_4", "md5": trained}],
            },
            "mima": {
                "params": {"outputs/code.yaml": {"mima": code_digest(study.root, study.stage)}},
                "deps": [
                    {"path": "outputs/studies/runs/mima_4", "md5": "a.dir"},
                    {"path": "outputs/base", "md5": "c.dir"},
                    {"path": "data", "md5": "c"},
                ],
            },
        }
        (study.root / "studies/dvc.lock").write_text(yaml.safe_dump({"stages": stages}))
        main = {"base": {"outs": [{"path": "outputs/base", "md5": base}]}}
        (study.root / "dvc.lock").write_text(yaml.safe_dump({"stages": main}))
        assert row_of("mima", index_text(tmp_path / "pages", [study]))[6] == told


def test_the_index_tells_a_record_that_the_lock_file_does_not_name(tmp_path: Path) -> None:
    shutil.copytree(PAGES / "results", tmp_path / "pages/results")
    text = index_text(tmp_path / "pages", [replace(STUDIES["mima"], root=tmp_path)])
    assert row_of("mima", text)[6] == "not locked"


def test_the_index_tells_what_a_training_run_took_that_its_studies_share(tmp_path: Path) -> None:
    root, study = tmp_path / "worlds" / "small", STUDIES["mima"]
    records = root / ".mergeflow" / "records"
    records.mkdir(parents=True)
    (records / "studies_dvc.yaml_mima.json").write_text(json.dumps({"seconds": 5400.4}))
    trained = {"training": {"seed_0": {"processor_seconds": 472.2}, "seed_1": {"processor_seconds": 478.3}}}
    (records / "studies_dvc.yaml_train@mima_4.json").write_text(json.dumps(trained))
    (tmp_path / "docs/studies/results").mkdir(parents=True)
    small = replace(study, root=root)
    write_times(tmp_path, small)
    text = index_text(tmp_path / "docs" / "studies", [small])
    total = r"studies add up to 1 h 30 min by the clock, .* runs to 0 h 16 min of one core \(1 of \d+ are"
    assert re.search(total, text)
    assert row_of("worlds/small/mima_4", text) == ["| worlds/small/mima_4", "mima", "950", f"{hardware()} |"]
    assert row_of("worlds/small/mima_8", text)[1:3] == ["mima", ""]
    write_times(tmp_path, replace(study, root=tmp_path))
    assert index_text(tmp_path / "docs" / "studies", [small]) == text, "nothing ran there"


def row_of(name: str, index: str) -> list[str]:
    [row] = [line for line in index.splitlines() if line.startswith((f"| [{name}]", f"| {name} |"))]
    return row.split(" | ")
