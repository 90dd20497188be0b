"""Tools to write a study: rows, claims, tables, figures, and the laboratory that opens runs and caches pieces."""

from studies.lab.claims import Claim
from studies.lab.inputs import Laboratory, choose_scale, grid
from studies.lab.plots import curves, table
from studies.lab.rows import Row, accuracy_rows, per_seed, select
from studies.lab.study import Study
from tasks.project.sections import Section

__all__ = [
    "Claim",
    "Laboratory",
    "Row",
    "Section",
    "Study",
    "accuracy_rows",
    "choose_scale",
    "curves",
    "grid",
    "per_seed",
    "select",
    "table",
]
