"""The project's commands for the registry: versions, their origin, promotion, rollback, serving."""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from mergeflow.checkpoints.fingerprint import short
from mergeflow.commands.options import print_table
from mergeflow.errors import MergeflowError
from mergeflow.yaml_text import in_words

if TYPE_CHECKING:
    from registry.lineage import Node

Which = Annotated[str, typer.Argument(help="A version's number or an alias; also MODEL@ALIAS or MODEL/NUMBER.")]
Name = Annotated[str | None, typer.Option("--model", help="The registered model; params.yaml's by default.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

Opened = Callable[..., tuple[Any, str, str]]
"""(name or None, which) → the open registry, the model's name, the version's number or alias."""


def add_commands(app: typer.Typer, root: Path) -> tuple[typer.Typer, Opened]:
    """Add the group `registry`; return it with the function that opens the registry, which other commands use."""
    group = typer.Typer(help="The registry: versions, the champion, promotion and rollback.", no_args_is_help=True)
    app.add_typer(group, name="registry")

    def opened(name: str | None, which: str = "champion") -> tuple[Any, str, str]:
        from registry.store import connect
        from tasks.project.sections import read_registry_section

        model, number = split_address(which)
        model = model or name or read_registry_section(root).model
        return connect(project_root=root), model, number

    def asked(name: str | None, which: str = "champion") -> tuple[Any, str, str]:
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # MLflow's own patience is four minutes
        return opened(name, which)

    _add_questions(group, asked)
    _add_history(group, asked)
    _add_lineage(group, asked)
    _add_changes(group, opened, root)
    _add_serving(group, opened)
    return group, opened


def split_address(which: str) -> tuple[str | None, str]:
    """Split an address into its model (None where it is not named) and its version.

    Example:
        >>> split_address("merged@champion"), split_address("merged/3"), split_address("@champion")
        (('merged', 'champion'), ('merged', '3'), (None, 'champion'))
    """
    name, _, version = which.removeprefix("models:/").replace("@", "/").rpartition("/")
    return name or None, version


def _add_questions(group: typer.Typer, opened: Opened) -> None:
    @group.command("list")
    def list_(name: Name = None) -> None:
        """List the versions of the model, oldest first, with their normalised validation accuracy."""
        from registry.versions import list_versions

        store, model, _ = opened(name)
        heads = ("version", "aliases", "method", "tasks", "normalised", "fingerprint")
        table = Table(*heads, box=None, pad_edge=False)
        for version in list_versions(store, model):
            score = version.metrics.get("validation/normalised")
            shown = "" if score is None else f"{100 * score:.2f} %"
            aliases = ", ".join(f"@{alias}" for alias in version.aliases)
            count = str(len(version.tasks) or "")
            fingerprint = short(version.fingerprint or "")
            table.add_row(version.version, aliases, version.method, count, shown, fingerprint)
        print_table(Console(), table)

    @group.command("show")
    def show_(which: Which = "champion", name: Name = None, as_json: AsJson = False) -> None:
        """Show one version: method, figures, accuracies, decision, where it comes from; with --json all of it."""
        from registry.versions import show

        store, model, version = opened(name, which)
        shown = show(store, model, version)
        if as_json:
            typer.echo(json.dumps(shown, indent=1, default=str))
        else:
            _print_version(shown, Console())

    @group.command("compare")
    def compare_(left: Which, right: Which, name: Name = None) -> None:
        """Print two versions side by side: metrics and validation accuracies."""
        from registry.versions import compare

        store, model, first = opened(name, left)
        other, second = split_address(right)
        if other not in (None, model):
            raise MergeflowError(f"'{left}' is of '{model}' and '{right}' of '{other}': compare versions of one model.")
        comparison = compare(store, model, first, second)
        table = Table("figure", f"version {comparison['left']}", f"version {comparison['right']}", "change", box=None)
        for part in ("metrics", "accuracy"):
            for key, row in comparison[part].items():
                table.add_row(
                    key, *("" if row[side] is None else f"{row[side]:.4f}" for side in ("left", "right", "change"))
                )
        print_table(Console(), table)


def _add_history(group: typer.Typer, opened: Opened) -> None:
    @group.command("history")
    def history_(name: Name = None, as_json: AsJson = False) -> None:
        """List every change of champion, oldest first."""
        from registry.versions import history

        store, model, _ = opened(name)
        events = history(store, model)
        if as_json:
            typer.echo(json.dumps([asdict(event) for event in events], indent=1))
            return
        table = Table("when (UTC)", "action", "champion", "before", "who", "why", box=None, pad_edge=False)
        for event in events:
            table.add_row(
                event.at[:16].replace("T", " "), event.action, event.version, event.before or "–", event.who, event.why
            )
        print_table(Console(), table)


def _print_version(shown: dict[str, Any], console: Console) -> None:
    args = in_words((shown["recipe"] or {}).get("args") or {})
    names = "".join(f" @{alias}" for alias in shown["aliases"])
    made = f", {shown['method']}{f' ({args})' if args else ''}" if shown["method"] else ""
    lines = [f"{shown['name']} version {shown['version']}{names}{made}"]
    day = datetime.fromtimestamp(shown["created"] / 1000, UTC)
    facts = {"registered": f"{day:%Y-%m-%d %H:%M} UTC", "weights": short(shown["fingerprint"] or "")}
    facts |= {"files": shown["source"], "run": shown["run_id"], "made by": shown["kind"]}
    if parent := shown["parent"]:
        facts["made by"] += f" of {parent['task']}, from version {parent['version']}"
    facts |= {"without": ", ".join(shown["removed_tasks"]), **shown["tags"]}
    facts |= {key: f"{figure:.4f}" for key, figure in shown["metrics"].items()}
    width = max(map(len, facts))
    lines += [f"  {key:{width}}  {value}" for key, value in facts.items() if value]
    if decision := shown["decision"]:
        lines += [f"The gates {'let it be champion' if decision['promote'] else 'refused it'}:"]
        lines += [f"  · {reason}" for reason in decision["reasons"]]
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)
    table = Table("task", "validation", "expert's", box=None)
    for task in shown["tasks"]:
        scores = (shown[part].get(task) for part in ("accuracy", "expert_accuracy"))
        table.add_row(task, *("" if score is None else f"{100 * score:.2f} %" for score in scores))
    print_table(console, table)


def _add_lineage(group: typer.Typer, opened: Opened) -> None:
    @group.command("lineage")
    def lineage_(
        which: Which = "champion",
        name: Name = None,
        as_json: AsJson = False,
        picture: Annotated[Path | None, typer.Option(help="Draw the tree into this SVG file.")] = None,
    ) -> None:
        """Print where a version comes from: recipe, experts, data, commit, environment."""
        from mergeflow.checkpoints import write_text
        from registry.lineage import lineage, lineage_nodes, tree_lines

        if picture is not None and picture.suffix.lower() != ".svg":
            raise MergeflowError(f"--picture {picture}: the tree is drawn as SVG only; give a file that ends in .svg.")
        store, model, version = opened(name, which)
        tree = lineage(store, model, version)
        if picture is not None:
            write_text(picture, lineage_svg(lineage_nodes(tree)))
            typer.echo(str(picture), err=as_json)  # the JSON stands alone on stdout
        if as_json:
            typer.echo(json.dumps(tree, indent=1, default=str))
        elif picture is None:
            typer.echo("\n".join(tree_lines(tree)))


def _add_changes(group: typer.Typer, opened: Opened, root: Path) -> None:
    @group.command("promote")
    def promote_(
        which: Which = "candidate",
        name: Name = None,
        force: Annotated[bool, typer.Option(help="Promote against the gates; needs --who and --why.")] = False,
        who: Annotated[str, typer.Option(help="Who asks; without --force by default the user of this machine.")] = "",
        why: Annotated[str, typer.Option(metavar="TEXT", help="The reason, kept with the event.")] = "",
    ) -> None:
        """Make a version champion if the gates of params.yaml let it; exit status 1 when they do not."""
        from registry.promotion import Force, promote
        from registry.versions import find_version
        from tasks.project.sections import read_registry_section

        store, model, version = opened(name, which)
        settings = read_registry_section(root)
        number = find_version(store, model, version).version
        done = promote(
            store, model, number, settings, force=Force(who, why) if force else None, who=who or None, why=why
        )
        if done.decision is None:
            typer.echo(f"{model}: version {number} is champion already; nothing was changed or recorded")
            return
        for reason in done.decision.reasons:
            typer.echo(f"· {reason}")
        typer.echo(f"{model}: champion is version {done.champion}")
        raise typer.Exit(0 if done.champion == number else 1)

    @group.command("rollback")
    def rollback_(
        name: Name = None,
        who: Annotated[str | None, typer.Option(help="Who decided; by default the user of this machine.")] = None,
        why: Annotated[str, typer.Option(metavar="TEXT", help="The reason, kept with the event.")] = "",
    ) -> None:
        """Return to the champion before the present one; called again, to the one before that."""
        from registry.promotion import rollback

        store, model, _ = opened(name)
        typer.echo(f"{model}: champion is version {rollback(store, model, who=who, why=why).version}")


def _add_serving(group: typer.Typer, opened: Opened) -> None:
    @group.command("serve")
    def serve_(
        which: Which = "champion",
        name: Name = None,
        host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen on.")] = "127.0.0.1",
        port: Annotated[int, typer.Option(help="Port to listen on.")] = 5001,
        max_rows: Annotated[int, typer.Option(min=1, help="Most rows of one request.")] = 1024,
        max_mib: Annotated[int, typer.Option(min=1, help="Largest size of one request, in MiB.")] = 32,
        foreign: Annotated[
            bool, typer.Option(help="Serve a version that another program registered; this runs code from its files.")
        ] = False,
    ) -> None:
        """Serve a version over HTTP (POST /invocations): classes of images or texts, or continuations of texts.

        If MERGEFLOW_SERVE_TOKEN is set, callers have to send it as `Authorization: Bearer TOKEN`.
        """
        from registry.serving import Limits, serve

        store, model, version = opened(name, which)
        limits = Limits(max_mib * 2**20, max_rows)

        def ready(number: str, address: str) -> None:
            typer.echo(f"{model} version {number} on {address}")

        serve(store, model, version, host, port, ready, limits=limits, foreign=foreign)


_GAP, _BELOW, _LONGEST = 40.0, 8.0, 46  # points between columns and between rows; characters of a line


def lineage_svg(top: "Node") -> str:
    """Draw the tree of `lineage_nodes` as an SVG document, the version on the left and its data on the right.

    Example:
        >>> from registry.lineage import Node
        >>> lineage_svg(Node("version", [Node("recipe"), Node("run")])).count('id="box-')
        3
    """
    from tasks.plotting.boxes import Box, boxes_figure, width_of
    from tasks.plotting.drawing import to_svg

    depths: dict[int, int] = {}
    boxes: list[Box] = []
    links: list[tuple[int, int]] = []

    def place(node: "Node", depth: int, begin: float) -> tuple[int, float]:
        """Put a node halfway down its children; return its number, and where the next one below may begin."""
        number = len(boxes)
        lines = list(_wrapped(node.text))
        boxes.append(Box(lines, 0.0, width_of(lines), begin, faulty=lines[0].startswith("missing")))
        depths[number], below, children = depth, begin, []
        for child in node.children:
            placed, below = place(child, depth + 1, below)
            children.append(placed)
        if children:
            middle = (boxes[children[0]].middle + boxes[children[-1]].middle) / 2
            boxes[number] = replace(boxes[number], top=max(begin, middle - boxes[number].height / 2))
        links.extend((number, child) for child in children)
        return number, max(below, boxes[number].top + boxes[number].height + _BELOW)

    place(top, 0, 1.0)
    widths = [max(boxes[n].width for n in depths if depths[n] == depth) for depth in range(max(depths.values()) + 1)]
    lefts = [1 + sum(widths[:depth]) + _GAP * depth for depth in range(len(widths))]
    placed = [replace(box, left=lefts[depths[n]], width=widths[depths[n]]) for n, box in enumerate(boxes)]
    figure = boxes_figure(placed, [(placed[start], placed[end]) for start, end in links])
    return to_svg(figure, f"Lineage of {top.text}").decode()


def _wrapped(text: str) -> Iterator[str]:
    """Break the text after commas, so that no box is wider than it has to be."""
    line = ""
    for part in text.split(", "):
        longer = f"{line}, {part}" if line else part
        if line and len(longer) > _LONGEST:
            yield f"{line},"
            longer = part
        line = longer
    yield line
