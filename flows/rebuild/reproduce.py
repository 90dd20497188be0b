"""Make a registered version again from its lineage, in a scratch folder, and compare it bit for bit."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flows.rebuild.scratch import base_of, expert_of, gather, split_of, stage_making
from mergeflow import layout
from mergeflow.checkpoints import LazyStateDict, fingerprint, open_checkpoint
from mergeflow.checkpoints.fingerprint import short
from mergeflow.errors import MergeflowError
from mergeflow.modalities.heads import read_head
from mergeflow.modalities.served import WEIGHTS
from registry.lineage import environment, environment_changes
from registry.stage import replay
from registry.store import Store
from registry.versions import describe, download_model, find_stored, head_files, read_documents
from tasks.project.files import read_yaml
from tasks.project.graph import load_graph
from tasks.running.runner import run_stage
from tasks.running.scratch_project import link, scratch_project, write_params


@dataclass(frozen=True)
class Reproduction:
    """The outcome of making a version again.

    Attributes:
        experts: task to whether the retrained expert has the recorded digest; empty where experts were not retrained.
        differences: tensor to the largest absolute difference, the largest first; None where shapes differ.
        places: ancestor's recorded path → where its bytes were read, such as DVC's cache.
    """

    model: str
    version: str
    recipe: dict[str, Any]
    same: bool
    fingerprint: str
    registered: str
    experts: dict[str, bool]
    differences: dict[str, float | None]
    environment: list[str]
    places: dict[str, str]
    seconds: float


def reproduce(
    root: Path,
    store: Store,
    name: str,
    which: str | int,
    *,
    from_data: bool = False,
    report: Callable[[str], None] = lambda text: None,
) -> Reproduction:
    """Merge a version again from its experts, or fine-tune these again first, and compare."""
    stored = find_stored(store, name, which)
    version = describe(stored, {})
    recipe, origin = read_documents(store, stored)
    # What was unlearned is an ancestor too: the merge takes its vector away.
    origin["experts"] |= origin.get("unlearned", {})
    with scratch_project(root, "reproduce") as scratch:
        registered = download_model(store, stored, scratch / "registered")
        digest = _fingerprint(registered / WEIGHTS)
        if digest != version.fingerprint:
            raise MergeflowError(
                f"the weights that the registry holds for version {version.version} of '{name}' have the digest "
                f"{short(digest)}, registered was {short(str(version.fingerprint))}: the file has changed since. "
                "Restore it, or register the model again."
            )
        places = gather(root, _wanted(origin, from_data), scratch)
        if from_data:
            _link_frozen_heads(registered, scratch)
            _retrain(root, scratch, origin, report)
        report(f"merging {len(origin['experts'])} experts by {recipe['method']}")
        made, other_inputs = replay(recipe, scratch, scratch / "replayed.safetensors")
        same = made.fingerprint == digest
        return Reproduction(
            model=name,
            version=version.version,
            recipe=recipe,
            same=same,
            fingerprint=made.fingerprint,
            registered=digest,
            experts={task: task not in other_inputs for task in origin["experts"]} if from_data else {},
            differences={} if same else largest_differences(made.path, registered / WEIGHTS),
            environment=environment_changes(origin["environment"], environment()),
            places=places,
            seconds=made.seconds,
        )


def largest_differences(left: Path, right: Path) -> dict[str, float | None]:
    """Return max |a − b| of each tensor that differs, the largest first; None where it has no partner of its shape."""
    with open_checkpoint(left) as first, open_checkpoint(right) as second:
        differences = dict(_differences(first, second))
    return dict(
        sorted(differences.items(), key=lambda pair: float("inf") if pair[1] is None else pair[1], reverse=True)
    )


def _differences(first: LazyStateDict, second: LazyStateDict) -> Iterator[tuple[str, float | None]]:
    for tensor in sorted({*first, *second}):
        value, other = first.get(tensor), second.get(tensor)
        if value is None or other is None or value.shape != other.shape:
            yield tensor, None
        elif not torch.equal(value, other):
            yield tensor, float((value.double() - other.double()).abs().max())


def _wanted(origin: dict[str, Any], from_data: bool) -> Iterator[Any]:
    yield base_of(origin)
    for task in origin["experts"]:
        if from_data:
            yield split_of(origin, task, "train")
            yield split_of(origin, task, "validation")
        else:
            yield expert_of(origin, task)


def _link_frozen_heads(registered: Path, scratch: Path) -> None:
    """Give training the version's own heads where they are frozen; trained ones start again from the base's."""
    for task, path in head_files(registered).items():
        head = read_head(path)
        if head is None or not head.trained:
            link(path, scratch / layout.head(task))


def _retrain(root: Path, scratch: Path, origin: dict[str, Any], report: Callable[[str], None]) -> None:
    """Run the stages that make the experts, each with the settings and the seed it was made with."""
    values = read_yaml(root / "params.yaml")
    values["model"] = origin["params"]["model"]
    values["tasks"] = {task: expert["source"] for task, expert in origin["experts"].items()}
    for number, (task, expert) in enumerate(origin["experts"].items(), start=1):
        if (scratch / expert["path"] / layout.MODEL_FILE).exists():  # a stage that trains several tasks made it
            continue
        report(f"fine-tuning {task} ({number} of {len(origin['experts'])})")
        write_params(scratch, {**values, "finetune": expert["settings"], "seed": expert["seed"]})
        _make(scratch, expert["path"])


def _make(scratch: Path, path: str) -> None:
    stages = load_graph(scratch)
    maker = stage_making(path, stages)
    for dep in maker.deps:
        if not (scratch / dep).exists():
            _make(scratch, dep)
    run_stage(scratch, maker)


def _fingerprint(path: Path) -> str:
    with open_checkpoint(path) as state:
        return fingerprint(state)
