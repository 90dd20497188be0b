"""Predict the device memory of a project's stages before they start; refuse a batch that cannot fit."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console

from mergeflow import layout
from mergeflow.checkpoints import open_checkpoint
from mergeflow.data import load_manifest
from mergeflow.errors import MergeflowError
from mergeflow.memory import Forecast, Need, Work, Workload, blank_model, same_result
from mergeflow.merging.execution.device import fits, free_bytes
from mergeflow.modalities.catalog import MODALITIES
from mergeflow.training.settings import TOGETHER, FineTuneSettings
from tasks.project.graph import load_graph
from tasks.project.parameters import Params, load_study_params
from tasks.project.stage import CHOICES, Stage
from tasks.project.stage import STUDIES as STUDY_GRAPH
from tasks.project.validate_params import check_base, validate_params
from tasks.running.devices import device_names
from tasks.training import tuned_model

JUDGING = ("sweep", "select", "evaluate")
STUDIES = "studies"
# Settings of a run that do not affect its memory.
_TAKE_NOTHING = {
    *("steps", "epochs", "learning_rate", "weight_decay", "warmup", "schedule", "save_every", "keep_epochs"),
    *("gradient_clip", "iterative"),
}
_CLASSES = 1000  # of a task that is not prepared yet: more than most have, and they take little


def print_device_memory(root: Path, params: Params, addresses: Iterable[str], console: Console) -> None:
    """Print the CUDA memory of the stages that are about to run; print nothing for the CPU."""
    if device_names(params.run.device) == ["cpu"]:
        return
    stages = load_graph(root, studies=True)
    wanted = list(addresses)
    chosen = [stages[address] for address in wanted if address in stages]
    names = {address.partition("@")[0] for address in wanted} | {STUDIES for stage in chosen if stage.is_study}
    needs = forecast(root, params, stages=names, runs=_runs(root, params, chosen))
    needs.announce(console)


def _runs(root: Path, params: Params, stages: Iterable[Stage]) -> dict[str, FineTuneSettings]:
    """Return the settings of the studies' training runs among the stages, but for those that take checkpoints."""
    names = [stage.item for stage in stages if stage.name == "train" and stage.file == STUDY_GRAPH]
    runs = load_study_params(root / CHOICES, params).runs if names else {}
    return {str(name): runs[str(name)].finetune for name in names if not runs[str(name)].checkpoints}


def check_project(root: Path, wanted: str | None, console: Console) -> None:
    """Validate params.yaml and say what each stage will take of the device's memory."""
    params = validate_params(root)
    check_base(root, params)
    count = len(params.tasks)
    console.print(
        f"params.yaml is valid: {count} task{'s' * (count > 1)}, regime {params.finetune.regime}.", highlight=False
    )
    needs = forecast(root, params, wanted)
    if not needs.works:
        console.print("What memory training takes is not known yet: the stage `base` tells it (not of every modality).")
        return
    needs.announce(console)


def forecast(
    root: Path,
    params: Params,
    wanted: str | None = None,
    stages: Collection[str] | None = None,
    runs: Mapping[str, FineTuneSettings] | None = None,
) -> Forecast:
    """Predict the device memory of the stages that use a device; none of a modality without blank examples.

    Of the studies' training runs the one that takes most is told, and every other that does not fit.

    Args:
        stages: names of those to look at; all of them if None. Whatever judges a model beside them is a study.
    """
    names = device_names(wanted or params.run.device)
    free = None if "cpu" in names else min(free_bytes(name) for name in names)
    workload = _workload(root, params)
    works = [] if workload is None else [*_works(workload, params, stages)]
    if runs and workload is not None:
        works += _run_works(workload, params, runs, free)
    return Forecast(", ".join(names), free, tuple(works))


def _works(workload: Workload, params: Params, stages: Collection[str] | None) -> Iterator[Work]:
    settings, judged = params.finetune, params.evaluation.batch_size
    training = "multitask" if settings.regime in TOGETHER else "finetune"
    if stages is None or training in stages:
        yield from _training_works(workload, params, training, settings, "finetune")
    judging = [stage for stage in JUDGING if stages is None or stage in stages]
    judging += [STUDIES] if stages is not None and STUDIES in stages else []
    if judging:
        yield Work(", ".join(judging), workload.judging, judged, same_result("evaluation.batch_size"))


def _run_works(
    workload: Workload, params: Params, runs: Mapping[str, FineTuneSettings], free: int | None
) -> Iterator[Work]:
    distinct: dict[str, tuple[str, FineTuneSettings]] = {}
    for name, settings in runs.items():  # rates and lengths take no memory
        distinct.setdefault(settings.model_dump_json(exclude=_TAKE_NOTHING), (name, settings))
    options = [
        [*_training_works(workload, params, f"train@{name}", settings, f"runs.{name}")]
        for name, settings in distinct.values()
    ]
    options.sort(key=lambda works: -max(work.need.total for work in works))
    yield from options[0]
    if free is not None:
        yield from (work for works in options[1:] for work in works if not fits(work.need.total, free))


def _training_works(
    workload: Workload, params: Params, stage: str, settings: FineTuneSettings, place: str
) -> Iterator[Work]:
    """Yield a step of training, whose batch may be split into parts of fewer examples, and a validation."""
    section: Any = params.model
    tower, judged = MODALITIES.get(section.modality).tower(section), params.evaluation.batch_size
    whole = settings.regime == "full_batch_gd"
    rows = settings.batch_size if whole else -(-settings.batch_size // settings.accumulate)

    def change(rows: int) -> tuple[str, int]:
        return ("batch_size", rows) if whole else ("accumulate", -(-settings.batch_size // rows))

    @cache
    def training(rows: int, judged: int) -> tuple[Need, Need]:
        tuned = replace(workload, build=lambda: tuned_model(workload.build(), settings, 0, tower))
        return tuned.training(settings.model_copy(update=dict([change(rows)])), judged, len(params.tasks))

    def split(rows: int) -> str:
        name, value = change(rows)
        return same_result(f"{place}.{name}")(value)

    no_way, smaller = "take a smaller model, the regime lora or a larger device", same_result("evaluation.batch_size")
    yield Work(f"{stage}: a step", lambda rows: training(rows, judged)[0], rows, split, no_way)
    yield Work(f"{stage}: validation", lambda judged: training(rows, judged)[1], judged, smaller)


def _workload(root: Path, params: Params) -> Workload | None:
    """Return a project's models and examples.

    None for a modality without blank examples, or one that builds no model before there is a base.
    """
    base, record = root / layout.BASE_MODEL, dict[str, str]()
    folders = [root / layout.manifest_folder(task) for task in params.tasks]
    counts = [len(load_manifest(folder)["class_names"]) for folder in folders if folder.exists()]
    classes = max(counts) if len(counts) == len(folders) else _CLASSES
    if base.exists():
        with open_checkpoint(base) as state:
            record = dict(state.metadata)
    modality = MODALITIES.get(params.lookup("model.modality"))
    workload = Workload.of(modality, params.model, record, params.data, classes)
    try:
        if workload is not None:
            blank_model(workload.build)
    except MergeflowError:
        if base.exists():
            raise
        return None
    return workload
