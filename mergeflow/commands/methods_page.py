"""The page of methods, written from the catalog: `mergeflow docs methods`."""

from typing import Any

from pydantic import BaseModel

from mergeflow.merging.catalog import get, methods
from mergeflow.merging.compression.compressor import Compressor, compressors
from mergeflow.merging.method import Method, section_of

_HEAD = """# Merge methods

`mergeflow methods NAME` prints the section of one method.

τ_t = θ_t − θ0 are the task vectors of T experts, w_t their weights (1 by default). Every result is
**anchor + scale · direction**. "Matrix" means a 2-D weight with both sides > 1, or each one of a
3-D stack of experts, that `matrices` selects by its role: see `mergeflow docs architectures`. Arithmetic is float32
(float64 where an input is), results are cast to the base's types, integer tensors are the base's
(tables of integers that differ, as quantised weights do, are refused).
"""


def methods_page() -> str:
    """Return the page: a table of all methods and compressors, then a section for each."""
    rows = [
        f"| [`{name}`](#{name}) | {method.summary} | {method.anchor} | {', '.join(_argument_names(method.args))} |"
        for name, method in methods().items()
    ]
    small = [
        f"| [`{name}`](#{name}) | {compressor.summary} | {', '.join(_argument_names(compressor.args))} |"
        for name, compressor in compressors().items()
    ]
    parts = [
        _HEAD,
        "| method | what it is | anchor | arguments (default) |\n|---|---|---|---|\n" + "\n".join(rows),
        "## Per-task compression\n\nOne model per task at a fraction of the storage.\n\n"
        "| compressor | what it keeps | arguments (default) |\n|---|---|---|\n" + "\n".join(small),
        "## Each method",
        *(method_section(name) for name in methods()),
        "## Each compressor",
        *(_section(name, compressor) for name, compressor in compressors().items()),
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def method_section(name: str) -> str:
    """Return the section of one method (or compressor): formula, arguments with ranges, property, source."""
    return _section(name, compressors()[name] if name in compressors() else get(name))


def _section(name: str, entry: Method | Compressor) -> str:
    doc = entry.doc
    body = section_of(doc, "")
    formula, _, notes = body.partition("\n\n")
    arguments = "\n".join(
        f"| `{key}` | {_shown(field.default)} | {field.description} |" for key, field in entry.args.model_fields.items()
    )
    table = f"| argument | default | meaning |\n|---|---|---|\n{arguments}" if arguments else "No arguments."
    needs = f"Needs given statistics: {', '.join(entry.data)}." if isinstance(entry, Method) and entry.data else ""
    lines = [
        f"### {name}",
        entry.summary,
        f"```\n{formula}\n```" if formula else "",
        " ".join(notes.split()),
        needs,
        table,
        *(f"*{title}.* {text}" for title in ("Property", "Source") if (text := _flat(doc, title))),
    ]
    return "\n\n".join(line for line in lines if line)


def _flat(doc: str, title: str) -> str:
    return " ".join(section_of(doc, title).split())


def _argument_names(args: type[BaseModel]) -> list[str]:
    return [f"{key} {_shown(field.default)}" for key, field in args.model_fields.items()]


def _shown(value: Any) -> str:
    if value is None:
        return "found"
    if isinstance(value, float):
        return f"{value:g}"
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value if value != () else "none")
