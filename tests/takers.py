"""Which functions and classes of the house take a `device`, read from the source, and which of them were given one."""

import ast
import importlib
import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any
from unittest.mock import patch

from pydantic import BaseModel

ROOT = Path(__file__).parents[1]
PACKAGES = ("mergeflow", "tasks", "registry", "flows", "studies")

_reached: set[str] = set()
_originals: dict[str, Any] = {}


def takers() -> dict[str, Any]:
    """Every function with an argument, and class with a field, called `device`, by "module:name".

    Settings that only name a device are left out: what reads them is in the list.
    """
    by_place: dict[str, Any] = {}
    for path in (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))):
        text = path.read_text()
        if "device" not in text:
            continue
        module = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
        for place, node in _places(ast.parse(text), ""):
            if _takes(node):
                thing = importlib.import_module(module)
                for part in place.split("."):
                    thing = getattr(thing, part)
                if not (isinstance(thing, type) and issubclass(thing, BaseModel)):
                    by_place[f"{module}:{place}"] = thing
    return by_place


def _places(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.AST]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            yield prefix + child.name, child
            yield from _places(child, f"{prefix}{child.name}.")


def _takes(node: ast.AST) -> bool:
    if isinstance(node, ast.FunctionDef):
        args = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        return any(argument.arg == "device" for argument in args)
    fields = [field.target for field in getattr(node, "body", []) if isinstance(field, ast.AnnAssign)]
    return any(isinstance(field, ast.Name) and field.id == "device" for field in fields)


@contextmanager
def watched() -> Iterator[set[str]]:
    """Give the set of `takers()` that were called in this process with a CUDA device, inside such a block.

    A function's code is exchanged, not its name: whoever has imported it calls the same object.
    """
    with ExitStack() as stack:
        for name, thing in takers().items():
            if isinstance(thing, type):
                made = thing.__init__  # type: ignore[misc]
                _originals[name] = made
                stack.enter_context(patch.object(thing, "__init__", _shim(name)))
            else:
                function = inspect.unwrap(thing)
                _exchange(name, getattr(function, "__func__", function), stack)  # a class method is bound
        yield _reached


def _exchange(name: str, function: FunctionType, stack: ExitStack) -> None:
    assert not function.__closure__, name
    code, signature = function.__code__, inspect.signature(function)
    original = FunctionType(code, function.__globals__, function.__name__, function.__defaults__)
    original.__kwdefaults__ = function.__kwdefaults__
    _originals[name] = original
    function.__signature__ = signature  # type: ignore[attr-defined]
    function.__code__ = _shim(name).__code__
    stack.callback(setattr, function, "__code__", code)
    stack.callback(delattr, function, "__signature__")


def _shim(name: str) -> FunctionType:
    made: dict[str, Any] = {}
    exec(f"def shim(*args, **kwargs):\n    from {__name__} import call\n    return call({name!r}, args, kwargs)", made)
    shim: FunctionType = made["shim"]
    return shim


def call(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call what a name stands for, and remember it where its device is a CUDA device."""
    original = _originals[name]
    given = inspect.signature(original).bind(*args, **kwargs).arguments.get("device")
    if str(given).startswith("cuda"):
        _reached.add(name)
    return original(*args, **kwargs)
