"""The choices of every study, validated before any training run starts."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ValidationError

from mergeflow.errors import MergeflowError, unknown_name
from mergeflow.schema import faults_of, refusal
from tasks.project.parameters import StudyParams
from tasks.project.stage import CHOICES
from tasks.project.studies import find_study_modules, load_declaration

_SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class ChosenStudy:
    """A study of the project, with what its declaration makes of the project's choices.

    Attributes:
        name: the study's name.
        module: its module, by dotted name or as a file of the project.
        runs: the training runs that it reads.
        splits: the prepared splits that it reads.
        systems: the papers' systems that it covers.
    """

    name: str
    module: str
    runs: tuple[str, ...]
    splits: tuple[str, ...]
    systems: tuple[str, ...]


def check_study_options(root: Path, params: StudyParams) -> list[ChosenStudy]:
    """Check the section of each study in studies/params.yaml against what the study declares.

    Args:
        root: the project folder.
        params: studies/params.yaml.

    Returns:
        The project's studies, in the order of studies/params.yaml.

    Raises:
        MergeflowError: listing every fault of every study at once.
    """
    modules = find_study_modules(root)
    chosen, faults = [], unchosen(root, params.studies)
    for name, section in params.studies.items():
        if name not in modules:
            faults.append(str(unknown_name("study", name, modules)))
            continue
        try:
            chosen.append(_chosen(root, name, modules[name], section, params))
        except ValidationError as error:
            options = load_declaration(root, modules[name], name).options
            faults += [f"studies.{name}: {fault}" for fault in faults_of(error, options)]
        except MergeflowError as error:
            faults.append(str(error))
    if faults:
        raise refusal(CHOICES, faults)
    return chosen


def unchosen(root: Path, sections: Mapping[str, object]) -> list[str]:
    """Return one fault for each study in the project's own folder that has no section in studies/params.yaml."""
    own = (name for name, module in find_study_modules(root).items() if module.endswith(".py"))
    return [
        f"the study in studies/{name}.py has no choices: add `{name}: {{…}}` to `studies`, or remove that file"
        for name in own
        if name not in sections
    ]


def _chosen(root: Path, name: str, module: str, section: object, params: StudyParams) -> ChosenStudy:
    declared = load_declaration(root, module, name)
    options: BaseModel = declared.options.model_validate(section)
    runs, splits = tuple(dict.fromkeys(declared.runs(options))), declared.splits
    faults = [str(unknown_name("run", run, params.runs)) for run in runs if run not in params.runs]
    faults += [str(unknown_name("split", split, _SPLITS)) for split in splits if split not in _SPLITS]
    if faults:
        raise MergeflowError(f"studies.{name} reads what does not exist: {' '.join(faults)}")
    return ChosenStudy(name, module, runs, splits, declared.systems)
