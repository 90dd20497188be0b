"""Steps of a recipe: merges, and models put together from others, whose results other steps and the recipe read."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Annotated, Any

from pydantic import PlainSerializer

from mergeflow.errors import MergeflowError, unknown_name
from mergeflow.merging.files.fields import shown
from mergeflow.merging.files.mixture import Mixture
from mergeflow.merging.files.slices import Slice
from mergeflow.schema import refusal, validated

PREFIX = "step:"
# Keys of a recipe whose value is the one step that it passes through.
ASSEMBLED = ("slices", "mixture")
_ONLY_WHOLE = ("out", "steps", "device", "shard_size", "adapter", "chat_template", "tokenizer", "tokenizer_source")


class Slices(tuple[Slice, ...]):
    """A step that puts blocks of models one behind the other."""

    def paths(self) -> Iterator[str]:
        """Yield the models it is made of."""
        yield from (one.model for one in self)


def step_named(path: str) -> str | None:
    """Return the step that a path names, or None.

    Example:
        >>> step_named("step:first"), step_named("models/first")
        ('first', None)
    """
    return path.removeprefix(PREFIX) if path.startswith(PREFIX) else None


def lifted(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe's values with `slices` or `mixture` as its one step and expert, which is taken as it is."""
    found = dict(values)
    for key in ASSEMBLED:
        if key in found:
            if "experts" in found or "steps" in found:
                raise ValueError(
                    f"`{key}` is the whole model: in a recipe with experts or steps it is a step of its own"
                )
            found |= {"steps": {key: {key: found.pop(key)}}, "experts": {key: PREFIX + key}}
            found.setdefault("method", "passthrough")
    return found


def check_steps(steps: Mapping[str, Any], paths: Iterable[str]) -> None:
    """Check that steps and what is read of them fit: every name is a step, every step is read, none reads itself.

    Args:
        steps: The steps of a recipe, by name.
        paths: What the recipe itself reads.

    Raises:
        MergeflowError: All faults.
    """
    reads = {name: [n for path in step.paths() if (n := step_named(path))] for name, step in steps.items()}
    top = [name for path in paths if (name := step_named(path))]
    asked = {name for names in (*reads.values(), top) for name in names}
    faults = [str(unknown_name("step", name, steps)).removesuffix(".") for name in sorted(asked - steps.keys())]
    faults += [f"the step '{name}' is read by nothing: remove it, or name it as {PREFIX}{name}"
               for name in steps if name not in asked]  # fmt: skip
    try:
        tuple(TopologicalSorter(reads).static_order())
    except CycleError as error:
        faults.append(f"steps read each other in a circle: {' ← '.join(error.args[1])}")
    if faults:
        raise MergeflowError("\n".join(faults))


def parse_steps(value: Any, merge: type, parse_merge: Callable[[Any, str], Any]) -> Any:
    """Return steps as pairs of a name and a checked record.

    Args:
        value: What a recipe has as its steps.
        merge: The record of a step that is a merge.
        parse_merge: (mapping, its name for messages) → such a record.
    """
    if value is None or isinstance(value, tuple):
        return value or None
    if not isinstance(value, Mapping):
        raise ValueError(f"expected a mapping of names to steps, found {shown(value)}")
    return tuple((_name(name), _step(str(name), step, merge, parse_merge)) for name, step in value.items()) or None


def _name(name: Any) -> str:
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_][\w.-]*", name):
        raise ValueError(f"the name {name!r:.60} of a step: use letters, digits, dots, dashes and underscores")
    return name


def _step(name: str, value: Any, merge: type, parse_merge: Callable[[Any, str], Any]) -> Any:
    origin = f"step '{name}'"
    if isinstance(value, merge | Slices | Mixture):
        return value
    if isinstance(value, Mapping) and set(value) == {"mixture"}:
        return validated(Mixture, value["mixture"], origin)
    if isinstance(value, Mapping) and set(value) == {"slices"}:
        value = value["slices"]
    if isinstance(value, Sequence) and not isinstance(value, str):
        if not value:
            raise MergeflowError(f"{origin}: no slices")
        return Slices(validated(Slice, one, f"{origin}, slice {index + 1}") for index, one in enumerate(value))
    if not isinstance(value, Mapping):
        raise ValueError(
            f"{origin}: expected a merge (method, experts …), a list of slices, or a mixture, found {shown(value)}"
        )
    strange = [f"`{key}` belongs to the whole recipe, not to a step" for key in _ONLY_WHOLE if key in value]
    if strange:
        raise refusal(origin, strange)
    return parse_merge(value, origin)


def _plain_steps(value: Any) -> Any:
    return value and {
        name: [one.model_dump(mode="json", exclude_none=True) for one in step]
        if isinstance(step, Slices)
        else {"mixture": step.model_dump(mode="json", exclude_none=True)}
        if isinstance(step, Mixture)
        else step.model_dump(mode="json", exclude_none=True, exclude=set(_ONLY_WHOLE))
        for name, step in value
    }


Steps = Annotated[tuple[tuple[str, Any], ...] | None, PlainSerializer(_plain_steps)]
