"""Docstrings of all packages: `Args` name parameters that there are; arrays have shapes."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ["mergeflow", "registry", "flows", "benchmarks", "tasks", "suites", "studies"]
_ONE = r"((torch\.)?Tensor|(np\.)?ndarray|NDArray\[.*\])"
ARRAY = re.compile(rf"{_ONE}( \| None)?|(tuple|list|Sequence)\[{_ONE}(, .*)?\]")
SHAPE = re.compile(r"\[[^\]]*\]")
# Words that became habits: names of values that do not say what a value is (variables, loop variables, parameters,
# functions), and docstrings that begin with "Return what". Lower a number when the count has fallen; never raise one.
# The tests have none.
BUDGET = {"found": 0, "one": 0, "own": 0, "known": 0, "told": 0, "kept": 2, "beside": 0, "Return what": 0}
# The same for what users read: the pages, and the packages' messages and helps.
READ = {"beside": 0, "stands?": 1, "told": 0}
REFERENCE = re.compile(r"^Args: As of `(\w+)`", re.MULTILINE)
ENTRY = re.compile(r"^    (\w+(?:, \w+)*):", re.MULTILINE)
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Known:
    """What the packages declare, so that it need not be said again at each use.

    Attributes:
        promises: names of methods that a protocol declares, with their parameters.
        documents: docstrings of functions, and of types of functions (`Name = Callable[…]`), by name.
    """

    promises: set[tuple[str, ...]] = field(default_factory=set)
    documents: dict[str, list[str]] = field(default_factory=dict)

    def add(self, tree: ast.Module) -> None:
        for name, node in functions(tree):
            self.documents.setdefault(name.rpartition(".")[2], []).append(ast.get_docstring(node) or "")
        for node, after in pairwise([*tree.body, ast.Pass()]):
            if isinstance(node, ast.Assign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                self.documents.setdefault(ast.unparse(node.targets[0]), []).append(str(after.value.value))
            if isinstance(node, ast.ClassDef) and any("Protocol" in ast.unparse(base) for base in node.bases):
                methods = [statement for statement in node.body if isinstance(statement, Function)]
                self.promises |= {(method.name, *(given.arg for given in parameters(method))) for method in methods}


def parameters(node: Function) -> list[ast.arg]:
    given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return [argument for argument in given if argument.arg not in ("self", "cls") and not argument.arg.startswith("_")]


def functions(tree: ast.Module) -> Iterator[tuple[str, Function]]:
    waiting: list[tuple[str, ast.stmt]] = [("", statement) for statement in tree.body]
    while waiting:
        prefix, node = waiting.pop()
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            waiting += [(f"{node.name}.", statement) for statement in node.body]
        elif isinstance(node, Function) and not node.name.startswith("_"):
            yield prefix + node.name, node


def explained(docstring: str) -> set[str]:
    body = re.split(r"^\S", docstring.partition("Args:\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    return {name for names in ENTRY.findall(body) for name in names.split(", ")}


def faults(tree: ast.Module, declared: Known) -> Iterator[str]:
    for name, node in functions(tree):
        given = parameters(node)
        types = [ast.unparse(argument.annotation) for argument in given if argument.annotation]
        text, promised = ast.get_docstring(node) or "", (name.rpartition(".")[2], *(argument.arg for argument in given))
        if promised in declared.promises and "." in name and not text:
            continue
        if reference := REFERENCE.search(text):
            names, there = {argument.arg for argument in given}, declared.documents.get(reference[1], [])
            if not (fitting := [docstring for docstring in there if names <= explained(docstring)]):
                yield f"{name} has the arguments of {reference[1]}, which does not explain {sorted(names)}"
            text += "\n".join(fitting)
        elif "Args:" in text:
            names, more = (
                {argument.arg for argument in given},
                {argument.arg for argument in (node.args.vararg, node.args.kwarg) if argument},
            )
            if not explained(text) <= names | more:
                yield f"{name} takes {sorted(names)}, but its Args are {sorted(explained(text))}"
        arrays = [
            annotation
            for annotation in [*types, ast.unparse(node.returns) if node.returns else ""]
            if ARRAY.fullmatch(annotation)
        ]
        if arrays and not SHAPE.search(text):
            yield f"{name} takes or returns an array and gives no shape"


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.Module]:
    files = [path.relative_to(ROOT) for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return {path: ast.parse((ROOT / path).read_text()) for path in files}


@pytest.fixture(scope="module")
def declared(trees: dict[Path, ast.Module]) -> Known:
    everything = Known()
    for tree in trees.values():
        everything.add(tree)
    return everything


def habits(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.ExceptHandler(name=name):
                names = [name]
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.Module():
                text = ast.get_docstring(node) or ""
                names = [words for words in BUDGET if " " in words and text.startswith(words)]
                names += [] if isinstance(node, ast.Module) else [node.name]
            case _:
                names = []
        yield from (name for name in names if name in BUDGET)


def test_words_that_became_habits_only_fall(trees: dict[Path, ast.Module]) -> None:
    counts = Counter(word for tree in trees.values() for word in habits(tree))
    over = {word: f"{counts[word]} of {limit}" for word, limit in BUDGET.items() if counts[word] > limit}
    assert not over, f"name values by what they are (scores, row, message, cached): {over}"


def test_the_tests_name_their_values_by_what_they_are() -> None:
    files = sorted([*(ROOT / "tests").rglob("*.py"), *(ROOT / "docs").glob("*.py")])
    uses = {path.relative_to(ROOT): sorted(set(habits(ast.parse(path.read_text())))) for path in files}
    assert {path: words for path, words in uses.items() if words} == {}


@pytest.mark.parametrize(
    "text",
    [
        "found = 1",
        "for found in x: pass",
        "[found for found in x]",
        "lambda found: 1",
        "def found(): ...",
        "def f(*, found=1): ...",
        "with x as found: pass",
        "try: ...\nexcept E as found: ...",
        "(a, *found), b = x",
        "if (found := x): ...",
    ],
)
def test_every_way_to_name_a_value_is_counted(text: str) -> None:
    assert list(habits(ast.parse(text))) == ["found"]


def messages(tree: ast.Module) -> Iterator[str]:
    documented = [node.body for node in ast.walk(tree) if isinstance(node, Function | ast.ClassDef | ast.Module)]
    docstrings = {id(body[0].value) for body in documented if body and isinstance(body[0], ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def test_what_users_read_has_no_habits_either(trees: dict[Path, ast.Module]) -> None:
    read_by_users = [path for path in trees if path.parts[0] in ("mergeflow", "registry", "flows", "tasks")]
    texts = {path: "\n".join(messages(trees[path])) for path in read_by_users}
    texts |= {path: path.read_text() for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]}
    for pattern, limit in READ.items():
        uses = [
            f"{path}: {line}" for path, text in texts.items() for line in re.findall(rf".*\b(?:{pattern})\b.*", text)
        ]
        assert len(uses) <= limit, "\n".join(uses)


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_function_says_what_it_takes(package: str, trees: dict[Path, ast.Module], declared: Known) -> None:
    read = [path for path in trees if path.parts[0] == package and path.parent.name != "studies"]  # nobody calls those
    assert read
    assert [f"{path}: {fault}" for path in read for fault in faults(trees[path], declared)] == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("def f(a, b): '''Add.\n\n    Args:\n        a: one.\n        d: two.\n    '''", "its Args are ['a', 'd']"),
        ("def f(a: Tensor): 'Return nothing.'", "gives no shape"),
        ("def f(a, b, c): '''Add.\n\n    Args: As of `unknown`.\n    '''", "unknown, which does not explain"),
    ],
)
def test_what_a_docstring_lacks_is_found(text: str, fault: str, declared: Known) -> None:
    (reported,) = faults(ast.parse(text), declared)
    assert fault in reported


def test_what_is_said_once_need_not_be_said_again() -> None:
    tree = ast.parse(
        "Paint = Callable[[int, int, int], np.ndarray]\n'''Paints.\n\nArgs:\n    a, b, c: ones [n].\n'''\n"
        "class P(Protocol):\n    def read(self, a, b, c): ...\n"
        "class A:\n    def read(self, a, b, c): ...\n"
        "def paint(a, b, c) -> np.ndarray: '''Paint.\n\n    Args: As of `Paint`.\n    '''\n"
    )
    declared = Known()
    declared.add(tree)
    assert list(faults(tree, declared)) == []
