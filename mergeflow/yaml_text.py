"""YAML as people write it, read as the safe loader reads it, but for what is silently otherwise than it looks.

A key that is given twice is an error, keys are texts (`no` and `007` are names), and 010 or 1:30 are no numbers.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import Composer

from mergeflow.errors import MergeflowError

_LARGEST = 1_000_000
_TAG = "tag:yaml.org,2002:"
_NAMES = {_TAG + kind for kind in ("bool", "int", "float", "null", "timestamp")}
_LOOKS_OTHERWISE = re.compile(r"[-+]?(?:0[0-7_]+|[0-9_]+(?::[0-5]?[0-9])+(?:\.[0-9_]*)?)")


class _OnceLoader(Composer, yaml.CSafeLoader):
    """Refuses equal keys and numbers in old notations while YAML is composed, before any `<<` is merged into it.

    libyaml scans and parses, six times as fast as Python does. Its own composer is not used: it calls itself for each
    level of nesting, until the process dies.
    """

    def __init__(self, text: str) -> None:
        yaml.CSafeLoader.__init__(self, text)
        Composer.__init__(self)

    def get_single_node(self) -> yaml.Node | None:
        node: yaml.Node | None = super().get_single_node()
        if node is not None:
            sizes: dict[int, int] = {}
            if _expanded(node, sizes) > max(_LARGEST, 10 * len(sizes)):
                raise yaml.YAMLError(f"its aliases amount to more than {_LARGEST} values: write them out, or use fewer")
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, value in node.value:
            _check_number(value)
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            line = key.start_mark.line + 1
            if key.value in lines:
                where = f"line {line}" if lines[key.value] == line else f"lines {lines[key.value]} and {line}"
                raise yaml.YAMLError(f"the key '{key.value}' is given twice, in {where}: keep one")
            lines[key.value] = line
            key.tag = _TAG + "str" if key.tag in _NAMES else key.tag
        return node

    def compose_sequence_node(self, anchor: Any) -> yaml.SequenceNode:
        node = super().compose_sequence_node(anchor)
        for value in node.value:
            _check_number(value)
        return node


def _check_number(node: yaml.Node) -> None:
    if node.tag in (_TAG + "int", _TAG + "float") and _LOOKS_OTHERWISE.fullmatch(node.value):
        raise yaml.YAMLError(
            f"in line {node.start_mark.line + 1}, {node.value} is a number to base 8 or 60 to YAML: write it as a "
            "decimal number, or in quotes"
        )


def _expanded(node: yaml.Node, sizes: dict[int, int]) -> int:
    """Return how many values a node stands for where each alias is a copy; of a node inside itself none."""
    if id(node) not in sizes:
        sizes[id(node)] = 0
        held = node.value if isinstance(node.value, list) else []
        inner = [node_inside for item in held for node_inside in (item if isinstance(item, tuple) else (item,))]
        sizes[id(node)] = 1 + sum(_expanded(child, sizes) for child in inner)
    return sizes[id(node)]


def parse_yaml(text: str, name: str) -> Any:
    """Return the value of a YAML (or JSON) text.

    Args:
        name: What it is, for messages: "recipe 'a.yaml'".

    Example:
        >>> parse_yaml("a: 1", "note")
        {'a': 1}
    """
    try:
        return yaml.load(text, _OnceLoader)
    # Beside its own errors the reader lets through those of a date such as 2024-13-01 and of deep nesting.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise MergeflowError(f"{name} is not valid YAML: {_described(error, text)}.") from None


def read_yaml(path: Path, kind: str) -> Any:
    """Read a YAML or JSON file that a person wrote."""
    return parse_yaml(_text(path, kind), f"{kind} '{path}'")


def read_documents(path: Path, kind: str) -> list[Any]:
    """Read the documents of a YAML file, which lines of three dashes part."""
    parts = re.split(r"^---(?:[ \t].*)?$", _text(path, kind), flags=re.MULTILINE)
    values = [parse_yaml(part, f"{kind} '{path}'") for part in parts]
    return [value for value in values if value is not None]


def _text(path: Path, kind: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise MergeflowError(f"cannot read {kind} '{path}': {error.strerror}. Check the path.") from None
    except UnicodeDecodeError as error:
        raise MergeflowError(f"{kind} '{path}' is not valid YAML: it is not UTF-8 text ({error.reason}).") from None


def in_words(args: Mapping[str, Any]) -> str:
    """Join arguments; lists and mappings are written as YAML.

    Example:
        >>> in_words({"scale": 1.0, "t": ({"filter": "mlp", "value": (0, 0.5)}, 1)})
        'scale 1.0, t [{filter: mlp, value: [0, 0.5]}, 1]'
    """
    layout: dict[str, Any] = {"default_flow_style": True, "sort_keys": False, "allow_unicode": True, "width": math.inf}
    return ", ".join(
        f"{name} {yaml.safe_dump(value, **layout).strip() if isinstance(value, list | tuple | Mapping) else value}"
        for name, value in args.items()
    )


def kind_of(value: Any) -> str:
    """Say what a value of YAML is, for a message.

    Example:
        >>> kind_of(None), kind_of([1]), kind_of("x")
        ('nothing', 'a list', "'x'")
    """
    if value is None or value == {}:
        return "nothing"
    return "a list" if isinstance(value, list) else "a mapping" if isinstance(value, dict) else repr(value)


def _described(error: Exception, text: str) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        at = error.problem_mark
        if text.split("\n")[at.line :][:1] and text.split("\n")[at.line][at.column :].startswith("\t"):
            return f"line {at.line + 1} has a tab where YAML takes spaces alone"
        if "another document" in str(error.problem):
            return f"it holds several documents, the second from line {error.problem_mark.line + 1} on, expected one"
        if "alias" in f"{error.context} {error.problem}":
            return f"in line {at.line + 1} a text that begins with * needs quotes, as '*.bias' has here"
        return f"{error.problem} (line {error.problem_mark.line + 1})"
    return str(error).splitlines()[0].removesuffix(".")
