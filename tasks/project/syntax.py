"""What one Python file says: the digest of what it means, and the dotted names that it reaches. Nothing is imported."""

import ast
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_EMPTY: tuple[Any, ...] = (None, [], ())
_LOGGERS = ("logging", "logger", "log")
_LEVELS = ("debug", "info", "warning", "error", "exception", "critical")


@dataclass(frozen=True)
class Source:
    """What one Python file says.

    Attributes:
        meaning: SHA-256 of its syntax tree without comments, docstrings, layout, imports for type checkers and the
            texts of errors, warnings and log lines.
        names: what it imports, reaches through an import, or has as a string: `module`, or `module:name.name`.
        whole: whose `__path__` or `__name__` it reads, and the packages of a `Shelf` that it makes: the modules of such
            a package are found by name.
        strings: its strings that may be names of files and folders beside it.
        shelves: folders of the project, and groups of entry points, where a `Shelf` that it makes looks for more.
        parts: package, folder and part of every `Parts` that it makes: modules PART of packages found by name.
        methods: the merge methods that it declares, `@method("name", …)`.
        exports: what is behind each name, if the file only passes names on (a package's front door); else None.
    """

    meaning: str
    names: list[str]
    whole: list[str]
    strings: list[str]
    shelves: list[str]
    parts: list[list[str]]
    methods: list[str]
    exports: dict[str, str] | None


def read_source(text: bytes, package: str, is_package: bool = False) -> Source:
    """Return what a Python file says.

    Args:
        text: the file.
        package: the dotted name of the package that its relative imports start from.
        is_package: whether it is an `__init__.py`, which alone can be a front door.

    Raises:
        SyntaxError: it is not Python.
    """
    tree = ast.parse(text)
    _leave_out_what_means_nothing(tree)
    _empty_messages(tree)
    bound = dict(_bindings(tree, package))
    reached = {name for node in ast.walk(tree) if isinstance(node, ast.Attribute) and (name := _dotted(node, bound))}
    whole = {name[: match.start()] for name in reached if (match := re.search(r"[.:]__(path|name)__$", name))}
    shelves = [*_made(tree, "Shelf", {"package": 2, "folder": 3})]
    whole |= {package for package, _ in shelves if package}
    strings = set(_strings(tree))
    modules = {text for text in strings if "." in text and all(part.isidentifier() for part in text.split("."))}
    names = {*bound.values(), *_plain_imports(tree), *modules, *reached}
    meaning = hashlib.sha256("".join(_words(tree)).encode("utf-8", "surrogatepass")).hexdigest()
    exports = _exports(tree, bound) if is_package else None
    folders = sorted(folder for _, folder in shelves)
    parts = sorted(_made(tree, "Parts", {"package": 2, "folder": 3, "part": 4}))
    methods = sorted(_methods(tree))
    return Source(meaning, sorted(names), sorted(whole), sorted(strings), folders, parts, methods, exports)


def meaning_of_functions(text: bytes) -> dict[str, str]:
    """Return what each function and method means, by its qualified name, and under `<module>` all that is outside."""
    tree = ast.parse(text)
    _leave_out_what_means_nothing(tree)
    _empty_messages(tree)
    found: dict[str, str] = {}
    waiting: list[tuple[str, ast.Module | ast.ClassDef]] = [("", tree)]
    while waiting:
        prefix, block = waiting.pop()
        for node in block.body:
            if isinstance(node, ast.ClassDef):
                waiting.append((f"{prefix}{node.name}.", node))
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found[f"{prefix}{node.name}"] = "".join(_words(node.body))
                node.body = []
    return found | {"<module>": "".join(_words(tree))}


def _leave_out_what_means_nothing(tree: ast.Module) -> None:
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list):
                setattr(node, field, [kept for one in block for kept in _meant(one)])


def _meant(statement: ast.stmt) -> list[ast.stmt]:
    """Return what is left of a statement: nothing of a docstring or `pass`, the `else` of `if TYPE_CHECKING`."""
    if isinstance(statement, ast.Pass):
        return []
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return []
    if isinstance(statement, ast.If) and _last_name(statement.test) == "TYPE_CHECKING":
        return [kept for one in statement.orelse for kept in _meant(one)]
    return [statement]


def _empty_messages(tree: ast.Module) -> None:
    """Empty the texts that only people read: a corrected message in a reader must not train every expert again."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert) and node.msg and _is_text(node.msg):
            node.msg = ast.Constant("")
        elif isinstance(node, ast.Call) and _says(node):
            node.args = [ast.Constant("") if _is_text(one) else one for one in node.args]


def _says(call: ast.Call) -> bool:
    """Whether a call makes an error or a warning, logs, or prints to the terminal (a `file` could be a result)."""
    name = _last_name(call.func)
    if name.endswith(("Error", "Exception", "Warning")) or (name == "warn" and isinstance(call.func, ast.Attribute)):
        return True
    if name in ("print", "echo"):
        return not any(keyword.arg in ("file", None) for keyword in call.keywords)
    home = _last_name(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    return name in _LEVELS and home.lower().strip("_") in _LOGGERS


def _is_text(node: ast.expr) -> bool:
    """Whether an argument is a sentence. A single word may be a key that somebody reads again: it counts."""
    if any(isinstance(inner, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom) for inner in ast.walk(node)):
        return False
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _is_text(node.left) or _is_text(node.right)
    if isinstance(node, ast.IfExp):
        return _is_text(node.body) and _is_text(node.orelse)
    if isinstance(node, ast.JoinedStr):
        return any(isinstance(part, ast.Constant) and " " in str(part.value) for part in node.values)
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _words(node: Any) -> Iterator[str]:
    """Yield the syntax tree as text that is the same for every version of Python: empty fields are left out."""
    if isinstance(node, ast.AST):
        yield type(node).__name__ + "("
        for name in node._fields:
            value = getattr(node, name, None)
            if name not in ("ctx", "kind", "type_comment") and value not in _EMPTY:
                yield name + "="
                yield from _words(value)
        yield ")"
    elif isinstance(node, list):
        yield "["
        for one in node:
            yield from _words(one)
        yield "]"
    else:
        yield repr(node) + ","


def _bindings(tree: ast.Module, package: str) -> Iterator[tuple[str, str]]:
    """Yield the names that imports bind, wherever they stand, each with what is behind it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield (alias.asname, alias.name) if alias.asname else (alias.name.split(".")[0],) * 2
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join(filter(None, [*above, node.module]))
            for alias in node.names:
                yield alias.asname or alias.name, module if alias.name == "*" else f"{module}:{alias.name}"


def _plain_imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def _strings(tree: ast.Module) -> Iterator[str]:
    """Yield the strings that may be names: of a module, a file or a folder."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"[\w.-]{3,80}", node.value):
            yield node.value


def _made(tree: ast.Module, name: str, wanted: dict[str, int]) -> Iterator[list[str]]:
    """Yield wanted arguments, by name or position, of each call that makes a `name`; "" where one is not a string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _last_name(node.func) == name:
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            placed = dict(enumerate(node.args))
            values = [given.get(argument, placed.get(place)) for argument, place in wanted.items()]
            if None not in values:  # else something else of that name
                yield [str(value.value or "") if isinstance(value, ast.Constant) else "" for value in values]


def _methods(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _last_name(node.func) == "method" and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield name.value


def _dotted(node: ast.Attribute, bound: dict[str, str]) -> str | None:
    parts: list[str] = []
    inner: ast.expr = node
    while isinstance(inner, ast.Attribute):
        parts.append(inner.attr)
        inner = inner.value
    if isinstance(inner, ast.Name) and inner.id in bound:
        home, attributes = bound[inner.id], ".".join(reversed(parts))
        return f"{home}.{attributes}" if ":" in home else f"{home}:{attributes}"
    return None


def _exports(tree: ast.Module, bound: dict[str, str]) -> dict[str, str] | None:
    """Return what a front door passes on: by `from … import`, or by `__getattr__` over a table of names and homes."""
    found, lazy = dict(bound), any(_defined(one) == "__getattr__" for one in tree.body)
    for statement in tree.body:
        if _defined(statement) in ("__getattr__", "__dir__"):
            continue
        if isinstance(statement, ast.Assign) and (value := _literal(statement.value)) is not None:
            if _last_name(statement.targets[0]) == "__all__":
                continue
            if lazy and isinstance(value, dict):
                found |= {name: f"{home}:{name}" for name, home in value.items()}
                continue
        if not isinstance(statement, ast.Import | ast.ImportFrom):
            return None
    return found


def _defined(statement: ast.stmt) -> str:
    """Return the name that a function or an assignment gives; "" of other statements."""
    if isinstance(statement, ast.FunctionDef):
        return statement.name
    return _last_name(statement.targets[0]) if isinstance(statement, ast.Assign) else ""


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None
