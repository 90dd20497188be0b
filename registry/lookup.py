"""Questions about what is registered; they change nothing and are answered in plain values."""

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from mergeflow.errors import MergeflowError, unknown_name
from registry.championship import Event, read_snapshot, resolve
from registry.evidence import read_evidence
from registry.files import MODEL, check_part, fetched, reading
from registry.logging import FINGERPRINT
from registry.quiet import mlflow
from registry.store import Store
from registry.versions import (
    CANDIDATE,
    CHAMPION,
    DECISION,
    REMOVED,
    RegisteredVersion,
    all_versions,
    describe,
    find_model,
    require_model,
    same_model,
    snapshot,
)


@dataclass(frozen=True)
class Current:
    """The versions that a model's aliases stand for now.

    Args:
        name: of the registered model.
        champion: what is live; None when nothing is.
        candidate: what waits for its gates; None when nothing does.
        previous: what a rollback would return to; None when there is no earlier champion.
    """

    name: str
    champion: RegisteredVersion | None
    candidate: RegisteredVersion | None
    previous: RegisteredVersion | None


def current(store: Store, name: str) -> Current:
    """Return champion, candidate and the rollback's target, right even while another process promotes.

    A name that nobody has registered gives None three times.
    """
    if find_model(store, name) is None:
        return Current(name, None, None, None)
    found = snapshot(store, name)
    state, versions = resolve(found), all_versions(store, name)  # the versions last: they only grow

    def known(number: str | None) -> RegisteredVersion | None:
        return describe(versions[number], found.aliases) if number in versions else None

    candidate = found.aliases.get(CANDIDATE)
    waiting = candidate if candidate != state.champion else None
    return Current(name, known(state.champion), known(waiting), known(state.line[-1] if state.line else None))


def find_registered(
    store: Store, name: str, fingerprint: str | None, tasks: Collection[str]
) -> RegisteredVersion | None:
    """Return the version of these weights that serves exactly these tasks and whose files are there, if any.

    Args:
        store: the registry.
        name: the registered model; one that does not exist has no such version.
        fingerprint: of the weights; None finds nothing.
        tasks: exactly those that the version has to serve.
    """
    model = find_model(store, name)
    if model is None:
        return None
    for version in all_versions(store, name).values():
        if same_model(store, version, fingerprint, tasks):
            return describe(version, model.aliases)
    return None


def list_models(store: Store) -> list[Current]:
    """Return every registered model with its champion and candidate, by name."""
    names: list[str] = []
    token: str | None = None
    while True:
        page = store.client.search_registered_models(max_results=1000, page_token=token)
        names += [model.name for model in page]
        token = page.token
        if not token:
            return [current(store, name) for name in sorted(names)]


def list_versions(store: Store, name: str) -> list[RegisteredVersion]:
    """Return all versions of a model, oldest first."""
    model = require_model(store, name)
    return [describe(version, model.aliases) for version in all_versions(store, name).values()]


def find_version(store: Store, name: str, which: str | int) -> RegisteredVersion:
    """Return one version by number or alias.

    Args:
        store: the open registry.
        name: of the registered model.
        which: its number (3, "3") or an alias ("champion", "@champion").

    Raises:
        MergeflowError: no such model, version or alias.
    """
    model, versions = require_model(store, name), all_versions(store, name)
    word = str(which).removeprefix("@")
    number = str(model.aliases.get(word, word))
    if number not in versions:
        state = resolve(read_snapshot(model.aliases, set(versions), model.tags))
        if word == CHAMPION and state.champion is not None:
            raise MergeflowError(
                f"'{name}' has no champion: the version that was it, or its alias, was deleted outside mergeflow. "
                f"`mergeflow registry rollback` makes version {state.champion} champion again."
            )
        raise unknown_name(f"version or alias of '{name}'", word, [*versions, *model.aliases])
    return describe(versions[number], model.aliases)


def show(store: Store, name: str, which: str | int = CHAMPION) -> dict[str, Any]:
    """Return all that is known of one version as JSON values: figures, evidence, decision, recipe, parent, tags.

    Args:
        store: the registry.
        name: the registered model.
        which: a version's number or an alias.

    Raises:
        MergeflowError: no such model, version or alias.
    """
    found = find_version(store, name, which)
    version = store.client.get_model_version(name, found.version)
    evidence = read_evidence(store, version)
    recipe, origin = read_document(store, version, "recipe") or {}, read_document(store, version, "provenance") or {}
    return {
        **asdict(found),
        "aliases": list(found.aliases),
        "source": version.source,
        "method": recipe.get("method", found.method),
        "tasks": sorted(evidence.accuracy),
        "kind": origin.get("kind"),
        "parent": origin.get("parent"),
        "removed_tasks": json.loads(version.tags.get(REMOVED, "[]")),
        "recipe": recipe or None,
        "accuracy": dict(evidence.accuracy),
        "expert_accuracy": dict(evidence.expert_accuracy),
        "reproducible": evidence.reproducible,
        "decision": json.loads(version.tags.get(DECISION, "null")),
        "tags": {key: text for key, text in version.tags.items() if not key.startswith("mergeflow.")},
    }


def read_document(store: Store, version: ModelVersion, stem: str) -> dict[str, Any] | None:
    """Return a JSON document kept beside a version's weights, such as `recipe`; None when it is not there.

    Args:
        store: the registry.
        version: MLflow's version.
        stem: the document's name without `.json`.
    """
    try:
        with fetched(store, str(version.source), f"{MODEL}/{stem}.json") as path:
            document: dict[str, Any] = json.loads(path.read_text())
    except (MlflowException, OSError):
        return None
    return document


def compare(store: Store, name: str, left: str | int, right: str | int) -> dict[str, Any]:
    """Return two versions side by side: metrics and validation accuracies of each, and right minus left.

    Args:
        store: the registry.
        name: the registered model.
        left: a version's number or an alias.
        right: another.

    Returns:
        `name`, the numbers `left` and `right`, and by `metrics` and `accuracy` for every key that either has: `left`,
        `right` and `change`, None where one is missing.

    Raises:
        MergeflowError: no such model, version or alias.
    """
    first, second = show(store, name, left), show(store, name, right)
    answer: dict[str, Any] = {"name": name, "left": first["version"], "right": second["version"]}
    for part in ("metrics", "accuracy"):
        keys = sorted(set(first[part]) | set(second[part]))
        rows = {}
        for key in keys:
            a, b = first[part].get(key), second[part].get(key)
            rows[key] = {"left": a, "right": b, "change": None if a is None or b is None else b - a}
        answer[part] = rows
    return answer


def history(store: Store, name: str) -> list[Event]:
    """Return every change of champion that was committed, oldest first."""
    found = snapshot(store, name)
    last = resolve(found).sequence
    return [event for number, event in found.events.items() if number <= last]


def download(store: Store, name: str, which: str | int, folder: Path) -> Path:
    """Fetch a version's files into `folder`: weights, heads/, model.json and the documents, as registered.

    Args:
        store: the registry.
        name: the registered model.
        which: a version's number or an alias.
        folder: where to; it is made where it does not exist.

    Returns:
        The folder that holds them, inside `folder`.

    Raises:
        MergeflowError: no such model, version or alias, or its files cannot be read or are not those registered.
    """
    version = store.client.get_model_version(name, find_version(store, name, which).version)
    folder.mkdir(parents=True, exist_ok=True)
    with reading(version), fetched(store, str(version.source), MODEL, folder) as got:
        check_part(version, MODEL, got)
        return got


def head_files(folder: Path) -> dict[str, Path]:
    """Return the head of each task among a version's downloaded files."""
    heads = json.loads((folder / "model.json").read_text())["heads"]
    return {task: folder / file for task, file in heads.items()}


def load(store: Store, name: str, which: str | int = CHAMPION, *, foreign: bool = False) -> Any:
    """Return the version's model as MLflow's pyfunc: `predict` takes a DataFrame with the columns of its signature.

    The weights are compared with what was registered, and read by this library's code. Whoever can write into the
    registry's files can put code among them, which MLflow's own way of loading executes.

    Args:
        store: the registry.
        name: the registered model.
        which: a version's number or an alias.
        foreign: load a version that another program registered, and so execute what lies in its files.

    Raises:
        MergeflowError: no such model, version or alias; its files cannot be read, or are not those that were
            registered; or another program registered it.
    """
    version = store.client.get_model_version(name, find_version(store, name, which).version)
    with reading(version):
        if version.tags.get(FINGERPRINT) is not None:
            with fetched(store, str(version.source), MODEL) as folder:
                check_part(version, MODEL, folder)
                from registry.pyfunc_model import as_pyfunc  # it imports torch, which listing versions does without

                return as_pyfunc(folder)
        if not foreign:
            raise MergeflowError(
                f"version {version.version} of '{name}' was registered by another program: to load it is to execute "
                "what lies in its files. Where you trust whoever can write there, allow that with --foreign "
                "(in Python: foreign=True)."
            )
        with store.active():
            return mlflow.pyfunc.load_model(version.source)
