"""The shape of studies/params.yaml, checked before anything reads it.

It stands apart from the loader, on which every study's digest of code depends: a better message makes no record stale.
"""

import re
import string
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mergeflow.errors import MergeflowError
from mergeflow.schema import refusal
from mergeflow.yaml_text import parse_yaml

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


def read_study_file(path: Path) -> dict[str, Any]:
    """Return what the file says, unless it is no mapping of seeds, runs and studies, or its seeds or runs cannot be.

    Args:
        path: studies/params.yaml of a project.

    Raises:
        MergeflowError: the file is not UTF-8, is not YAML, or has another shape; all faults of it at once.
    """
    file = f"{path.parent.name}/{path.name}"
    try:
        found = parse_yaml(path.read_text("utf-8"), file)
    except UnicodeDecodeError as error:
        raise MergeflowError(f"{file} is not UTF-8 at byte {error.start}: save it as UTF-8.") from None
    if not isinstance(found, dict):
        raise MergeflowError(f"{file} must be a mapping of seeds, runs and studies, found {_told(found)}.")
    faults = [*_seed_faults("seeds", found.get("seeds")), *_run_faults(found), *_study_faults(found)]
    if not isinstance(found.get("seeds"), list):
        faults.insert(0, f"seeds: must be a list of whole numbers, found {_told(found.get('seeds'))}")
    if faults:
        raise refusal(file, faults)
    return found


def _run_faults(found: dict[str, Any]) -> Iterator[str]:
    runs, seeds = found.get("runs"), found.get("seeds")
    if not isinstance(runs, dict) or not runs:
        yield (
            f"runs: name at least one training run, such as `experts: {{}}`, found {_told(runs)}; it is trained where "
            "a study reads it"
        )
        return
    for name, changes in runs.items():
        if not isinstance(name, str):
            yield f"run {name}: quote the name, which YAML reads as a number, a date or a truth value"
        elif not _NAME.fullmatch(name):
            yield f"run '{name}': use letters, digits, '-' and '_' in its name, which is a folder's too"
        if not isinstance(changes, dict):
            yield f"runs.{name}: must be a mapping, `{{}}` where it changes nothing, found {_told(changes)}"
            continue
        if "checkpoints" in changes:
            yield from _pattern_faults(f"runs.{name}.checkpoints", changes["checkpoints"])
        if isinstance(seeds, list) and isinstance(count := changes.get("seeds"), int) and count > len(seeds):
            yield f"runs.{name}.seeds: there are {len(seeds)} seeds, found {count}"


def _pattern_faults(place: str, pattern: Any) -> Iterator[str]:
    try:
        names = {name for _, name, _, _ in string.Formatter().parse(pattern) if name is not None}
    except (ValueError, TypeError) as error:
        yield f"{place}: must be a path with {{task}}, found {pattern!r} ({error})"
        return
    if others := sorted(names - {"task", "seed"}):
        yield f"{place}: {{task}} and {{seed}} are put in, found {', '.join(f'{{{name}}}' for name in others)}"


def _study_faults(found: dict[str, Any]) -> Iterator[str]:
    studies = found.get("studies")
    for name, choices in studies.items() if isinstance(studies, dict) else ():
        if isinstance(choices, dict):
            yield from _seed_faults(f"studies.{name}.seeds", choices.get("seeds"))


def _seed_faults(place: str, seeds: Any) -> Iterator[str]:
    """Yield what makes seeds no set of repetitions; what is no list of whole numbers is the loader's to tell."""
    if isinstance(seeds, list) and all(isinstance(seed, int) for seed in seeds):
        yield from (f"{place}: {seed} stands twice; name each seed once" for seed, n in Counter(seeds).items() if n > 1)
        yield from (f"{place}: must be 0 or more, found {seed}" for seed in seeds if seed < 0)


def _told(value: Any) -> str:
    if value is None or value == {}:
        return "nothing"
    return "a list" if isinstance(value, list) else "a mapping" if isinstance(value, dict) else repr(value)
