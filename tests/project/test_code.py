"""The code that a stage depends on is what its imports reach, and its digest is of what that code means."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.project.code import Code
from tasks.project.graph import load_graph
from tasks.project.syntax import read_source
from tests.project import import_closure

ROOT = Path(__file__).parents[2]
MODULES = {stage.name: stage.module for stage in load_graph(ROOT, studies=True).values()}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copy")
    for name in import_closure.OURS:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def stale_after(copy: Path, path: str, added: bytes = b"_EDITED = 1\n") -> set[str]:
    """Return the stages whose digest changes when a file of the copy grows; that is undone afterwards."""
    script = (
        "import json, sys; from pathlib import Path; from tasks.project.code import Code\n"
        "code = Code(Path(sys.argv[1]))\n"
        "print(json.dumps({name: code.digest(module) for name, module in json.loads(sys.argv[2]).items()}))"
    )

    def digests() -> dict[str, str]:
        command = [sys.executable, "-c", script, str(copy), json.dumps(MODULES)]
        done = subprocess.run(command, cwd=copy, env={"PYTHONPATH": str(copy)}, capture_output=True, check=True)
        return json.loads(done.stdout)  # type: ignore[no-any-return]

    before, text = digests(), (copy / path).read_bytes()
    (copy / path).write_bytes(text + added)
    after = digests()
    (copy / path).write_bytes(text)
    return {name for name in MODULES if after[name] != before[name]}


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_random_edits_make_stale_what_imports_them_and_comments_nothing(copy: Path, seed: int) -> None:
    count = 25 if seed == 1 else 200
    command = [sys.executable, import_closure.__file__, str(copy), json.dumps(MODULES), str(seed), str(count)]
    done = subprocess.run(command, cwd=copy, env={"PYTHONPATH": str(copy)}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert len(seen) == count
    assert {edit["module"]: edit["stale"] for edit in seen} == {edit["module"]: edit["wanted"] for edit in seen}
    assert [edit["module"] for edit in seen if not edit["same"]] == []
    assert any(edit["stale"] for edit in seen)


def test_every_stage_counts_what_compiled_code_imports() -> None:
    code = Code(ROOT)
    for name, module in MODULES.items():
        assert set(code.closure(module)) == import_closure.closure(ROOT, module), name


def test_what_decides_every_accuracy_makes_stale_whoever_judges(copy: Path) -> None:
    stale = stale_after(copy, "mergeflow/modalities/classification.py")
    assert {"multitask", "finetune", "sweep", "select", "evaluate", "train", "mima"} <= stale
    assert not {"figures", "prepare"} & stale
    stale = stale_after(copy, "tasks/models.py")
    assert {"multitask", "finetune", "sweep", "select", "evaluate", "vectors", "train", "mima"} <= stale
    assert not {"prepare", "figures"} & stale


def test_a_drawing_of_the_suite_trains_nothing_again(copy: Path) -> None:
    stale = stale_after(copy, "mergeflow/suites/drawn/digits.py")
    assert "prepare" in stale
    assert not {"base", "finetune", "multitask", "sweep", "select", "evaluate", "train", "register"} & stale


def test_data_beside_code_count_for_whoever_names_them(copy: Path) -> None:
    stale = stale_after(copy, "mergeflow/modalities/vision/tokenizer/vocabulary.txt")
    assert "base" in stale
    assert not {"figures", "prepare"} & stale
    assert stale_after(copy, "tasks/project/new_readme.md") == set()


def test_every_file_that_is_not_python_is_named_by_a_module_beside_it() -> None:
    code = Code(ROOT)
    named = {file for name, path in import_closure.modules(ROOT).items() for file in code.data_files(name, path)}
    listed = subprocess.run(
        ["git", "ls-files", *import_closure.OURS], cwd=ROOT, capture_output=True, text=True, check=True
    )
    templates = ("/params.yaml", "py.typed")  # of new projects: no stage reads them
    others = {ROOT / name for name in listed.stdout.split() if not name.endswith((".py", *templates))}
    assert others - named == set()


def test_a_stages_own_outputs_are_not_its_code() -> None:
    assets = "mergeflow/modalities/vision/assets/pocket8-base.safetensors"
    assert Code(ROOT).digest("tasks.base", [assets]) != Code(ROOT).digest("tasks.base")


def test_the_same_code_has_the_same_digest_in_every_project(tmp_path: Path) -> None:
    here, there = Code(ROOT), Code(tmp_path)
    assert {name: here.digest(module) for name, module in MODULES.items()} == {
        name: there.digest(module) for name, module in MODULES.items()
    }


def test_code_of_the_project_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_stage.py").write_text("from own_help import add\nfrom mergeflow.merging import configure\n")
    (tmp_path / "own_help.py").write_text("def add(a, b): return a + b\n")
    (tmp_path / "methods").mkdir()
    (tmp_path / "methods/mine.py").write_text("import mergeflow.errors\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = Code(tmp_path).closure("own_stage")
    assert {"own_stage", "own_help", "methods/mine.py", "mergeflow.merging.methods.ties"} <= found.keys()
    before = Code(tmp_path).digest("own_stage")
    (tmp_path / "methods/mine.py").write_text("import mergeflow.errors\nCHANGED = 1\n")
    assert Code(tmp_path).digest("own_stage") != before


def test_digests_need_no_torch_and_well_under_a_second() -> None:
    script = (
        "import sys, time; from pathlib import Path; from tasks.project.digests import stage_digests\n"
        "stage_digests(Path.cwd()); import tasks.project.code as code; code.code_of.cache_clear()\n"
        "start = time.process_time(); stage_digests(Path.cwd()); print(time.process_time() - start)\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    seconds, torch = done.stdout.split()
    assert float(seconds) < 0.8  # 0.2 on the machine of the developers
    assert torch == "False"


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("x = 1", "x = 1  # one", True),
        ("x = (1,\n 2)", "x = 1, 2", True),
        ('def f():\n    "docs"\n    return 1', "def f():\n    return 1", True),
        ("class A:\n    'docs'", "class A:\n    pass", True),
        (
            "from typing import TYPE_CHECKING",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import json",
            True,
        ),
        ("x = 1", "x = 1.0", False),
        ("x = 1", "x = True", False),
        ("x = 'a'", "x = b'a'", False),
        ("x = 0.0", "x = -0.0", False),
        ("def f(a, /): ...", "def f(a): ...", False),
        ("def f(a): ...", "def f(*, a): ...", False),
        ("f(a)", "f(*a)", False),
        ("f(a=None)", "f(**None)", False),
        ("if a:\n    b\nc()", "if a:\n    b\n    c()", False),
        ("async def f(): ...", "def f(): ...", False),
        ("import a", "import a as b", False),
        ("from . import a", "from .. import a", False),
        ("f'{x!r}'", "f'{x}'", False),
    ],
)
def test_the_digest_is_of_the_meaning(one: str, other: str, same: bool) -> None:
    left, right = (read_source(text.encode(), "p.q").meaning for text in (one, other))
    assert (left == right) is same
