"""A record judged again: its rows, today's rules."""

import json
from pathlib import Path

import pyarrow.parquet as pq

from mergeflow.errors import MergeflowError
from studies.old.judging.rules import judge_rows, notes_of
from studies.old.page import DAYS, has_other_choices, read_days, render_page, write_json
from studies.old.results import StudyResult
from tasks.project.studies import Study


def judge_again(root: Path, study: Study, day: str) -> Path:
    """Judge a study's recorded rows by the rules of today, write its findings and its page, return the page's path.

    Rows, tables and figures stay as they were recorded, and so do notes that the rows do not tell. The page says on
    which day it was judged.

    Args:
        root: the folder whose `docs/studies` have the record.
        study: whose record it is.
        day: today's date.

    Raises:
        MergeflowError: the study has no record, has other choices than its record, or is not one of mergeflow's.
    """
    folder, name = root / "docs" / "studies", study.stage.name
    path = folder / "results" / f"{name}.json"
    rows = path.with_suffix(".parquet")
    if not (path.exists() and rows.exists()):
        raise MergeflowError(
            f"study {name} has no record with rows in docs/studies/results: measure it, "
            f"`mergeflow study {name} --document`."
        )
    if has_other_choices(study):
        raise MergeflowError(
            f"`studies.{name}` in studies/params.yaml is not what the record of study {name} was made with, so that "
            f"today's rules do not fit its rows: measure it, `mergeflow study {name} --document`."
        )
    known, content = pq.read_table(rows).to_pylist(), json.loads(path.read_text())
    findings = [vars(one) for one in judge_rows(study.root, name, known)]
    notes = notes_of(study.root, name, known)
    judged = content | {"findings": findings, "notes": content["notes"] if notes is None else notes}
    if judged != content:
        making = path.with_name(f".{path.name}.new")
        making.write_text(json.dumps(judged, indent=1, ensure_ascii=False) + "\n")
        write_json(folder / DAYS, read_days(folder) | {name: day})
        making.replace(path)
    return render_page(folder, study, StudyResult.parse(path.read_text()))
