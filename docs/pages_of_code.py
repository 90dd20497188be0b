"""The pages of the site that are written from the code: commands, methods, architectures, parameters, API, gallery."""

import importlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from mergeflow import layout

ROOT = Path(__file__).parents[1]
MODALITIES = ("vision", "text", "causal", "toy")
API = {
    "mergeflow": "merge prepare configure methods load_recipe make_recipe check_recipe open_checkpoint "
    "write_checkpoint MergeflowError",
    "mergeflow.merging": "configure Direction Merged Plan",
    "mergeflow.merging.method": "method Args Parts Stack",
    "mergeflow.merging.contract": "check",
    "mergeflow.search.sweep_file": "load_sweep",
    "mergeflow.search.sweep": "run_sweep SweepResult",
    "mergeflow.search.soup": "soup Soup",
    "mergeflow.analysis.provable.correlation": "correlations",
    "mergeflow.modality": "Model Predictions Examples Base Modality",
    "mergeflow.modalities.catalog": "open_recorded",
    "mergeflow.modalities.causal.modality": "perplexity",
    "mergeflow.modalities.vision.preparation": "image_decoding open_images",
    "mergeflow.data": "load_split Split",
    "mergeflow.data.prepare": "prepare_task",
    "mergeflow.data.task": "Example RawTask",
    "mergeflow.data.decoding": "Source",
    "mergeflow.application": "make_importable",
    "registry.store": "connect",
    "registry.versions": "current list_models list_versions show compare history download load",
    "registry.promotion": "register promote rollback",
    "registry.gates": "decide Evidence GateSettings",
    "registry.lineage": "lineage lineage_nodes tree_lines",
    "registry.commands": "lineage_svg",
}
FIGURES = {
    "mima": ("accuracy", "Rounds of merging while tuning"),
    "rank_curve": ("mean_8", "Accuracy over the rank of CART"),
    "many_tasks": ("radar", "Eight to twenty tasks"),
    "landscape": ("vehicles_aerial", "The landscape between experts"),
    "interference": ("layers_8", "Interference by layer"),
    "linearity_pairs": ("digits", "Linearity of features by layer"),
    "coloured_clip": ("scales", "Coefficients that the theory promises"),
    "unlearning": ("perplexity", "Unlearning a book"),
}


def write_reference(folder: Path, pictures: bool = True) -> None:
    """Write all generated pages and pictures into a folder.

    Args:
        folder: `docs/reference`, which is not tracked.
        pictures: Draw the gallery; without them its page has the texts alone.
    """
    import typer

    from mergeflow.cli import add_all_commands, app
    from mergeflow.commands.methods_page import methods_page
    from mergeflow.commands.pages import commands_page
    from mergeflow.merging.architectures.page import architectures_page

    (folder / "files").mkdir(parents=True, exist_ok=True)
    if pictures:
        draw_gallery(folder)
    add_all_commands(ROOT)
    pages = {
        "commands": commands_page(typer.main.get_command(app)),
        "methods": methods_page(),
        "architectures": architectures_page(),
        "parameters": parameters_page(),
        "api": api_page(),
        "gallery": gallery_page(folder, pictures),
    }
    for name, text in pages.items():
        path = folder / f"{name}.md"
        if not path.exists() or path.read_text(encoding="utf-8") != text:  # Sphinx reads again what is newer
            path.write_text(text, encoding="utf-8")


def parameters_page() -> str:
    """Write the page of params.yaml: every key with its type and default, and the file of each modality."""
    from tasks.project.parameters import params_of

    parts = [
        "# Parameters",
        "Every value that a person may choose is in a project's `params.yaml`. Unknown keys are refused, and "
        "`mergeflow check` lists all faults at once. [Training](../training.md), [data](../data.md) and "
        "[registry](../registry.md) explain the sections.",
        _table(_rows(params_of({"modality": "vision"}), "")),
    ]
    for modality in MODALITIES:
        model = params_of({"modality": modality})
        rows = [
            *_rows(model.model_fields["model"].annotation, "model."),
            *_rows(model.model_fields["data"].annotation, "data."),
        ]
        parts.append(f"## `model` and `data` of the modality `{modality}`")
        parts.append(_table(rows))
    parts.append("## A whole file\n\nThis is the file of the repository's own project.")
    parts.append(f"```yaml\n{(ROOT / 'params.yaml').read_text(encoding='utf-8').strip()}\n```")
    return "\n\n".join(parts) + "\n"


def _rows(model: Any, prefix: str) -> Iterator[str]:
    """Yield a row for each value of a section, and of the sections in it."""
    meanings = _meanings(model)
    for name, field in model.model_fields.items():
        annotation = field.annotation
        if f"{prefix}{name}" in ("model", "data", "model.modality"):
            continue
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from _rows(annotation, f"{prefix}{name}.")
            continue
        default = "required" if field.is_required() else f"`{json.dumps(field.get_default(call_default_factory=True))}`"
        yield f"| `{prefix}{name}` | {_type(annotation)} | {default} | {meanings.get(name, '')} |"


def _meanings(model: Any) -> dict[str, str]:
    """Take what the docstrings of a section and its parents say of each value: a list of attributes, or sentences."""
    names = "|".join(map(re.escape, model.model_fields))
    meanings: dict[str, str] = {}
    for section in (kind for kind in reversed(model.__mro__) if issubclass(kind, BaseModel) and kind is not BaseModel):
        text = inspect.cleandoc(vars(section).get("__doc__") or "")
        pairs = re.findall(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", text, re.MULTILINE)
        if not pairs:
            pieces = re.split(rf"(?:^|\s)`?({names})`?: ", " ".join(text.split()))
            pairs = list(zip(pieces[1::2], pieces[2::2], strict=True))
        meanings |= {name: " ".join(meaning.split()).rstrip(".").replace("|", "or") for name, meaning in pairs}
    return meanings


def _table(rows: Iterable[str]) -> str:
    return "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows])


def _type(annotation: Any) -> str:
    """Name a type in words."""
    arguments, origin = get_args(annotation), get_origin(annotation)
    if origin in (types.UnionType, Union):
        return " or ".join(_type(part) for part in arguments)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (dict, list):
        return "mapping" if origin is dict else f"list of {_type(arguments[0])}"
    words = {"NoneType": "null", "str": "text", "int": "integer", "float": "number", "bool": "true or false"}
    name = getattr(annotation, "__name__", str(annotation))
    return words.get(name, name)


def api_page() -> str:
    """Write the page of the Python API, which Sphinx fills from the docstrings."""
    parts = ["# Python API", "[The merge tutorial](../merge-tutorial.md#in-python) shows how these are used."]
    for module, names in API.items():
        home = importlib.import_module(module)  # here, because Sphinx would import it as a type checker does
        kinds = [(name, _directive(getattr(home, name))) for name in names.split()]
        lines = [f".. auto{kind}:: {module}.{name}\n{'   :members:' * (kind == 'class')}\n" for name, kind in kinds]
        parts.append(f"## `{module}`\n\n```{{eval-rst}}\n" + "\n".join(lines) + "```")
    return "\n\n".join(parts) + "\n"


def _directive(value: Any) -> str:
    return "class" if inspect.isclass(value) else "function" if inspect.isroutine(value) else "data"


def draw_gallery(folder: Path) -> None:
    """Draw the gallery's pictures into a folder; those that are there already are not made again."""
    if not (folder / "files/report.html").exists():
        _run_project(folder)
    draw_figures(ROOT / "docs/research/figures")


def gallery_page(folder: Path, pictures: bool = True) -> str:
    """Write the gallery: a run's report, lineage and curves, and figures of studies, each with its command.

    Args:
        folder: Holds the pictures of a run.
        pictures: Show the pictures; otherwise only their titles and commands.
    """
    curves = [path.name for path in sorted(folder.glob("run_*.svg"))]
    parts = [
        "# Gallery",
        "Pictures that mergeflow draws, each with the command that draws it.",
        "## The report of a run\n\n```console\nmergeflow new shapes --modality toy\ncd shapes\nmergeflow run\n```\n\n"
        'The run writes `outputs/report.html`; <a href="../report.html">open it alone</a>.\n\n'
        '<iframe class="report" src="../report.html" title="Report of a run"></iframe>',
        "## Lineage of a version\n\n```console\nmergeflow registry lineage champion --picture lineage.svg\n```\n\n"
        '![Lineage of version 1](lineage.svg)\n\n<a href="../_images/lineage.svg">Open it alone</a>.',
        "## Figures of a run\n\n`mergeflow run` draws them into `outputs/results/figures`.",
        *(f"![{name.removeprefix('run_').removesuffix('.svg')}]({name})" for name in curves),
        "## Studies\n\n`mergeflow study --pages --figures` draws every figure of the [research pages]"
        "(../research/README.md) from the recorded rows.",
    ]
    for study, (figure, title) in FIGURES.items():
        picture = f"![{title}](../research/figures/{study}.{figure}.svg)"
        parts.append(f"### {title}\n\n```console\nmergeflow study {study} --judge\n```\n\n{picture}")
    text = "\n\n".join(parts) + "\n"
    return text if pictures else re.sub(r"!\[(.*?)\]\(.*?\)", r"\1", text)


def _run_project(folder: Path) -> None:
    """Run the pipeline of a project of small nets, about half a minute, and keep its pictures."""
    with tempfile.TemporaryDirectory() as scratch:
        project = Path(scratch) / "shapes"
        for words, where in (
            (("new", "shapes", "--modality", "toy"), project.parent),
            (("run",), project),
            (("registry", "lineage", "champion", "--picture", "lineage.svg"), project),
        ):
            command = [sys.executable, "-m", "mergeflow.cli", *words]
            env = os.environ | {"PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
            subprocess.run(command, cwd=where, env=env, check=True, stdout=subprocess.DEVNULL)
        (folder / "files").mkdir(parents=True, exist_ok=True)
        shutil.copy(project / "lineage.svg", folder)
        for figure in (project / layout.FIGURES).glob("*.svg"):
            shutil.copy(figure, folder / f"run_{figure.name}")
        shutil.copy(project / "outputs/report.html", folder / "files")


def draw_figures(folder: Path) -> None:
    """Draw the studies' figures, unless they are newer than all records and the studies' code."""
    from studies.commands.study import find_studies
    from studies.lab.pages import draw
    from studies.lab.records import recorded
    from tasks.project.stage import RECORDS

    records = list((ROOT / RECORDS).glob("*.parquet"))
    sources = [*records, *(ROOT / "studies").rglob("*.py")]
    if folder.exists() and max(map(_time, folder.glob("*.svg")), default=0) > max(map(_time, sources)):
        return
    shutil.rmtree(folder, ignore_errors=True)
    names = {path.stem for path in records}
    chosen = {study.stage.name: study for study in find_studies(ROOT).values() if study.stage.name in names}
    draw(folder, {name: recorded(ROOT, study) for name, study in chosen.items()})


def _time(path: Path) -> float:
    return path.stat().st_mtime
