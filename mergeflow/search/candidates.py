"""Candidates of a search: grids, spaces, strategies that choose the next one, and the journal of scores."""

import json
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import product
from math import log
from pathlib import Path
from typing import Any, Self

from mergeflow.errors import MergeflowError, unknown_name
from mergeflow.evaluation.averages import at_grid_edge
from mergeflow.merging import MethodCall, configure, get
from mergeflow.merging.files.output import lock_file

_FORMAT = 1


class Journal:
    """A file of JSON lines, each with a key; the first says which inputs all others belong to.

    One process at a time holds it, from its making to `close`. A line that a kill cut short is dropped when the file is
    opened again.

    Args:
        path: The file; made when missing, and removed by `close` when nothing was written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: dict[str, Any] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        held = lock_file(path)
        if held is None:
            raise MergeflowError(
                f"another process is at work on '{path}': wait for it, or choose another folder (--out)."
            )
        self._file = held

    def recorded(self) -> dict[str, Any]:
        """Return the inputs that the entries belong to; {} if the file is empty or not a journal."""
        try:
            return dict(json.loads(self.path.read_bytes().partition(b"\n")[0])["inputs"])
        except (ValueError, TypeError, KeyError):
            return {}

    def begin(self, inputs: dict[str, Any]) -> None:
        """Read the entries; refuse a journal of other inputs."""
        whole, end, _ = self.path.read_bytes().rpartition(b"\n")
        try:
            lines = [json.loads(line) for line in whole.splitlines()]
            entries = {line["key"]: line["value"] for line in lines[1:]}
            first: dict[str, Any] = {"format": _FORMAT, "inputs": inputs} if not lines else lines[0]
            before: dict[str, Any] | None = dict(first["inputs"]) if first["format"] == _FORMAT else None
        except (ValueError, TypeError, KeyError):
            before = None
        if before is None:
            raise MergeflowError(
                f"'{self.path}' is not a journal of this version: remove it, or choose another folder."
            )
        differing = sorted(key for key in {*before, *inputs} if before.get(key) != inputs.get(key))
        if differing:
            raise MergeflowError(
                f"'{self.path}' holds results of other inputs ({', '.join(differing)} changed): "
                "choose another folder (--out), or remove the file to start again."
            )
        os.ftruncate(self._file, len(whole) + len(end))
        if not lines:
            self._write(first)
        self.entries = entries

    def cached(self, key: str, compute: Callable[[], Any]) -> Any:
        """Return the value of an entry; compute and write it first if the journal lacks it."""
        if key not in self.entries:
            self.append(key, compute())
        return self.entries[key]

    def append(self, key: str, value: Any) -> None:
        """Add an entry; on return it is on the disk."""
        self._write({"key": key, "value": value})
        self.entries[key] = value

    def _write(self, line: dict[str, Any]) -> None:
        text = json.dumps(line, ensure_ascii=False).encode() + b"\n"
        written = os.write(self._file, text)
        if written != len(text):
            raise MergeflowError(f"cannot write '{self.path}': the disk is full. Free some space and run again.")
        os.fsync(self._file)

    def close(self) -> None:
        """Close the file, so that another process may go on."""
        if os.fstat(self._file).st_size == 0:
            self.path.unlink(missing_ok=True)
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


Args = dict[str, Any]

Strategy = Generator[Args, float, None]
"""Yields the arguments of one candidate after the other and is sent the objective of each; larger is better."""

Scorer = Callable[[MethodCall], Mapping[str, float]]
"""Merges one candidate and returns its score per task."""

Objective = Callable[[Mapping[str, float]], float]
"""Scores per task to the one number that a search maximises."""


@dataclass(frozen=True)
class Scored:
    """One candidate that was tried; `varied` are the arguments that the strategy named."""

    call: MethodCall
    varied: Args
    scores: dict[str, float]
    value: float


def score_all(method: str, strategy: Strategy, score: Scorer, objective: Objective) -> Iterator[Scored]:
    """Yield every candidate that a strategy asks for, scored; it gets each objective before it asks for the next."""
    with closing(strategy):
        args = next(strategy, None)
        while args is not None:
            call = configure(method, args)
            scores = dict(score(call))
            scored = Scored(call, args, scores, objective(scores))
            yield scored
            try:
                args = strategy.send(scored.value)
            except StopIteration:
                return


def remembered(score: Scorer, journal: Journal) -> Scorer:
    """Return a scorer that takes a candidate's score from the journal if it is there."""
    return lambda call: journal.cached(candidate_key(call), lambda: dict(score(call)))


def candidate_key(call: MethodCall) -> str:
    """Return a candidate's key in a journal: the method and all its arguments."""
    return json.dumps(["candidate", call.name, call.args], sort_keys=True)


# Search a grid: every combination of a method's values, in an order in which candidates share their directions.

Grid = Mapping[str, Sequence[Any]]


def grid(method: str, values: Grid) -> Strategy:
    """Ask for every candidate of a grid, whatever the scores are."""
    for args in grid_of(method, values):
        _ = yield args


def grid_of(method: str, values: Grid) -> list[Args]:
    """Return every combination of a method's values, with `scale` changing fastest, so that directions are shared.

    Two combinations that mean the same call (1 and 1.0) are one candidate.
    """
    names = sorted(values, key=lambda name: name == "scale")
    combinations = [dict(zip(names, chosen, strict=True)) for chosen in product(*(values[name] for name in names))]
    distinct: dict[str, Args] = {}
    for args in combinations:
        distinct.setdefault(repr(configure(method, args).args), args)
    return list(distinct.values())


# The space of one method: a grid of values, or ranges and choices for a search.

Space = dict[str, Any] | None
"""Argument → list of values; or, in a search, a mapping with low and high (log, step) or choices."""

_RANGE = ("low", "high", "log", "step", "choices")
# A searched value within this share of its range from an end counts as at the edge.
_EDGE = 0.02
# Corners of a search's box that are checked before it starts; the other combinations are checked when they come.
_CORNERS = 256


def values_of(space: Space) -> dict[str, list[Any]]:
    """Return the grid as argument → list of values; a value that is not a list stands alone."""
    return {name: list(values) if isinstance(values, list) else [values] for name, values in (space or {}).items()}


def check_space(method: str, space: Space, searched: bool) -> Iterator[dict[str, Any]]:
    """Check the space of one method; yield the combinations to validate: all of a grid, or a box's corners.

    Args:
        searched: Whether a search with Optuna tries them, so that ranges are allowed.
    """
    fields = get(method).args.model_fields
    for name in space or {}:
        if name not in fields:
            raise unknown_name(f"argument of {method}", str(name), fields)
    if not searched:
        for name, values in values_of(space).items():
            if not values:
                raise MergeflowError(f"methods.{method}.{name} is empty: name at least one value.")
            if any(isinstance(value, Mapping) and set(value) & set(_RANGE[:2]) for value in values):
                raise MergeflowError(f"methods.{method}.{name} is a range: ranges need `search: {{trials: N}}`.")
        yield from grid_of(method, values_of(space))
        return
    ends = {name: _ends(method, name, values) for name, values in (space or {}).items()}
    for _, chosen in zip(range(_CORNERS), product(*ends.values()), strict=False):
        args = dict(zip(ends, chosen, strict=True))
        configure(method, args)
        yield args


def _ends(method: str, name: str, values: Any) -> list[Any]:
    """Return the values of a dimension that must be valid: both ends of a range, or all choices."""
    place = f"methods.{method}.{name}"
    if isinstance(values, list):
        values = {"choices": values}
    if not isinstance(values, Mapping):
        return [values]
    for key in values:
        if key not in _RANGE:
            raise unknown_name(f"key of {place}", str(key), _RANGE)
    if "choices" in values:
        if len(values) > 1 or not isinstance(values["choices"], list) or not values["choices"]:
            raise MergeflowError(f"{place}: `choices` is a list of one value or more, without other keys.")
        return list(values["choices"])
    low, high = (_number(place, key, values.get(key)) for key in ("low", "high"))
    if not low < high:
        raise MergeflowError(f"{place}: low {low:g} must be below high {high:g}.")
    if values.get("log") not in (None, False, True):
        raise MergeflowError(f"{place}.log must be true or false, found {values['log']!r}.")
    if values.get("log") and (low <= 0 or values.get("step") is not None):
        raise MergeflowError(f"{place}: a range with `log` starts above 0 and has no `step`.")
    if values.get("step") is not None and not 0 < _number(place, "step", values["step"]) <= high - low:
        raise MergeflowError(f"{place}.step must be above 0 and at most high - low, found {values['step']!r}.")
    if is_whole(method, name):
        if any(value != int(value) for value in (low, high, float(values.get("step") or 1))):
            raise MergeflowError(f"{place} is a whole number: give whole low, high and step.")
        return [int(low), int(high)]
    return [low, high]


def _number(place: str, key: str, value: Any) -> float:
    try:
        number = float(value) if not isinstance(value, bool) else None
    except (TypeError, ValueError):
        number = None
    if number is None or not abs(number) < float("inf"):
        raise MergeflowError(f"{place}.{key} must be a finite number, found {value!r}.")
    return number


def is_whole(method: str, name: str) -> bool:
    """Whether an argument is a whole number."""
    return get(method).args.model_fields[name].annotation is int


def at_edge(space: Space, args: Mapping[str, Any]) -> list[str]:
    """Return the arguments whose value is at an end of its range: a better one may be outside."""
    ranges = {name: values for name, values in (space or {}).items() if isinstance(values, Mapping) and "low" in values}
    edges = at_grid_edge(args, values_of({name: v for name, v in (space or {}).items() if name not in ranges}))
    for name, values in ranges.items():
        bend = log if values.get("log") else float
        low, high, value = (bend(float(number)) for number in (values["low"], values["high"], args[name]))
        if min(value - low, high - value) <= _EDGE * (high - low):
            edges.append(name)
    return edges


# Search along one argument: the best of many values of `scale` without trying them all.


def line(
    argument: str, values: Sequence[float], start: float, fixed: Mapping[str, Any] | None = None, slack: float = 0.01
) -> Strategy:
    """Ask for the values of one argument from `start` on, both ways, until the objective has fallen by `slack`.

    The best of them is the best of all values wherever the objective has no dip deeper than `slack`; accuracy over the
    scale of a merge has one hump, and costs a quarter of the grid this way.

    Args:
        values: Ascending, at least one.
        start: Where to begin; the nearest value is taken.
    """
    assert list(values) == sorted(values)
    first = min(range(len(values)), key=lambda i: abs(values[i] - start))
    heights = {first: (yield {**(fixed or {}), argument: values[first]})}
    for step in (1, -1):
        index = first + step
        while 0 <= index < len(values):
            heights[index] = yield {**(fixed or {}), argument: values[index]}
            if heights[index] < max(heights.values()) - slack:
                break
            index += step


def best_on_line(scored: Iterable[Scored], argument: str) -> Scored:
    """Return the best candidate of a line; of equals the one with the smallest value."""
    return max(scored, key=lambda candidate: (candidate.value, -candidate.varied[argument]))


# Search by climbing: start from a known good choice and look only around it.


def climb(grid: Grid, start: Mapping[str, Any]) -> Strategy:
    """Ask for the neighbours of the best candidate, one argument after the other, until none of them is better.

    Args:
        grid: Argument → its values, in order; they bound the climb.
        start: Argument → value; a value that is not in the grid is replaced by the middle one, and arguments that the
            grid does not name play no part.
    """
    heights: dict[tuple[Any, ...], float] = {}
    names = sorted(grid, key=lambda name: name != "scale")  # candidates of other scales cost least
    best = {
        name: start[name] if start.get(name) in values else values[len(values) // 2] for name, values in grid.items()
    }
    height = yield from _ask(best, heights)
    moved = True
    while moved:
        moved = False
        for name, values in ((name, list(grid[name])) for name in names):
            while True:
                place, around = values.index(best[name]), []
                for other in values[max(0, place - 1) : place] + values[place + 1 : place + 2]:
                    args = {**best, name: other}
                    around.append(((yield from _ask(args, heights)), args))
                higher, args = max(around, key=lambda scored: scored[0], default=(height, best))
                if not higher > height:  # a tie ends the climb
                    break
                best, height, moved = args, higher, True


def _ask(args: Args, heights: dict[tuple[Any, ...], float]) -> Generator[Args, float, float]:
    """Ask for a candidate, unless it was asked for before; return its objective."""
    key = tuple(args.values())
    if key not in heights:
        heights[key] = yield dict(args)
    return heights[key]
