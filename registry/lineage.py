"""Where a version comes from: recipe, experts, data, commit and environment, read back from MLflow as plain values."""

import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mlflow.entities import Run
from mlflow.exceptions import MlflowException
from mlflow.utils.mlflow_tags import MLFLOW_PARENT_RUN_ID

from registry.logging import KIND, NAME, search_runs
from registry.lookup import find_version
from registry.quiet import mlflow
from registry.store import Store
from registry.versions import CHAMPION


def lineage(store: Store, name: str, which: str | int = CHAMPION) -> dict[str, Any]:
    """Return a version's ancestors as a tree of JSON values.

    Args:
        store: the open registry.
        name: of the registered model.
        which: its number or an alias.

    Returns:
        `model`, `version`, `aliases`, `fingerprint`, `created`; `recipe`; `run` (id, git commit, parameters);
        `experts`, each with task, run, settings, fingerprint, DVC hash and its data splits with their digests;
        `environment` (package requirements); `missing`: what could not be found, in words.

    Raises:
        MergeflowError: no such model, version or alias.
    """
    found = find_version(store, name, which)
    missing: list[str] = []
    tree: dict[str, Any] = {
        "model": name,
        "version": found.version,
        "aliases": list(found.aliases),
        "fingerprint": found.fingerprint,
        "created": found.created,
    }
    with TemporaryDirectory(prefix="mergeflow-lineage-") as scratch:
        folder = Path(scratch)
        tree["recipe"], tree["environment"] = _from_files(store, name, found.version, folder, missing)
        run = _find_run(store, found.run_id, missing)
        hashes = {} if run is None else _dvc_hashes(store, run, folder, missing)
    tree["run"] = None if run is None else _describe_run(run)
    tree["experts"] = [] if run is None else list(_experts(store, run, hashes))
    tree["dvc"] = hashes
    tree["missing"] = missing
    return tree


def tree_lines(tree: dict[str, Any]) -> Iterator[str]:
    """Yield the lineage as indented lines for a terminal.

    Example:
        >>> empty = {"model": "m", "version": "1", "aliases": ["champion"], "fingerprint": None, "recipe": None,
        ...          "run": None, "experts": [], "environment": [], "missing": ["no run"]}
        >>> print("\\n".join(tree_lines(empty)))
        m version 1 @champion
        └─ missing: no run
    """
    aliases = "".join(f" @{alias}" for alias in tree["aliases"])
    yield f"{tree['model']} version {tree['version']}{aliases}"
    branches: list[tuple[str, list[str]]] = []
    if tree["fingerprint"]:
        branches.append((f"weights {_short(tree['fingerprint'])}", []))
    if tree["recipe"]:
        arguments = ", ".join(f"{key} {value}" for key, value in tree["recipe"].get("args", {}).items())
        branches.append((f"recipe {tree['recipe'].get('method', '')} {arguments}".rstrip(), []))
    for expert in tree["experts"]:
        data = [f"{one['split']} {_short(one['digest'])} ({one['path']})" for one in expert["data"]]
        text = f"expert {expert['task']}, weights {_short(expert['fingerprint'])}, run {_short(expert['run'])}"
        branches.append((text, [f"data {line}" for line in data]))
    if tree["run"]:
        branches.append((f"run {_short(tree['run']['id'])}, git commit {_short(tree['run']['git_commit'])}", []))
    if tree["environment"]:
        branches.append((f"environment {', '.join(tree['environment'])}", []))
    branches += [(f"missing: {text}", []) for text in tree["missing"]]
    for number, (text, leaves) in enumerate(branches, start=1):
        last = number == len(branches)
        yield f"{'└─' if last else '├─'} {text}"
        for leaf in leaves:
            yield f"{'   ' if last else '│  '}   {leaf}"


def _from_files(
    store: Store, name: str, version: str, folder: Path, missing: list[str]
) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the recipe and the package requirements kept in the version; the weights stay where they are."""
    source = store.client.get_model_version(name, version).source
    texts: list[str] = []
    for part in ("requirements.txt", "artifacts/model/recipe.json"):
        try:
            with store.active():
                got = mlflow.artifacts.download_artifacts(f"{source}/{part}", dst_path=str(folder))
            texts.append(Path(got).read_text())
        except (MlflowException, OSError):
            missing.append(f"the version's file {source}/{part}")
            texts.append("")
    needs = [line for line in texts[0].splitlines() if line and not line.startswith("#")]
    return (json.loads(texts[1]) if texts[1] else None), needs


def _find_run(store: Store, run_id: str | None, missing: list[str]) -> Run | None:
    if run_id is None:
        missing.append("the pipeline's run: the version was registered without one")
        return None
    try:
        return store.client.get_run(run_id)
    except MlflowException:
        missing.append(f"the pipeline's run {run_id}")
        return None


def _dvc_hashes(store: Store, run: Run, folder: Path, missing: list[str]) -> dict[str, str]:
    try:
        path = store.client.download_artifacts(run.info.run_id, "dvc.json", str(folder))
        hashes: dict[str, str] = json.loads(Path(path).read_text())
    except (MlflowException, OSError):
        missing.append(f"DVC's hashes of run {run.info.run_id}")
        return {}
    return hashes


def _describe_run(run: Run) -> dict[str, Any]:
    own = {key: value for key, value in run.data.params.items() if not key.startswith("dvc/")}
    return {"id": run.info.run_id, "git_commit": run.data.tags.get("git_commit"), "params": own}


def _experts(store: Store, run: Run, hashes: dict[str, str]) -> Iterator[dict[str, Any]]:
    data: dict[str, list[dict[str, Any]]] = {}
    for one in run.inputs.dataset_inputs if run.inputs is not None else []:
        facts, source = json.loads(one.dataset.profile or "{}"), json.loads(one.dataset.source)
        split = {"split": facts["split"], "digest": facts["sha256"], "path": source["uri"], "counts": facts["counts"]}
        data.setdefault(one.dataset.name, []).append({**split, "dvc": hashes.get(source["uri"])})
    children = search_runs(store, MLFLOW_PARENT_RUN_ID, run.info.run_id)
    for child in sorted(children, key=lambda child: str(child.data.tags.get(NAME))):
        if child.data.tags.get(KIND) != "expert":
            continue
        task = child.data.tags[NAME]
        yield {
            "task": task,
            "run": child.info.run_id,
            "fingerprint": child.data.params.get("fingerprint"),
            "settings": {key: value for key, value in child.data.params.items() if key != "fingerprint"},
            "dvc": {path: digest for path, digest in hashes.items() if Path(path).parts[-2:] == ("experts", task)},
            "data": data.get(task, []),
        }


def _short(text: str | None) -> str:
    return (text or "unknown")[:12]
