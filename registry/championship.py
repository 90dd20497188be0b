"""Which version is champion, which ones were, and what a crash or a change by hand left to repair; pure functions.

The truth is one alias. Every change first writes its event, numbered, as a tag of the registered model (the intent),
then moves the alias (the commit), then updates what is derived: the tag that says which event was the last, the alias
`previous`, the alias `candidate`. An event with a higher number than the last committed one belongs to a change that
never came to its commit. Events are kept with the model, not with a version, so that they outlive a deleted version.
A writer that does not know yet that it has lost its lock may write an event of the same number, under a tag of its own.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, TypeVar

EVENT = "mergeflow.event."
LAST = "mergeflow.last"


@dataclass(frozen=True)
class Event:
    """One change of champion.

    Args:
        sequence: 1, 2, ... without gaps.
        action: "promote", "force", "rollback", or "outside" for an alias that somebody moved by hand.
        version: the champion from here on.
        before: the champion until here; None for the first.
        line: champions that a rollback can return to, the nearest last.
        who: person or process.
        why: in words.
        at: UTC time, ISO 8601.
        id: tells events of one number apart; those of former days have none.
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
        """Return the tag's text."""
        return json.dumps(asdict(self), sort_keys=True)


Versions = TypeVar("Versions", bound=Collection[str])


@dataclass(frozen=True)
class Snapshot(Generic[Versions]):
    """What the registry says of one model at one moment.

    Args:
        aliases: alias to version number.
        versions: the numbers of the versions that exist, or a mapping of them.
        events: number to event, committed or not.
        last: number of the last event known to be committed; 0: none yet.
        losers: names of the tags of further events, of writers that had lost their lock.
    """

    aliases: Mapping[str, str]
    versions: Versions
    events: Mapping[int, Event] = field(default_factory=dict)
    last: int = 0
    losers: tuple[str, ...] = ()


@dataclass(frozen=True)
class State:
    """The champion and its past, as they count.

    Args:
        champion: version number; None when there has been none.
        line: champions to roll back to, the nearest last; only versions that still exist.
        sequence: number of the last event that counts.
        outside: the champion was moved by hand since, which still has to be written down as an event.
    """

    champion: str | None
    line: tuple[str, ...]
    sequence: int
    outside: bool = False


def read_snapshot(aliases: Mapping[str, str], versions: Versions, tags: Mapping[str, str]) -> Snapshot[Versions]:
    """Read a registered model's aliases, versions and tags.

    Of several events of one number that one counts which the last tag names, or which has moved the alias.

    Args:
        aliases: alias to version number.
        versions: the numbers of the versions that exist, or a mapping of them.
        tags: of the model.
    """
    last = tags.get(LAST, "0")
    entries = [json.loads(text) for key, text in tags.items() if key.startswith(EVENT)]
    events = [Event(**{**entry, "line": tuple(entry["line"])}) for entry in entries]
    events.sort(key=lambda event: (event.sequence, event.last == last, event.version == aliases.get("champion")))
    counting = {event.sequence: event for event in events}
    losers = tuple(event.key for event in events if event is not counting[event.sequence])
    return Snapshot(aliases, versions, counting, int(last.partition("-")[0]), losers)


def resolve(snapshot: Snapshot[Any]) -> State:
    """Return the state that counts, whatever was interrupted or done by hand.

    1. The alias is where the last event put it: that is the state.
    2. It is on the version that the next event names: the change was committed, its derived values are missing.
    3. It is on another version: somebody moved it by hand; the old champion joins the line.
    4. It is gone: the last champion counts again, or the nearest of its line that still exists.

    Example:
        >>> resolve(Snapshot({"champion": "1"}, {"1"}))
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
    """Say whether a rollback took the version out of service and nothing has put it back since.

    Args:
        events: the committed ones, by number.
    """
    answer = False
    for number in sorted(events):
        event = events[number]
        if event.action == "rollback" and event.before == version:
            answer = True
        elif event.version == version:
            answer = False
    return answer


def _line(past: tuple[str, ...], champion: str | None, snapshot: Snapshot[Any]) -> tuple[str, ...]:
    """Return the past without versions that no longer exist, so that each step back is to another version."""
    line: list[str] = []
    for version in past:
        if version in snapshot.versions and (not line or line[-1] != version):
            line.append(version)
    return tuple(line[:-1] if line and line[-1] == champion else line)
