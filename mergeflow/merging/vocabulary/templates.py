"""Chat templates of model folders: read wherever transformers keeps them, and the one that a recipe chooses."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mergeflow.checkpoints.formats import read_json
from mergeflow.checkpoints.writer import write_text
from mergeflow.errors import MergeflowError
from mergeflow.merging.vocabulary.named_templates import NAMED
from mergeflow.merging.vocabulary.tokens import SETTINGS, settings_of

FILE, MORE, KEY, DEFAULT = "chat_template.jinja", "additional_chat_templates", "chat_template", "default"
_PROCESSOR = "chat_template.json"

Templates = Mapping[str, str]
"""Templates by name; a model's only one is named `default`."""


def templates_of(folder: Path | None) -> dict[str, str]:
    """Return a folder's chat templates, from files of their own or, of older versions, from tokenizer_config.json."""
    if folder is None:
        return {}
    found: dict[str, str] = {}
    processor = read_json(folder / _PROCESSOR) if (folder / _PROCESSOR).is_file() else {}
    for given in (settings_of(folder).get(KEY), processor.get(KEY)):
        found |= _named(given)
    files = {DEFAULT: folder / FILE, **{path.stem: path for path in sorted((folder / MORE).glob("*.jinja"))}}
    return found | {name: _text(path) for name, path in files.items() if path.is_file()}


def _named(given: Any) -> dict[str, str]:
    if isinstance(given, str):
        return {DEFAULT: given}
    listed = given if isinstance(given, list) else []
    return {
        one["name"]: one["template"] for one in listed if isinstance(one, dict) and {"name", "template"} <= one.keys()
    }


def chosen_templates(choice: str, folders: Mapping[str, Path | None]) -> dict[str, str]:
    """Return the chat templates that a recipe chooses.

    Args:
        choice: `base`, an expert's name, `auto` (what most models have; of equally many the first), the path of a
            Jinja file, a template itself, or the name of a format such as `chatml`.
        folders: The models' folders by name, the base's first.

    Raises:
        MergeflowError: A model without a template, or a choice that is none of these.
    """
    found = {name: templates_of(folder) for name, folder in folders.items()}
    if choice == "auto":
        counted = Counter(templates[DEFAULT] for templates in found.values() if DEFAULT in templates)
        if not counted:
            raise MergeflowError("`chat_template: auto`: no model has a chat template. Remove it, or give a file.")
        most = counted.most_common(1)[0][0]
        return next(templates for templates in found.values() if templates.get(DEFAULT) == most)
    if choice in found:
        if not found[choice]:
            having = ", ".join(f"'{name}'" for name, templates in found.items() if templates) or "no model"
            raise MergeflowError(f"`chat_template: {choice}`: '{choice}' has no chat template; {having} has one.")
        return found[choice]
    text = read_template(choice)
    text = NAMED.get(choice) if text is None else text
    if text is None:
        known = ", ".join(("auto", *found))
        raise MergeflowError(
            f"`chat_template: {choice}` is neither a model of the merge ({known}), nor a file, nor a Jinja template, "
            f"nor a known format ({', '.join(NAMED)})."
        )
    return {DEFAULT: text}


def read_template(choice: str) -> str | None:
    """Return the text of a choice that is the path of a file, or a template itself; None where it is neither."""
    if "{{" in choice or "{%" in choice:
        return choice
    path = Path(choice).expanduser()
    return _text(path) if path.is_file() else None


def write_templates(templates: Templates, folder: Path) -> None:
    """Give a model folder these chat templates and no others."""
    settings = settings_of(folder)
    if settings.pop(KEY, None) is not None:
        write_text(folder / SETTINGS, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
    for path in (folder / FILE, folder / _PROCESSOR, *(folder / MORE).glob("*.jinja")):
        path.unlink(missing_ok=True)
    for name, text in templates.items():
        write_text(folder / FILE if name == DEFAULT else folder / MORE / f"{name}.jinja", text)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise MergeflowError(f"cannot read the chat template '{path}': {error}.") from None
