"""The recorded rows of every study come out of its code once more: the first seed of each, from nothing.

Two stages that share something that they should not, or a record of other code, give other rows.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

from flows.plan import needed_for
from flows.study_commands import find_studies
from tasks.project.graph import load_graph
from tasks.project.runner import run_stage
from tasks.project.study_graph import write_study_graph
from tasks.studies.results import StudyResult
from tasks.studies.rows import Row
from tasks.studies.times import hardware
from tests.studies.documented import RESULTS
from tests.studies.small_lab import ROOT

STUDIES = find_studies(ROOT)
WITH_ROWS = sorted(path.stem for path in RESULTS.glob("*.parquet"))
FEWEST = {"laboratory": 2}
"""Seeds of studies that refuse a single one."""


def with_few_seeds(world: Path, root: Path, name: str) -> list[int]:
    """Write the same project as `world` with one study and as few seeds as it takes; return them."""
    for file in ("params.yaml", "dvc.yaml"):
        shutil.copy(world / file, root / file)
    shutil.copytree(world / "inputs", root / "inputs")
    whole = yaml.safe_load((world / "studies/params.yaml").read_text())
    options = whole["studies"][name]
    seeds: list[int] = options.get("seeds", whole["seeds"])[: FEWEST.get(name, 1)]
    options |= {"seeds": seeds} if "seeds" in options else {}
    for run in whole["runs"].values():
        run.pop("seeds", None)
    whole |= {"seeds": seeds, "studies": {name: options}}
    (root / "studies").mkdir()
    (root / "studies/params.yaml").write_text(yaml.safe_dump(whole, sort_keys=False))
    write_study_graph(root)
    return seeds


def of_seeds(rows: list[Row], seeds: list[int]) -> list[Row]:
    return [row for row in rows if row.get("seed") in seeds]


def largest_difference(found: list[Row], recorded: list[Row]) -> float:
    """Return max |found − recorded| / (1 + |recorded|) over the numbers of all rows; whatever else differs fails."""
    assert len(found) == len(recorded)
    worst = 0.0
    for one, other in zip(found, recorded, strict=True):
        assert one.keys() == other.keys()
        for name, value in other.items():
            if isinstance(value, float) and isinstance(one[name], float):
                if not (np.isnan(value) and np.isnan(one[name])):
                    worst = max(worst, abs(one[name] - value) / (1 + abs(value)))
            else:
                assert one[name] == value, name
    return worst


@pytest.mark.nightly
@pytest.mark.parametrize("name", WITH_ROWS)
def test_one_seed_computed_again_gives_the_recorded_rows(name: str, tmp_path: Path) -> None:
    """To the last bit, on a processor like the one that made the record: elsewhere a training goes other ways."""
    study = STUDIES[name]
    recorded_on = json.loads((RESULTS / "costs.json").read_text()).get(name, {}).get("hardware")
    if recorded_on != hardware():
        pytest.skip(f"its record was made on {recorded_on}")
    seeds = with_few_seeds(study.root, tmp_path, name)
    stages = load_graph(tmp_path, studies=True)
    for address in (one for one in stages if one in needed_for([name], stages)):
        run_stage(tmp_path, stages[address])
    found = StudyResult.read(tmp_path / study.stage.outs[0]).rows
    recorded = pq.read_table(RESULTS / f"{name}.parquet").to_pylist()
    assert of_seeds(recorded, seeds), "no row names its seed"
    assert largest_difference(of_seeds(found, seeds), of_seeds(recorded, seeds)) == 0.0


def test_a_row_that_differs_is_found() -> None:
    rows = [{"seed": 0, "task": "a", "loss": 0.5}]
    assert largest_difference(rows, [{**rows[0], "loss": 0.5 + 1e-9}]) > 0
    with pytest.raises(AssertionError, match="task"):
        largest_difference(rows, [{**rows[0], "task": "b"}])
