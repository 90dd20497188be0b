"""Study `equivalence`, short: what it finds, what it draws, and the numbers behind it."""

import json
from collections.abc import Callable

import pyarrow.parquet as pq
import pytest
from studies.old.judging.merging import of_equivalence

from studies.old.papers.equivalence import study as equivalence
from studies.old.papers.equivalence.study import Case, Options, Tables, figures, measure, project_cases
from studies.old.results import StudyResult
from studies.old.rows import Row, picked
from studies.theory.gradient_descent import feed_forward_problem
from tasks.plotting.drawing import to_svg
from tasks.project.stage import StageIO
from tests.studies.small_lab import ROOT, make_lab, study_io

SMALL = {
    "epochs": 2,
    "widths": [6, 8, 8, 3],
    "samples": 16,
    "seeds": [0, 1],
    "net_steps": [1e-5, 1e-4, 1e-3],
    "scales": [0.25, 1 / 3, 0.7],
    "gains": [0.1, 1.0],
    "examples": 2,
    "model_tasks": ["red", "blue", "grey"],
    "model_steps": [1e-7, 1e-6],
    "model_scales": [1 / 3],
}
REFUTED = [
    "Less half of that (the ½ of the proof's Taylor step) it falls as η³.",
    "Less the printed +η²C (Theorem 1) it falls as η³.",
    "The task factor |αT − 1| (statement) bounds C.",
    "The task factor |α(T+1) − 1| (last line of the proof) bounds C.",
    "The bound in the weights' spectral norms as printed in the main text holds.",
    "The bound in the weights' spectral norms as printed in the appendix holds.",
]


@pytest.fixture(scope="module")
def io(tmp_path_factory: pytest.TempPathFactory) -> StageIO:
    """The study has run, with the base of a project whose tasks are drawn squares."""
    root = make_lab(tmp_path_factory.mktemp("project"), {})
    small = study_io(root, "equivalence", tmp_path_factory.mktemp("equivalence"), **SMALL)
    equivalence.run(small)
    return small


@pytest.fixture(scope="module")
def tables(io: StageIO) -> Tables:
    """As a study that was killed at the end finds them: nothing is measured again."""

    def measured(name: str, done: int, total: int, work: equivalence.Work) -> Tables:
        found: Tables = json.loads((io.scratch / "pieces" / f"{name}.json").read_text())
        return found

    options = Options.model_validate(SMALL)
    return measure(options, project_cases(io, options), measured)


def refuted(result: StudyResult) -> list[str]:
    assert {finding.system for finding in result.findings} == {"G1", "G2", "G3", "G4"}
    return [finding.claim for finding in result.findings if not finding.holds]


@pytest.mark.slow
def test_what_was_derived_holds_and_what_was_printed_does_not(io: StageIO) -> None:
    assert refuted(StudyResult.read(io.scratch / "building/outputs/studies/equivalence")) == REFUTED


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
    for gain in SMALL["gains"]:
        own = [row for row in tables["network"] if (row["model"], row["gain"]) == ("tanh net", gain)]
        assert [row["seed"] for row in own] == SMALL["seeds"]
        assert own[0]["norm"] != own[1]["norm"], "each seed draws its own net"


@pytest.mark.slow
def test_the_study_leaves_every_table_and_figure(io: StageIO, tables: Tables) -> None:
    folder = io.scratch / "building/outputs/studies/equivalence"
    drawn = figures(tables)
    assert {path.name for path in folder.iterdir()} == {
        "result.json",
        "rows.parquet",
        *(f"{name}.svg" for name in drawn),
    }
    assert all(to_svg(figure, name) == (folder / f"{name}.svg").read_bytes() for name, figure in drawn.items())
    for table in StudyResult.read(folder).tables:
        assert len({tuple(row) for row in table.rows}) == 1


# What a claim begins with, the table and the rows of which one is changed, the column, and its value at a share of the
# limit that the rule prints.
LIMITS: list[tuple[str, str, Row, str, Callable[[Row, float], float]]] = [
    ("After one epoch", "one_epoch", {}, "error", lambda row, share: share * 1e-12),
    ("One-epoch task arithmetic", "joint", {"epochs": 1}, "error", lambda row, share: share * 1e-12),
    ("One-epoch task arithmetic", "joint", {"epochs": 3}, "error", lambda row, share: 1e-12 / share),
    ("The gap falls as η²", "slopes", {}, "gap", lambda row, share: 2 + share * 0.1),
    ("Less the derived", "slopes", {}, "after_derived", lambda row, share: 3 - share * 0.1),
    ("The coefficient", "coefficient", {}, "measured", lambda row, share: row["derived"] - share * 0.01 * row["scale"]),
    ("The gap grows with k", "growth", {}, "ratio", lambda row, share: row["derived"] * (1 + share * 0.02)),
    ("‖C‖₂ is below the derived", "task_factor", {}, "measured", lambda row, share: share * row["derived"]),
    ("‖C‖₂ is below the derived", "network", {}, "norm", lambda row, share: share * row["derived"]),
    ("At α = ", "network", {"gain": 1}, "norm", lambda row, share: share * min(row["statement"], row["appendix"])),
]


@pytest.mark.parametrize(("claim", "table", "wanted", "column", "at"), LIMITS)
def test_one_row_beyond_a_limit_refutes_a_claim(
    claim: str, table: str, wanted: Row, column: str, at: Callable[[Row, float], float]
) -> None:
    for share, holds in ((0.99, True), (1.01, False)):
        rows = pq.read_table(ROOT / "studies/records/equivalence.parquet").to_pylist()
        changed = picked(rows, table=table, **wanted)[0]
        changed[column] = at(changed, share)
        assert [one.holds for one in of_equivalence(rows) if one.claim.startswith(claim)] == [holds]


def test_the_same_model_gives_the_same_rows() -> None:
    options = Options.model_validate(SMALL)
    first, again = (
        equivalence.rows_of(
            Case(feed_forward_problem("tanh", (4, 5, 3), samples=8), 0, 0.1, [1e-4, 1e-3], [0.7]), options
        )
        for _ in range(2)
    )
    assert first == again


def test_relus_switch_side_at_large_steps_alone() -> None:
    problem = feed_forward_problem("relu", (8, 16, 16, 4))
    near, far = (problem.switched_units(0.7, step, 3) for step in (1e-4, 1e-1))
    assert near == 0 < far
    assert feed_forward_problem("tanh", (8, 16, 16, 4)).switched_units(0.7, 1e-1, 3) == 0
