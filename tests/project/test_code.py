"""The code that a stage depends on is what its imports reach, and its digest is of what that code means."""

import json
import shutil
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from mergeflow.errors import MergeflowError
from tasks.project.graph import load_graph
from tasks.project.stage import RECORDS, STATE
from tasks.running.digests import Code, code_files, read_source
from tests.project import import_closure
from tests.project_folder import remember_code

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
RUNS = yaml.safe_load((ROOT / "studies/params.yaml").read_text())["runs"]
MODULES = {stage.name: stage.module for stage in load_graph(ROOT, studies=True).values()}


@pytest.fixture(scope="module")
def remembered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the files of this repository have said, as each project folder keeps it."""
    folder = tmp_path_factory.mktemp("remembered")
    remember_code(folder)
    return folder / STATE / "code.json"


@pytest.fixture(scope="module")
def copy(remembered: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copy")
    for name in import_closure.OURS:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("params.yaml", "dvc.yaml", "studies/params.yaml", "studies/dvc.yaml"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    shutil.copytree(remembered.parent, folder / remembered.parent.name)
    return folder


def stale_after(copy: Path, path: str, added: bytes = b"_EDITED = 1\n") -> set[str]:
    """Return the stages whose digest changes when a file of the copy grows or is new; that is undone afterwards."""
    before = untouched(copy, (copy / "params.yaml").read_text())
    text = (copy / path).read_bytes() if (copy / path).exists() else None
    (copy / path).parent.mkdir(exist_ok=True)
    (copy / path).write_bytes((text or b"") + added)
    after = digests(copy)
    (copy / path).unlink() if text is None else (copy / path).write_bytes(text)
    return {name for name in before if after[name] != before[name]}


@cache
def untouched(copy: Path, choices: str) -> dict[str, str]:
    return digests(copy)


def digests(copy: Path) -> dict[str, str]:
    script = (
        "import json, sys; from pathlib import Path; from tasks.running.digests import stage_digests\n"
        "print(json.dumps(stage_digests(Path.cwd()))); assert 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=copy, env={"PYTHONPATH": str(copy)}, capture_output=True, check=True)
    by_stage = json.loads(done.stdout)
    by_item = {stage: by_stage.pop(stage) for stage in ("train", "sweep")}
    return by_stage | {f"{stage}.{item}": value for stage, items in by_item.items() for item, value in items.items()}


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_every_stage_counts_what_compiled_code_imports_and_an_edit_makes_that_stale(copy: Path, seed: int) -> None:
    """Random edits make stale what imports them; another layout and comments make nothing stale."""
    count = 3 if seed == 1 else 200
    command = [sys.executable, import_closure.__file__, str(copy), json.dumps(MODULES), str(seed), str(count)]
    done = subprocess.run(command, cwd=copy, env={"PYTHONPATH": str(copy)}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    seen = answer["edits"]
    assert answer["differ"] == []
    assert len(seen) == count
    assert {edit["module"]: edit["stale"] for edit in seen} == {edit["module"]: edit["wanted"] for edit in seen}
    assert [edit["module"] for edit in seen if not edit["same"]] == []
    assert any(edit["stale"] for edit in seen)


def test_what_decides_every_accuracy_makes_stale_whoever_judges(copy: Path) -> None:
    stale = stale_after(copy, "mergeflow/modalities/classification.py")
    assert {"multitask", "finetune", "sweep.average", "select", "evaluate", "train.one_epoch", "mima"} <= stale
    assert not {"figures", "prepare"} & stale
    stale = stale_after(copy, "tasks/models.py")
    assert {"multitask", "finetune", "sweep.average", "select", "evaluate", "vectors", "train.mima_4", "mima"} <= stale
    assert not {"prepare", "figures"} & stale


def test_a_modality_that_the_project_does_not_use_makes_nothing_stale(copy: Path) -> None:
    assert stale_after(copy, "mergeflow/modalities/text/preparation.py") == set()
    assert stale_after(copy, "mergeflow/modalities/text/modality.py") == {"sentence_arithmetic"}  # whose encoder it is
    assert stale_after(copy, "mergeflow/modalities/toy/modality.py") == {"equivalence"}  # whose nets these are
    assert {"base", "finetune", "train.one_epoch"} <= stale_after(copy, "mergeflow/modalities/vision/modality.py")


def test_a_drawing_of_the_suite_trains_nothing_again(copy: Path) -> None:
    stale = stale_after(copy, "suites/pocket/drawn/digits.py")
    assert "prepare" in stale
    images = ("adviser", "analogy", "bases", "coloured", "equivalence", "linearity_", "structure", "unseen_tasks")
    drawing = {name for name in stale if name.startswith(images)}
    assert drawing
    assert stale - drawing == {"prepare"}


ROUNDS = {f"train.{name}" for name, run in RUNS.items() if run["regime"] == "iterative"}


@pytest.mark.parametrize(
    ("path", "trained", "swept"),
    [
        ("mergeflow/merging/methods/sphere.py", set(), set()),
        ("mergeflow/merging/methods/ties.py", set(), {"ties"}),
        ("mergeflow/merging/methods/linear.py", ROUNDS, {"average", "task_arithmetic"}),
        ("mergeflow/merging/execution/engine.py", ROUNDS, {"average", "task_arithmetic", "ties", "cart"}),
    ],
)
def test_a_merge_method_makes_stale_its_sweep_and_the_runs_that_merge_by_it(
    copy: Path, path: str, trained: set[str], swept: set[str]
) -> None:
    stale = stale_after(copy, path)
    assert {name for name in stale if name.startswith("train.")} == trained
    assert {name.removeprefix("sweep.") for name in stale if name.startswith("sweep.")} == swept
    assert "select" in stale
    assert {"prepare", "base", "multitask", "finetune", "vectors", "evaluate", "figures"} & stale == set()


def test_a_method_counts_for_those_that_name_it(copy: Path) -> None:
    choices = (copy / "params.yaml").read_text()
    values = yaml.safe_load(choices)
    values["sweep"] |= {"lines": {"scale": [1.0]}, "core_space": {"scale": [1.0], "then": ["iso_c"]}}
    (copy / "params.yaml").write_text(yaml.safe_dump(values))
    swept = {
        path: {name for name in stale_after(copy, f"mergeflow/merging/methods/{path}.py") if name.startswith("sweep.")}
        for path in ("linear", "subspace", "layerwise")
    }
    (copy / "params.yaml").write_text(choices)
    assert {"sweep.lines", "sweep.core_space", "sweep.average"} <= swept["linear"]
    assert "sweep.core_space" in swept["subspace"]
    assert swept["layerwise"] == {"sweep.lines"}


def test_methods_of_the_projects_own_count_for_those_that_merge_by_one(copy: Path) -> None:
    added = b'from mergeflow.merging.method import method\n@method("mine", None)\ndef mine(): ...\n'
    stale = stale_after(copy, "methods/mine.py", added)
    assert "select" in stale
    assert not {name for name in stale if name.startswith(("train.", "sweep."))}
    choices = (copy / "params.yaml").read_text()
    values = yaml.safe_load(choices)
    values["sweep"]["mine"] = {"scale": [1.0]}
    (copy / "params.yaml").write_text(yaml.safe_dump(values))
    (copy / "methods").mkdir(exist_ok=True)
    (copy / "methods/mine.py").write_bytes(added)
    stale = stale_after(copy, "methods/_help.py")
    (copy / "methods/mine.py").unlink()
    (copy / "params.yaml").write_text(choices)
    assert {name for name in stale if name.startswith("sweep.")} == {"sweep.mine"}


def test_a_project_that_trains_in_rounds_depends_on_the_methods(copy: Path) -> None:
    choices = (copy / "params.yaml").read_text()
    values = yaml.safe_load(choices)
    values["finetune"]["regime"] = "iterative"
    (copy / "params.yaml").write_text(yaml.safe_dump(values))
    stale = stale_after(copy, "mergeflow/merging/methods/linear.py")
    (copy / "params.yaml").write_text(choices)
    assert "multitask" in stale
    assert "finetune" not in stale  # it copies what `multitask` made


def test_code_that_is_left_out_of_a_digest_is_not_imported(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from tests.toy_project import make_toy_project, run_pipeline\n"
        "run_pipeline(make_toy_project(Path(sys.argv[1])), ('prepare', 'base', 'multitask', 'finetune'))\n"
        "print({'tasks.rounds', 'mergeflow.training.iterative'} & {*sys.modules})"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "project")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_front_door_names_modules_that_there_are() -> None:
    paths = import_closure.modules(ROOT)
    homes = {home for door in import_closure.doors(ROOT).values() for home, _ in door.values()}
    assert {home for home in homes if home not in paths and find_spec(home) is None} == set()


def test_data_beside_code_count_for_whoever_names_them(copy: Path) -> None:
    stale = stale_after(copy, "mergeflow/modalities/vision/tokenizer/vocabulary.txt")
    assert "base" in stale
    assert not {"figures", "prepare"} & stale
    assert stale_after(copy, "tasks/project/new_readme.md") == set()


def test_every_file_that_is_not_python_is_named_by_a_module_beside_it(remembered: Path) -> None:
    code = Code(remembered.parent.parent)
    named = {file for name, path in import_closure.modules(ROOT).items() for file in code.data_files(name, path)}
    listed = subprocess.run(
        ["git", "ls-files", *import_closure.OURS], cwd=ROOT, capture_output=True, text=True, check=True
    )
    templates = ("/params.yaml", "/dvc.yaml", "/dvc.lock", "py.typed")  # of projects: no stage reads them
    files = (name for name in listed.stdout.split() if not name.startswith(RECORDS))
    assert {ROOT / name for name in files if not name.endswith((".py", *templates))} - named == set()


def test_records_of_studies_are_not_code_of_a_study_that_has_the_folders_name_as_a_string(
    copy: Path, tmp_path: Path
) -> None:
    records = tmp_path / RECORDS
    records.mkdir(parents=True)
    (tmp_path / "studies/mine.py").write_text('def listed(rows): return rows.to_dict("records")\n')
    before = Code(tmp_path).digest("studies/mine.py")
    (records / "mine.json").write_text("{}")
    assert Code(tmp_path).digest("studies/mine.py") == before
    stages = load_graph(ROOT, studies=True).values()
    assert (copy / RECORDS).is_dir()
    assert not {file for stage in stages for file in code_files(copy, stage) if RECORDS in file.as_posix()}


def test_a_stages_own_outputs_are_not_its_code() -> None:
    assets = "mergeflow/modalities/vision/assets/pocket8-base.safetensors"
    assert Code(ROOT).digest("tasks.base", [assets]) != Code(ROOT).digest("tasks.base")


def test_the_same_code_has_the_same_digest_in_every_project(remembered: Path, tmp_path: Path) -> None:
    shutil.copytree(remembered.parent, tmp_path / STATE)
    here, there = Code(ROOT), Code(tmp_path)
    assert {name: here.digest(module) for name, module in MODULES.items()} == {
        name: there.digest(module) for name, module in MODULES.items()
    }


def test_code_of_the_project_counts(remembered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(remembered.parent, tmp_path / STATE)
    (tmp_path / "own_stage.py").write_text("from own_help import add\nfrom mergeflow.merging import configure\n")
    (tmp_path / "own_help.py").write_text("def add(a, b): return a + b\n")
    (tmp_path / "methods").mkdir()
    (tmp_path / "methods/mine.py").write_text("import mergeflow.errors\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    closure = Code(tmp_path).closure("own_stage")
    assert {"own_stage", "own_help", "methods/mine.py", "mergeflow.merging.methods.ties"} <= closure.keys()
    before = Code(tmp_path).digest("own_stage")
    (tmp_path / "methods/mine.py").write_text("import mergeflow.errors\nCHANGED = 1\n")
    assert Code(tmp_path).digest("own_stage") != before


@pytest.mark.parametrize(
    ("first", "other", "same"),
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
        ("raise ValueError('one sentence')", "raise ValueError(f'another, of {x}')", True),
        ("raise m.MergeflowError('a b' + c)", "raise m.MergeflowError('a b c')", True),
        ("assert a, 'no a'", "assert a, 'an a is missing'", True),
        ("logging.info('a step')", "logging.info('one step')", True),
        ("print('a step')", "print('one step')", True),
        ("print('a step', file=f)", "print('one step', file=f)", False),
        ("raise KeyError('a')", "raise KeyError('b')", False),
        ("raise ValueError('a b')", "raise TypeError('a b')", False),
        ("if x: raise ValueError('a b')", "if y: raise ValueError('a b')", False),
        ("raise ValueError(f'a {(x := 1)}')", "raise ValueError(f'a {(x := 2)}')", False),
        ("x = 'a sentence'", "x = 'another sentence'", False),
        ("scores.error('a b')", "scores.error('c d')", False),
    ],
)
def test_the_digest_is_of_the_meaning(first: str, other: str, same: bool) -> None:
    left, right = (read_source(text.encode(), "p.q").meaning for text in (first, other))
    assert (left == right) is same


def test_a_stage_that_an_upgrade_has_taken_out_is_named(tmp_path: Path) -> None:
    with pytest.raises(MergeflowError, match=r"runs tasks\.advise, which this version of mergeflow does not have"):
        Code(tmp_path).digest("tasks.advise")


@pytest.mark.parametrize("text", ["x = Parts(1)", "x = Shelf()", "class Parts: ...\nPart = Parts()"])
def test_a_call_of_something_else_named_as_ours_leads_nowhere(text: str) -> None:
    source = read_source(text.encode(), "p")
    assert source.parts == []
    assert source.shelves == []
