"""studies/dvc.yaml, written from what the studies declare and studies/params.yaml chooses."""

from pathlib import Path
from typing import Any

import yaml

from mergeflow import layout
from mergeflow.checkpoints import write_text
from mergeflow.errors import MergeflowError
from mergeflow.schema import refusal
from tasks.project.files import read_yaml
from tasks.project.parameters import StudyParams, load_params, load_study_params
from tasks.project.stage import CHOICES, STUDIES
from tasks.project.studies import study_text
from tasks.project.study_file import read_study_file
from tasks.project.study_options import ChosenStudy, check_study_options, unchosen

_HEAD = """\
# The studies' graph, which reads what the stages of ../dvc.yaml make. `mergeflow study` writes this file from what each
# study declares and from the choices in params.yaml: edit those. `mergeflow study NAME` runs one study and what it
# needs, `dvc repro studies/dvc.yaml:NAME` does the same without MLflow.
"""
_TRAIN = "train"
_JUDGING = ["tasks", "model", "evaluation"]


def study_graph(root: Path, params: StudyParams) -> str:
    """Return the text of studies/dvc.yaml.

    Raises:
        MergeflowError: listing what is wrong in the choices of any study.
    """
    stages = {study.name: _body(root, study) for study in check_study_options(root, params)}
    whole = {"stages": {_TRAIN: _training(), **stages}}
    return _HEAD + yaml.safe_dump(whole, sort_keys=False, width=200, allow_unicode=True)


def check_study_graph(root: Path, params: StudyParams) -> None:
    """Check the choices of every study, and that studies/dvc.yaml is what they and the declarations ask for.

    Raises:
        MergeflowError: listing what is wrong.
    """
    if study_graph(root, params) != (root / STUDIES).read_text("utf-8"):
        raise MergeflowError(
            f"{STUDIES} is not what the studies declare and {CHOICES} chooses: run `mergeflow study`, which writes it."
        )


def chosen_graph(root: Path) -> str:
    """Return the text of studies/dvc.yaml for what the project's studies/params.yaml chooses.

    Raises:
        MergeflowError: listing what is wrong in the shape of that file, in its values, or in the choices of any study.
    """
    read_study_file(root / CHOICES)
    return study_graph(root, load_study_params(root / CHOICES, load_params(root / "params.yaml")))


def write_study_graph(root: Path) -> None:
    """Bring studies/dvc.yaml up to date; a file that says the same already is not touched.

    Raises:
        MergeflowError: as `chosen_graph`.
    """
    text = chosen_graph(root)
    if not (root / STUDIES).exists() or (root / STUDIES).read_text("utf-8") != text:
        write_text(root / STUDIES, text)


def names_differ(root: Path) -> bool:
    """Whether studies/dvc.yaml lacks a study that studies/params.yaml chooses, or has another one. Imports no study.

    Raises:
        MergeflowError: a study in the project's own folder has no choices, or as `read_study_file`.
    """
    if not (root / CHOICES).exists():
        return False
    sections = read_study_file(root / CHOICES).get("studies") or {}
    if faults := unchosen(root, sections):
        raise refusal(CHOICES, faults)
    known = read_yaml(root / STUDIES)["stages"] if (root / STUDIES).exists() else {}
    return set(known) != {_TRAIN, *sections}


def _body(root: Path, study: ChosenStudy) -> dict[str, Any]:
    """Return the stage of a study."""
    judging = _JUDGING if study.splits else _JUDGING[:-1] if study.runs else []
    own = [f"studies.{study.name}"]
    deps = [layout.BASE] if judging else []
    deps += [f"{layout.DATA}/{split}" for split in study.splits]
    deps += [layout.study_run(run) for run in study.runs]
    title = study_text(root, study.module)[0]
    return {
        "desc": title.partition(": ")[2] or title,
        "wdir": "..",
        "cmd": f"mergeflow stage run {study.name}",
        "meta": {"run": study.module, "systems": list(study.systems)},
        "params": [*judging, {CHOICES: ["seeds", *own] if judging else own}, {layout.CODE: [study.name]}],
        **({"deps": deps} if deps else {}),
        "outs": [{layout.study(study.name): {"persist": True}}],
    }


def _training() -> dict[str, Any]:
    """Return the stage of the training runs that studies share."""
    return {
        "foreach": "${runs}",
        "do": {
            "desc": "Fine-tune all tasks in one way, for every seed",
            "wdir": "..",
            "cmd": f"mergeflow stage run {_TRAIN} --item ${{key}}",
            "meta": {"run": "studies.lab.runs"},
            "params": [*_JUDGING, {CHOICES: ["seeds", "runs.${key}"]}, {layout.CODE: [f"{_TRAIN}.${{key}}"]}],
            "deps": [layout.BASE, f"{layout.DATA}/train", f"{layout.DATA}/validation"],
            "outs": [{layout.study_run("${key}"): {"persist": True}}],
        },
    }
