"""The study `equivalence`, short: what it finds, that it finds it again, and what it draws."""

import json
from pathlib import Path

import pytest

from tasks.plotting.drawing import to_svg
from tasks.studies.equivalence import SHORT, Options, Tables, figures, measure
from tasks.studies.equivalence_results import study_result
from tasks.studies.results import StudyResult, markdown_table


@pytest.fixture(scope="module")
def tables() -> Tables:
    measured = measure(Options.model_validate(SHORT), lambda name, done, total, work: work())
    return json.loads(json.dumps(measured))  # as a study that is resumed finds them


@pytest.fixture(scope="module")
def result(tables: Tables) -> StudyResult:
    return study_result(tables)


def test_what_was_derived_holds_and_what_was_printed_does_not(result: StudyResult) -> None:
    held = {finding.claim: finding.holds for finding in result.findings}
    assert [claim for claim, holds in held.items() if not holds] == [
        "Less half of that (the ½ of the proof's Taylor step) it falls as η³.",
        "Less the printed +η²C (Theorem 1) it falls as η³.",
        "The task factor |αT − 1| (statement) bounds C.",
        "The task factor |α(T+1) − 1| (last line of the proof) bounds C.",
        "The bound in the weights' spectral norms as printed in the main text holds.",
        "The bound in the weights' spectral norms as printed in the appendix holds.",
    ]
    assert {finding.system for finding in result.findings} == {"G1", "G2", "G3", "G4"}
    assert len(held) == 14


def test_the_numbers_behind_the_findings(tables: Tables) -> None:
    models = {"tanh net", "relu net", "CLIP image encoder"}
    for name in ("one_epoch", "joint", "gap", "slopes", "coefficient", "task_factor"):
        assert {row["model"] for row in tables[name]} == models
    assert all(row["error"] < 1e-12 for row in tables["one_epoch"])
    assert all(row["error"] < 1e-12 for row in tables["joint"] if row["epochs"] == 1)
    for row in tables["slopes"]:
        assert row["gap"] == pytest.approx(2, abs=0.1)
        assert row["after_derived"] == pytest.approx(3, abs=0.1)
        assert row["after_printed"] == pytest.approx(2, abs=0.1)
    assert all(row["measured"] == pytest.approx(-row["scale"], rel=1e-2) for row in tables["coefficient"])
    assert all(row["norm"] < row["derived"] for row in tables["network"])


def test_the_page_has_every_table_and_figure(result: StudyResult, tables: Tables, tmp_path: Path) -> None:
    drawn = figures(tables)
    result.write(tmp_path / "equivalence", drawn)
    assert {path.name for path in (tmp_path / "equivalence").iterdir()} == {
        "result.json",
        "gap.svg",
        "coefficient.svg",
        "bounds.svg",
    }
    assert all(len(set(map(tuple, table.rows))) == 1 for table in result.tables)
    assert "| α | tanh net | relu net | CLIP image encoder |" in "".join(map(markdown_table, result.tables))
    again = figures(tables)
    assert all(to_svg(again[name], name) == (tmp_path / "equivalence" / f"{name}.svg").read_bytes() for name in drawn)
