"""Commands that judge causal language models as they are: perplexity, and tasks of lm-evaluation-harness."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from mergeflow.commands.options import Device, print_table
from mergeflow.errors import MergeflowError

Base = Annotated[
    str | None,
    typer.Option(
        metavar="PATH",
        help="The base of weight files and adapters: a file, a folder or an id; in a project its base. "
        "A folder with config.json needs none.",
    ),
]
_MOST = 709.0  # nats: the exponential of more is no floating-point number
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def add_commands(app: typer.Typer) -> None:
    app.command("perplexity")(perplexity)
    app.command("lm-eval")(lm_eval)


def perplexity(
    context: typer.Context,
    models: Annotated[
        list[str] | None,
        typer.Argument(
            help="Checkpoints, folders, adapters or models:/NAME@ALIAS; in a project base, experts and merges."
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SOURCE", help="Texts: folder:, jsonl:, parquet:, hf:, suite: or a prepared folder; repeat."
        ),
    ] = None,
    base: Base = None,
    split: Annotated[
        str | None,
        typer.Option(help="train, validation or test of the source; its test by default, a project's validation."),
    ] = None,
    block: Annotated[
        int | None,
        typer.Option(min=3, help="Tokens per block; by default 1024, or the model's maximum if smaller."),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(min=1, help="Overlap blocks: tokens from one start to the next, fewer than --block."),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Blocks per forward pass.")] = 8,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Print the perplexity of texts under causal models."""
    import torch

    from mergeflow.commands.texts import opened_models, prepared_block, project_models, project_texts, read_texts
    from mergeflow.evaluation.memory import estimate_perplexity_memory
    from mergeflow.modalities.causal.modality import total_loss
    from mergeflow.training.arithmetic import arithmetic

    sources = data or project_texts(split or "validation")
    results: dict[str, dict[str, Any]] = {}
    read: dict[tuple[str, str, int], Any] = {}
    foretold: set[tuple[str, int]] = set()
    blocks = {source: prepared_block(source, block) for source in sources}
    for model, opened in opened_models(context, models or project_models(), base):
        limit = getattr(opened.model.module.whole.config, "max_position_embeddings", None)
        size = block or min(limit or 1024, 1024)
        longest = max(held or size for held in blocks.values())
        if limit and longest > limit:
            held = next((source for source, size in blocks.items() if size == longest and block is None), None)
            counted = f"--block is {longest}" if held is None else f"the blocks of {held} have {longest} tokens"
            way = "lower it" if held is None else "give its source, such as folder:texts/"
            raise MergeflowError(f"{counted}, which {model} cannot take (its max_position_embeddings: {limit}): {way}.")
        if device != "cpu" and (opened.config, longest) not in foretold:
            foretold.add((opened.config, longest))
            estimate_perplexity_memory(opened.config, batch_size, longest, device).announce(Console(stderr=True))
        opened.model.module.to(device)
        for source in sources:
            key = (source, opened.tokenizer.digest, size)
            if key not in read:
                read[key] = read_texts(source, split, opened.tokenizer, size, torch.device(device), Path())
            with arithmetic():
                total, tokens = total_loss(opened.model, read[key], batch_size, stride)
            results.setdefault(model, {})[_name(source, sources)] = _numbers(total / tokens, tokens)
    useless = [model for model, texts in results.items() if any(result["loss"] is None for result in texts.values())]
    if as_json:
        typer.echo(json.dumps(results, indent=1))
        _refuse(useless)
        return
    rows = {model: [_shown(result) for result in texts.values()] for model, texts in results.items()}
    texts = next(iter(results.values()))
    counts = {
        model: ", ".join(f"{name} {row['tokens']}" for name, row in texts.items()) for model, texts in results.items()
    }
    over = f"; windows begin {stride} tokens apart" if stride else ""
    _print(f"Perplexity, smaller is better{over}", list(texts), rows)
    if len(set(counts.values())) == 1:
        typer.echo(f"predicted tokens: {counts[next(iter(results))]}")
    else:
        typer.echo("Perplexities of different tokens do not compare; predicted tokens of")
        for model, counted in counts.items():
            typer.echo(f"  {model}: {counted}")
    _refuse(useless)


def _numbers(loss: float, tokens: int) -> dict[str, Any]:
    """Return the numbers of a text; a loss that is no number is null, which JSON has."""
    finite = math.isfinite(loss)
    return {
        "perplexity": math.exp(loss) if finite and loss < _MOST else None,
        "loss": loss if finite else None,
        "tokens": tokens,
    }


def _shown(numbers: Mapping[str, Any]) -> str:
    if numbers["loss"] is None:
        return "NaN"
    return "∞" if numbers["perplexity"] is None else f"{numbers['perplexity']:.3f}"


def _refuse(useless: Sequence[str]) -> None:
    """End with an error where models gave no number, after the others were told."""
    if useless:
        raise MergeflowError(f"the loss under {', '.join(useless)} is not a number: these weights are of no use.")


def lm_eval(
    context: typer.Context,
    models: Annotated[list[str], typer.Argument(help="Checkpoints, folders, adapters or models:/NAME@ALIAS.")],
    tasks: Annotated[list[str], typer.Option("--task", metavar="TASK", help="A task of the harness; repeatable.")],
    base: Base = None,
    include_path: Annotated[Path | None, typer.Option(help="A folder with tasks of yours in its format.")] = None,
    num_fewshot: Annotated[
        int | None, typer.Option(min=0, help="Examples in the prompt; the task's by default.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Documents per task at most.")] = None,
    split: Annotated[str, typer.Option(help="validation, or test.")] = "validation",
    batch_size: Annotated[int, typer.Option(min=1, help="Documents per forward pass.")] = 8,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Score causal models on tasks of lm-evaluation-harness, the extra `lm-eval`."""
    from mergeflow.commands.texts import opened_models
    from mergeflow.errors import unknown_name
    from mergeflow.search.scorer import evaluate, find_tasks, metrics_of
    from mergeflow.search.sweep_file import LmEvalScore

    if split not in ("validation", "test"):
        raise unknown_name("split", split, ("validation", "test"))
    include = None if include_path is None else str(include_path)
    part = LmEvalScore(lm_eval=tasks, include=include, few_shot=num_fewshot, limit=limit, batch_size=batch_size)
    manager = find_tasks(part)
    scores: dict[str, dict[str, float]] = {}
    for model, opened in opened_models(context, models, base):
        with TemporaryDirectory(prefix="mergeflow-lm-eval-") as folder:
            opened.save(Path(folder))
            results = evaluate(part, Path(folder), split, manager, device)
        better = results["higher_is_better"]
        scores[model] = {
            f"{task} {metric}": value
            for task in tasks
            for metric, value in metrics_of(results["results"][task], better[task]).items()
        }
    if as_json:
        typer.echo(json.dumps(scores, indent=1))
        return
    names = list(next(iter(scores.values())))
    rows = {model: [f"{numbers[name]:.4g}" for name in names] for model, numbers in scores.items()}
    _print(f"lm-evaluation-harness, {split}", names, rows)


def _name(source: str, sources: Sequence[str]) -> str:
    """Return the title of a column: a prepared folder's own name, where no other has it."""
    last = Path(source).name
    return last if ":" not in source and [Path(path).name for path in sources].count(last) == 1 else source


def _print(title: str, names: Sequence[str], rows: dict[str, list[str]]) -> None:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    table.add_column("model", overflow="fold")
    for name in names:
        table.add_column(name, justify="right")
    for model, cells in rows.items():
        table.add_row(model, *cells)
    print_table(Console(highlight=False), table)
