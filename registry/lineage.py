"""Where a version comes from: recipe, experts, data, commit and environment, read back from MLflow as plain values."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mlflow.entities import Run
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from mergeflow.checkpoints.fingerprint import short
from mergeflow.errors import MergeflowError
from registry.provenance import examples_of
from registry.store import Store, mlflow
from registry.versions import CHAMPION, chosen_version, describe, read_documents


@dataclass(frozen=True)
class Node:
    """One ancestor: what it is, and what it was made from."""

    text: str
    children: list["Node"] = field(default_factory=list)


def lineage(store: Store, name: str, which: str | int = CHAMPION) -> dict[str, Any]:
    """Return a version's ancestors as a tree of JSON values.

    Returns:
        `model`, `version`, `aliases`, `fingerprint`, `created`; `kind` (pipeline, unmerge, unlearn or add-task) and
        `parent`; `recipe`; `base`; `experts`, each with task, run, regime, seed, settings, fingerprint, DVC hash,
        manifest and data splits with their digests; `run` (id, parameters); `git_commit`; `accepted`: stages whose
        outputs are of older code, with who accepted them and why; `environment`; `requirements`;
        `missing`: what could not be found, in words.

    Raises:
        MergeflowError: no such model, version or alias.
    """
    version, aliases = chosen_version(store, name, which)
    described = describe(version, aliases)
    missing: list[str] = []
    recipe, origin = _documents(store, version, missing)
    ancestors = {**origin.get("experts", {}), **origin.get("unlearned", {})}
    experts = [_expert(store, task, facts, missing) for task, facts in sorted(ancestors.items())]
    run = _find_run(store, described.run_id, missing)
    return {
        "model": name,
        "version": described.version,
        "aliases": list(described.aliases),
        "fingerprint": described.fingerprint,
        "created": described.created,
        "kind": origin.get("kind"),
        "parent": origin.get("parent"),
        "recipe": recipe or None,
        "base": origin.get("base"),
        "experts": experts,
        "run": None if run is None else _describe_run(run),
        "git_commit": origin.get("git_commit"),
        "accepted": origin.get("accepted", []),
        "environment": origin.get("environment"),
        "requirements": _requirements(store, str(version.source), missing),
        "missing": missing,
    }


def lineage_nodes(tree: dict[str, Any]) -> Node:
    """Return the lineage as nested texts: what a terminal and a picture show."""
    aliases = "".join(f" @{alias}" for alias in tree["aliases"])
    top = Node(f"{tree['model']} version {tree['version']}{aliases}, weights {_short(tree['fingerprint'])}")
    parent = tree["parent"]
    if parent:
        top.children.append(Node(f"{tree['kind']} of {parent['task']}, from version {parent['version']}"))
    if tree["recipe"]:
        weights = {f"weight of {task}": weight for task, weight in tree["recipe"].get("weights", {}).items()}
        given = {**tree["recipe"].get("args", {}), **weights}
        arguments = ", ".join(f"{key} {value}" for key, value in given.items())
        recipe = Node(f"recipe {tree['recipe'].get('method', '')}: {arguments}".rstrip(": "))
        if tree["base"]:
            recipe.children.append(Node(_tracked(f"base, weights {_short(tree['base']['fingerprint'])}", tree["base"])))
        recipe.children.extend(_expert_node(expert) for expert in tree["experts"])
        top.children.append(recipe)
    if tree["run"]:
        top.children.append(Node(f"run {_short(tree['run']['id'])}"))
    if tree["git_commit"]:
        commit, _, changes = tree["git_commit"].partition(" ")
        top.children.append(Node(f"git commit {_short(commit)} {changes}".rstrip()))
    for entry in tree.get("accepted", []):
        top.children.append(Node(f"{entry['stage']} is of older code, accepted by {entry['who']}: {entry['because']}"))
    if tree["environment"]:
        top.children.append(Node(f"environment {_environment_text(tree['environment'])}"))
    top.children.extend(Node(f"missing: {text}") for text in tree["missing"])
    return top


def tree_lines(tree: dict[str, Any]) -> Iterator[str]:
    """Yield the lineage as indented lines for a terminal.

    Example:
        >>> empty = {"model": "m", "version": "1", "aliases": ["champion"], "fingerprint": "ab12", "recipe": None,
        ...          "parent": None, "base": None, "run": None, "experts": [], "git_commit": None,
        ...          "environment": None, "missing": ["no run"]}
        >>> print("\\n".join(tree_lines(empty)))
        m version 1 @champion, weights ab12
        └─ missing: no run
    """
    top = lineage_nodes(tree)
    yield top.text
    yield from _lines(top.children, "")


def _lines(nodes: list[Node], indent: str) -> Iterator[str]:
    for node in nodes:
        last = node is nodes[-1]
        yield f"{indent}{'└─' if last else '├─'} {node.text}"
        yield from _lines(node.children, indent + ("   " if last else "│  "))


def _expert_node(expert: dict[str, Any]) -> Node:
    words = [f"expert {expert['task']}, {expert['regime']}, seed {expert['seed']}"]
    words += [f"weights {_short(expert['fingerprint'])}", f"run {_short(expert['run'])}"]
    manifest = expert["manifest"]
    source = Node(_tracked(f"data {expert['source']}, manifest {_short(manifest['sha256'])}", manifest))
    for split in expert["data"]:
        text = f"{split['split']}, {examples_of(split)} examples, sha256 {_short(split['sha256'])}"
        source.children.append(Node(_tracked(text, split)))
    return Node(_tracked(", ".join(words), expert), [source])


def _expert(store: Store, task: str, expert: dict[str, Any], missing: list[str]) -> dict[str, Any]:
    if expert["run"] is not None and not _exists(store, expert["run"]):
        missing.append(f"the run {expert['run']} of the expert '{task}'")
    data = [{"split": split, **facts} for split, facts in expert["splits"].items()]
    rest = {key: value for key, value in expert.items() if key != "splits"}
    return {"task": task, "regime": expert["settings"]["regime"], **rest, "data": data}


def _documents(store: Store, version: ModelVersion, missing: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        return read_documents(store, version)
    except MergeflowError as error:
        missing.append(str(error))
        return {}, {}


def _requirements(store: Store, source: str, missing: list[str]) -> list[str]:
    with TemporaryDirectory(prefix="mergeflow-lineage-") as scratch, store.active():
        try:
            got = mlflow.artifacts.download_artifacts(f"{source}/requirements.txt", dst_path=scratch)
            lines = Path(got).read_text().splitlines()
        except (MlflowException, OSError):
            missing.append(f"the version's file {source}/requirements.txt")
            return []
    return [line for line in lines if line and not line.startswith("#")]


def _find_run(store: Store, run_id: str | None, missing: list[str]) -> Run | None:
    if run_id is None:
        missing.append("the run that made it: the version was registered without one")
        return None
    if not _exists(store, run_id):
        missing.append(f"the run {run_id} that made it")
        return None
    return store.client.get_run(run_id)


def _exists(store: Store, run_id: str) -> bool:
    try:
        return bool(store.client.get_run(run_id).info.lifecycle_stage == "active")
    except MlflowException:
        return False


def _describe_run(run: Run) -> dict[str, Any]:
    params = {key: value for key, value in run.data.params.items() if not key.startswith("dvc/")}
    return {"id": run.info.run_id, "params": params}


def _environment_text(environment: dict[str, Any]) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in environment["packages"].items())
    machine = environment["accelerator"] or environment["processor"]
    return f"code {environment['code']}, Python {environment['python']}, {environment['system']}, {machine}, {packages}"


def _tracked(text: str, record: dict[str, Any]) -> str:
    return f"{text}, DVC {_short(record['dvc'])}" if record.get("dvc") else text


def _short(text: str | None) -> str:
    return short(text or "unknown")
