"""The record that makes a version again, kept inside it: base, experts, data, settings, commit, environment.

It is a JSON document beside the recipe. What can be read from it does not depend on runs that somebody may delete.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from mergeflow import layout
from mergeflow.errors import MergeflowError
from registry.environment import environment
from registry.lookup import find_version, read_document
from registry.pipeline_records import dvc_hashes, git_commit, read_json, split_digest
from registry.store import Store
from tasks.project.dvc_lock import digest_as_dvc
from tasks.project.stage import StageIO

NAME = "provenance"
SECTIONS = ("model", "finetune", "seed")


def describe_origin(io: StageIO, selection: Mapping[str, Any], runs: Mapping[str, str]) -> dict[str, Any]:
    """Return the document for a merge that the stage `select` made.

    Args:
        io: the stage's files; its `root` holds dvc.lock.
        selection: what `select` wrote.
        runs: task to the MLflow run of its expert.

    Raises:
        MergeflowError: an ancestor's bytes are not those of the hash that would be written.

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
            "dvc": _proven(io, layout.BASE, hashes),
            "fingerprint": recipe["base_fingerprint"],
        },
        "experts": {task: describe_expert(io, task, hashes, commit, runs.get(task)) for task in selection["tasks"]},
        "params": {key: _plain(io.section(key)) for key in SECTIONS},
        "git_commit": commit,
        "accepted": accepted(io.root),
        "environment": environment(),
    }


def accepted(root: Path) -> list[dict[str, str]]:
    """Return whose outputs of older code a project counts, with who decided so and why: what is in force now."""
    path, codes = root / layout.ACCEPTED, root / layout.CODE
    entries = yaml.safe_load(path.read_text("utf-8")) if path.exists() else None
    digests = yaml.safe_load(codes.read_text("utf-8")) if codes.exists() else {}
    return [entry for entry in entries or [] if _lookup(digests, entry["stage"]) == entry["outputs_of"]]


def _lookup(digests: Any, key: str) -> Any:
    name, _, item = key.partition(".")
    return digests.get(name, {}).get(item) if item else digests.get(name)


def describe_expert(io: StageIO, task: str, hashes: Mapping[str, str], commit: str, run: str | None) -> dict[str, Any]:
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
            "dvc": _proven(io, layout.split(split, task), hashes),
        }
        for split, facts in manifest["splits"].items()
    }
    return {
        "path": layout.expert(task),
        "dvc": _proven(io, layout.expert(task), hashes),
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
            "dvc": _proven(io, manifest_path, hashes),
        },
        "splits": splits,
    }


def _proven(io: StageIO, path: str, hashes: Mapping[str, str]) -> str | None:
    """Return DVC's hash of an ancestor, which its bytes have, where they are here.

    Raises:
        MergeflowError: the bytes are others, so that the version could not be made again from what the hash names.
    """
    recorded = hashes.get(path)
    if recorded is not None and (io.root / path).exists():
        found = digest_as_dvc(io.root / path)
        if found != recorded:
            raise MergeflowError(
                f"{path} is not what dvc.lock has recorded: MD5 {found}, recorded {recorded}. A version merged from it "
                "could not be made again. Remove it, and `mergeflow run` makes it again; or bring it back with "
                "`dvc checkout`."
            )
    return recorded


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
