"""Register, promote, roll back: every change under the model's lock, committed by moving one alias."""

import getpass
import json
import shutil
import socket
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

from mlflow.entities import LoggedModel, LoggedModelOutput, Metric
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from mergeflow.errors import MergeflowError, check_model_name, unknown_name
from registry.artifacts import (
    DIGESTS,
    ModelFiles,
    check_model,
    check_pyfunc,
    digests_of,
    read_evidence,
    save_pyfunc,
    write_evidence,
)
from registry.gates import Decision, Evidence, GateSettings, comparable, decide
from registry.logging import FINGERPRINT, log_file
from registry.store import Check, LockLost, Store
from registry.versions import (
    CANDIDATE,
    CHAMPION,
    DECISION,
    LAST,
    LOGGED_MODEL,
    METRICS,
    PREVIOUS,
    REMOVED,
    TASKS,
    Event,
    RegisteredVersion,
    Snapshot,
    State,
    describe,
    find_model,
    resolve,
    same_model,
    serves,
    snapshot,
    withdrawn,
)

_MODEL = "mergeflow.model"
# An event's tag holds the line; MLflow allows 100 000 characters.
_LONGEST_LINE = 5000
_ATTEMPTS = 5
_T = TypeVar("_T")


@dataclass(frozen=True)
class Force:
    who: str
    why: str

    def __post_init__(self) -> None:
        if not self.who.strip() or not self.why.strip():
            raise MergeflowError("a forced promotion is recorded with who and why: give both.")


@dataclass(frozen=True)
class Promotion:
    """The outcome of an attempt to promote.

    Args:
        decision: the gates' answer; None when the version was champion already.
        changed: whether the champion is another than before.
    """

    version: str
    champion: str | None
    decision: Decision | None
    changed: bool


@dataclass(frozen=True)
class Candidate:
    """A model to register: files, evidence and origin.

    Args:
        evidence: validation figures, kept with the version for every later comparison.
        fingerprint: digest of all that decides the weights.
    """

    files: ModelFiles
    evidence: Evidence
    fingerprint: str
    metrics: Mapping[str, float] = field(default_factory=dict)
    run_id: str | None = None
    description: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)


def register(store: Store, name: str, candidate: Candidate) -> RegisteredVersion:
    """Register the model once per fingerprint and point `candidate` at it, unless it is champion."""
    check_model_name(name)

    def attempt(change: _Change) -> RegisteredVersion:
        change = change.mended()
        version, new = _ensure_version(store, name, candidate, change.model.versions)
        aliases, number = dict(change.model.aliases), str(version.version)
        if number != change.state.champion:
            store.client.set_registered_model_alias(name, CANDIDATE, number)
            aliases[CANDIDATE] = number
        return describe(version, aliases, new=new)

    return _locked(store, name, attempt, missing_ok=True)


def _ensure_version(
    store: Store, name: str, candidate: Candidate, versions: Mapping[str, ModelVersion]
) -> tuple[ModelVersion, bool]:
    """Find MLflow's version with the candidate's weights and tasks, or make it; the second value says which.

    The caller holds the model's lock. The version's row is written last, so that a version that exists is complete;
    what a killed attempt left is used when whole and deleted when not. A version whose files were lost or damaged since
    does not count: another one is made.
    """
    tasks = sorted(candidate.evidence.accuracy)
    for version in versions.values():
        same = version.tags.get(FINGERPRINT) == candidate.fingerprint
        if same and same_model(store, version, candidate.fingerprint, tasks) and _is_whole(store, version):
            return version, False
    taken = {version.tags.get(LOGGED_MODEL) for version in versions.values()}
    logged = _finished_upload(store, name, candidate, taken) or _upload(store, name, candidate)
    if not versions and find_model(store, name) is None:
        store.client.create_registered_model(name)
    tags = {**candidate.tags, FINGERPRINT: candidate.fingerprint, METRICS: json.dumps(dict(candidate.metrics))}
    tags |= {TASKS: json.dumps(tasks), LOGGED_MODEL: logged.model_id}  # MLflow's own field does not come back
    tags |= {key: text for key, text in logged.tags.items() if key == DIGESTS}
    with store.active():
        version = store.client.create_model_version(
            name,
            logged.artifact_location,
            run_id=candidate.run_id,
            tags=tags,
            description=candidate.description or None,
            model_id=logged.model_id,
        )
    return version, True


def _finished_upload(
    store: Store, name: str, candidate: Candidate, taken: Collection[str | None]
) -> LoggedModel | None:
    words = f"tags.`{FINGERPRINT}` = '{candidate.fingerprint}' AND tags.`{_MODEL}` = '{name}'"
    finished = None
    for logged in store.client.search_logged_models([store.experiment_id], filter_string=words):
        if logged.model_id in taken:
            continue
        if str(logged.status) == "READY" and serves(store, logged.artifact_location, candidate.evidence.accuracy):
            finished = logged
        else:
            store.client.delete_logged_model(logged.model_id)
    return finished


def _upload(store: Store, name: str, candidate: Candidate) -> LoggedModel:
    with _scratch_folder(store, name) as scratch:
        folder = scratch / "model"
        save_pyfunc(folder, candidate.files, {"fingerprint": candidate.fingerprint})
        check_pyfunc(folder, candidate.files.served)
        write_evidence(folder / "evidence", candidate.evidence)
        logged = store.client.create_logged_model(
            store.experiment_id,
            name=name,
            source_run_id=candidate.run_id,
            tags={FINGERPRINT: candidate.fingerprint, _MODEL: name, DIGESTS: digests_of(folder)},
            model_type=f"merged {candidate.files.model['modality']} model",
        )
        store.client.log_model_artifacts(logged.model_id, str(folder))
    if candidate.run_id is not None:
        now = logged.creation_timestamp
        points = [Metric(key, value, now, 0, model_id=logged.model_id) for key, value in candidate.metrics.items()]
        store.client.log_batch(candidate.run_id, metrics=points)
        store.client.log_outputs(candidate.run_id, [LoggedModelOutput(logged.model_id, step=0)])
    return store.client.finalize_logged_model(logged.model_id, "READY")


@contextmanager
def _scratch_folder(store: Store, name: str) -> Iterator[Path]:
    """Open an empty folder on the project's disk; files of a killed holder of the lock are removed first."""
    folder = store.scratch / name
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        yield folder
    except OSError as error:
        raise MergeflowError(
            f"the registry could not write for the model '{name}': {error}. Nothing was promoted; make room or give "
            "access there, and run again."
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _is_whole(store: Store, version: ModelVersion) -> bool:
    try:
        check_model(store, version)
        read_evidence(store, version)
    except MergeflowError:
        return False
    return True


def promote(
    store: Store,
    name: str,
    version: str | int,
    settings: GateSettings,
    *,
    evidence: Evidence | None = None,
    reevaluate: Callable[[ModelVersion], Evidence] | None = None,
    force: Force | None = None,
    only_ask: bool = False,
    who: str | None = None,
    why: str = "",
) -> Promotion:
    """Make the version champion if the gates let it.

    Args:
        evidence: the version's present evidence; None: the evidence registered with it. Weights that a run finds again
            are the version that was registered first, which may have been evaluated on other examples. The bounds of a
            version made to forget a task stay those it was registered with.
        reevaluate: version to its evidence on the present validation split; called for the champion when its registered
            evidence is of other examples.
        only_ask: log the gates' decision and leave the champion as it is.
        why: kept with the event, before the gates' reasons.

    Returns:
        The outcome. A refused version is no error, nor is a champion whose files are gone: the gates report both.
    """
    number = str(version)

    def attempt(change: _Change) -> Promotion:
        change = change.mended()
        versions, state = change.model.versions, change.state
        if number not in versions:
            raise unknown_name(f"version of '{name}'", number, versions)
        if state.champion == number:
            return Promotion(number, number, None, changed=False)
        registered = _checked_evidence(store, versions[number])
        judged = registered if evidence is None else _bounded(evidence, registered)
        champion, unreadable = None, ""
        if state.champion is not None:
            try:
                champion = read_evidence(store, versions[state.champion])
                if reevaluate is not None and not comparable(judged, champion):
                    champion = reevaluate(versions[state.champion])
            except MergeflowError as error:
                unreadable = _unreadable(name, number, state.champion, error)
        out = any(withdrawn(change.model.events, twin) for twin in _twins(versions, number))
        removed = json.loads(versions[number].tags.get(REMOVED, "[]"))
        decision = decide(judged, champion, settings, withdrawn=out, removed_tasks=removed, unreadable=unreadable)
        _log_decision(store, versions[number], state, decision, force, judged)
        if only_ask or (not decision.promote and force is None):
            return Promotion(number, state.champion, decision, changed=False)
        past = (*state.line, state.champion) if state.champion is not None else ()
        by_the_gates = ("promote", who or _me(), "; ".join(filter(None, [why, *decision.reasons])))
        action, by, reason = by_the_gates if force is None else ("force", force.who, force.why)
        change.commit(change.event(action, number, past, by, reason))
        return Promotion(number, number, decision, changed=True)

    return _locked(store, name, attempt)


def rollback(store: Store, name: str, *, who: str | None = None, why: str = "") -> RegisteredVersion:
    """Return to the champion before the present one; repeated, to the one before that, and so on.

    The version that leaves is withdrawn: later promotions refuse it unless forced, and no rollback returns to it. If
    the champion or its alias was deleted, the last existing champion is restored, and nothing else changes.
    """

    def attempt(change: _Change) -> RegisteredVersion:
        model, state = change.model, change.state
        if model.aliases.get(CHAMPION) not in model.versions and state.champion is not None:
            target, line = state.champion, state.line
            before: str | None = model.events[model.last].version
        else:
            change = change.mended()
            (target, line), before = _step_back(name, change.state), change.state.champion
        _checked_evidence(store, model.versions[target])
        if target != before:
            change.commit(replace(change.event("rollback", target, line, who or _me(), why), before=before))
        model = change.read_again().mended().model
        return describe(model.versions[target], model.aliases)

    return _locked(store, name, attempt)


def _step_back(name: str, state: State) -> tuple[str, tuple[str, ...]]:
    """Return the champion before the present one, and those that a rollback can return to from there."""
    if not state.line:
        raise MergeflowError(
            f"'{name}' has no earlier champion to return to: the present one is "
            f"{'version ' + state.champion if state.champion else 'none'}. Promote another version instead."
        )
    return state.line[-1], tuple(earlier for earlier in state.line[:-1] if earlier != state.champion)


def repair(store: Store, name: str) -> State:
    """Finish or undo an interrupted change, record changes made by hand, and return the champion."""
    return _locked(store, name, lambda change: change.mended().state, missing_ok=True)


def _checked_evidence(store: Store, version: ModelVersion) -> Evidence:
    """Read a version's evidence; all of its files must be there, and be those that were registered."""
    evidence = read_evidence(store, version)
    check_model(store, version)
    return evidence


def _bounded(evidence: Evidence, stored: Evidence) -> Evidence:
    """Return the evidence with its own figures under the bounds of the evidence that was kept."""
    measured = {(criterion.task, criterion.kept, criterion.form): criterion.measured for criterion in evidence.criteria}
    bounds = [
        replace(criterion, measured=measured.get((criterion.task, criterion.kept, criterion.form), criterion.measured))
        for criterion in stored.criteria
    ]
    return replace(evidence, criteria=bounds)


def _unreadable(name: str, number: str, champion: str, error: MergeflowError) -> str:
    return (
        f"the champion, version {champion}, cannot be compared with: {error} To put version {number} in service "
        f'without a comparison: `mergeflow registry promote {name}/{number} --force --who NAME --why "..."`'
    )


def _twins(versions: Mapping[str, ModelVersion], number: str) -> list[str]:
    """Return the version and those of the same weights and tasks, of which it takes the place where files were lost."""
    tags = versions[number].tags
    same = [
        other
        for other, version in versions.items()
        if all(version.tags.get(key) == tags.get(key) is not None for key in (FINGERPRINT, TASKS))
    ]
    return same or [number]


@dataclass(frozen=True)
class _Change:
    """A change of a registered model under its lock, which goes by one snapshot of the registry."""

    store: Store
    name: str
    check: Check
    model: Snapshot

    @cached_property
    def state(self) -> State:
        return resolve(self.model)

    def read_again(self) -> "_Change":
        """Read aliases and events again; the versions stay as they are under the lock."""
        return replace(self, model=snapshot(self.store, self.name, self.model.versions))

    def event(self, action: str, version: str, line: tuple[str, ...], who: str, why: str) -> Event:
        state, short, key = self.state, line[-_LONGEST_LINE:], uuid4().hex[:8]
        return Event(state.sequence + 1, action, version, state.champion, short, who, why, _now(), key)

    def commit(self, event: Event) -> None:
        """Write the event and move the alias, if nobody else can have written since the snapshot.

        Raises:
            LockLost: somebody can have; nothing counts as changed.
        """
        client = self.store.client
        self._check_unchanged()
        client.set_registered_model_tag(self.name, event.key, event.to_json())  # the intent
        try:
            self._check_unchanged()
        except LockLost:
            client.delete_registered_model_tag(self.name, event.key)
            raise
        client.set_registered_model_alias(self.name, CHAMPION, event.version)  # the commit
        with suppress(MlflowException):  # a server that went away now: whoever changes something next derives the rest
            self.read_again()._mend()

    def _check_unchanged(self) -> None:
        self.check()
        if self.read_again().state != self.state:
            raise LockLost(f"the champion of '{self.name}' was changed by another process meanwhile: try again.")

    def mended(self) -> "_Change":
        """Bring the registry in line with the state that counts, whatever change was interrupted or made by hand."""
        return self.read_again() if self._mend() else self

    def _mend(self) -> bool:
        writes = list(self._mending())
        for write in writes:
            write()
        return bool(writes)

    def _mending(self) -> Iterator[Callable[[], object]]:
        """Yield the writes that bring events, aliases and the `last` tag in line with the state."""
        client, name, model, state = self.store.client, self.name, self.model, self.state
        aliases = model.aliases
        uncommitted = [event.key for number, event in model.events.items() if number > state.sequence]
        for key in (*uncommitted, *model.losers):
            yield partial(client.delete_registered_model_tag, name, key)
        if state.champion is None:
            return
        last = model.events.get(state.sequence)
        if state.outside:
            before = model.events[model.last].version if model.last in model.events else None
            why = "the alias was moved outside mergeflow"
            last = replace(self.event("outside", state.champion, state.line, _me(), why), before=before)
            yield partial(client.set_registered_model_tag, name, last.key, last.to_json())
        if aliases.get(CHAMPION) != state.champion:
            yield partial(client.set_registered_model_alias, name, CHAMPION, state.champion)
        if last is not None and model.last != last.sequence:
            yield partial(client.set_registered_model_tag, name, LAST, last.last)
        previous = state.line[-1] if state.line else None
        if previous is None and PREVIOUS in aliases:
            yield partial(client.delete_registered_model_alias, name, PREVIOUS)
        elif previous is not None and aliases.get(PREVIOUS) != previous:
            yield partial(client.set_registered_model_alias, name, PREVIOUS, previous)
        if aliases.get(CANDIDATE) == state.champion:
            yield partial(client.delete_registered_model_alias, name, CANDIDATE)


def _locked(store: Store, name: str, attempt: Callable[[_Change], _T], *, missing_ok: bool = False) -> _T:
    """Run an attempt under the model's lock; one that loses the lock before its commit starts over."""
    for left in reversed(range(_ATTEMPTS)):
        try:
            with store.lock(f"model {name}") as check:
                return attempt(_Change(store, name, check, snapshot(store, name, missing_ok=missing_ok)))
        except LockLost:
            if not left:
                raise
    raise AssertionError


def _log_decision(
    store: Store, version: ModelVersion, state: State, decision: Decision, force: Force | None, evidence: Evidence
) -> None:
    """Record the answer: a JSON file with the run (or the model), and a summary as a tag of the version."""
    name, number = str(version.name), str(version.version)
    against = state.champion or "none"
    document = {"model": name, "version": number, "against": against, "at": _now(), **asdict(decision)}
    document |= {"reasons": decision.reasons, "force": asdict(force) if force else None}
    document["judged_by"] = {"accuracy": dict(evidence.accuracy), "digests": dict(evidence.digests)}
    with _scratch_folder(store, name) as scratch:
        path = scratch / f"{name}-v{number}-against-v{against}.json"
        path.write_text(json.dumps(document, indent=2, sort_keys=True))
        if version.run_id:
            log_file(store, version.run_id, path, "decisions")
        else:
            store.client.log_model_artifact(version.tags[LOGGED_MODEL], str(path), "decisions")
    summary = {"promote": decision.promote, "against": against, "reasons": decision.reasons}
    store.client.set_model_version_tag(name, number, DECISION, json.dumps(summary))


def _me() -> str:
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (OSError, KeyError):  # a container's user need not have a name
        return socket.gethostname()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
