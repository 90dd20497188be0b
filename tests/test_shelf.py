"""The shelf: things by name, from the package, from installed packages, from the project's folder and from a file."""

import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import mergeflow.plugins
from mergeflow.errors import MergeflowError
from mergeflow.merging import catalog, configure, get, methods
from mergeflow.merging.method import Method
from mergeflow.plugins import Shelf, project_folder

DOUBLED = '''"""Doubled."""
from mergeflow.merging.method import Args, Parts, Stack, method
from mergeflow.merging.methods.ties import ties  # what is imported is not declared here


class DoubledArgs(Args):
    """Arguments of `doubled`."""


@method("NAME", DoubledArgs, elementwise=True)
def doubled(stack: Stack, args: DoubledArgs) -> Parts:
    """Twice the sum."""
    return stack.base, 2 * stack.taus.sum(0)
'''


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project folder that is the current one, on a shelf of its own."""
    for name in ("params.yaml", "dvc.yaml"):
        (tmp_path / name).touch()
    (tmp_path / "methods").mkdir()
    catalogue = catalog.METHODS
    shelf = Shelf(catalogue.kind, catalogue.declared, catalogue.package, catalogue.folder, catalogue.how)
    monkeypatch.setattr(catalog, "METHODS", shelf)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_file_of_the_project_s_folder_is_found_by_name(project):
    write(project / "methods/statistics.py", DOUBLED.replace("NAME", "doubled"))
    write(project / "methods/_helper.py", "raise RuntimeError")
    before = sys.modules.get("statistics")
    assert get("doubled") is methods()["doubled"]
    assert configure("doubled", {"scale": 0.5}).scale == 0.5
    assert catalog.METHODS.origin("doubled").place == "methods/statistics.py"
    assert catalog.METHODS.origin("ties").place == "mergeflow"
    assert sys.modules.get("statistics") is before  # it shadows nothing


def test_a_project_is_found_from_inside_and_its_studies_folder_is_a_part_of_it(project, monkeypatch):
    for name in ("params.yaml", "dvc.yaml"):
        write(project / "studies" / name, "")
    (project / "studies/deep").mkdir()
    for folder in ("studies", "studies/deep", "methods"):
        monkeypatch.chdir(project / folder)
        assert project_folder() == project


def test_outside_the_project_its_methods_are_unknown(project, tmp_path_factory, monkeypatch):
    write(project / "methods/mine.py", DOUBLED.replace("NAME", "doubled"))
    assert "doubled" in methods()
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    with pytest.raises(MergeflowError, match="unknown method 'doubled'"):
        get("doubled")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def broken(:\n", r"'.*methods/mine\.py' cannot be loaded, line 1 of mine\.py: SyntaxError: invalid syntax"),
        ("\n1 / 0\n", r"mine\.py' cannot be loaded, line 2 of mine\.py: ZeroDivisionError: division by zero"),
        ("import nowhere_at_all\n", r"mine\.py' cannot be loaded, line 1 of mine\.py: ModuleNotFoundError"),
        ("raise SystemExit(3)\n", r"mine\.py' cannot be loaded, line 1 of mine\.py: SystemExit: 3"),
        ("def mine(): ...\n", r"'methods/mine\.py' declares no method: declare one with `@method"),
        (
            "from mergeflow.merging.methods.ties import ties\n",
            r"'methods/mine\.py' declares no method",
        ),
        (DOUBLED.replace("NAME", "ties"), "two methods are named 'ties': one of 'mergeflow' and one of 'methods/mine"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(project, text, message):
    write(project / "methods/mine.py", text)
    for _ in range(2):
        with pytest.raises(MergeflowError, match=message):
            methods()


def test_two_files_with_one_name_are_both_named(project):
    write(project / "methods/one.py", DOUBLED.replace("NAME", "doubled"))
    write(project / "methods/two.py", DOUBLED.replace("NAME", "doubled"))
    with pytest.raises(MergeflowError, match=r"'doubled': one of 'methods/one\.py' and one of 'methods/two\.py'"):
        get("ties")


def test_files_import_each_other_relatively_and_a_digest_is_of_all_that_they_import(project):
    write(project / "methods/_factor.py", "FACTOR = 2\n")
    text = DOUBLED.replace("NAME", "doubled").replace("\n\n\nclass", "\nfrom ._factor import FACTOR\n\n\nclass", 1)
    write(project / "methods/mine.py", text)
    digest = catalog.METHODS.origin("doubled").digest
    assert digest is not None

    def digest_elsewhere(folder, factor):
        write(project / folder / "_factor.py", f"FACTOR = {factor}\n")
        file = write(project / folder / "mine.py", text)
        shelf = Shelf("method", Method, "mergeflow.merging.methods", "no_such_folder", "")
        assert shelf.add_file(file) == ["doubled"]
        return shelf.origin("doubled").digest

    assert digest_elsewhere("same", 2) == digest
    assert digest_elsewhere("other", 3) != digest


def test_a_package_is_loaded_by_its_folder(project):
    write(project / "methods/mine/__init__.py", "from .inner import doubled\n")
    write(project / "methods/mine/inner.py", DOUBLED.replace("NAME", "doubled"))
    assert catalog.METHODS.origin("doubled").place == "methods/mine"


def test_a_method_may_configure_others_while_it_is_loaded(project):
    text = DOUBLED.replace("NAME", "doubled")
    write(
        project / "methods/mine.py", f"{text}\n\nfrom mergeflow.merging import configure\n\nTIES = configure('ties')\n"
    )
    assert get("doubled").name == "doubled"


def test_a_file_can_be_added_and_a_broken_one_leaves_the_shelf_as_it_was(project):
    good = write(project / "elsewhere/mine.py", DOUBLED.replace("NAME", "doubled"))
    bad = write(project / "elsewhere/bad.py", "1 / 0")
    with pytest.raises(MergeflowError, match=r"bad\.py' cannot be loaded"):
        catalog.METHODS.add_file(bad)
    with pytest.raises(MergeflowError, match="there is no file"):
        catalog.METHODS.add_file(project / "nowhere.py")
    assert catalog.METHODS.add_file(good) == ["doubled"]
    assert catalog.METHODS.add_file(good) == ["doubled"]
    assert "doubled" in methods()


@pytest.mark.parametrize("value", ["acme_merging", "acme_merging:doubled"])
def test_an_installed_package_declares_methods_by_an_entry_point(project, monkeypatch, value):
    write(project / "site/acme_merging/__init__.py", "from acme_merging.inner import doubled\n")
    write(project / "site/acme_merging/inner.py", DOUBLED.replace("NAME", "doubled"))
    monkeypatch.syspath_prepend(project / "site")
    point = EntryPoint("acme", value, "mergeflow.methods")
    monkeypatch.setattr(mergeflow.plugins, "entry_points", lambda group: [point] if group == point.group else [])
    assert get("doubled").name == "doubled"
    assert value in catalog.METHODS.origin("doubled").place
    for name in ("acme_merging", "acme_merging.inner"):
        sys.modules.pop(name)


def test_a_broken_entry_point_is_named(project, monkeypatch):
    point = EntryPoint("acme", "acme_nowhere", "mergeflow.methods")
    monkeypatch.setattr(mergeflow.plugins, "entry_points", lambda group: [point])
    with pytest.raises(MergeflowError, match=r"entry point 'acme = acme_nowhere'.*ModuleNotFoundError"):
        methods()


def test_methods_are_listed_and_explained_without_torch():
    code = (
        "import sys, mergeflow.cli\n"
        "for words in ('methods', 'methods ties', 'methods emr'):\n"
        "    sys.argv = ['mergeflow', *words.split()]\n"
        "    try: mergeflow.cli.main()\n"
        "    except SystemExit as done: assert not done.code\n"
        "    print('---')\n"
        "print([name for name in ('torch', 'numpy', 'scipy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    *texts, heavy = done.stdout.split("---\n")
    assert [len(text.splitlines()) > 10 for text in texts] == [True] * 3
    assert heavy == "[]\n"
