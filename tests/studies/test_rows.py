"""Rows of studies are picked by the values of their columns."""

import pytest

from studies.old.rows import picked

ROWS = [{"seed": 0, "N": 4}, {"seed": 1, "N": 4}, {"seed": 0}]


def test_a_row_without_the_column_counts_as_none() -> None:
    assert picked(ROWS, seed=0, N=4) == [ROWS[0]]
    assert picked(ROWS, N=None) == [ROWS[2]]
    assert picked([], N=4) == []


def test_a_column_that_no_row_has_is_an_error() -> None:
    with pytest.raises(KeyError, match="sead"):
        picked(ROWS, sead=0)
