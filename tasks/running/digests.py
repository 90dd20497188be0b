"""The stage `code`: one digest for each stage of the code that it depends on, every module that its imports reach.

A module counts by its syntax tree without comments, docstrings, layout and the texts of errors and log lines, so that
a better comment or message makes nothing stale. A file beside it that is not Python (an architecture, a vocabulary, a
page's template) counts by its bytes where the module has its name, or the name of its folder, as a string. A package's
`__init__` that only passes names on is a front door: what counts is the module behind each name that is used. What is
not ours (torch, the standard library) does not count: its versions are recorded with the results.

A digest may count as that of older code: a release has shown both to make the same bits, or a person has accepted the
older outputs.
"""

import ast
import getpass
import hashlib
import json
import re
import socket
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from mergeflow.application import HOME
from mergeflow.checkpoints.writer import write_atomically
from mergeflow.errors import MergeflowError
from mergeflow.layout import ACCEPTED, CODE
from mergeflow.plugins import entry_points
from mergeflow.training.settings import IterativeSettings
from tasks.project.files import read_yaml
from tasks.project.graph import load_graph, training_settings
from tasks.project.recorded import hash_once, sha256_of
from tasks.project.stage import CHOICES, RECORDS, STATE, Stage
from tasks.project.study_graph import read_study_file

RELEASES = Path(__file__).with_name("equivalent.yaml")
_ACCEPTED_HEAD = "# By `mergeflow accept`: whose outputs of older code count. Without its entry a stage runs again.\n"
_RELEASES_HEAD = "# By `mergeflow release check`: digests of code that was shown to make the same bits as older code.\n"


def of_older_code(root: Path, key: str, digest: str) -> str:
    """Return the digest of older code that a stage's digest counts as; itself where nobody accepted anything."""
    for entry in reversed(read_accepted(root)):
        if (entry["stage"], entry["code"]) == (key, digest):
            return str(entry["outputs_of"])
    return digest


def read_accepted(root: Path) -> list[dict[str, str]]:
    path = root / ACCEPTED
    entries = read_yaml(path) if path.exists() else []
    fields = {"stage", "code", "outputs_of", "who", "because", "date"}
    if not isinstance(entries, list) or not all(isinstance(entry, dict) and fields <= set(entry) for entry in entries):
        raise MergeflowError(f"{path} is not what `mergeflow accept` writes: a list of entries with {sorted(fields)}.")
    return entries


def accept(root: Path, codes: Mapping[str, tuple[str, str]], because: str, who: str = "") -> None:
    """Let outputs of older code count as they are, until the code of their stages changes again.

    Args:
        codes: by a stage's key, the digest of its code today and that of the code that made its outputs.
    """
    if not because.strip():
        raise MergeflowError("say why outputs of older code count: --because 'only a reader of Parquet changed'.")
    who = who or f"{getpass.getuser()}@{socket.gethostname()}"
    date = datetime.now(UTC).isoformat(timespec="seconds")
    entries = [entry for entry in read_accepted(root) if entry["stage"] not in codes]
    entries += [
        {"stage": key, "code": today, "outputs_of": older, "who": who, "because": because, "date": date}
        for key, (today, older) in codes.items()
    ]
    write_atomically(root / ACCEPTED, _ACCEPTED_HEAD + yaml.safe_dump(entries, sort_keys=False, allow_unicode=True))


@cache
def equivalents() -> dict[str, str]:
    """Return the digests of code that releases have shown to make the same bits as older code, with the oldest such."""
    table: dict[str, Any] = (read_yaml(RELEASES) if RELEASES.exists() else None) or {}
    return {str(new): str(old) for new, old in table.items()}


def write_equivalents(pairs: Mapping[str, str]) -> None:
    """Add what a release check has shown, by the new digest the older one, to the table that releases carry."""
    before = equivalents()
    table = before | {new: before.get(old, old) for new, old in pairs.items() if new != old}
    write_atomically(RELEASES, _RELEASES_HEAD + yaml.safe_dump(table))
    equivalents.cache_clear()


CODE_STAGE = "code"
_ROUNDS = ("tasks.rounds", "studies.lab.rounds")  # imported by the regime `iterative` alone, where it begins
_SWEEP = "tasks.sweep"
_MERGE = IterativeSettings.model_fields["merge"].default
_HEAD = "# By `mergeflow stage digests`: what the code means that each stage depends on.\n"


def code_digest(root: Path, stage: Stage, read: Callable[[Path], Any] = read_yaml) -> str:
    """Return the digest that decides whether a stage is stale: of its code, or of older code that counts the same."""
    return of_older_code(root, digest_key(stage), strict_digest(root, stage, read))


def digest_key(stage: Stage) -> str:
    """Return the key of a stage's digest of code, as dvc.yaml names it: `finetune`, `sweep.ties`."""
    return f"{stage.name}.{stage.item}" if stage.digest_by_item else stage.name


def strict_digest(root: Path, stage: Stage, read: Callable[[Path], Any] = read_yaml) -> str:
    """Return the digest of the code that a stage depends on with the project's choices.

    Code that a release has shown to make the same bits as older code has the digest of the older one.

    Only training in rounds merges, by one method. In every other regime a new merge method, or a change of one, trains
    nothing again; in this one, as in the sweep of a method, only a change of that method counts. Where a run takes
    experts that somebody published, or a study names checkpoints of its own, their files count by their bytes: one
    that is replaced is taken anew.
    """
    code = code_of(root, _methods(root, stage, read)).digest(stage.module, stage.outs, _unused(stage))
    code = equivalents().get(code, code)
    files = _published(root, stage, read)
    lines = [f"{name} {hash_once(path, sha256_of)}" for name, path in files.items()]
    return hashlib.sha256("\n".join([code, *lines]).encode()).hexdigest()[:LENGTH] if files else code


def code_files(root: Path, stage: Stage) -> set[Path]:
    """Return the files of code that the digest of a stage is made of, and those beside them that are not Python."""
    code = code_of(root, _methods(root, stage, read_yaml))
    modules = code.closure(stage.module, _unused(stage))
    return {*modules.values(), *(file for name, path in modules.items() for file in code.data_files(name, path))}


def _unused(stage: Stage) -> tuple[str, ...]:
    return () if stage.regime == "iterative" else _ROUNDS


def _published(root: Path, stage: Stage, read: Callable[[Path], Any]) -> dict[str, Path]:
    """Return the files of checkpoints that a stage's choices name, by their names; a checkpoint may be a folder."""
    checkpoints = {name: [root / name, *sorted((root / name).rglob("*"))] for name in _checkpoints(root, stage, read)}
    return {
        f"{name} {path.relative_to(root / name)}": path
        for name, paths in checkpoints.items()
        for path in paths
        if path.is_file()
    }


def _checkpoints(root: Path, stage: Stage, read: Callable[[Path], Any]) -> Iterable[str]:
    """Return the checkpoints that a run takes instead of training, or those that a study names itself."""
    choices = (root / stage.file).with_name("params.yaml")
    if not choices.exists():
        return ()
    if stage.is_study:
        section = (read(choices).get("studies") or {}).get(stage.name) or {}
        return [name.removeprefix("text:") for name in _strings([section.get("checkpoints")])]
    if not stage.digest_by_item:
        return ()
    common = read(root / "params.yaml")
    run = training_settings(stage, read(choices), common) or {}
    if not (pattern := run.get("checkpoints")):
        return ()
    tasks, seeds = list(common["tasks"])[: run.get("tasks")], read(choices)["seeds"][: run.get("seeds")]
    return dict.fromkeys(pattern.format(task=task, seed=seed) for seed in seeds for task in tasks)


def _methods(root: Path, stage: Stage, read: Callable[[Path], Any]) -> frozenset[str] | None:
    """Return the merge methods that a stage may use, among the strings of its settings; None: any."""
    common = root / "params.yaml"
    if stage.regime == "iterative":
        settings = training_settings(stage, read((root / stage.file).with_name("params.yaml")), read(common)) or {}
        rounds = settings.get("iterative") or {}
        return frozenset({rounds.get("merge", _MERGE), *_strings((rounds.get("args") or {}).values())})
    if stage.module == _SWEEP and stage.digest_by_item:
        return frozenset({str(stage.item), *_strings((read(common)["sweep"].get(stage.item) or {}).values())})
    return None


def _strings(values: Iterable[Any]) -> Iterator[str]:
    for value in values:
        if isinstance(value, dict | list):
            yield from _strings(value.values() if isinstance(value, dict) else value)
        elif isinstance(value, str):
            yield value


def stage_digests(root: Path) -> dict[str, str | dict[str, str]]:
    """Return the digest of the code behind each stage of the project, by the stage's name.

    Where the items of a stage have regimes of their own, which are the studies' training runs, each has its digest.
    """
    if (root / CHOICES).exists():
        read_study_file(root / CHOICES)
    digests: dict[str, str | dict[str, str]] = {}
    read = cache(read_yaml)
    homes: dict[str, str] = {}
    for stage in load_graph(root, studies=True).values():
        if homes.setdefault(stage.name, stage.file) != stage.file:
            raise MergeflowError(
                f"two stages are named '{stage.name}', in {homes[stage.name]} and {stage.file}: rename one."
            )
        if stage.digest_by_item:
            items = digests.setdefault(stage.name, {})
            assert isinstance(items, dict)
            items[str(stage.item)] = code_digest(root, stage, read)
        elif stage.name not in digests:
            digests[stage.name] = code_digest(root, stage, read)
    return dict(sorted(digests.items()))


def write_digests(root: Path) -> None:
    """Write `outputs/code.yaml`; a file that says the same already is not touched."""
    text = _HEAD + yaml.safe_dump(stage_digests(root))
    path = root / CODE
    if not path.exists() or path.read_text("utf-8") != text:
        write_atomically(path, text)


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
    tree = ast.parse(text)
    _leave_out_what_means_nothing(tree)
    _empty_messages(tree)
    nodes = list(ast.walk(tree))  # once: to walk a tree takes longer than to parse it
    bound = dict(_bindings(nodes, package))
    reached = {name for node in nodes if isinstance(node, ast.Attribute) and (name := _dotted(node, bound))}
    whole = {name[: match.start()] for name in reached if (match := re.search(r"[.:]__(path|name)__$", name))}
    shelves = [*_made(nodes, "Shelf", {"package": 2, "folder": 3})]
    whole |= {package for package, _ in shelves if package}
    strings = set(_names_in(nodes))
    modules = {text for text in strings if "." in text and all(part.isidentifier() for part in text.split("."))}
    names = {*bound.values(), *_plain_imports(nodes), *modules, *reached}
    meaning = hashlib.sha256("".join(_words(tree)).encode("utf-8", "surrogatepass")).hexdigest()
    exports = _exports(tree, bound) if is_package else None
    folders = sorted(folder for _, folder in shelves)
    parts = sorted(_made(nodes, "Parts", {"package": 2, "folder": 3, "part": 4}))
    methods = sorted(name for (name,) in _made(nodes, "method", {"name": 0}) if name)
    return Source(meaning, sorted(names), sorted(whole), sorted(strings), folders, parts, methods, exports)


def meaning_of_functions(text: bytes) -> dict[str, str]:
    """Return the meaning of each function by its qualified name, and of all that is outside as `<module>`."""
    tree = ast.parse(text)
    _leave_out_what_means_nothing(tree)
    _empty_messages(tree)
    meanings: dict[str, str] = {}
    waiting: list[tuple[str, ast.Module | ast.ClassDef]] = [("", tree)]
    while waiting:
        prefix, block = waiting.pop()
        for node in block.body:
            if isinstance(node, ast.ClassDef):
                waiting.append((f"{prefix}{node.name}.", node))
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                meanings[f"{prefix}{node.name}"] = "".join(_words(node.body))
                node.body = []
    return meanings | {"<module>": "".join(_words(tree))}


def _leave_out_what_means_nothing(tree: ast.Module) -> None:
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list):
                setattr(node, field, [remaining for statement in block for remaining in _meant(statement)])


def _meant(statement: ast.stmt) -> list[ast.stmt]:
    """Return the rest of a statement: nothing of a docstring or `pass`, the `else` of `if TYPE_CHECKING`."""
    if isinstance(statement, ast.Pass):
        return []
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return []
    if isinstance(statement, ast.If) and _last_name(statement.test) == "TYPE_CHECKING":
        return [remaining for inner in statement.orelse for remaining in _meant(inner)]
    return [statement]


def _empty_messages(tree: ast.Module) -> None:
    """Empty the texts that only people read: a corrected message in a reader must not train every expert again."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert) and node.msg and _is_text(node.msg):
            node.msg = ast.Constant("")
        elif isinstance(node, ast.Call) and _says(node):
            node.args = [ast.Constant("") if _is_text(argument) else argument for argument in node.args]


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


def _words(node: Any, words: list[str] | None = None) -> list[str]:
    """Return the syntax tree as text that is the same for every version of Python: empty fields are left out."""
    words = [] if words is None else words
    if isinstance(node, ast.AST):
        words.append(type(node).__name__ + "(")
        for name in node._fields:
            value = getattr(node, name, None)
            if name not in ("ctx", "kind", "type_comment") and value not in _EMPTY:
                words.append(name + "=")
                _words(value, words)
        words.append(")")
    elif isinstance(node, list):
        words.append("[")
        for child in node:
            _words(child, words)
        words.append("]")
    else:
        words.append(repr(node) + ",")
    return words


def _bindings(nodes: list[ast.AST], package: str) -> Iterator[tuple[str, str]]:
    """Yield the names that imports bind, wherever they stand, each with what is behind it."""
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield (alias.asname, alias.name) if alias.asname else (alias.name.split(".")[0],) * 2
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join(filter(None, [*above, node.module]))
            for alias in node.names:
                yield alias.asname or alias.name, module if alias.name == "*" else f"{module}:{alias.name}"


def _plain_imports(nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def _names_in(nodes: list[ast.AST]) -> Iterator[str]:
    """Yield the strings that may be names: of a module, a file or a folder."""
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"[\w.-]{3,80}", node.value):
            yield node.value


def _made(nodes: list[ast.AST], name: str, wanted: dict[str, int]) -> Iterator[list[str]]:
    """Yield wanted arguments, by name or position, of each call that makes a `name`; "" where one is not a string."""
    for node in nodes:
        if isinstance(node, ast.Call) and _last_name(node.func) == name:
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            placed = dict(enumerate(node.args))
            values = [given.get(argument, placed.get(place)) for argument, place in wanted.items()]
            if None not in values:  # else something else of that name
                yield [str(value.value or "") if isinstance(value, ast.Constant) else "" for value in values]


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
    """Return the names that a front door passes on: by `from … import`, or by `__getattr__` over a table."""
    exports, lazy = dict(bound), any(_defined(statement) == "__getattr__" for statement in tree.body)
    for statement in tree.body:
        if _defined(statement) in ("__getattr__", "__dir__"):
            continue
        if isinstance(statement, ast.Assign) and (value := _literal(statement.value)) is not None:
            if _last_name(statement.targets[0]) == "__all__":
                continue
            if lazy and isinstance(value, dict):
                exports |= {name: f"{home}:{name}" for name, home in value.items()}
                continue
        if not isinstance(statement, ast.Import | ast.ImportFrom):
            return None
    return exports


def _defined(statement: ast.stmt) -> str:
    if isinstance(statement, ast.FunctionDef):
        return statement.name
    return _last_name(statement.targets[0]) if isinstance(statement, ast.Assign) else ""


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


ALWAYS = "tasks.running.determinism"  # decides the bits of every stage, although no stage imports it
RULES = "2"  # which rules made a digest; part of each
LENGTH = 16
MEMORY = "code.json"  # in a project's state: what files have said
MOST = 3000  # files that are remembered, some 700 bytes each


class Code:
    """The modules of a project as they are when they are first asked for: what a process runs does not change later.

    Args:
        root: the project folder. It may hold modules of its own; below it is kept what files have said.
        chosen: by the folder of packages found by name, the one that counts, as {"modalities": "vision"}; of a folder
            that is not named all count.
    """

    def __init__(
        self, root: Path, chosen: Mapping[str, str] | None = None, methods: Collection[str] | None = None
    ) -> None:
        self._root = root
        self._chosen = dict(chosen or {})
        self._methods = methods
        self._ours = {"mergeflow"}
        self._next: dict[str, list[str]] = {}
        self._paths: dict[str, Path | None] = {}
        self._sources: dict[str, Source] = {}
        self._others: dict[Path, dict[Path, set[str]]] = {}
        self._memory = _memory(root / STATE / MEMORY)

    def digest(self, module: str, made: Iterable[str] = (), unused: Collection[str] = ()) -> str:
        """Return the digest of the code that `module` depends on.

        Args:
            made: paths relative to the project that are not code, even where they lie beside it: the stage's outputs.
            unused: modules that do not count, nor what they alone reach: imported inside functions that are not called.
        """
        reached, outputs = self.closure(module, unused), {(self._root / out).resolve() for out in made}
        files = {(name, path) for name, at in reached.items() for path in self.data_files(name, at)}
        lines = [f"{name} {self._source(name).meaning}" for name in reached]
        lines += [
            f"{name} {path.name} {hash_once(path, sha256_of)}" for name, path in files if path.resolve() not in outputs
        ]
        self._memory.write()
        return hashlib.sha256("\n".join([RULES, *sorted(lines)]).encode()).hexdigest()[:LENGTH]

    def closure(self, module: str, unused: Collection[str] = ()) -> dict[str, Path]:
        """Return the file of every module that counts for `module`, by its dotted name, in alphabetical order."""
        files: dict[str, Path] = {}
        # With a file of the project's own counts the rest of its folder, which it may import relatively.
        neighbours = [*self._files(str(Path(module).parent))] if module.endswith(".py") else []
        seen, queue = set(unused), [module, *neighbours, ALWAYS]
        if module.endswith(".py") and module not in neighbours:
            raise MergeflowError(f"{module} is missing, which a stage runs. Bring it back, or remove that stage.")
        if not self._path(module):
            raise MergeflowError(
                f"a stage of this project's dvc.yaml runs {module}, which this version of mergeflow does not have: "
                "take that stage out, or compare with the dvc.yaml that `mergeflow new` writes into an empty folder."
            )
        while queue:
            name = queue.pop()
            if name not in seen:
                seen.add(name)
                path = self._path(name)
                if path and self._source(name).exports is None:
                    files[name] = path
                    queue += self._reached(name)
        return dict(sorted(files.items()))

    def data_files(self, name: str, path: Path) -> Iterator[Path]:
        """Yield the files beside a module, down to the next package, whose name or folder is one of its strings."""
        strings = set(self._source(name).strings)
        folder = path.parent
        if folder not in self._others and folder != self._root:
            self._others[folder] = {file: {*file.relative_to(folder).parts} for file in _other_files(folder)}
        yield from (file for file, names in self._others.get(folder, {}).items() if strings & names)

    def _reached(self, name: str) -> list[str]:
        """Return the modules that one module's imports, and what it finds by name, lead to."""
        if name not in self._next:
            source = self._source(name)
            modules = {module for target in source.names for module in self._behind(target)}
            packaged = {module for target in source.whole for module in self._below(target)}
            outside = {module for folder in source.shelves for module in self._outside(folder)}
            modules |= self._counting(packaged, outside) if "methods" in source.shelves else packaged | outside
            modules |= {module for parts in source.parts for module in self._parts(*parts)}
            stems = (text[:-3] for text in source.strings if text.endswith(".py"))  # code that is read as a file
            modules |= {sibling for stem in stems if self._path(sibling := f"{name.rpartition('.')[0]}.{stem}")}
            self._next[name] = sorted(modules)
        return self._next[name]

    def _counting(self, packaged: Collection[str], outside: Collection[str]) -> set[str]:
        """Return the modules of a shelf that declare the merge methods that count, and those that such modules name.

        Helpers that declare none are reached by imports. What lies outside our package counts whole or not at all.
        """
        if self._methods is None:
            return {*packaged, *outside}
        homes = {method: module for module in packaged for method in self._source(module).methods}
        declared = {method for module in outside for method in self._source(module).methods}
        names, counting = set(self._methods), set[str]()
        if names & declared or not names & homes.keys():
            counting = set(outside)
            names |= {text for module in outside for text in self._source(module).strings}
        while more := {homes[name] for name in names & homes.keys()} - counting:
            counting |= more
            names = {text for module in more for text in self._source(module).strings}
        return counting

    def _behind(self, name: str) -> Iterator[str]:
        """Yield the modules that `module` or `module:name.name` leads through."""
        module, _, attributes = name.partition(":")
        if self._is_ours(module.partition(".")[0]):
            parts = module.split(".")
            yield from (parent for end in range(len(parts)) if self._path(parent := ".".join(parts[: end + 1])))
            yield from self._behind_attributes(module, attributes) if self._path(module) else ()

    def _behind_attributes(self, module: str, attributes: str) -> Iterator[str]:
        """Yield the modules behind `module.name.name`, in Python's order: a package's own name, then its file."""
        for name in filter(None, attributes.split(".")):
            target = (self._source(module).exports or {}).get(name)
            if target is not None:
                yield from self._behind(target)
                return
            module = f"{module}.{name}"
            if not self._path(module):
                return
            yield module

    def _below(self, name: str) -> Iterator[str]:
        """Yield every module of a package of ours, at any depth; nothing if the name is not a package's."""
        package = name.replace(":", ".")
        path = self._path(package) if self._is_ours(package.partition(".")[0]) and "." in package else None
        if path and path.name == "__init__.py":
            for file in sorted(path.parent.rglob("*.py")):
                parts = file.relative_to(path.parent).with_suffix("").parts
                module = ".".join([package, *(parts[:-1] if parts[-1] == "__init__" else parts)])
                if self._path(module) == file:
                    yield module

    def _outside(self, folder: str) -> Iterator[str]:
        """Yield the modules of a shelf outside its package: files in the project's folder, installed packages."""
        yield from self._files(folder)
        for point in entry_points(f"mergeflow.{folder}"):
            self._ours.add(point.module.partition(".")[0])
            yield from self._behind(point.module)

    def _parts(self, package: str, folder: str, part: str) -> Iterator[str]:
        """Yield the module `part` of each package found by name: of ours, installed, in the project's folder."""
        home, in_project = self._path(package), self._root / folder
        assert home, f"there is no package {package}"
        homes = [(path.parent.name, f"{package}.{path.parent.name}") for path in home.parent.glob("*/__init__.py")]
        for point in entry_points(f"mergeflow.{folder}"):
            self._ours.add(point.value.partition(".")[0])
            homes.append((point.name, point.value))
        for path in sorted(in_project.glob("[!_.]*/__init__.py")):
            homes.append((path.parent.name, f"{folder}.{path.parent.name}"))
            self._ours.add(folder)
            # Names as if the project's folder were a package: so relative imports inside it are followed.
            for file in path.parent.rglob("*.py"):
                parts = file.relative_to(self._root).with_suffix("").parts
                self._paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
        packages = [package for name, package in homes if self._chosen.get(folder, name) == name]
        yield from (module for package in packages for module in self._behind(f"{package}.{part}"))

    def _files(self, folder: str) -> Iterator[str]:
        """Yield every Python file in a folder of the project and below it."""
        for path in sorted((self._root / folder).rglob("*.py")):
            name = path.relative_to(self._root).as_posix()
            self._paths[name] = path
            yield name

    def _is_ours(self, package: str) -> bool:
        """Whether code of this package counts: ours, the project's own, or one whose entry points we load."""
        if package not in self._ours and package not in sys.stdlib_module_names:
            path = self._path(package)
            if path is not None and {self._root, HOME} & {path.parent, path.parent.parent}:
                self._ours.add(package)
        return package in self._ours

    def _path(self, name: str) -> Path | None:
        """Return the file of a module; None if there is none or it is not Python."""
        if name not in self._paths:
            package, _, last = name.rpartition(".")
            self._paths[name] = self._path_in(self._path(package), last) if package else _top(name)
        return self._paths[name]

    @staticmethod
    def _path_in(package: Path | None, last: str) -> Path | None:
        if package is None or package.name != "__init__.py":
            return None
        candidates = (package.parent / last / "__init__.py", package.parent / f"{last}.py")
        return next((path for path in candidates if path.is_file()), None)

    def _source(self, name: str) -> Source:
        if name not in self._sources:
            path = self._path(name)
            assert path, f"there is no module {name}"
            self._sources[name] = self._memory.source(path, name)
        return self._sources[name]


@cache
def code_of(root: Path, methods: frozenset[str] | None = None) -> Code:
    """Return the code of a project as this process has it; of the modalities the one of its params.yaml counts."""
    choices = root / "params.yaml"
    modality = (read_yaml(choices).get("model") or {}).get("modality") if choices.exists() else None
    return Code(root, {"modalities": modality} if modality else {}, methods)


class _Memory:
    """What files have said, by their content: to read the syntax of all takes seconds, to look it up a hundredth."""

    def __init__(self, path: Path) -> None:
        self._path, self._is_new = path, False
        self._used: dict[str, Source] = {}

    @cached_property
    def _known(self) -> dict[str, Source]:
        try:
            return {key: Source(**source) for key, source in json.loads(self._path.read_text()).items()}
        except (OSError, ValueError, TypeError):  # none yet, or of another version: read the files again
            return {}

    def source(self, path: Path, name: str) -> Source:
        is_package, text = path.name == "__init__.py", path.read_bytes()
        package = name if is_package else name.rpartition(".")[0]
        rules = hash_once(Path(__file__), sha256_of)
        key = hashlib.sha256(f"{rules} {package} {is_package} ".encode() + text).hexdigest()
        if key not in self._known:
            self._is_new = True
            try:
                self._known[key] = read_source(text, package, is_package)
            except (SyntaxError, ValueError) as error:
                raise MergeflowError(f"{path} is not Python: {error}.") from error
        self._used[key] = self._known[key]
        return self._used[key]

    def write(self) -> None:
        """Keep what is known, if some of it is new; of very much only what this process has used."""
        if self._is_new:
            self._is_new = False
            remembered = self._known if len(self._known) < MOST else self._used
            write_atomically(self._path, json.dumps({key: vars(source) for key, source in remembered.items()}))


@cache
def _memory(path: Path) -> _Memory:
    return _Memory(path)


def _top(name: str) -> Path | None:
    try:
        spec = find_spec(name)
    except ValueError:  # `__main__`
        return None
    return Path(spec.origin) if spec and spec.origin and spec.origin.endswith(".py") else None


def _other_files(folder: Path) -> Iterator[Path]:
    """Yield the files in a package's folder that are not Python, down to the next package; records are no code."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith((".", "__pycache__")) or path.suffix in (".py", ".pyc") or path.match(RECORDS):
            continue
        if path.is_file():
            yield path
        elif path.is_dir() and not (path / "__init__.py").exists():
            yield from _other_files(path)
