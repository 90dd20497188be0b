"""The project's commands for the registry: what is live, why, and what was before."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

Which = Annotated[str, typer.Argument(help="A version's number or an alias.")]
Name = Annotated[str | None, typer.Option("--model", help="The registered model; params.yaml's by default.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def add_commands(app: typer.Typer, root: Path) -> None:
    """Add the group `registry` for the project folder `root`."""
    group = typer.Typer(help="The registry: versions, the champion, promotion and rollback.", no_args_is_help=True)
    app.add_typer(group, name="registry")

    def opened(name: str | None) -> tuple[Any, str]:
        from registry.store import connect
        from tasks.parameters import load_params

        return connect(project_root=root), name or load_params(root / "params.yaml").registry.model

    _add_questions(group, opened)
    _add_changes(group, opened, root)


def _add_questions(group: typer.Typer, opened: Callable[[str | None], tuple[Any, str]]) -> None:
    @group.command("list")
    def list_(name: Name = None) -> None:
        """List the versions of the model, oldest first."""
        from registry.lookup import list_versions

        store, model = opened(name)
        table = Table("version", "aliases", "validation, normalised", "fingerprint", box=None, pad_edge=False)
        for version in list_versions(store, model):
            score = version.metrics.get("validation/normalised")
            shown = "" if score is None else f"{100 * score:.2f} %"
            aliases = ", ".join(f"@{alias}" for alias in version.aliases)
            table.add_row(version.version, aliases, shown, (version.fingerprint or "")[:16])
        Console().print(table)

    @group.command("show")
    def show_(which: Which = "champion", name: Name = None) -> None:
        """Print all that is known of one version as JSON: figures, decision, recipe's record, tags."""
        from registry.lookup import show

        store, model = opened(name)
        typer.echo(json.dumps(show(store, model, which), indent=1, default=str))

    @group.command("compare")
    def compare_(left: Which, right: Which, name: Name = None) -> None:
        """Print two versions side by side: metrics and validation accuracies."""
        from registry.lookup import compare

        store, model = opened(name)
        found = compare(store, model, left, right)
        table = Table("figure", f"version {found['left']}", f"version {found['right']}", "change", box=None)
        for part in ("metrics", "accuracy"):
            for key, row in found[part].items():
                table.add_row(
                    key, *("" if row[side] is None else f"{row[side]:.4f}" for side in ("left", "right", "change"))
                )
        Console().print(table)

    @group.command("history")
    def history_(name: Name = None) -> None:
        """Print every change of champion, oldest first."""
        from registry.lookup import history

        store, model = opened(name)
        for event in history(store, model):
            typer.echo(json.dumps(asdict(event), default=str))

    @group.command("lineage")
    def lineage_(which: Which = "champion", name: Name = None, as_json: AsJson = False) -> None:
        """Print where a version comes from: recipe, experts, data, commit, environment."""
        from registry.lineage import lineage, tree_lines

        store, model = opened(name)
        tree = lineage(store, model, which)
        typer.echo(json.dumps(tree, indent=1, default=str) if as_json else "\n".join(tree_lines(tree)))


def _add_changes(group: typer.Typer, opened: Callable[[str | None], tuple[Any, str]], root: Path) -> None:
    @group.command("promote")
    def promote_(
        which: Which = "candidate",
        name: Name = None,
        force: Annotated[bool, typer.Option(help="Promote against the gates; needs --who and --why.")] = False,
        who: Annotated[str, typer.Option(help="Who answers for a forced promotion.")] = "",
        why: Annotated[str, typer.Option(help="Why it is forced.")] = "",
    ) -> None:
        """Make a version champion if the gates of params.yaml let it; exit status 1 when they do not."""
        from registry.gates import GateSettings
        from registry.lookup import find_version
        from registry.promotion import Force, promote
        from tasks.parameters import load_params

        store, model = opened(name)
        section = load_params(root / "params.yaml").registry
        settings = GateSettings(**section.model_dump(exclude={"model"}))
        number = find_version(store, model, which).version
        done = promote(store, model, number, settings, force=Force(who, why) if force else None)
        for reason in done.decision.reasons if done.decision else []:
            typer.echo(f"· {reason}")
        typer.echo(f"{model}: champion is version {done.champion}")
        raise typer.Exit(0 if done.champion == number else 1)

    @group.command("rollback")
    def rollback_(
        name: Name = None,
        why: Annotated[str, typer.Option(help="The reason, kept with the event.")] = "",
    ) -> None:
        """Return to the champion before the present one; again, to the one before that."""
        from registry.promotion import rollback

        store, model = opened(name)
        typer.echo(f"{model}: champion is version {rollback(store, model, why=why).version}")

    @group.command("serve")
    def serve_(
        which: Which = "champion",
        name: Name = None,
        host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
        port: Annotated[int, typer.Option(help="Port to listen on.")] = 5001,
    ) -> None:
        """Answer classification requests over HTTP (POST /invocations) until stopped."""
        from registry.serving import serve

        store, model = opened(name)
        typer.echo(f"{model} {which} on http://{host}:{port}/invocations")
        serve(store, model, which, host, port)
