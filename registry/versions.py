"""Registered versions as plain values: which one is champion, which ones were, and what each one holds.

The champion is one alias. Every change first writes its event, numbered, as a tag of the registered model (the intent),
then moves the alias (the commit), then updates what is derived: the tag that says which event was the last, the alias
`previous`, the alias `candidate`. An event with a higher number than the last committed one belongs to a change that
never came to its commit. Events are kept with the model, not with a version, so that they outlive a deleted version.
A writer that does not know yet that it has lost its lock may write an event of the same number, under a tag of its own.
"""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from mlflow.entities.model_registry import ModelVersion, RegisteredModel
from mlflow.exceptions import MlflowException

from mergeflow import documents, layout
from mergeflow.errors import MergeflowError, unknown_name
from mergeflow.modalities.served import WEIGHTS
from registry.artifacts import (
    EVIDENCE,
    MODEL,
    UNREADABLE,
    as_pyfunc,
    check_part,
    fetched,
    load_evidence,
    read_evidence,
    reading,
)
from registry.logging import FINGERPRINT
from registry.store import Store, connect, every_page, mlflow

CANDIDATE, CHAMPION, PREVIOUS = "candidate", "champion", "previous"
METRICS, DECISION, LOGGED_MODEL = "mergeflow.metrics", "mergeflow.decision", "mergeflow.logged_model"
REMOVED = "mergeflow.removed"  # tasks that the version lacks on purpose
TASKS, METHOD = "mergeflow.tasks", "mergeflow.method"
EVENT = "mergeflow.event."
LAST = "mergeflow.last"


@dataclass(frozen=True)
class Event:
    """One change of champion.

    Args:
        action: "promote", "force", "rollback", or "outside" for an alias that somebody moved by hand.
        version: the champion from here on.
        before: the champion until here; None for the first.
        line: champions that a rollback can return to, the nearest last.
        who: person or process.
        id: tells events of one number apart.
    """

    sequence: int
    action: str
    version: str
    before: str | None
    line: tuple[str, ...]
    who: str
    why: str
    at: str
    id: str = ""

    @property
    def key(self) -> str:
        """Name of the registered model's tag that holds this event."""
        return f"{EVENT}{self.sequence:08d}{self._suffix}"

    @property
    def last(self) -> str:
        """Text of the tag that says that this event was the last one."""
        return f"{self.sequence}{self._suffix}"

    @property
    def _suffix(self) -> str:
        return f"-{self.id}" if self.id else ""

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


@dataclass(frozen=True)
class Snapshot:
    """The registry's entries of one model at one moment.

    Args:
        versions: MLflow's versions by number, oldest first.
        events: number to event, committed or not.
        last: number of the last event known to be committed; 0: none yet.
        losers: names of the tags of further events, of writers that had lost their lock.
    """

    aliases: Mapping[str, str]
    versions: Mapping[str, ModelVersion]
    events: Mapping[int, Event] = field(default_factory=dict)
    last: int = 0
    losers: tuple[str, ...] = ()


@dataclass(frozen=True)
class State:
    """The champion and its history, after repair.

    Args:
        line: champions to roll back to, the nearest last; only versions that still exist.
        sequence: number of the last event that counts.
        outside: the champion was moved by hand since, which still has to be written down as an event.
    """

    champion: str | None
    line: tuple[str, ...]
    sequence: int
    outside: bool = False


def read_snapshot(
    aliases: Mapping[str, str], versions: Mapping[str, ModelVersion], tags: Mapping[str, str]
) -> Snapshot:
    """Read a registered model's aliases, versions and tags.

    Of several events of one number that one counts which the last tag names, or which has moved the alias.
    """
    last = tags.get(LAST, "0")
    entries = [json.loads(text) for key, text in tags.items() if key.startswith(EVENT)]
    events = [Event(**{**entry, "line": tuple(entry["line"])}) for entry in entries]
    events.sort(key=lambda event: (event.sequence, event.last == last, event.version == aliases.get("champion")))
    counting = {event.sequence: event for event in events}
    losers = tuple(event.key for event in events if event is not counting[event.sequence])
    return Snapshot(aliases, versions, counting, int(last.partition("-")[0]), losers)


def resolve(snapshot: Snapshot) -> State:
    """Compute the valid state, whatever change was interrupted or made by hand.

    1. The alias is where the last event put it: that is the state.
    2. It is on the version that the next event names: the change was committed, its derived values are missing.
    3. It is on another version: somebody moved it by hand; the old champion joins the line.
    4. It is gone: the last champion counts again, or the nearest of its line that still exists.

    Example:
        >>> resolve(Snapshot({"champion": "1"}, {"1": ...}))
        State(champion='1', line=(), sequence=0, outside=True)
    """
    alias = snapshot.aliases.get("champion")
    alias = alias if alias in snapshot.versions else None  # older servers keep the alias of a deleted version
    last, following = snapshot.events.get(snapshot.last), snapshot.events.get(snapshot.last + 1)
    if alias is not None and last is not None and last.version == alias:
        return State(alias, _line(last.line, alias, snapshot), snapshot.last)
    if alias is not None and following is not None and following.version == alias:
        return State(alias, _line(following.line, alias, snapshot), snapshot.last + 1)
    past = (*last.line, last.version) if last is not None else ()
    if alias is not None:
        return State(alias, _line(past, alias, snapshot), snapshot.last, outside=True)
    past = _line(past, None, snapshot)
    if last is None or not past:
        return State(None, (), snapshot.last)
    return State(past[-1], past[:-1], snapshot.last, outside=past[-1] != last.version)


def withdrawn(events: Mapping[int, Event], version: str) -> bool:
    """Say whether a rollback took the version out of service and nothing has put it back since."""
    answer = False
    for number in sorted(events):
        event = events[number]
        if event.action == "rollback" and event.before == version:
            answer = True
        elif event.version == version:
            answer = False
    return answer


def _line(past: tuple[str, ...], champion: str | None, snapshot: Snapshot) -> tuple[str, ...]:
    """Return the past without versions that no longer exist, so that each step back is to another version."""
    line: list[str] = []
    for version in past:
        if version in snapshot.versions and (not line or line[-1] != version):
            line.append(version)
    return tuple(line[:-1] if line and line[-1] == champion else line)


@dataclass(frozen=True)
class RegisteredVersion:
    """One registered version with its aliases and tags.

    Args:
        fingerprint: digest of all that decides its weights; None for one that mergeflow did not register.
        created: milliseconds since 1970.
        new: whether this call made it.
        tasks: that it serves, sorted; empty where they are not noted.
    """

    name: str
    version: str
    aliases: tuple[str, ...]
    fingerprint: str | None
    run_id: str | None
    metrics: dict[str, float] = field(default_factory=dict)
    created: int = 0
    new: bool = False
    method: str | None = None
    tasks: tuple[str, ...] = ()


def find_model(store: Store, name: str) -> RegisteredModel | None:
    """Return MLflow's registered model, or None when there is none of that name."""
    try:
        return store.client.get_registered_model(name)
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None
        raise


def all_versions(store: Store, name: str) -> dict[str, ModelVersion]:
    """List the versions of a model by number, oldest first."""
    search = partial(store.client.search_model_versions, f"name='{name}'")
    versions: list[ModelVersion] = sorted(every_page(search), key=lambda version: int(version.version))
    return {str(version.version): version for version in versions}


def snapshot(
    store: Store, name: str, versions: Mapping[str, ModelVersion] | None = None, *, missing_ok: bool = False
) -> Snapshot:
    """Read a model's aliases, events and versions once.

    Args:
        versions: as they were read under the same lock, which are not read again; None: they are read.
        missing_ok: of a model that does not exist return an empty one.
    """
    model = find_model(store, name)  # first: its aliases are then of versions listed below
    if model is not None:
        aliases = {alias: str(number) for alias, number in model.aliases.items()}
        return read_snapshot(aliases, all_versions(store, name) if versions is None else versions, model.tags)
    if missing_ok:
        return Snapshot({}, {})
    names = [model.name for model in store.client.search_registered_models()]
    if not names:
        raise MergeflowError(
            f"nothing is registered yet, so there is no '{name}': run the pipeline with `mergeflow run`."
        )
    raise unknown_name("registered model", name, names)


def describe(version: ModelVersion, aliases: Mapping[str, Any], *, new: bool = False) -> RegisteredVersion:
    names = sorted(alias for alias, number in aliases.items() if str(number) == str(version.version))
    return RegisteredVersion(
        name=str(version.name),
        version=str(version.version),
        aliases=tuple(names),
        fingerprint=version.tags.get(FINGERPRINT),
        run_id=version.run_id or None,
        metrics=json.loads(version.tags.get(METRICS, "{}")),
        created=int(version.creation_timestamp),
        new=new,
        method=version.tags.get(METHOD),
        tasks=tuple(json.loads(version.tags.get(TASKS, "[]"))),
    )


def same_model(store: Store, version: ModelVersion, fingerprint: str | None, tasks: Collection[str]) -> bool:
    """Say whether the version has these weights, serves exactly these tasks, and its files are still there.

    That the files are there is looked at; that their bytes are those that were registered is not.

    Args:
        fingerprint: of the weights; None is the same as no version's.
    """
    if fingerprint is None or version.tags.get(FINGERPRINT) != fingerprint:
        return False
    return serves(store, str(version.source), tasks)


def serves(store: Store, source: str, tasks: Collection[str]) -> bool:
    try:
        with store.active():
            inside = mlflow.artifacts.list_artifacts(artifact_uri=f"{source}/{MODEL}")
        with fetched(store, source, EVIDENCE) as folder:
            evidence = load_evidence(folder)
    except UNREADABLE:
        return False
    return set(evidence.accuracy) == set(tasks) and any(file.path.endswith(WEIGHTS) for file in inside)


@dataclass(frozen=True)
class Current:
    """The versions behind a model's aliases now.

    Args:
        champion: what is live; None when nothing is.
        candidate: what waits for its gates; None when nothing does.
        previous: what a rollback would return to; None when there is no earlier champion.
    """

    name: str
    champion: RegisteredVersion | None
    candidate: RegisteredVersion | None
    previous: RegisteredVersion | None


def current(store: Store, name: str) -> Current:
    """Read champion, candidate and the rollback's target, consistently even while another process promotes.

    An unknown name gives None three times.
    """
    model = snapshot(store, name, missing_ok=True)
    state = resolve(model)

    def described(number: str | None) -> RegisteredVersion | None:
        version = model.versions.get(number or "")
        return None if version is None else describe(version, model.aliases)

    candidate = model.aliases.get(CANDIDATE)
    waiting = candidate if candidate != state.champion else None
    previous = state.line[-1] if state.line else None
    return Current(name, described(state.champion), described(waiting), described(previous))


def find_registered(
    store: Store, name: str, fingerprint: str | None, tasks: Collection[str]
) -> RegisteredVersion | None:
    """Return the version of these weights that serves exactly these tasks and whose files are there, if any."""
    model = snapshot(store, name, missing_ok=True)
    same = (version for version in model.versions.values() if same_model(store, version, fingerprint, tasks))
    return next((describe(version, model.aliases) for version in same), None)


def is_registered(root: Path) -> bool:
    """Check whether the configured registry holds the version of `outputs/registration.json` with its files."""
    noted = documents.read_document(root / layout.REGISTRATION, documents.Registration)
    tasks = [expert["task"] for expert in noted["lineage"]["experts"]]
    return find_registered(connect(project_root=root), noted["model"], noted["fingerprint"], tasks) is not None


def list_models(store: Store) -> list[Current]:
    """List the registered models by name, each with its champion and candidate."""
    names = [model.name for model in every_page(store.client.search_registered_models)]
    return [current(store, name) for name in sorted(names)]


def list_versions(store: Store, name: str) -> list[RegisteredVersion]:
    model = snapshot(store, name)
    return [describe(version, model.aliases) for version in model.versions.values()]


def find_version(store: Store, name: str, which: str | int) -> RegisteredVersion:
    """Return one version by number or alias.

    Args:
        which: its number (3, "3") or an alias ("champion", "@champion").
    """
    return describe(*chosen_version(store, name, which))


def find_stored(store: Store, name: str, which: str | int) -> ModelVersion:
    """Find MLflow's version by number or alias; it names the place of its files."""
    return chosen_version(store, name, which)[0]


def chosen_version(store: Store, name: str, which: str | int) -> tuple[ModelVersion, Mapping[str, str]]:
    word = str(which).removeprefix("@")
    registered = find_model(store, name)
    if registered is not None:
        try:
            number = str(registered.aliases.get(word, word))
            if re.fullmatch(r"[1-9]\d{0,8}", number):  # one of many: the others are not read
                return store.client.get_model_version(name, number), registered.aliases
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
    model = snapshot(store, name)
    state = resolve(model)
    if word == CHAMPION and state.champion is not None:
        raise MergeflowError(
            f"'{name}' has no champion: the version that was it, or its alias, was deleted outside mergeflow. "
            f"`mergeflow registry rollback` makes version {state.champion} champion again."
        )
    raise unknown_name(f"version or alias of '{name}'", word, [*model.versions, *model.aliases])


def show(store: Store, name: str, which: str | int = CHAMPION) -> dict[str, Any]:
    """Describe one version in JSON values: figures, evidence, decision, recipe, parent, tags."""
    version, aliases = chosen_version(store, name, which)
    facts = describe(version, aliases)
    evidence = read_evidence(store, version)
    recipe, origin = read_document(store, version, "recipe") or {}, read_document(store, version, "provenance") or {}
    return {
        **asdict(facts),
        "aliases": list(facts.aliases),
        "source": version.source,
        "method": recipe.get("method", facts.method),
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


def read_documents(store: Store, version: ModelVersion) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a version's recipe and its origin, the document of `registry.lineage`."""
    documents = []
    for stem in ("recipe", "provenance"):
        document = read_document(store, version, stem)
        if document is None:
            raise MergeflowError(
                f"version {version.version} of '{version.name}' holds no {stem}.json at {version.source}: only "
                "versions that this project's pipeline, `unmerge`, `unlearn` or `add-task` registered can be made "
                "again from their ancestors."
            )
        documents.append(document)
    return documents[0], documents[1]


def read_document(store: Store, version: ModelVersion, stem: str) -> dict[str, Any] | None:
    """Read a JSON document of a version, such as `recipe`; None when it is not there."""
    try:
        with fetched(store, str(version.source), f"{MODEL}/{stem}.json") as path:
            document: dict[str, Any] = json.loads(path.read_text())
    except (MlflowException, OSError):
        return None
    return document


def compare(store: Store, name: str, left: str | int, right: str | int) -> dict[str, Any]:
    """Compare two versions: metrics and validation accuracies (fractions) of each, and right minus left.

    Returns:
        `name`, the numbers `left` and `right`, and by `metrics` and `accuracy` for every key that either has: `left`,
        `right` and `change`, None where one is missing.
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
    """List every committed change of champion, oldest first."""
    model = snapshot(store, name)
    last = resolve(model).sequence
    return [event for number, event in model.events.items() if number <= last]


def download(store: Store, name: str, which: str | int, folder: Path) -> Path:
    """Fetch a version's files into `folder`: weights, heads/, model.json and the documents, as registered."""
    return download_model(store, find_stored(store, name, which), folder)


def download_model(store: Store, version: ModelVersion, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with reading(version), fetched(store, str(version.source), MODEL, folder) as got:
        check_part(version, MODEL, got)
        return got


def head_files(folder: Path) -> dict[str, Path]:
    """Find the head of each task among a version's downloaded files."""
    heads = json.loads((folder / "model.json").read_text())["heads"]
    return {task: folder / file for task, file in heads.items()}


def load(store: Store, name: str, which: str | int = CHAMPION, *, foreign: bool = False) -> Any:
    """Load the version's model as MLflow's pyfunc: `predict` takes a DataFrame with the columns of its signature.

    The weights are compared with what was registered, and read by this library's code. Whoever can write into the
    registry's files can put code among them, which MLflow's own way of loading executes.

    Args:
        foreign: load a version that another program registered, and so execute code in its files.
    """
    version = find_stored(store, name, which)
    with reading(version):
        if version.tags.get(FINGERPRINT) is not None:
            with fetched(store, str(version.source), MODEL) as folder:
                check_part(version, MODEL, folder)
                return as_pyfunc(folder)
        if not foreign:
            raise MergeflowError(
                f"version {version.version} of '{name}' was registered by another program: to load it is to execute "
                "what is in its files. Where you trust whoever can write there, allow that with --foreign "
                "(in Python: foreign=True)."
            )
        with store.active():
            return mlflow.pyfunc.load_model(version.source)
