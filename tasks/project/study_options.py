"""The choices of every study, validated before any training run starts."""

from importlib import import_module
from pathlib import Path

from pydantic import BaseModel, ValidationError

from mergeflow.errors import unknown_name
from mergeflow.schema import faults_of, refusal
from tasks.project.graph import load_graph
from tasks.project.parameters import StudyParams


def check_study_options(root: Path, params: StudyParams) -> None:
    """Check the section of each study in studies/params.yaml against the `Options` that the study's module declares.

    Args:
        root: the project folder.
        params: studies/params.yaml.

    Raises:
        MergeflowError: listing every fault of every study at once.
    """
    modules = {stage.name: stage.module for stage in load_graph(root, studies=True).values() if stage.systems}
    faults = [str(unknown_name("study", name, modules)) for name in params.studies if name not in modules]
    for name, module in modules.items():
        options: type[BaseModel] = import_module(module).Options
        if name not in params.studies:
            faults.append(f"studies.{name} is missing")
            continue
        try:
            options.model_validate(params.studies[name])
        except ValidationError as error:
            faults += [f"studies.{name}: {fault}" for fault in faults_of(error, options)]
    if faults:
        raise refusal("studies/params.yaml", faults)
