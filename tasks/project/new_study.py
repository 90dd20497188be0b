"""Makes a new study in a project's own folder: its file, its choices and its stage."""

import re
from pathlib import Path

from mergeflow.checkpoints import write_text
from mergeflow.errors import MergeflowError
from tasks.project.files import read_yaml
from tasks.project.graph import load_graph
from tasks.project.params_edit import add_line, write_whole
from tasks.project.stage import CHOICES
from tasks.project.studies import find_study_modules
from tasks.project.study_graph import chosen_graph, write_study_graph

_TEMPLATE = Path(__file__).parent / "study_template"
_TAKEN = ("new", "train")  # the command that makes a study, and the stage of the training runs


def new_study(root: Path, name: str) -> Path:
    """Write `studies/NAME.py`, a study that runs as it is, choose it in studies/params.yaml, write studies/dvc.yaml.

    Args:
        root: the project folder. What it lacks of `studies` is made, with one training run.
        name: the study's name.

    Returns:
        The study's file.

    Raises:
        MergeflowError: the name cannot be used or is taken, or studies/params.yaml has faults or cannot be edited; then
            nothing is written.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise MergeflowError(f"'{name}' cannot name a study: use lower-case letters, digits and '_'.")
    stages = {stage.name for stage in load_graph(root, studies=True).values()}
    file, choices = root / "studies" / f"{name}.py", root / CHOICES
    if name in {*_TAKEN, *stages, *find_study_modules(root)} or file.exists():
        raise MergeflowError(f"the name '{name}' is taken, by a stage, a study or studies/{name}.py: take another one.")
    if choices.exists():
        chosen_graph(root)
    text = choices.read_text("utf-8") if choices.exists() else _filled("params.yaml", name)
    run = next(iter(read_yaml(choices)["runs"])) if choices.exists() else "experts"
    text = add_line(text, "studies", name, {"run": run})
    file.parent.mkdir(exist_ok=True)
    write_text(file, _filled("study.py", name))
    write_whole(choices, text) if choices.exists() else write_text(choices, text)
    write_study_graph(root)
    return file


def _filled(file: str, name: str) -> str:
    return (_TEMPLATE / f"{file}.txt").read_text("utf-8").replace("$NAME", name)
