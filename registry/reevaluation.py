"""A registered version on today's validation data: how an old champion stays comparable when the data change."""

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from mergeflow.data import load_manifest
from mergeflow.errors import MergeflowError
from mergeflow.evaluation import example_scores
from mergeflow.modalities.serving import read_model
from mergeflow.training.arithmetic import arithmetic
from registry.evidence import read_evidence
from registry.gates import Evidence
from registry.lookup import download, find_version
from registry.store import Store


@arithmetic()
def evaluate_version(
    store: Store,
    name: str,
    which: str | int,
    splits: Mapping[str, Path],
    candidate: Evidence,
    batch_size: int = 256,
    device: str | torch.device = "cpu",
) -> Evidence:
    """Return the version's evidence on prepared validation splits, to be compared with a candidate's.

    A task that the candidate lacks keeps the figures it was registered with. A task whose classes are no longer those
    of the version's head is left out: there the version cannot be compared.

    Args:
        store: the open registry.
        name: of the registered model.
        which: its number or an alias.
        splits: task to the folder that `prepare_task` wrote.
        candidate: gives the experts' accuracies and the splits' digests of today.
        batch_size: examples per forward pass.
        device: where to compute.

    Raises:
        MergeflowError: no such version, or its examples were prepared in another way.
    """
    device = torch.device(device)
    version = store.client.get_model_version(name, find_version(store, name, which).version)
    kept = read_evidence(store, version)
    others = sorted(set(kept.accuracy) - set(candidate.accuracy))
    with TemporaryDirectory(prefix="mergeflow-version-") as scratch:
        loaded = read_model(download(store, name, which, Path(scratch)), device)
    scores = {}
    for task in sorted(set(loaded.heads) & set(splits) & set(candidate.accuracy)):
        manifest, head = load_manifest(splits[task]), loaded.heads[task]
        if list(manifest["class_names"]) != list(loaded.class_names[task]):
            continue
        found = {key: manifest["decoding"].get(key) for key in loaded.decoding}
        if found != loaded.decoding:
            raise MergeflowError(
                f"version {which} of '{name}' takes examples of {_in_words(loaded.decoding)}, task '{task}' is "
                f"prepared with {_in_words(found)}: they cannot be compared. Register under another name, or force it."
            )
        examples = loaded.modality.open(task, splits[task], "validation", head and head.to(device), device)
        scores[task] = example_scores(loaded.model, examples, batch_size)
    return Evidence(
        accuracy={task: kept.accuracy[task] for task in others}
        | {task: float(found.mean(dtype=np.float64)) for task, found in scores.items()},
        expert_accuracy={task: kept.expert_accuracy[task] for task in others}
        | {task: candidate.expert_accuracy[task] for task in scores},
        scores=scores,
        digests={task: candidate.digests[task] for task in scores if task in candidate.digests},
    )


def _in_words(decoding: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in decoding.items())
