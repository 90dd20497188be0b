"""The parameters of a run: params.yaml, validated whole before anything is read or trained."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field, create_model, field_validator

from mergeflow.errors import MergeflowError, check_name
from mergeflow.modalities.sections import DEFAULT, SECTIONS
from mergeflow.schema import Frozen, Seed, refusal, validated
from mergeflow.training.settings import FineTuneSettings, Precision
from mergeflow.yaml_text import kind_of
from tasks.project.files import read_yaml
from tasks.project.sections import RegistrySection, RunSection, Section


class EvaluationSection(Section):
    """How models are judged.

    batch_size: examples per forward pass; no result depends on it beyond float rounding. precision: of the forward
    passes of sweeps, selections, evaluations, validations and studies; merges are made in float32 or wider. compile:
    whether they go through torch.compile, all but those of validations.
    """

    batch_size: int = Field(256, ge=1)
    precision: Precision = "float32"
    compile: bool = False


class ParamsFile(Section):
    """A whole file of parameters, asked by dotted key."""

    def lookup(self, key: str) -> Any:
        """Return the value under a dotted key, for example `sweep.cart` or `finetune`."""
        value: Any = self
        for part in key.split("."):
            value = value[part] if isinstance(value, dict) else getattr(value, part)
        return value

    def lookup_json(self, key: str) -> Any:
        """Return the value under a dotted key as plain JSON values."""
        value: Any = self.model_dump(mode="json")
        for part in key.split("."):
            value = value[part]
        return value


class Params(ParamsFile):
    """All of params.yaml; `model.modality` decides what `model` and `data` may say.

    seed: of splits, training and draws. tasks: source by name of task. sweep: values to try, by argument, by method.
    """

    seed: Seed = 0
    tasks: dict[str, str] = Field(min_length=1)
    data: Frozen
    model: Frozen
    finetune: FineTuneSettings
    sweep: dict[str, dict[str, list[bool | int | float | str]]] = Field(min_length=1)
    evaluation: EvaluationSection
    registry: RegistrySection
    run: RunSection

    @field_validator("tasks")
    @classmethod
    def _plain_names(cls, tasks: dict[str, str]) -> dict[str, str]:
        for name in tasks:
            check_name("task", name)
        return tasks

    def __reduce__(self) -> tuple[Any, ...]:
        """Go to another process as values: the class is made for the project's modality, and has no module."""
        return _typed, (self.model_dump(),)


def _typed(values: dict[str, Any]) -> Params:
    return params_of(values["model"]).model_validate(values)


class StudyRun(Section):
    """A training run of the studies.

    tasks: how many of the project's tasks, in order; None: all of them. seeds: how many of the seeds; None: all.
    checkpoints: files that are the experts, with `{task}` and, for several seeds, `{seed}` in the path; nothing is
    trained then.
    """

    tasks: int | None = Field(None, ge=1)
    seeds: int | None = Field(None, ge=1)
    checkpoints: str | None = Field(None, pattern=r"\{task\}")
    finetune: FineTuneSettings


class StudyParams(ParamsFile):
    """All of studies/params.yaml.

    seeds: one repetition of every training run for each. runs: name → how many tasks the run takes and what it changes
    in params.yaml's `finetune`. studies: name → that study's choices, which the study validates.
    """

    seeds: list[Seed] = Field(min_length=1)
    runs: dict[str, StudyRun]
    studies: dict[str, dict[str, Any]]


def load_study_params(path: Path, params: Params) -> StudyParams:
    """Read and validate studies/params.yaml; a run takes from params.yaml's `finetune` what it does not set."""
    raw, file = read_yaml(path), f"{path.parent.name}/{path.name}"
    common = params.finetune.model_dump(mode="json")
    if isinstance(raw, dict) and isinstance(raw.get("runs"), dict):
        raw = {**raw, "runs": {name: _run(changes, common) for name, changes in raw["runs"].items()}}
    studies = validated(StudyParams, raw, file)
    count_of_tasks = len(params.tasks)
    greedy = {name: run.tasks for name, run in studies.runs.items() if (run.tasks or 0) > count_of_tasks}
    faults = [
        f"run '{name}' asks for {count} tasks, but params.yaml has {count_of_tasks}" for name, count in greedy.items()
    ]
    faults += [fault for name, run in studies.runs.items() for fault in _merge_faults(run.finetune, f"runs.{name}")]
    if faults:
        raise refusal(file, faults)
    return studies


def _run(changes: Any, common: dict[str, Any]) -> Any:
    if not isinstance(changes, dict):
        return changes  # which the validation refuses
    run: dict[str, Any] = {key: changes[key] for key in ("tasks", "seeds", "checkpoints") if key in changes}
    tuning = {key: value for key, value in changes.items() if key not in run}
    return {**run, "finetune": {**common, **tuning}}


def load_params(path: Path) -> Params:
    raw = read_yaml(path)
    if not isinstance(raw, dict):
        raise MergeflowError(f"{path.name} must be a mapping of sections, found {kind_of(raw)}.")
    params = validated(params_of(raw.get("model"), raw.get("data")), raw, path.name)
    if faults := [*_method_faults(params.sweep), *_merge_faults(params.finetune, "finetune")]:
        raise refusal(path.name, faults)
    return params


def params_of(model: Any, data: Any = None) -> type[Params]:
    """Return the parameters with the sections of the modality that the section `model` names."""
    if not isinstance(model, dict):  # that alone is the fault: nobody knows what `data` may say
        return create_model("Params", __base__=Params, data=(Any, ...))
    if "modality" not in model:
        _check_default({*model, *(data if isinstance(data, dict) else ())})
    try:
        sections = SECTIONS.get(str(model.get("modality", DEFAULT)))
    except MergeflowError as error:
        raise MergeflowError(f"params.yaml: model.modality: {error}") from None
    return create_model("Params", __base__=Params, model=(sections.model, ...), data=(sections.data, ...))


def _check_default(keys: set[str]) -> None:
    """Refuse keys of `model` and `data` that fit another modality as well as the default."""
    fits = {}
    for name in SECTIONS.names():
        sections = SECTIONS.get(name)
        fits[name] = len(keys & {*sections.model.model_fields, *sections.data.model_fields})
    best = [name for name, count in fits.items() if count == max(fits.values())]
    if best != [DEFAULT]:
        raise MergeflowError(
            f"params.yaml: model.modality is missing, and without it models are of images ({DEFAULT}). The keys of "
            f"`model` and `data` are those of {' or '.join(best)}: write which it is, such as `modality: {best[-1]}`."
        )


def _method_faults(sweep: dict[str, dict[str, list[Any]]]) -> Iterator[str]:
    from mergeflow.search.candidates import grid_of  # here, because most stages depend on no merge method

    for method, grid in sweep.items():
        yield from (f"sweep.{method}.{name} is empty: name at least one value" for name in grid if not grid[name])
        try:
            grid_of(method, {name: values for name, values in grid.items() if values})
        except MergeflowError as error:
            yield f"sweep.{method}: {error}"


def _merge_faults(finetune: FineTuneSettings, place: str) -> Iterator[str]:
    from mergeflow.training.between import merge_between  # here, because most stages depend on no merge method

    try:
        merge_between(finetune.iterative)
    except MergeflowError as error:
        yield f"{place}.iterative: {error}"
