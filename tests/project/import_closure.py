"""The closure of imports, read from compiled code: what the digest of code reads from the syntax, a second time.

Run as a program with the import path on a copy of the packages, it edits random modules there and prints what it saw.
"""

import ast
import dis
import json
import pkgutil
import random
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from types import CodeType
from typing import Any

OURS = ("mergeflow", "tasks", "registry", "suites", "studies")


@cache
def modules(root: Path) -> dict[str, Path]:
    paths = {}
    for package in OURS:
        for path in (root / package).rglob("*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return paths


def closure(root: Path, start: str) -> set[str]:
    paths, met, queue = modules(root), set[str](), [start, "tasks.running.determinism"]
    while queue:
        name = queue.pop()
        if name in met or name not in paths or doors(root).get(name) is not None:
            continue
        met.add(name)
        queue += reached(root, name)
    return met


@cache
def doors(root: Path) -> dict[str, dict[str, tuple[str, str]]]:
    """Return, for each package whose `__init__` only passes names on, where each name comes from."""
    exports = {}
    for name, path in modules(root).items():
        code = compiled(path)
        steps = list(dis.get_instructions(code))
        works = [at for at, step in enumerate(steps) if step.opname in ("CALL", "FOR_ITER", "STORE_SUBSCR")]
        calls = any(steps[at + 1].argval != "__getattr__" for at in works)  # what is called makes no such function
        stored = {str(step.argval) for step in steps if step.opname == "STORE_NAME"}
        defined = stored - {"__doc__", "__all__", "_HOMES", "__getattr__", *(bound for _, _, bound in imports(code))}
        if path.name == "__init__.py" and not calls and not defined:
            exports[name] = {bound: (home, original) for home, original, bound in imports(code) if original}
            if "_HOMES" in stored:
                exports[name] |= {key: (home, key) for key, home in vars(import_module(name))["_HOMES"].items()}
    return exports


@cache
def reached(root: Path, name: str) -> tuple[str, ...]:
    code, paths = compiled(modules(root)[name]), modules(root)
    modules_named = [module for home, original, _ in imports(code) for module in resolve(root, home, original)]
    modules_named += [text for text in texts(code) if "." in text and text in paths]
    siblings = {path.name: other for other, path in paths.items() if path.parent == paths[name].parent}
    modules_named += [siblings[text] for text in texts(code) if text in siblings]
    if "Shelf" in code.co_names and name != "mergeflow.plugins":
        for value in vars(import_module(name)).values():
            if type(value).__name__ == "Shelf" and value.package:
                package = import_module(value.package)
                modules_named += [
                    module.name for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
                ]
    if "Parts" in code.co_names and name != "mergeflow.plugins":
        for value in vars(import_module(name)).values():
            if type(value).__name__ == "Parts":
                packages = pkgutil.iter_modules(import_module(value.package).__path__)
                modules_named += [f"{value.package}.{walked.name}.{value.part}" for walked in packages if walked.ispkg]
    return tuple(modules_named)


def resolve(root: Path, home: str, name: str) -> Iterator[str]:
    parts = home.split(".")
    yield from (".".join(parts[: end + 1]) for end in range(len(parts)))
    if name in doors(root).get(home, {}):
        yield from resolve(root, *doors(root)[home][name])
    elif name:
        yield f"{home}.{name}"


@cache
def compiled(path: Path) -> CodeType:
    # The compiler drops what stands below `if False`: imports for type checkers.
    return compile(path.read_text().replace("if TYPE_CHECKING:", "if False:"), str(path), "exec")


def imports(code: CodeType) -> Iterator[tuple[str, str, str]]:
    """Yield module, name and bound name of each import, in functions and classes too; no name for `import module`."""
    home, steps = "", list(dis.get_instructions(code))
    for step, after in zip(steps, [*steps[1:], None], strict=True):
        if step.opname == "IMPORT_NAME":
            home = str(step.argval)
            yield home, "", ""
        elif step.opname == "IMPORT_FROM":
            yield home, str(step.argval), str(after.argval) if after else ""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from imports(inner)


def texts(code: CodeType) -> Iterator[str]:
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from texts(value)
        else:
            yield from (
                constant for constant in (value if isinstance(value, tuple) else [value]) if isinstance(constant, str)
            )


def main(root: Path, stages: dict[str, str], seed: int, count: int) -> None:
    """Print which stages' closures differ from those here, and which stages the edit of a module makes stale.

    Modules in `root` are edited one after the other, and put back.
    """
    from tasks.running.digests import Code

    def digests() -> dict[str, str]:
        code = Code(root)
        return {name: code.digest(module) for name, module in stages.items()}

    seen: list[dict[str, Any]] = []
    everything = modules(root)
    expected = {name: closure(root, module) for name, module in stages.items()}
    whole = Code(root)
    differ = [name for name, module in stages.items() if set(whole.closure(module)) != expected[name]]
    before = digests()
    for name in random.Random(seed).sample(sorted(everything.keys() - doors(root).keys()), count):
        path, text = everything[name], everything[name].read_text()
        path.write_text(f"{ast.unparse(ast.parse(text))}\n# a comment\n")  # another layout, no comments
        same = digests() == before
        path.write_text(f"{text}\n_EDITED = {len(seen)}\n")
        after = digests()
        path.write_text(text)
        stale = sorted(stage for stage in stages if after[stage] != before[stage])
        wanted = sorted(stage for stage in stages if name in expected[stage])
        seen.append({"module": name, "same": same, "stale": stale, "wanted": wanted})
    print(json.dumps({"differ": differ, "edits": seen}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
