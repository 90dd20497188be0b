"""`mergeflow finetune`: train experts in any regime on the project's prepared data, outside the pipeline."""

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich import box
from rich.console import Console
from rich.table import Table

from mergeflow import layout
from mergeflow.commands.options import read_pairs, seed_option
from mergeflow.documents import Training, read_document
from mergeflow.errors import MergeflowError, unknown_name
from tasks.project.files import file_lock
from tasks.project.stage import STATE

FINETUNE, MULTITASK = "finetune", "multitask"
_DATA = (layout.BASE, layout.HEADS)
_SPLITS = ("train", "validation")
_EXPERT = (layout.MODEL_FILE, layout.HEAD_FILE, layout.TRAINING_FILE, "adapter", "epochs")  # what may be in one
_PIPELINE = (
    *(layout.DATA, layout.BASE, layout.MULTITASK, layout.EXPERTS, layout.VECTORS, layout.SWEEPS, layout.MERGED),
    *(layout.RESULTS, layout.STUDIES),
)


def add_commands(app: typer.Typer, root: Path) -> None:
    @app.command("finetune")
    def finetune(
        tasks: Annotated[list[str] | None, typer.Argument(help="Tasks of params.yaml; all when none is named.")] = None,
        regime: Annotated[str | None, typer.Option(help="How to train; params.yaml's regime by default.")] = None,
        changes: Annotated[
            list[str] | None,
            typer.Option("--set", metavar="KEY=VALUE", help="Change a setting, e.g. iterative.rounds=4."),
        ] = None,
        seed: Annotated[
            int | None,
            seed_option("Seed of batch order and new weights; params.yaml's by default."),
        ] = None,
        out: Annotated[
            Path | None, typer.Option(help="Folder for the experts; outputs/finetuned/REGIME by default.")
        ] = None,
    ) -> None:
        """Train experts in any regime, outside the pipeline; the same command continues after a kill."""
        values = changed_params(root, tasks or [], regime, read_pairs(changes or [], "--set"), seed)
        target = out or root / layout.FINETUNED / values["finetune"]["regime"]
        console = Console()
        console.print(train_experts(root, values, target, console))


def changed_params(
    root: Path, tasks: list[str], regime: str | None, changes: Mapping[str, str], seed: int | None
) -> dict[str, Any]:
    """Return the content of params.yaml with other tasks, settings and seed.

    Args:
        changes: settings of `finetune` by dotted name, as YAML text.
    """
    from tasks.project.parameters import load_params

    values: dict[str, Any] = load_params(root / "params.yaml").model_dump(mode="json")
    for name in tasks:
        if name not in values["tasks"]:
            raise unknown_name("task", name, values["tasks"])
    values["tasks"] = {name: values["tasks"][name] for name in tasks or values["tasks"]}
    for key, text in changes.items():
        *path, last = key.split(".")
        section = values["finetune"]
        for part in path:
            section = section.setdefault(part, {})
            if not isinstance(section, dict):
                raise MergeflowError(f"--set {key}: finetune.{part} holds no settings of its own, but {section!r}.")
        section[last] = _value(text)
    values["finetune"]["regime"] = regime or values["finetune"]["regime"]
    values["seed"] = values["seed"] if seed is None else seed
    return values


def train_experts(root: Path, values: Mapping[str, Any], target: Path, console: Console) -> Table:
    """Train the experts that `values` describe into `target/<task>`; return the table of what was trained.

    The stages `multitask` and `finetune` do it, in a project folder of their own with these parameters: it is found
    again after a kill, and removed when every expert is in its place.
    """
    from tasks.memory import print_device_memory
    from tasks.project.graph import find_stage, load_graph
    from tasks.project.parameters import load_params
    from tasks.running.progress import progress_bars
    from tasks.running.runner import run_stage

    check_places(root, target, values["tasks"])
    with _view(root, values) as folder:
        print_device_memory(root, load_params(folder / "params.yaml"), (FINETUNE, MULTITASK), console)
        _bring_inputs(root, folder, list(values["tasks"]), console)
        stages = load_graph(folder)
        failures = []
        with progress_bars(folder, [MULTITASK, *(f"{FINETUNE}@{name}" for name in values["tasks"])], console):
            run_stage(folder, find_stage(stages, MULTITASK, None))
            for name in values["tasks"]:
                try:
                    run_stage(folder, find_stage(stages, FINETUNE, name))
                    _place(root, folder / layout.expert(name), target / name)
                except MergeflowError as error:
                    failures.append(str(error))
        if failures:
            raise MergeflowError("\n".join(failures))
        table = _table(
            folder, list(values["tasks"]), str(target.relative_to(root) if root in target.parents else target)
        )
        shutil.rmtree(folder)
    return table


def check_places(root: Path, target: Path, tasks: Iterable[str]) -> None:
    """Refuse places of experts that are the pipeline's, where examples are read from, or where anything else lies."""
    from mergeflow.data.address import parse_address
    from tasks.project.parameters import load_params

    root, sources = root.resolve(), load_params(root / "params.yaml").tasks
    for task in tasks:
        place = (target / task).resolve()
        for home in (root, *(folder for folder in place.parents if (folder / "dvc.yaml").exists())):
            for owned in (home / name for name in _PIPELINE):
                if _overlap(place, owned):
                    raise MergeflowError(
                        f"the expert of '{task}' would go to '{place}', and '{owned}' holds what the pipeline makes, "
                        "which stays as it is: choose another folder with --out."
                    )
        for other, source in sources.items():
            for read in ((root / path).resolve() for path in parse_address(source).paths if path):
                if _overlap(place, read) and not root.is_relative_to(read):
                    raise MergeflowError(
                        f"the expert of '{task}' would go to '{place}', and '{read}' holds examples of the task "
                        f"'{other}': choose another folder with --out."
                    )
        _check_free(place)


def _overlap(first: Path, other: Path) -> bool:
    return first.is_relative_to(other) or other.is_relative_to(first)


def _check_free(place: Path) -> None:
    """Refuse a place where anything lies but an earlier result of this command, which is replaced."""
    for path in (place, *place.parents):
        if path.exists() and not path.is_dir():
            raise MergeflowError(f"'{path}' is a file, and experts go into folders: choose another folder with --out.")
    names = sorted(path.name for path in place.iterdir()) if place.exists() else []
    others = [name for name in names if name not in _EXPERT or layout.TRAINING_FILE not in names]
    if others:
        raise MergeflowError(
            f"'{place}' holds {', '.join(others[:5])}{', …' if others[5:] else ''}, and only an earlier result of "
            f"`mergeflow finetune` is replaced, a folder with {layout.TRAINING_FILE} and none but its other files: "
            "choose another folder with --out, or move this one away."
        )


@contextmanager
def _view(root: Path, values: Mapping[str, Any]) -> Iterator[Path]:
    """Open the scratch project with these parameters; after a kill, the same one again."""
    from tasks.project.parameters import load_params
    from tasks.running.scratch_project import scratch_project, write_params

    choices = {key: values[key] for key in ("seed", "tasks", "data", "model", "finetune", "evaluation")}
    key = hashlib.sha256(json.dumps(choices, sort_keys=True).encode()).hexdigest()[:12]
    with scratch_project(root, f"{FINETUNE}/{key}", fresh=False) as folder:
        write_params(folder, values)
        try:
            load_params(folder / "params.yaml")
        except MergeflowError:
            shutil.rmtree(folder)
            raise
        yield folder


def _bring_inputs(root: Path, folder: Path, tasks: list[str], console: Console) -> None:
    from tasks.project.graph import load_graph, needed_for
    from tasks.running.progress import progress_bars
    from tasks.running.runner import run_stage
    from tasks.running.scratch_project import link

    stages = load_graph(root)
    needed = needed_for([MULTITASK], stages) - {MULTITASK}
    addresses = [name for name, stage in stages.items() if name in needed and not stage.frozen]
    with progress_bars(root, addresses, console):
        for address in addresses:
            run_stage(root, stages[address])
    shutil.rmtree(folder / layout.BASE, ignore_errors=True)
    shutil.rmtree(folder / layout.DATA, ignore_errors=True)
    for name in (*_DATA, *(layout.split(split, task) for split in _SPLITS for task in tasks)):
        for path in (root / name).iterdir():
            if path.is_file():
                link(path, folder / name / path.name)


def _place(root: Path, made: Path, target: Path) -> None:
    """Copy a folder to its place, whole; the stage keeps its own until all tasks are done.

    What a killed call has left beside the place is removed.
    """
    target = target.resolve()
    copy, old = (target.with_name(f".{target.name}.mergeflow.{kind}") for kind in ("new", "old"))
    with file_lock(root / STATE / "locks" / "finetune-place.lock", "the folders of experts"):
        _check_free(target)  # again: training took its time
        shutil.rmtree(copy, ignore_errors=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(made, copy)
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
            target.rename(old)
        copy.rename(target)
        shutil.rmtree(old, ignore_errors=True)


def _table(folder: Path, tasks: list[str], target: str) -> Table:
    from tasks.project.stage import read_record

    table = Table(title=f"Experts in {target}", box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for name in ("task", "regime", "steps", "validation %", "seconds", "examples/s"):
        table.add_column(name, justify="left" if name in ("task", "regime") else "right", no_wrap=True)
    for name in tasks:
        summary = read_document(folder / layout.expert_training(name), Training)
        cost = read_record(folder, f"{FINETUNE}@{name}").get("training")
        accuracy = f"{100 * summary['validation_accuracy']:.1f}"
        table.add_row(name, summary["settings"]["regime"], str(summary["steps"]), accuracy, *_cost(cost))
    together = read_record(folder, MULTITASK).get("training")
    if together:
        table.add_section()
        table.add_row("all tasks", "", str(together["steps"]), "", *_cost(together))
    return table


def _cost(cost: Mapping[str, Any] | None) -> tuple[str, str]:
    return (f"{cost['seconds']:.1f}", f"{cost['examples_per_second']:.0f}") if cost else ("", "")


def _value(text: str) -> Any:
    """Read a value as YAML; 1e-4, a text to YAML, is a number here."""
    try:
        value = yaml.safe_load(text)
        return float(value) if isinstance(value, str) else value
    except (yaml.YAMLError, ValueError):
        return text
