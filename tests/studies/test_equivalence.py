"""Study `equivalence`, short, with the base of a project whose tasks are drawn squares."""

import pandas as pd
import pytest

from studies.equivalence import Options, claims
from studies.lab.rows import select
from tests.studies.small_lab import make_lab, run_result

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
def rows(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    root = make_lab(tmp_path_factory.mktemp("project"), {})
    return run_result(root, "equivalence", tmp_path_factory.mktemp("equivalence"), **SMALL).rows


@pytest.mark.slow
def test_what_was_derived_holds_and_what_was_printed_does_not(rows: pd.DataFrame) -> None:
    findings = [claim.judge(rows) for claim in claims(Options.model_validate(SMALL))]
    assert [finding.claim for finding in findings if not finding.holds] == REFUTED
    assert len(select(rows, table="one_epoch")) == (2 * 2 + 1) * 3, "two nets of two seeds and the model; three tasks"
    assert select(rows, table="joint", epochs=1).error.max() < 1e-12


@pytest.mark.slow
def test_one_row_beyond_a_limit_refutes_an_identity(rows: pd.DataFrame) -> None:
    first = claims(Options.model_validate(SMALL))[0]
    assert first.judge(rows).holds
    worse = rows.assign(error=rows.error.mask(rows.index == 0, 1e-11))
    assert first.judge(worse).holds is False
