"""`benchmarks.paper` rehearsed: killed, it goes on to the rows that the studies measure when they run as one."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import yaml

from benchmarks import paper
from mergeflow import layout
from studies.commands.study import find_studies
from studies.lab.records import recorded
from studies.lab.study import ROWS, read_rows
from tasks.project.graph import load_graph
from tasks.project.parameters import load_params, load_study_params
from tasks.project.stage import STUDIES
from tasks.project.study_graph import check_study_options, write_study_graph
from tasks.running.runner import run_stage
from tests.studies.small_lab import ROOT


def command(out: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.paper", "--rehearse", "--out", str(out), *words]


def kill_after_a_unit(out: Path) -> None:
    """Begin the rehearsal, and kill all of its processes as soon as one unit is measured."""
    with subprocess.Popen(command(out, "--workers", "2"), cwd=ROOT, start_new_session=True) as process:
        while not json.loads((out / "facts.json").read_text() if (out / "facts.json").exists() else "{}").get("units"):
            assert process.poll() is None, "it ended before a unit was measured"
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)


def in_order(rows: pd.DataFrame) -> pd.DataFrame:
    order = sorted(set(rows) - {"scores"})  # hits of each example: lists, which do not sort
    return rows[sorted(rows)].sort_values(order).reset_index(drop=True)


@pytest.mark.nightly
def test_a_killed_rehearsal_goes_on_to_the_rows_of_a_whole_run(tmp_path: Path) -> None:
    out = tmp_path / "results"
    kill_after_a_unit(out)
    facts = json.loads((out / "facts.json").read_text())
    subprocess.run(command(out, "--workers", "2"), cwd=ROOT, check=True)
    after = json.loads((out / "facts.json").read_text())
    assert after["units"].items() > facts["units"].items(), "what was measured is not measured again"
    assert len({unit["base"] for unit in after["units"].values()}) == 1
    project, results = out / "project", paper.Results(out, paper.SMALL_CHOICES)
    assert not list((project / "units").iterdir())
    write_study_graph(project)
    for stage in load_graph(project, studies=True).values():
        if stage.file == STUDIES:
            run_stage(project, stage)
    for name in paper.SMALL_CHOICES["studies"]:
        rows, expected = pd.DataFrame(results.whole(name)), read_rows(project / layout.study(name) / ROWS)
        pd.testing.assert_frame_equal(in_order(rows), in_order(expected), check_dtype=False)
        assert rows.accuracy.nunique() > 3
    subprocess.run(command(out, "--record"), cwd=ROOT, check=True)
    study = find_studies(project)["pictures_mima"]
    assert len(recorded(project, study).rows) == len(results.whole("pictures_mima"))


def test_a_unit_chooses_one_seed_one_run_and_what_is_measured_of_it() -> None:
    choices = yaml.safe_load((paper.WORLD / "studies/params.yaml").read_text())
    first, second = (paper.choices_of(unit, choices) for unit in ("mima_1_3", "mima_20_0"))
    assert (first["seeds"], list(first["runs"]), list(first["studies"])) == ([3], ["mima_1"], [paper.MIMA, paper.RANKS])
    assert (second["seeds"], list(second["runs"]), list(second["studies"])) == ([0], ["mima_20"], [paper.MIMA])
    assert second["studies"][paper.MIMA]["rounds"] == [20]


def test_the_world_asks_for_the_papers_budget_and_its_studies_can_be_chosen() -> None:
    params = load_params(paper.WORLD / "params.yaml")
    studies = load_study_params(paper.WORLD / "studies/params.yaml", params)
    mima, ranks = check_study_options(paper.WORLD, studies)
    assert [studies.runs[run].finetune.iterative.rounds for run in mima.runs] == [1, 2, 4, 8, 16, 20]
    assert {run.finetune.steps for run in studies.runs.values()} == {2000}
    assert ranks.runs == ("mima_1",)
    assert params.run.device == "cuda"


def test_another_machine_does_not_go_on(tmp_path: Path) -> None:
    results = paper.Results(tmp_path, paper.SMALL_CHOICES)
    results.begin({"device": "A card", "torch": "2"})
    with pytest.raises(SystemExit, match=r"was measured on .*A card.*give another folder with --out"):
        results.begin({"device": "Another", "torch": "2"})
    with pytest.raises(SystemExit, match="4 of 4 units are not measured"):
        results.record(tmp_path)
