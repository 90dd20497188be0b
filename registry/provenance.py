"""The record that makes a version again, kept inside it: base, experts, data, settings, commit, environment.

It is a JSON document beside the recipe. What can be read from it does not depend on runs that somebody may delete.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

from mergeflow import layout
from mergeflow.errors import MergeflowError
from registry.environment import environment
from registry.lookup import find_version, read_document
from registry.pipeline_records import StageFiles, dvc_hashes, git_commit, read_json, split_digest
from registry.store import Store

NAME = "provenance"
SECTIONS = ("model", "finetune", "seed")


def describe_origin(io: StageFiles, selection: Mapping[str, Any], runs: Mapping[str, str]) -> dict[str, Any]:
    """Return the document for a merge that the stage `select` made.

    Args:
        io: the stage's files; its `root` holds dvc.lock.
        selection: what `select` wrote.
        runs: task to the MLflow run of its expert.

    Returns:
        `base`, `experts` by task, `params`, `git_commit`, `environment`. A path comes with DVC's hash where dvc.lock
        has one, and with a digest of mergeflow's own that proves the content wherever it is found.
    """
    hashes = dvc_hashes(io.root)
    commit = git_commit(io.root)
    recipe = selection["methods"][selection["winner"]]["recipe"]
    return {
        "kind": "pipeline",
        "base": {
            "path": layout.BASE,
            "dvc": hashes.get(layout.BASE),
            "fingerprint": recipe["base_fingerprint"],
        },
        "experts": {task: describe_expert(io, task, hashes, commit, runs.get(task)) for task in selection["tasks"]},
        "params": {key: _plain(io.section(key)) for key in SECTIONS},
        "git_commit": commit,
        "environment": environment(),
    }


def describe_expert(
    io: StageFiles, task: str, hashes: Mapping[str, str], commit: str, run: str | None
) -> dict[str, Any]:
    """Return one expert's part of the document: weights, settings, seed, run, and the data it saw.

    Args:
        io: the stage's files.
        task: the task's name.
        hashes: DVC's hashes, by path.
        commit: git's, of the project.
        run: MLflow's run that holds the expert's curves; None where there is none.
    """
    summary = read_json(io, layout.expert_training(task))
    manifest_path = layout.manifest_folder(task)
    manifest = read_json(io, f"{manifest_path}/manifest.json")
    splits = {
        split: {
            "path": layout.split(split, task),
            "sha256": split_digest(io, task, split),
            "examples": facts["count"],
            "dvc": hashes.get(layout.split(split, task)),
        }
        for split, facts in manifest["splits"].items()
    }
    return {
        "path": layout.expert(task),
        "dvc": hashes.get(layout.expert(task)),
        "fingerprint": summary["fingerprint"],
        "validation_accuracy": summary["validation_accuracy"],
        "settings": summary["settings"],
        "seed": io.section("seed"),
        "run": run,
        "git_commit": commit,
        "source": manifest.get("source"),
        "manifest": {
            "path": manifest_path,
            "sha256": hashlib.sha256(io.dep(f"{manifest_path}/manifest.json").read_bytes()).hexdigest(),
            "dvc": hashes.get(manifest_path),
        },
        "splits": splits,
    }


def read_documents(store: Store, name: str, which: str | int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a version's recipe and its origin.

    Args:
        store: the registry.
        name: the registered model.
        which: a version's number or an alias.

    Raises:
        MergeflowError: no such version, or it has none because the project's pipeline did not make it.
    """
    version = store.client.get_model_version(name, find_version(store, name, which).version)
    documents = []
    for stem in ("recipe", NAME):
        document = read_document(store, version, stem)
        if document is None:
            raise MergeflowError(
                f"version {version.version} of '{name}' holds no {stem}.json at {version.source}: only versions that "
                "this project's pipeline, `unmerge`, `unlearn` or `add-task` registered can be made again from their "
                "ancestors."
            )
        documents.append(document)
    return documents[0], documents[1]


def _plain(value: Any) -> Any:
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else value


def examples_of(split: Mapping[str, Any]) -> int:
    """Return how many examples a split of a provenance document has; versions of before count `images`."""
    return int(split["examples"] if "examples" in split else split["images"])
