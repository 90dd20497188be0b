"""The groups of `mergeflow --help`, and one example for each command and each group of commands."""

from pathlib import Path
from typing import Any, get_args, get_origin

from typer.core import TyperCommand, TyperGroup

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
    if parameter.param_type_name == "argument":
        parameter.metavar = parameter.metavar or parameter.name.upper()
        value = f"{_VALUES.get(kind, '')}{repeats}".strip()
    else:
        value = parameter.metavar = (parameter.metavar or _VALUES.get(kind, "NAME")).removesuffix(" …") + repeats
    vars(parameter)["display_type"] = lambda ctx: value


def arrange(app: Any) -> None:
    """Put every command into its panel of the help; show an example below each command and each group."""
    app.info.cls = Group
    group_of = {name: title for title, names in GROUPS.items() for name in names.split()}
    order = list(group_of)
    for entries in (app.registered_commands, app.registered_groups):
        for entry in entries:
            entry.rich_help_panel = group_of.get(entry.name)
        entries.sort(key=lambda entry: order.index(entry.name) if entry.name in order else len(order))
    for command in app.registered_commands:
        _add_example(command, command.name)
    for group in app.registered_groups:
        group.cls = Group
        group.epilog = f"Example: {EXAMPLES[FIRST_OF_GROUP[group.name]]}"
        for command in group.typer_instance.registered_commands:
            _add_example(command, f"{group.name} {command.name or command.callback.__name__.replace('_', '-')}")


def _add_example(command: Any, words: str) -> None:
    command.cls = Command
    if words in EXAMPLES:
        command.epilog = f"Example: {EXAMPLES[words]}"
