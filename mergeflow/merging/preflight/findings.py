"""What the comparison of models found: differences that are refused, and differences to know of."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from mergeflow.errors import MergeflowError
from mergeflow.merging.direction import RUNNING


@dataclass(frozen=True)
class Finding:
    """A difference between the base and experts.

    Attributes:
        subject: What differs: `rope_theta`, `tokenizer`; a recipe's `allow` speaks of it.
        text: The difference and, where there is one, the way out.
        refused: Whether it changes what weights mean.
    """

    subject: str
    text: str
    refused: bool = False


def difference(subject: str, base: Any, others: Mapping[str, Any], refused: bool = False, way_out: str = "") -> Finding:
    """Return the finding that experts have other values than the base, experts of one value together.

    Args:
        subject: What differs; a recipe's `allow` speaks of it.
        base: The base's value.
        others: The values of the experts that have another one, by name.
        refused: Whether it changes what weights mean.
        way_out: What to do, put behind the values.
    """
    groups: dict[str, list[str]] = {}
    for name, value in others.items():
        groups.setdefault(_short(value), []).append(f"'{name}'")
    listed = "; ".join(f"{', '.join(names)} {value}" for value, names in groups.items())
    return Finding(subject, f"{subject}: base {_short(base)}; {listed}{way_out}", refused)


@dataclass(frozen=True)
class Default:
    """A setting that config.json leaves out, as the class of the model has it."""

    value: Any
    cls: str


def _short(value: Any) -> str:
    if isinstance(value, Default):
        return f"{_short(value.value)} (left out, {value.cls}'s default)"
    text = repr(value) if isinstance(value, str) else "none" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def running_findings(names: Iterable[str]) -> list[Finding]:
    """Return that statistics of BatchNorm are among the tensors to be merged.

    Args:
        names: The tensors to be merged.
    """
    found = sorted(name for name in names if name.endswith(RUNNING))
    if not found:
        return []
    told = f"{len(found)} tensors such as '{found[0]}' are merged like weights, but are not the merged model's"
    return [Finding("batch_norm", f"batch_norm: {told}: compute them again from data before you use it")]


def check_findings(findings: Iterable[Finding], allow: Iterable[str]) -> None:
    """Refuse what changes the meaning of weights, all of it in one message.

    Args:
        findings: What differs.
        allow: Patterns of subjects that the recipe accepts.

    Raises:
        MergeflowError: A difference that is refused and not allowed.
    """
    patterns = tuple(allow)
    faults = [one for one in findings if one.refused and not allowed(one, patterns)]
    if not faults:
        return
    shown = "\n".join(f"  - {one.text}" for one in faults)
    subjects = ", ".join(dict.fromkeys(one.subject for one in faults))
    raise MergeflowError(
        f"the models differ in what their weights mean:\n{shown}\n"
        f"Merge fine-tuned copies of one base, or accept it and keep the base's: `allow: [{subjects}]`."
    )


def allowed(finding: Finding, patterns: Iterable[str]) -> bool:
    """Whether a recipe accepts a difference, by its name or the last part of it."""
    return any(
        fnmatchcase(name, pattern) for pattern in patterns for name in (finding.subject, finding.subject.split(".")[-1])
    )
