"""Licences of the models that go into a merge, as the front matter of their cards names them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from mergeflow.merging.preflight.licence_texts import licence_by_file

# Licences that ask for no more than notices; what they cover may be part of something under other terms.
_FREE = (
    "apache-2.0",
    "mit",
    "bsd",
    "bsd-2-clause",
    "bsd-3-clause",
    "isc",
    "cc0-1.0",
    "unlicense",
    "zlib",
    "cc-by-4.0",
    "pddl",
)
_LINKS = ("license_name", "license_link")


def front_matter(folder: Path | None) -> dict[str, Any]:
    """Return the front matter of a folder's README.md; {} where there is none."""
    path = folder / "README.md" if folder is not None else None
    if path is None or not path.is_file():
        return {}
    text = path.read_text(encoding="utf-8", errors="replace").lstrip("\ufeff")
    if not text.startswith("---"):
        return {}
    try:
        found = yaml.safe_load(text[3:].split("\n---", 1)[0])
    except (yaml.YAMLError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def licence_of(folder: Path | None) -> dict[str, str]:
    """Return `license`, and its name and link where it is `other`; {} where the card says nothing."""
    given = front_matter(folder)
    licence = given.get("license")
    if isinstance(licence, list):
        licence = licence[0] if licence else None
    if not isinstance(licence, str):
        return licence_by_file(folder) if folder is not None else {}
    return {"license": licence.lower(), **{key: str(given[key]) for key in _LINKS if given.get(key)}}


def merged_licence(licences: Mapping[str, Mapping[str, str]]) -> tuple[dict[str, str], str | None]:
    """Return the licence that a merge can have, and what is to be said of it.

    All equal: that one. One with terms of its own among free ones: that one. Several with terms of their own, which
    need not agree: none.

    Args:
        licences: Of each input, as `licence_of` gives it.

    Example:
        >>> merged_licence({"base": {"license": "mit"}, "a": {"license": "llama3.1"}})[0]
        {'license': 'llama3.1'}
    """
    given = {name: dict(licence) for name, licence in licences.items() if licence}
    silent = [f"'{name}'" for name in licences if name not in given]
    if not given:
        return {}, None
    kinds: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for name, licence in given.items():
        kinds.setdefault(tuple(sorted(licence.items())), []).append(f"'{name}'")
    listed = "; ".join(f"{', '.join(names)} {_word(dict(kind))}" for kind, names in kinds.items())
    bound = [dict(kind) for kind in kinds if dict(kind)["license"] not in _FREE]
    unknown = f"licence: {', '.join(silent)} name{'s' * (len(silent) == 1)} none" if silent else None
    if len(kinds) == 1:
        return next(iter(given.values())), unknown
    if len(bound) > 1:
        return {}, f"licences conflict: {listed}: read their terms before the result is given away"
    found = bound[0] if bound else max((dict(kind) for kind in kinds), key=lambda one: one["license"] == "apache-2.0")
    return found, f"licences differ: {listed}; the result's card says {_word(found)}"


def _word(licence: Mapping[str, str]) -> str:
    return licence.get("license_name", licence["license"])
