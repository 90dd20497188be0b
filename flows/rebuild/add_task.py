"""A new task arrives: its expert, a merge with the champion's experts, gates, promotion; nothing else is touched."""

import json
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from flows.dvc_commands import record_outputs
from flows.rebuild.scratch import (
    choose,
    lay_out,
    note_rebuild,
    register_view,
    stage_making,
)
from mergeflow import layout
from mergeflow.checkpoints import fingerprint, open_checkpoint
from mergeflow.checkpoints.fingerprint import short
from mergeflow.checkpoints.writer import write_atomically
from mergeflow.data import load_manifest
from mergeflow.data.address import COLUMNS, parse_address
from mergeflow.documents import Training, read_document
from mergeflow.errors import MergeflowError, check_name
from mergeflow.modalities.preparing import find_preparation
from mergeflow.training.settings import TOGETHER
from registry.lineage import describe_expert, dvc_hashes
from registry.stage import Rebuilt, register_rebuilt
from registry.store import Store
from registry.versions import current, find_stored, read_documents
from tasks.project.files import file_lock
from tasks.project.graph import load_graph, upstream
from tasks.project.new import add_line, remove_task_line, write_whole
from tasks.project.parameters import Params, load_params
from tasks.project.stage import STATE, Stage
from tasks.running.runner import DiskFull, has_finished, remove_outputs, run_stage
from tasks.running.scratch_project import link, scratch_project

Report = Callable[[str], None]
Watch = Callable[[list[str]], AbstractContextManager[None]]


def read_address(root: Path, address: str, name: str | None = None) -> tuple[str, str]:
    """Return name and source of a task, as params.yaml writes them.

    Args:
        address: a source (`hf:tanganke/eurosat?classes=0-4`), or a path: the ending of the files' names says of
            which kind it is, and a folder where they say none is one of class folders.
        name: of the task; None: the last part of the address, and what its transforms say.
    """
    kinds = find_preparation(load_params(root / "params.yaml").lookup("model.modality")).sources
    source = address if parse_address(address).kind in kinds else _local_source(root, address, kinds)
    if name is None:
        parsed = parse_address(source)
        last = re.sub(r"[@#].*$", "", parsed.place).rstrip("/").removesuffix(f".{parsed.kind}").split("/")[-1]
        transforms = [f"{transform}{value}" for transform, value in parsed.transforms if transform not in COLUMNS]
        whole = "_".join([last, *transforms])
        name = re.sub(r"[^a-z0-9_-]+", "_", whole.lower()).strip("_-")
    try:
        check_name("task", name)
    except MergeflowError as error:
        raise MergeflowError(f"{error} Name it: `mergeflow add-task NAME SOURCE`.") from None
    return name, source


def _local_source(root: Path, address: str, kinds: Collection[str]) -> str:
    place = Path(address).resolve()
    endings = {path.suffix for path in (place, *place.glob("**/*"))}
    kind = next((kind for kind in kinds if f".{kind}" in endings), "file" if place.is_file() else "folder")
    wrong_kind = f"a {kind}, which this project's tasks are not read from" if place.exists() else ""
    if not wrong_kind or kind not in kinds:
        path = "a path, or " if {"folder", "parquet"} & set(kinds) else ""
        raise MergeflowError(
            f"'{address}' is {wrong_kind or 'neither a folder here nor a source'}: give {path}KIND:ADDRESS with a "
            f"kind of {', '.join(sorted(kinds))}."
        )
    local = place.relative_to(root.resolve()).as_posix() if place.is_relative_to(root.resolve()) else str(place)
    return f"{kind}:{local}"


def add_task(
    root: Path,
    store: Store,
    name: str,
    source: str,
    *,
    promote: bool = True,
    full_sweep: bool = False,
    report: Report = lambda text: None,
    watch: Watch = lambda addresses: nullcontext(),
) -> Rebuilt:
    """Train one expert, merge it with the champion's experts, register, ask the gates, promote.

    The merge is chosen on validation by a climb over the grid of the champion's method, from the champion's choice;
    the next `mergeflow run` tries the whole sweep. A call that was killed continues when it is made again.
    Where data or expert are refused, params.yaml and outputs are as before.
    """
    with file_lock(root / STATE / "locks" / "add-task.lock", "`mergeflow add-task`"):
        params = load_params(root / "params.yaml")
        model = params.registry.model
        champion = current(store, model).champion
        if champion is None:
            raise MergeflowError(f"'{model}' has no champion to add a task to: run the pipeline with `mergeflow run`.")
        stored = find_stored(store, model, champion.version)
        recipe, origin = read_documents(store, stored)
        _check(params, origin, name, source)
        note_rebuild(root, origin, "add-task", stored, name, report)
        with scratch_project(root, "remerge") as scratch:
            report(f"looking for the ancestors of version {champion.version}")
            lay_out(root, store, stored, origin, scratch)
            with _line_in_params(root, name, source):
                addresses = _train(root, name, origin, watch)
                _check_expert(root, name, source)
            record_outputs(root, addresses)
            view, hashes = register_view(root), dvc_hashes(root)
            origin["experts"][name] = describe_expert(view, name, hashes, origin["git_commit"])
            _join(root, scratch, name)
            near = None if full_sweep or recipe["method"] not in params.sweep else recipe
            choose(root, scratch, origin, params.sweep, report, near)
            return register_rebuilt(store, model, register_view(scratch), origin, promote_it=promote, trained=name)


def _check(params: Params, origin: Mapping[str, Any], name: str, source: str) -> None:
    source_now = params.tasks.get(name)
    if source_now not in (None, source):
        raise MergeflowError(
            f"params.yaml has a task '{name}' already, with the source {source_now}: choose another name."
        )
    if name in origin["experts"]:
        raise MergeflowError(
            f"the champion was merged from a task '{name}' already: choose another name, or run the whole pipeline "
            "with `mergeflow run` when its data changed."
        )
    if params.finetune.regime in TOGETHER:
        raise MergeflowError(
            f"finetune.regime is '{params.finetune.regime}', which trains all tasks in one run: add the line "
            f"`{name}: {source}` to `tasks` in params.yaml and run `mergeflow run`."
        )


@contextmanager
def _line_in_params(root: Path, name: str, source: str) -> Iterator[None]:
    """Add the task to params.yaml; take it out again, with what was made of it, when it is refused.

    A line that was there already stays, unless an unfinished call has written it, which a note tells. A full disk
    refuses nothing: the next call continues.
    """
    path, note = root / "params.yaml", root / STATE / "add-task.json"
    texts = _noted_texts(note, name, source)
    if load_params(path).tasks.get(name) != source:
        before = path.read_text(encoding="utf-8")
        texts = (before, add_line(before, "tasks", name, source))
        write_atomically(note, json.dumps({"name": name, "source": source, "texts": texts}))
        write_whole(path, texts[1])
    try:
        yield
    except DiskFull:
        raise
    except MergeflowError as refused:
        if texts is not None:
            try:
                _take_out(root, name, *texts)
            except MergeflowError as error:
                raise MergeflowError(f"{refused}\n{error}") from refused
        note.unlink(missing_ok=True)
        raise
    note.unlink(missing_ok=True)


def _noted_texts(note: Path, name: str, source: str) -> tuple[str, str] | None:
    """Return params.yaml before and after an unfinished call wrote this task's line; None where none did."""
    noted = json.loads(note.read_text("utf-8")) if note.exists() else {}
    if (noted.get("name"), noted.get("source")) != (name, source):
        return None
    before, written = noted["texts"]
    return before, written


def _take_out(root: Path, name: str, before: str, written: str) -> None:
    """Take a task out of params.yaml, and away what was made of it."""
    path, stages = root / "params.yaml", load_graph(root)
    needed = _stages_of_expert(name, stages) if name in load_params(path).tasks else []
    made = [stage.address for stage in needed if has_finished(root, stage)]
    text = path.read_text(encoding="utf-8")
    write_whole(path, before if text == written else remove_task_line(text, name))
    remaining = load_graph(root)
    for address in stages.keys() - remaining.keys():
        remove_outputs(root, stages[address])
        shutil.rmtree(root / STATE / "scratch" / stages[address].folder_name, ignore_errors=True)
    for address in made:
        if address in remaining:  # the base has the new task's head: make it again without
            with suppress(MergeflowError):  # the next run tries again
                run_stage(root, remaining[address])


def _stages_of_expert(name: str, stages: dict[str, Stage]) -> list[Stage]:
    """Return the stages of a new expert in running order: its data, the base's heads, itself."""
    maker = stage_making(layout.expert(name), stages)
    needed = [*upstream(maker, stages), maker.address]
    return [stage for stage in stages.values() if not stage.frozen and stage.address in needed]


def _train(root: Path, name: str, origin: Mapping[str, Any], watch: Watch) -> list[str]:
    order = _stages_of_expert(name, load_graph(root))
    addresses = [stage.address for stage in order]
    with watch(addresses):
        for stage in order:
            if stage is order[-1]:
                _check_base(root, origin)
            run_stage(root, stage)
    return addresses


def _check_expert(root: Path, name: str, source: str) -> None:
    """Refuse an expert that is no better than a guess: measured against it, any merge would look good."""
    from mergeflow.modalities.metrics import best_guess, metric_of  # here, because it imports torch

    accuracy = read_document(root / layout.expert_training(name), Training)["validation_accuracy"]
    manifest = load_manifest(root / layout.split("validation", name))
    guess, count = best_guess(manifest, "validation"), manifest["splits"]["validation"]["count"]
    if accuracy <= guess + 0.5 / count:
        raise MergeflowError(
            f"the new expert '{name}' has {accuracy:.1%} {metric_of(manifest)} on its {count} validation examples; "
            f"giving all of them the same answer, the best that there is, has {guess:.1%}. It has learnt nothing to "
            f"merge: look at the labels of {source}, or train longer (`finetune` in params.yaml)."
        )


def _check_base(root: Path, origin: Mapping[str, Any]) -> None:
    recorded = origin["base"]["fingerprint"]
    with open_checkpoint(root / origin["base"]["path"] / layout.MODEL_FILE) as state:
        digest = fingerprint(state)
    if digest != recorded:
        raise MergeflowError(
            f"the base of this project has the digest {short(digest)}, the champion's has "
            f"{short(recorded)}: experts of different bases cannot be merged. Run the whole "
            "pipeline with `mergeflow run`."
        )


def _join(root: Path, scratch: Path, name: str) -> None:
    """Put the new task's expert, head and validation split beside the champion's."""
    for folder in (layout.expert(name), layout.split("validation", name)):
        for path in (root / folder).iterdir():
            link(path, scratch / folder / path.name)
    if not (root / layout.expert_head(name)).exists():  # what says that the task has none lies with the base
        link(root / layout.head(name), scratch / layout.expert_head(name))
    link(root / layout.split("validation", name) / layout.MANIFEST_FILE, scratch / layout.manifest(name))
