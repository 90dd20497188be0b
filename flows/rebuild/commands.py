"""Commands that make models from a version's lineage: reproduce, unmerge, unlearn, add-task."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Column
from rich.table import Table as RichTable

from mergeflow.checkpoints.fingerprint import short
from mergeflow.commands.options import print_table
from mergeflow.yaml_text import in_words
from registry import commands as registry_commands
from registry.commands import Name, Opened, Which

if TYPE_CHECKING:
    from flows.rebuild.reproduce import Reproduction
    from flows.rebuild.unlearn import Unlearnt
    from registry.stage import Rebuilt


def add_commands(app: typer.Typer, root: Path) -> None:
    """Add the group `registry` with `reproduce` and `unmerge`; `unlearn` and `add-task`."""
    group, opened = registry_commands.add_commands(app, root)
    console = Console(soft_wrap=True, highlight=False)
    _add_reproduce(group, opened, root, console)
    _add_unmerge(group, opened, root, console)
    _add_unlearn(app, opened, root, console)
    _add_add_task(app, opened, root, console)


def _reporter(console: Console) -> Callable[[str], None]:
    return lambda text: console.print(f"  [dim]{text}[/]")


def _add_reproduce(group: typer.Typer, opened: Opened, root: Path, console: Console) -> None:
    @group.command("reproduce")
    def reproduce_(
        which: Which = "champion",
        name: Name = None,
        from_data: Annotated[bool, typer.Option(help="Fine-tune the experts again too, from their data.")] = False,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    ) -> None:
        """Make a version again from its lineage, compare bit for bit; exit status 1 when it differs."""
        from flows.rebuild.reproduce import reproduce

        store, model, version = opened(name, which)
        report = _reporter(Console(quiet=True) if as_json else console)
        done = reproduce(root, store, model, version, from_data=from_data, report=report)
        typer.echo(json.dumps(asdict(done), indent=1) if as_json else "\n".join(_reproduction_lines(done)))
        raise typer.Exit(0 if done.same else 1)


def _add_unmerge(group: typer.Typer, opened: Opened, root: Path, console: Console) -> None:
    @group.command("unmerge")
    def unmerge_(
        task: Annotated[str, typer.Option(help="The task to leave out.")],
        which: Which = "champion",
        name: Name = None,
        promote: Annotated[bool, typer.Option(help="Make the result champion if the gates let it.")] = False,
    ) -> None:
        """Rebuild a version without one task and register the result as a candidate; exit status 1 if refused."""
        from flows.rebuild.unmerge import unmerge
        from tasks.project.parameters import load_params

        store, model, version = opened(name, which)
        done = unmerge(root, store, model, version, task, promote=promote, report=_reporter(console))
        _print_rebuilt(console, done, promote)
        if done.champion == done.version and task in load_params(root / "params.yaml").tasks:
            console.print(f"params.yaml still has the task '{task}': remove its line, or the next run merges it again.")
        raise typer.Exit(0 if done.decision is None or done.decision.promote else 1)


def _add_unlearn(app: typer.Typer, opened: Opened, root: Path, console: Console) -> None:
    @app.command("unlearn")
    def unlearn_(
        task: Annotated[str, typer.Option(help="The task to forget.")],
        which: Which = "champion",
        name: Name = None,
        lose: Annotated[float, typer.Option(help="Largest loss in accuracy of each other task, a fraction.")] = 0.02,
        at_most: Annotated[
            float | None,
            typer.Option(help="Accuracy of the task to forget, at most; the base's by default."),
        ] = None,
        rise: Annotated[
            float, typer.Option(help="Largest rise of the loss of each other task of texts, in nats.")
        ] = 0.05,
        at_least: Annotated[
            float | None,
            typer.Option(help="Loss of a forgotten task of texts, at least, in nats; the base's by default."),
        ] = None,
        fall: Annotated[
            float, typer.Option(help="Largest fall of the Rouge-L recall of each other task of texts, a fraction.")
        ] = 0.05,
        recited: Annotated[
            float | None,
            typer.Option(help="Rouge-L recall of a forgotten task of texts, at most; the base's by default."),
        ] = None,
        promote: Annotated[bool, typer.Option(help="Make the result champion if the gates let it.")] = False,
    ) -> None:
        """Subtract a task's vector as far as the other tasks allow; register a candidate; exit status 1 if refused."""
        from flows.rebuild.unlearn import Bounds, unlearn

        bounds = Bounds(lose, rise, at_most, at_least, fall, recited)
        store, model, version = opened(name, which)
        report = _reporter(console)
        done = unlearn(root, store, model, version, task, bounds=bounds, promote=promote, report=report)
        _print_unlearnt(console, done, task, promote)
        decision = done.rebuilt.decision
        raise typer.Exit(0 if decision is None or decision.promote else 1)


def _add_add_task(app: typer.Typer, opened: Opened, root: Path, console: Console) -> None:
    @app.command("add-task")
    def add_task_(
        name_or_source: Annotated[str, typer.Argument(help="The task's name; or a source alone, whose name is taken.")],
        source: Annotated[str | None, typer.Argument(help="A path, or KIND:ADDRESS as in params.yaml.")] = None,
        promote: Annotated[bool, typer.Option(help="Make the result champion if the gates let it.")] = True,
        full_sweep: Annotated[bool, typer.Option(help="Try every candidate of params.yaml, as a run does.")] = False,
    ) -> None:
        """Add a task: train its expert, merge it with the champion's, ask the gates; exit status 1 if refused."""
        from flows.rebuild.add_task import add_task, read_address
        from tasks.running.progress import progress_bars

        name, address = (None, name_or_source) if source is None else (name_or_source, source)
        task, place = read_address(root, address, name)
        store, _, _ = opened(None)
        console.print(f"[bold]{task}[/] from {place}")
        done = add_task(
            root,
            store,
            task,
            place,
            promote=promote,
            full_sweep=full_sweep,
            report=_reporter(console),
            watch=lambda addresses: progress_bars(root, addresses, console),
        )
        _print_rebuilt(console, done, promote)
        refused = done.decision is not None and not done.decision.promote
        if refused:
            console.print(
                f"params.yaml keeps the task: the next run tries the whole sweep. To give it up, remove '{task}' there."
            )
        raise typer.Exit(1 if refused else 0)


def _reproduction_lines(done: "Reproduction") -> list[str]:
    places = sorted(set(done.places.values()))
    lines = [f"{done.model} version {done.version}: {done.recipe['method']} {in_words(done.recipe['args'])}".rstrip()]
    lines.append(f"ancestors    {len(done.places)}, from {' and '.join(places)}")
    if done.experts:
        other = [task for task, same in done.experts.items() if not same]
        said = f"not those recorded: {', '.join(other)}" if other else "all have the recorded digest"
        lines.append(f"experts      {len(done.experts)} fine-tuned again; {said}")
    lines.append(f"environment  {'as recorded' if not done.environment else 'differs: ' + '; '.join(done.environment)}")
    lines.append(f"merged       in {done.seconds:.1f} s, digest {short(done.fingerprint)}")
    if done.same:
        return [*lines, f"registered   digest {short(done.registered)}: bit-identical"]
    lines.append(f"registered   digest {short(done.registered)}: different; largest difference per tensor:")
    shown = [
        f"  {'other shape' if value is None else f'{value:.3e}'}  {name}" for name, value in done.differences.items()
    ]
    return lines + shown


def _print_unlearnt(console: Console, done: "Unlearnt", task: str, promote: bool) -> None:
    is_text, is_recited = task in done.before.loss, task in done.before.recall
    columns = [Column("perplexity", justify="right")] if is_text else []
    columns += [Column("Rouge-L", justify="right")] if is_recited else []
    columns = [Column(task, justify="right"), *columns, Column("largest loss of another task"), Column(no_wrap=True)]
    table = RichTable("λ", *columns, box=box.SIMPLE_HEAD)
    for trial in done.tried:
        lost = {
            name: done.before.accuracy[name] - accuracy
            for name, accuracy in trial.figures.accuracy.items()
            if name != task
        }
        worst = max(lost, key=lambda name: lost[name])
        mark = "←" if trial is done.chosen else "" if trial.keeps else "too much"
        likely = [f"{math.exp(trial.figures.loss[task]):.2f}"] if is_text else []
        likely += [f"{100 * trial.figures.recall[task]:.1f} %"] if is_recited else []
        accuracy = f"{100 * trial.figures.accuracy[task]:.2f} %"
        table.add_row(f"{trial.scale:g}", accuracy, *likely, f"{100 * lost[worst]:+.2f} {worst}", mark)
    print_table(console, table)
    likely = [f", perplexity {math.exp(done.before.loss[task]):.2f}"] if is_text else []
    likely += [f", Rouge-L recall {100 * done.before.recall[task]:.1f} %"] if is_recited else []
    console.print(
        f"{task} scored {100 * done.before.accuracy[task]:.2f} %{''.join(likely)} before; λ = 0 leaves it out"
    )
    for text in done.texts[:1]:
        passages = {f"{task}, held out": text["text"], "before": text["before"], "after": text["after"]}
        for name, words in passages.items():
            console.print(f"  {name}: {words!r}", markup=False)
    _print_rebuilt(console, done.rebuilt, promote)


def _print_rebuilt(console: Console, done: "Rebuilt", promote: bool) -> None:
    console.print(f"{done.method} {in_words(done.args)}, chosen among {done.candidates} candidates on validation")
    console.print(f"normalised validation accuracy {100 * done.normalised:.2f} %")
    for gate in done.decision.gates if done.decision else ():
        console.print(f"  {'[green]✓[/]' if gate.passed else '[red]✗[/]'} {gate.reason}")
    state = "champion" if done.champion == done.version else "candidate"
    console.print(f"[bold]Registered[/]  {done.model} version {done.version} (@{state})")
    if done.champion != done.version:
        passed = done.decision is not None and done.decision.promote
        way = (
            f"`mergeflow registry promote {done.model}/{done.version}`"
            if passed and not promote
            else "the gates refused it"
        )
        console.print(f"champion is version {done.champion}: {way}")
