"""The documents are true: trees match the disk, commands exist, links lead somewhere, parameters are all there."""

import importlib
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest
import typer
import yaml
from pydantic import BaseModel

from mergeflow.cli import add_all_commands, app
from mergeflow.commands.pages import FROM_CODE, commands_page, every_command
from mergeflow.merging import methods
from tasks.project.parameters import params_of

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
ALL_PAGES = sorted({*PAGES, *(ROOT / "docs/research").glob("*.md"), *(ROOT / "examples").rglob("*.md")})


@pytest.fixture(scope="module")
def group() -> typer.core.TyperGroup:
    add_all_commands(ROOT)
    return typer.main.get_command(app)  # type: ignore[return-value]


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", page.read_text()):
        if not target.startswith(("http:", "https:", "mailto:")):
            there = page.parent / target if target else page
            made = there.parent == ROOT / "docs/reference"  # `make site` checks these
            assert there.exists() or made, target
            assert not anchor or made or anchor in anchors(there), f"{target}#{anchor}"


@cache
def anchors(page: Path) -> set[str]:
    """List the anchors of a page: headings in small letters, words joined by `-`, without other signs."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.strip().lower()).replace(" ", "-") for head in heads}


def test_readme_is_short_and_its_folders_are_on_the_disk() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    assert max(map(len, text.splitlines())) <= 120
    folders = re.findall(r"`(\w+/)`", text.split("## Where things are")[1])
    assert len(folders) >= 6
    assert all((ROOT / name).is_dir() for name in folders), folders


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_at_most_1500_words(page: Path) -> None:
    text = page.read_text()
    if page.name == "recipes.md":  # the reference of the recipe file
        text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    assert len(text.split()) <= 1500


def test_all_pages_together_have_at_most_24000_words() -> None:
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")]
    assert sum(len(page.read_text().split()) for page in pages) <= 24_000


def test_readme_counts_the_methods() -> None:
    assert f"{len(methods())} methods" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_the_documents_exist(page: Path, group: typer.core.TyperGroup) -> None:
    commands = every_command(group)
    for line in re.findall(r"(?:^|`)mergeflow ([a-z][a-z-]*[^`#|;&\n]*)", page.read_text(), re.MULTILINE):
        words = line.split()
        command = commands.get(" ".join(words[:2])) or commands.get(words[0])
        assert command, line
        options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        assert set(re.findall(r"(?<!\S)--[\w-]+", line)) <= {*options, "--help"}, line


def test_the_page_of_commands_has_every_command_and_option(group: typer.core.TyperGroup) -> None:
    page = commands_page(group)
    for words, command in every_command(group).items():
        section = page.partition(f"## `mergeflow {words}`")[2].partition("\n## ")[0]
        assert section, words
        for parameter in command.params:
            name = parameter.opts[0] if parameter.param_type_name == "option" else parameter.name.upper()
            assert f"`{name}" in section or name == "--help", (words, name)


def test_every_argument_of_a_command_has_help(group: typer.core.TyperGroup) -> None:
    commands = every_command(group).items()
    assert [
        (words, parameter.name) for words, command in commands for parameter in command.params if not parameter.help
    ] == []


def test_every_command_and_every_group_shows_an_example_that_exists(group: typer.core.TyperGroup) -> None:
    groups = {f"{name} ": member for name, member in group.commands.items() if hasattr(member, "commands")}
    assert len(groups) >= 5
    for words, command in {"": group, **groups, **every_command(group)}.items():
        start, _, example = (command.epilog or "").partition(" mergeflow ")
        assert start == "Example:", words
        shown = every_command(group)
        assert example.startswith(words.strip()), example
        used = shown.get(" ".join(example.split()[:2])) or shown.get(example.split()[0])
        assert used, example
        options = {option for parameter in used.params for option in (*parameter.opts, *parameter.secondary_opts)}
        assert set(re.findall(r"(?<!\S)--[\w-]+", example)) <= options, example


def test_params_yaml_names_every_parameter() -> None:
    values = yaml.safe_load((ROOT / "params.yaml").read_text())

    def check(model: type[BaseModel], section: dict[str, object], where: str) -> None:
        assert set(model.model_fields) == set(section), where
        for name, field in model.model_fields.items():
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
                check(field.annotation, section[name], f"{where}{name}.")  # type: ignore[arg-type]

    check(params_of(values["model"]), values, "")


def test_the_page_of_parameters_explains_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    rows = re.findall(r"^\| (`.*)\|$", importlib.import_module("pages_of_code").parameters_page(), re.MULTILINE)
    assert len(rows) > 50
    assert [row for row in rows if not row.split(" | ")[-1].strip()] == []


def test_the_page_of_the_api_has_every_name_that_a_page_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    page = importlib.import_module("pages_of_code").api_page()
    text = "\n".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    imports = re.findall(r"^ *from ((?:mergeflow|registry)\b[\w.]*) import ([\w, ]+)", text, re.MULTILINE)
    assert len(imports) > 15
    for module, names in imports:
        for name in names.split(", "):
            assert f"{module}.{name}\n" in page or f"## `{module}.{name}`" in page, f"{module}.{name}"


@pytest.mark.slow
def test_no_file_names_a_package_host_or_this_machine() -> None:
    import subprocess

    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    hosts = re.compile(
        r"pypi\.org|files\.pythonhosted|index-url [^\\\n]*://|deb\.debian\.org|registry\.npmjs", re.IGNORECASE
    )
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        assert not path.is_symlink(), f"{name} leads out of a fresh clone, or to another file of it"
        if path.suffix in (".safetensors", ".png") or name == "tests/test_docs.py" or not path.is_file():
            continue
        text = path.read_text(errors="replace")
        assert not hosts.search(text), name
        assert str(ROOT) + "/" not in text, name


def test_a_release_has_one_version_everywhere() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    heading = re.search(r"^## (\S+) · (\d{4}-\d\d-\d\d|unreleased)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heading
    assert heading[1] == version


def test_the_licence_of_every_direct_dependency_is_listed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(requirement for extra in project["optional-dependencies"].values() for requirement in extra),
    ]
    names = {re.split(r"[\[<>=!]", text)[0] for text in wanted} - {"mergeflow"}
    listed = (ROOT / "LICENCES.md").read_text()
    assert [name for name in sorted(names) if not re.search(rf"\b{re.escape(name)}\b", listed)] == []


def test_pages_that_code_and_choices_name_exist() -> None:
    files = [
        path
        for folder in ("mergeflow", "tasks", "registry", "flows", "suites", "studies", "worlds", "examples")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".yaml", ".md")
    ]
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} | FROM_CODE.keys()
    for path in [*files, ROOT / "params.yaml", ROOT / "prefect.yaml"]:
        named = re.findall(r"\bdocs/([a-z-]+)\.md|`mergeflow docs ([a-z-]+)", path.read_text(encoding="utf-8"))
        assert {page or other for page, other in named} <= pages, path
