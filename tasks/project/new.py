"""Make a project or a study, and edit one line of a file of parameters."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml

from mergeflow.application import TEMPLATE
from mergeflow.checkpoints import write_text
from mergeflow.errors import MergeflowError, check_name, unknown_name
from mergeflow.modalities.sections import SECTIONS
from tasks.project.files import read_yaml
from tasks.project.graph import load_graph
from tasks.project.stage import CHOICES
from tasks.project.studies import find_study_modules


def add_line(text: str, section: str, name: str, value: Any) -> str:
    """Return the text of a file of parameters with one more entry, the last of a section.

    Example:
        >>> add_line("studies: {}\\n", "studies", "mine", {"run": "experts"})
        'studies: {mine: {run: experts}}\\n'
    """
    flow = None if isinstance(value, dict) else False  # a mapping as {…} on the entry's line
    entry = yaml.safe_dump({name: value}, default_flow_style=flow, width=float("inf")).strip()
    entries = _section_node(text, section)
    if entries.flow_style:
        at = entries.end_mark.index - 1
        changed = f"{text[:at].rstrip()}{', ' if entries.value else ''}{entry}{text[at:]}"
    else:
        lines = text.splitlines(keepends=True)
        key, last = entries.value[-1]
        line = last.end_mark.line if last.end_mark.column else last.end_mark.line - 1
        if not lines[line].endswith("\n"):
            lines[line] += "\n"
        lines.insert(line + 1, f"{' ' * key.start_mark.column}{entry}\n")
        changed = "".join(lines)
    return _checked(text, changed, section, lambda values: values.update({name: value}))


def remove_task_line(text: str, name: str) -> str:
    r"""Return the text of params.yaml without a task that stands on a line of its own; as it is where it has none.

    Example:
        >>> remove_task_line("tasks:\n  a: suite:x\n  b: folder:b\nseed: 0\n", "b")
        'tasks:\n  a: suite:x\nseed: 0\n'
    """
    tasks = _section_node(text, "tasks")
    key = next((key for key, _ in tasks.value if key.value == name), None)
    if key is None:
        return text
    if tasks.flow_style:
        raise MergeflowError(f"params.yaml: remove the task '{name}' by hand, `tasks` is written on one line.")
    lines = text.splitlines(keepends=True)
    del lines[key.start_mark.line]
    return _checked(text, "".join(lines), "tasks", lambda values: values.pop(name))


def write_whole(path: Path, text: str) -> None:
    """Replace a file at once, keeping its permissions: a reader finds the old text or the new one.

    Where `path` is a link, the file that it points to is replaced.
    """
    path = path.resolve()
    mode = path.stat().st_mode
    write_text(path, text)
    os.chmod(path, mode)


def _section_node(text: str, section: str) -> Any:
    top: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    section_node = next((value for key, value in top.value if key.value == section), None)
    if not isinstance(section_node, yaml.MappingNode):
        raise MergeflowError(f"the parameters have no mapping `{section}` to add to: write it by hand.")
    return section_node


def _checked(before: str, after: str, section: str, change: Any) -> str:
    """Return `after` if it reads as `before` with the change, comments and other sections untouched."""
    original = yaml.safe_load(before)
    expected = {**original, section: dict(original[section])}  # a copy: an alias elsewhere must not change with it
    change(expected[section])
    try:
        result = yaml.safe_load(after)
    except yaml.YAMLError:
        result = None
    if result != expected:
        raise MergeflowError(
            f"the section `{section}` is written in a way that cannot be edited safely: change it by hand."
        )
    return after


_TEMPLATE = Path(__file__).parent / "study_template"
_TAKEN = ("new", "train")  # the command that makes a study, and the stage of the training runs


def new_study(root: Path, name: str) -> Path:
    """Write `studies/NAME.py`, a study that runs as it is, choose it in studies/params.yaml, write studies/dvc.yaml."""
    from tasks.project.study_graph import chosen_graph, write_study_graph  # imports numpy

    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise MergeflowError(f"'{name}' cannot name a study: use a to z, digits and '_'.")
    stages = {stage.name for stage in load_graph(root, studies=True).values()}
    file, choices = root / "studies" / f"{name}.py", root / CHOICES
    if name in {*_TAKEN, *stages, *find_study_modules(root)} or file.exists():
        raise MergeflowError(f"the name '{name}' is taken, by a stage, a study or studies/{name}.py: take another one.")
    if choices.exists():
        chosen_graph(root)
    text = choices.read_text("utf-8") if choices.exists() else _filled("params.yaml", name)
    run = next(iter(read_yaml(choices)["runs"])) if choices.exists() else "experts"
    text = add_line(text, "studies", name, {"run": run})
    file.parent.mkdir(exist_ok=True)
    write_text(file, _filled("study.py", name))
    write_whole(choices, text) if choices.exists() else write_text(choices, text)
    write_study_graph(root)
    return file


def _filled(file: str, name: str) -> str:
    return (_TEMPLATE / f"{file}.txt").read_text("utf-8").replace("$NAME", name)


AS_THEY_ARE = (
    "dvc.yaml",
    ".gitignore",
    ".dvcignore",
    ".dvc/.gitignore",
    ".dvc/config",
    ".dvc/plots",
    "inputs/README.md",
)
README = Path(__file__).with_name("new_readme.md")
_CHOICES = "params.yaml"  # a modality's own, of a project that runs as it is


def modalities() -> dict[str, Path]:
    """Return the file of first choices of every modality that has one, by the modality's name."""
    folders = SECTIONS.folders()
    return {name: folder / _CHOICES for name, folder in folders.items() if (folder / _CHOICES).exists()}


def worlds() -> dict[str, Path]:
    """Return the folders of projects with real data that their `inputs/make.py` fetches, by name."""
    return {path.parents[1].name: path.parents[1] for path in sorted(TEMPLATE.glob("worlds/*/inputs/make.py"))}


def new_project(folder: Path, modality: str, world: str | None = None) -> Path:
    """Make a project folder, whole or not at all: choices, graph, deployments, DVC's settings, a place for inputs."""
    name, starts = folder.name, worlds() if world else modalities()
    start = world or modality
    faults = []
    try:
        check_name("project", name)
    except MergeflowError as error:
        faults.append(str(error))
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        faults.append(f"{folder} exists and is not an empty folder: nothing in it is replaced. Take another name.")
    if start not in starts:
        faults.append(str(unknown_name("world" if world else "modality", start, starts)))
    if faults:
        raise MergeflowError("\n".join(faults))
    folder.parent.mkdir(parents=True, exist_ok=True)
    making = folder.parent / f".{name}.new{os.getpid()}"
    try:
        choices = starts[start]
        if world:
            _copy_texts(choices, making)
            choices = choices / _CHOICES
        if choices.exists():  # a world without choices is no pipeline: it has experts and a sweep file
            text = choices.read_text(encoding="utf-8")
            _write(making, name, text.replace(f"  model: {world}\n", "  model: $NAME\n"))
        if folder.exists():  # it may be the shell's own folder, which a rename over it would take from below the shell
            # params.yaml last: without it nothing takes the folder for a project
            for path in sorted(making.iterdir(), key=lambda path: path.name == _CHOICES):
                shutil.move(path, folder / path.name)
        else:
            making.rename(folder)
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return folder


def deployments(name: str) -> str:
    """Return prefect.yaml for the project `name`: its own work pool and deployments, so that projects share a server.

    Example:
        >>> print(*re.findall("name: .*", deployments("birds")), sep="; ")
        name: birds; name: birds; name: birds-nightly; name: birds-add-task; name: birds-gate
    """
    return re.sub(r"(?m)^([ -]*name: )mergeflow", rf"\g<1>{name}", (TEMPLATE / "prefect.yaml").read_text("utf-8"))


def _copy_texts(world: Path, folder: Path) -> None:
    """Copy a world's own files, and nothing that its `inputs/make.py` may have made there."""
    for path in (*world.glob("*.yaml"), *world.glob("inputs/*.py"), *world.glob("studies/params.yaml")):
        target = folder / path.relative_to(world)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)


def _write(folder: Path, name: str, choices: str) -> None:
    for path in AS_THEY_ARE:
        source, target = TEMPLATE / path, folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copyfile)(source, target)
    (folder / "prefect.yaml").write_text(deployments(name), encoding="utf-8")
    (folder / _CHOICES).write_text(choices.replace("$NAME", name), encoding="utf-8")
    (folder / "README.md").write_text(README.read_text("utf-8").replace("$NAME", name), encoding="utf-8")
    _put_under_git(folder)


def _put_under_git(folder: Path) -> None:
    """Give DVC the git repository around the folder, a new one, or, without git, the setting that needs none."""
    if shutil.which("git") is None:
        with (folder / ".dvc/config").open("a", encoding="utf-8") as config:
            config.write("[core]\n    no_scm = true\n")
        return
    asked = subprocess.run(["git", "check-ignore", "--quiet", "dvc.yaml"], cwd=folder, capture_output=True, check=False)
    if asked.returncode != 1:  # 0: a repository around the folder ignores it, and DVC refuses that; 128: there is none
        subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
