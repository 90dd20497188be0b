"""What a project's stages take of a device's memory, found before they start; a batch that cannot fit is refused."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from mergeflow import layout
from mergeflow.checkpoints import open_checkpoint
from mergeflow.data import load_manifest
from mergeflow.errors import MergeflowError
from mergeflow.memory import Forecast, Need, Work, Workload, blank_model, fewer, largest
from mergeflow.merging.device_memory import fits, free_bytes
from mergeflow.modalities.catalog import MODALITIES
from mergeflow.training.settings import TOGETHER, FineTuneSettings
from tasks.project.devices import device_names
from tasks.project.parameters import Params
from tasks.training import tuned_model

JUDGING = ("sweep", "select", "evaluate")
STUDIES = "studies"
# Settings of a run that decide nothing about its memory.
_TAKE_NOTHING = {
    *("steps", "epochs", "learning_rate", "weight_decay", "warmup", "schedule", "save_every", "keep_epochs"),
    *("gradient_clip", "iterative"),
}
_CLASSES = 1000  # of a task that is not prepared yet: more than most have, and they take little


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
        yield Work(", ".join(judging), workload.judging(judged), partial(_smaller, judged, workload.judging))


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
    tower, judged = MODALITIES.get(params.lookup("model.modality")).tower, params.evaluation.batch_size

    def training(settings: FineTuneSettings, judged: int) -> tuple[Need, Need]:
        tuned = replace(workload, build=lambda: tuned_model(workload.build(), settings, 0, tower))
        return tuned.training(settings, judged, len(params.tasks))

    step, validation = training(settings, judged)
    smaller = partial(_smaller, judged, lambda rows: training(settings, rows)[1])
    yield Work(f"{stage}: a step", step, partial(_split, settings, lambda changed: training(changed, 1)[0], place))
    yield Work(f"{stage}: validation", validation, smaller)


def _split(settings: FineTuneSettings, need: Callable[[FineTuneSettings], Need], place: str, free: int) -> str:
    """Say how a batch has to be split."""
    whole = settings.regime == "full_batch_gd"

    def changed(rows: int) -> FineTuneSettings:
        change = {"batch_size": rows} if whole else {"accumulate": -(-settings.batch_size // rows)}
        return settings.model_copy(update=change)

    most = settings.batch_size - 1 if whole else -(-settings.batch_size // (settings.accumulate + 1))
    rows = largest(max(most, 1), lambda rows: need(changed(rows)), free)
    if not rows:
        return "Not even one example at a time fits: take a smaller model, the regime lora or a larger device."
    name, value = ("batch_size", rows) if whole else ("accumulate", changed(rows).accumulate)
    return f"Set {place}.{name} to {value}: the result is the same but for rounding."


def _smaller(judged: int, need: Callable[[int], Need], free: int) -> str:
    """Say how many examples may be judged at once."""
    return fewer("evaluation.batch_size", judged, need, "the result is the same but for rounding", free)


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
