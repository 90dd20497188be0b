"""Whether a configuration of mergekit has the form that mergekit documents: a mistyped key would be lost else."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mergeflow.errors import MergeflowError, unknown_name

_MODEL, _SOURCE, _SLICE = ("model", "parameters"), ("model", "layer_range", "parameters"), ("sources", "parameters")
_REFERENCE, _PLACE = ("model", "lora"), ("path", "revision")


def check_keys(documents: Sequence[Mapping[str, Any]], origin: str) -> None:
    """Check the lists and mappings of a configuration: models, slices, sources and experts.

    Args:
        documents: Its documents.
        origin: Its name, for the message.

    Raises:
        MergeflowError: All that is of another form, with what was expected.
    """
    faults = [fault for document in documents for fault in _of_document(document)]
    if faults:
        listed = "\n".join(f"  - {fault}" for fault in dict.fromkeys(faults))
        raise MergeflowError(f"{origin} is not of the form that mergekit documents:\n{listed}")


def _of_document(document: Mapping[str, Any]) -> Iterator[str]:
    yield from _parameters(document.get("parameters"), "`parameters`")
    if document.get("base_model") is not None:
        yield from _reference(document["base_model"], "`base_model`")
    elif "merge_method" not in document:
        yield "`base_model` is missing: a mixture has its embeddings and attention"
    yield from _tokens(document.get("tokenizer"))
    for where, one in _entries(document, "models", "models"):
        yield from _entry(one, where, _MODEL)
    for where, one in _entries(document, "slices", "slices"):
        if "sources" not in one:
            yield f"{where}: `sources` is missing"
        yield from _parameters(one.get("parameters"), f"`parameters` of {where}")
        yield from _unknown(one, where, _SLICE)
        for place, source in _entries(one, "sources", f"{where}.sources"):
            yield from _entry(source, place, _SOURCE)
            yield from _range(source.get("layer_range"), place)
    for key in ("experts", "shared_experts"):
        for where, one in _entries(document, key, key):
            if one.get("source_model") is None:
                yield f"{where}: `source_model` is missing"
            else:
                yield from _reference(one["source_model"], f"{where}.source_model")
    # What is not a mapping was passed over above.
    yield from _not_entries(document, "")


def _entries(holder: Mapping[str, Any], key: str, where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    found = holder.get(key)
    for index, one in enumerate(found if isinstance(found, list) else []):
        if isinstance(one, Mapping):
            yield f"{where}[{index}]", one


def _not_entries(holder: Mapping[str, Any], where: str) -> Iterator[str]:
    wanted = {"models": "model", "slices": "sources", "sources": "model"}
    wanted |= dict.fromkeys(("experts", "shared_experts"), "source_model")
    for key, inner in wanted.items():
        found = holder.get(key)
        if found is None and not (key == "sources" and key in holder):
            continue
        if not isinstance(found, list) or (key == "sources" and not found):
            yield f"{where}{key}: expected a list of mappings with `{inner}`, found {found!r:.60}"
            continue
        for index, one in enumerate(found):
            if isinstance(one, Mapping):
                yield from _not_entries(one, f"{where}{key}[{index}].") if key == "slices" else ()
            else:
                yield f"{where}{key}[{index}]: expected a mapping with `{inner}`, found {one!r:.60}"


def _entry(one: Mapping[str, Any], where: str, known: Sequence[str]) -> Iterator[str]:
    if one.get("model") is None:
        yield f"{where}: `model` is missing"
    else:
        yield from _reference(one["model"], f"{where}.model")
    yield from _parameters(one.get("parameters"), f"`parameters` of {where}")
    yield from _unknown(one, where, known)


def _reference(model: Any, where: str) -> Iterator[str]:
    """A path, or a mapping with one: {model: {path, revision}, lora: {path, revision}}."""
    if not isinstance(model, Mapping):
        if not isinstance(model, str):
            yield f"{where}: expected a path, or a mapping with `path`, found {model!r:.60}"
        return
    if all(model.get(key) is None for key in ("path", "model")):
        yield f"{where}: `{'path' if 'path' in model else 'model'}` is missing"
    yield from _unknown(model, where, _PLACE if "path" in model else _REFERENCE)
    for key in _REFERENCE:
        if isinstance(model.get(key), Mapping):
            yield from _unknown(model[key], f"{where}.{key}", _PLACE)
            if "path" not in model[key]:
                yield f"{where}.{key}: `path` is missing"


def _mapping(found: Any, where: str) -> Iterator[str]:
    if found is not None and not isinstance(found, Mapping):
        yield f"{where}: expected a mapping of names to values, found {found!r:.60}"


def _parameters(found: Any, where: str) -> Iterator[str]:
    yield from _mapping(found, where)
    if isinstance(found, Mapping):
        for key, value in found.items():
            if not _is_setting(value):
                wanted = "a number, a list of them, or filters with a `value`"
                yield f"`{key}` of {where}: expected {wanted}, found {value!r:.60}"


def _is_setting(value: Any) -> bool:
    """Whether a value is a number, or numbers over depth or by filters."""
    if isinstance(value, Mapping):
        return "value" in value and _is_setting(value["value"])
    if isinstance(value, list):
        return bool(value) and all(map(_is_setting, value))
    return isinstance(value, int | float)


def _tokens(tokenizer: Any) -> Iterator[str]:
    if tokenizer is not None and not isinstance(tokenizer, str | Mapping):
        yield f"`tokenizer`: expected a name or a mapping with `source`, found {tokenizer!r:.60}"
    tokens = tokenizer.get("tokens") if isinstance(tokenizer, Mapping) else None
    yield from _mapping(tokens, "`tokens` of `tokenizer`")
    for token, own in tokens.items() if isinstance(tokens, Mapping) else ():
        yield from _mapping(own, f"token '{token}'") if own is not None else (f"token '{token}': `source` is missing",)


def _unknown(one: Mapping[str, Any], where: str, known: Sequence[str]) -> Iterator[str]:
    yield from (
        str(unknown_name(f"key of {where}", str(key), known)).removesuffix(".") for key in one if key not in known
    )


def _range(found: Any, where: str) -> Iterator[str]:
    if found is None:
        return
    whole = isinstance(found, list) and len(found) == 2 and all(type(one) is int for one in found)
    if not whole or not 0 <= found[0] < found[1]:
        yield f"{where}: layer_range is two numbers of blocks such as [0, 16], the second larger, found {found!r:.60}"


def reference(model: Any) -> str:
    """Return a model as one text: `path`, `path@revision`, or `path+adapter`.

    Args:
        model: A text, {path, revision}, or {model: …, lora: …} of these.

    Example:
        >>> reference({"model": {"path": "a/b", "revision": "v1"}, "lora": "c/d"})
        'a/b@v1+c/d'
    """
    if not isinstance(model, Mapping):
        return str(model)
    if "path" in model:
        return f"{model['path']}@{model['revision']}" if model.get("revision") else str(model["path"])
    adapter = model.get("lora")
    return reference(model.get("model")) + (f"+{reference(adapter)}" if adapter else "")
