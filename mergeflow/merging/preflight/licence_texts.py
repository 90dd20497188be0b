"""Licence files of model folders: which licence a text is, and the texts that a merged model's folder holds."""

import re
from collections.abc import Mapping
from pathlib import Path

_FILES = ("LICENSE*", "LICENCE*", "COPYING*")
_BESIDE = ("NOTICE*", "USE_POLICY*")
# Beginnings of licences, each with the Hub's name for it; the first that is found counts.
_KNOWN = (
    (r"Apache License\s+Version 2\.0", "apache-2.0"),
    (r"LLAMA (\d(?:\.\d)?) COMMUNITY LICENSE", "llama{0}"),
    (r"Gemma Terms of Use", "gemma"),
    (r"GNU AFFERO GENERAL PUBLIC LICENSE\s+Version 3", "agpl-3.0"),
    (r"GNU GENERAL PUBLIC LICENSE\s+Version (\d)", "gpl-{0}.0"),
    (r"Attribution-NonCommercial 4\.0", "cc-by-nc-4.0"),
    (r"Attribution-ShareAlike 4\.0", "cc-by-sa-4.0"),
    (r"Attribution 4\.0 International", "cc-by-4.0"),
    (r"CC0 1\.0", "cc0-1.0"),
    (r"MIT License|Permission is hereby granted, free of charge", "mit"),
    (r"Redistribution and use in source and binary forms[\s\S]*Neither the name", "bsd-3-clause"),
    (r"Redistribution and use in source and binary forms", "bsd-2-clause"),
)  # fmt: skip
_READ = 20_000  # characters of a text that are looked at


def licence_of_text(text: str) -> str | None:
    """Return the Hub's name of a licence, told by how its text begins; None for any other text.

    Args:
        text: The content of a licence file.

    Example:
        >>> licence_of_text("LLAMA 3.1 COMMUNITY LICENSE AGREEMENT"), licence_of_text("Ask us first.")
        ('llama3.1', None)
    """
    for pattern, name in _KNOWN:
        found = re.search(pattern, text[:_READ], re.IGNORECASE)
        if found:
            return name.format(*found.groups())
    return None


def licence_by_file(folder: Path) -> dict[str, str]:
    """Return the licence that a folder's licence file states, as a card would name it; {} where there is no file.

    Args:
        folder: The model's folder. A text that is not known counts as `other`, with terms of its own.
    """
    files = _held(folder, _FILES)
    if not files:
        return {}
    known = licence_of_text(files[0].read_text(encoding="utf-8", errors="replace"))
    return {"license": known} if known else {"license": "other", "license_name": f"see {files[0].name}"}


def licence_files(folders: Mapping[str, Path | None], holder: str | None) -> dict[str, bytes]:
    """Return the licence files of a merged model's folder: those of all its inputs, each text once.

    Args:
        folders: The inputs' folders by name.
        holder: The input whose licence the result has; its files keep their names, others get their input's name.

    Returns:
        Contents by name, such as `LICENSE` and `LICENSE-chat.txt`.
    """
    found: dict[str, bytes] = {}
    for name in sorted(folders, key=lambda one: one != holder):
        folder = folders[name]
        for path in licence_paths(folder) if folder is not None else ():
            content = path.read_bytes()
            if content not in found.values():
                plain = re.sub(r"[^\w.-]+", "-", name)
                own = path.name if name == holder else f"{path.stem}-{plain}{path.suffix}"
                found[own] = content
    return found


def licence_paths(folder: Path) -> list[Path]:
    """Return the licence files of a folder, with notices and policies of use."""
    return _held(folder, (*_FILES, *_BESIDE))


def _held(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    return [path for pattern in patterns for path in sorted(folder.glob(pattern)) if path.is_file()]
