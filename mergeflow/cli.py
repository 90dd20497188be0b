"""The command line: the table of all commands, the help, the call. Library commands work anywhere.

A command's module is imported when it is called, and heavy imports happen inside the commands.
"""

import atexit
import gc
import os
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup

from mergeflow.application import call, find_project, make_importable
from mergeflow.commands import ANYWHERE
from mergeflow.errors import MergeflowError, first_line, is_full, not_installed, not_permitted, require
from mergeflow.version import version

FAMILIES = {
    "mergeflow.commands.merging": "merge check methods convert diff push",
    "mergeflow.commands.derived": "soup compress extract-task extract-lora vector",
    "mergeflow.commands.sweep": "sweep",
    "mergeflow.commands.statistics": "statistics adamerge",
    "mergeflow.commands.language": "perplexity lm-eval",
    "mergeflow.commands.pages": "docs",
    "tasks.commands.advise": "advise",
    "tasks.commands.finetune": "finetune",
    "tasks.commands.linearity": "linearity",
    "flows.commands": "new run status results report accept stage release",
    "flows.rebuild.commands": "registry add-task unlearn",
    "studies.commands.study": "study",
}
"""The commands that each module adds: the library's by `add_commands(app)`, the project's by `(app, root)`."""
GROUPS = {
    "Merge": (
        "merge check methods sweep convert diff push soup compress extract-task extract-lora vector statistics "
        "adamerge linearity advise perplexity lm-eval"
    ),
    "Project": "new run status results report add-task finetune unlearn accept stage release docs",
    "Registry": "registry",
    "Research": "study",
}
EXAMPLES = {
    "accept": 'mergeflow accept finetune vectors --because "only the reader of Parquet changed"',
    "adamerge": "mergeflow adamerge recipe.yaml --task cars=data/cars --architecture ViT-B-32 --out coefficients",
    "add-task": "mergeflow add-task birds folder:inputs/birds",
    "advise": "mergeflow advise recipe.yaml --architecture ViT-B-32 --data folder:inputs/cars",
    "check": "mergeflow check recipe.yaml",
    "compress": "mergeflow compress emr --base base/ --expert cars=cars/ --expert dtd=dtd/ --out suite.safetensors",
    "convert": "mergeflow convert mergekit.yml --out recipe.yaml",
    "diff": "mergeflow diff base/ merged/",
    "docs": "mergeflow docs recipes",
    "extract-lora": "mergeflow extract-lora base/ expert/ --out lora/ --rank 16",
    "extract-task": "mergeflow extract-task suite.safetensors cars --base base/ --out cars.safetensors",
    "finetune": "mergeflow finetune digits land --regime one_epoch",
    "linearity": "mergeflow linearity digits signs",
    "lm-eval": "mergeflow lm-eval merged/ --task lambada_openai --limit 200",
    "merge": "mergeflow merge recipe.yaml --set args.scale=0.4",
    "methods": "mergeflow methods ties",
    "new": "mergeflow new birds --modality vision",
    "perplexity": "mergeflow perplexity base/ merged/ --data folder:texts",
    "push": "mergeflow push merged/ owner/name --dry-run",
    "registry compare": "mergeflow registry compare 1 2",
    "registry history": "mergeflow registry history",
    "registry lineage": "mergeflow registry lineage champion --picture lineage.svg",
    "registry list": "mergeflow registry list",
    "registry promote": "mergeflow registry promote 2",
    "registry reproduce": "mergeflow registry reproduce champion",
    "registry rollback": 'mergeflow registry rollback --why "complaints about birds"',
    "registry serve": "mergeflow registry serve champion --port 5001",
    "registry show": "mergeflow registry show champion",
    "registry unmerge": "mergeflow registry unmerge champion --task birds",
    "release check": "mergeflow release check dist/mergeflow-0.1.0-py3-none-any.whl",
    "report": "mergeflow report",
    "results": "mergeflow results",
    "run": "mergeflow run --push",
    "soup": "mergeflow soup outputs/run --window 3 --out soup/",
    "stage digests": "mergeflow stage digests",
    "stage list": "mergeflow stage list",
    "stage run": "mergeflow stage run finetune --item digits",
    "statistics fisher": (
        "mergeflow statistics fisher cars.safetensors --task data/cars --head heads/cars.safetensors "
        "--architecture ViT-B-32 --out fisher/cars.safetensors"
    ),
    "statistics gram": (
        "mergeflow statistics gram cars.safetensors --task data/cars --architecture ViT-B-32 --out gram.safetensors"
    ),
    "status": "mergeflow status",
    "study": "mergeflow study mima --judge",
    "sweep": "mergeflow sweep sweep.yaml --out sweeps/first",
    "unlearn": "mergeflow unlearn champion --task birds",
    "vector add": "mergeflow vector add a.safetensors b.safetensors --weight 0.3 --weight 0.5 --out sum.safetensors",
    "vector analogy": "mergeflow vector analogy a.safetensors b.safetensors c.safetensors --out d.safetensors",
    "vector extract": "mergeflow vector extract base/ cars/ --out cars.safetensors",
    "vector negate": "mergeflow vector negate cars.safetensors --out unlearn.safetensors",
    "vector scale": "mergeflow vector scale cars.safetensors 0.5 --out half.safetensors",
}
FIRST_OF_GROUP = {
    "registry": "registry show",
    "release": "release check",
    "stage": "stage run",
    "statistics": "statistics gram",
    "vector": "vector extract",
}
"""The command whose example a group of commands shows."""
QUIET = {
    "DO_NOT_TRACK": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DVC_NO_ANALYTICS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""Variables by which nothing that a command starts reports home. The word "true": Prefect does not take "1"."""
_VALUES = {Path: "PATH", int: "INTEGER", float: "FLOAT", bool: ""}
"""What the help calls a value of an option; other kinds are names, unless the option has a metavar."""


class _InWords:
    """Help that says what to type for a value (PATH, NAME), where typer shows Python's type (`<list[Path]>`)."""

    def get_params(self, ctx: Any) -> list[Any]:
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            _name_value(parameter)
        return parameters

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        pieces: list[str] = super().collect_usage_pieces(ctx)  # type: ignore[misc]
        return [piece.replace("{", "").replace("}", "") for piece in pieces]  # typer's sign of a required argument


class Command(_InWords, TyperCommand): ...


class Group(_InWords, TyperGroup): ...


def _name_value(parameter: Any) -> None:
    annotation = parameter.type_descriptor.annotation
    repeats = " …" if get_origin(annotation) is list else ""
    kind = get_args(annotation)[0] if repeats else annotation
    if kind is Path:
        parameter.callback = _from_home
    if parameter.param_type_name == "argument":
        parameter.metavar = parameter.metavar or parameter.name.upper()
        value = f"{_VALUES.get(kind, '')}{repeats}".strip()
    else:
        value = parameter.metavar = (parameter.metavar or _VALUES.get(kind, "NAME")).removesuffix(" …") + repeats
    vars(parameter)["display_type"] = lambda ctx: value


def _from_home(_context: Any, _parameter: Any, value: Any) -> Any:
    """Put the home folder in place of `~`, where a shell does not: in `--out=~/merged`."""
    if isinstance(value, (list, tuple)):
        return [Path(os.path.expanduser(part)) for part in value]
    return value if value is None else Path(os.path.expanduser(value))


class Commands(Mapping[str, Any]):
    """All commands by name, in the order of the help; the module of one is imported when it is asked for.

    Args:
        root: The project folder; outside a project the folder that the command works in.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._homes = {name: module for module, names in FAMILIES.items() for name in names.split()}
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            self._loaded |= self._load(self._homes[name])
        return self._loaded[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Return a command; a KeyError while its module is imported does not mean that there is none."""
        return self[name] if name in self._homes else default

    def __iter__(self) -> Iterator[str]:
        names = (name for names in GROUPS.values() for name in names.split())
        return iter(sorted(names, key=FIRST_OF_GROUP.__contains__))  # typer lists groups of commands last

    def __len__(self) -> int:
        return len(self._homes)

    def is_of_the_library(self, name: str | None) -> bool:
        return self._homes.get(name or "", "").startswith("mergeflow.")

    def _load(self, module: str) -> Mapping[str, Any]:
        app = typer.Typer()
        import_module(module).add_commands(app, *([] if module.startswith("mergeflow.") else [self._root]))
        _arrange(app)
        return typer.main.get_group(app).commands


def group_of(commands: Commands) -> type[Group]:
    """Return the group of all commands, as a class, which is what typer takes."""

    class AllCommands(Group):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options | {"commands": commands})

    return AllCommands


def _arrange(app: Any) -> None:
    """Put every command into its panel of the help; show an example below each command and each group."""
    panels = {name: title for title, names in GROUPS.items() for name in names.split()}
    for command in app.registered_commands:
        command.rich_help_panel = panels.get(command.name)
        _add_example(command, command.name)
    for group in app.registered_groups:
        group.rich_help_panel = panels.get(group.name)
        group.cls = Group
        group.epilog = f"Example: {EXAMPLES[FIRST_OF_GROUP[group.name]]}"
        for command in group.typer_instance.registered_commands:
            _add_example(command, f"{group.name} {command.name or command.callback.__name__.replace('_', '-')}")


def _add_example(command: Any, words: str) -> None:
    command.cls = Command
    if words in EXAMPLES:
        command.epilog = f"Example: {EXAMPLES[words]}"


app = typer.Typer(
    name="mergeflow",
    help="Merge fine-tuned models, and keep the best merge of a project in a registry.",
    epilog="Example: mergeflow check recipe.yaml",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def add_all_commands(start: Path) -> None:
    """Offer the library's commands and the project's; outside a project folder the latter say what they lack."""
    project = find_project(start)
    make_importable()
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    commands = Commands(project or start)
    app.info.cls = group_of(commands)

    @app.callback()
    def _root(
        context: typer.Context,
        _: Annotated[
            bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
        ] = False,
    ) -> None:
        """Merge fine-tuned models, and keep the best merge of a project in a registry."""
        asked = context.invoked_subcommand
        if commands.is_of_the_library(asked) or asked in ANYWHERE or "--help" in sys.argv:
            return
        if project is None:
            raise MergeflowError(
                f"`mergeflow {asked}` works inside a project, and {start} is not in a project folder (one with "
                "dvc.yaml and params.yaml): go into one, or make one with `mergeflow new NAME`."
            )
        require("dvc", "mlflow", "prefect")


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"mergeflow {version()}")
        raise typer.Exit


def _run_the_projects_own_library(project: Path | None) -> None:
    """Start again with the library that lies in the project's repository, where another copy of it is running.

    DVC runs experiments in copies of the repository and records the copy's code as what made the results.
    """
    above = [project, *project.parents] if project else []
    root = next((folder for folder in above if (folder / "mergeflow/cli.py").is_file()), None)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if root and not (root / "mergeflow").samefile(Path(__file__).parent) and str(root) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), *paths]))
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, "-m", "mergeflow.cli", *sys.argv[1:]])


def _end_soon() -> None:
    """Keep Python from searching all modules for garbage at its end: half a second, once torch is imported."""
    if "triton" not in sys.modules:  # it prints what was not collected
        gc.freeze()


def main() -> None:
    """Run the command line; a `MergeflowError` is printed as one message and ends with status 2."""
    atexit.register(_end_soon)
    project = find_project(Path.cwd())
    _run_the_projects_own_library(project)
    add_all_commands(Path.cwd())
    try:  # in a project, commands follow references to its models
        app(obj=project and partial(call, "flows.references", "resolve_reference", project))
    except Exception as error:
        message = _message_of(error)
        if message is None:
            raise
        Console(stderr=True, soft_wrap=True, highlight=False).print(f"[bold red]error:[/] {_plain(str(message))}")
        sys.exit(2)


def _message_of(error: Exception) -> Exception | None:
    """Translate an error into a message for the user; None for a fault of this library."""
    if isinstance(error, ModuleNotFoundError):
        return not_installed(error.name)
    if type(error).__name__ == "OutOfMemoryError":  # torch's, which is not imported here
        first = str(error).partition("\n")[0].partition(". GPU ")[0].rstrip(".")
        return MergeflowError(
            f"the device has too little memory: {first}. Put fewer examples on it at once (a smaller batch, or "
            "finetune.accumulate), end what else uses it, or use the device cpu."
        )
    if isinstance(error, MergeflowError):
        return error
    if denied := not_permitted(error):
        return denied
    if is_full(error):
        return MergeflowError(
            f"the disk is full: {first_line(error)}. Free some space and call the command again: finished work is kept."
        )
    from mergeflow.plugins import failed_in_own_code

    return failed_in_own_code(error)


def _plain(text: str) -> str:
    return text.replace("[", r"\[")


if __name__ == "__main__":
    main()
