"""`mergeflow linearity`: compare features by layer, and rank pairs by the predictor that a study chose."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Column, Table

from mergeflow.application import find_project
from mergeflow.commands.options import print_table
from mergeflow.errors import MergeflowError
from tasks.commands.expert_inputs import Architecture, ExpertInputs

if TYPE_CHECKING:
    from mergeflow.linearity.affine import Linearity
    from mergeflow.linearity.pairs import Pair
    from mergeflow.modality import State


@dataclass(frozen=True)
class Answer:
    """A prediction and what it was worth in the record.

    Attributes:
        within: its rank correlation with the loss of merging, mean over ways of training and seeds.
        across: the same over the pairs of all ways together.
    """

    prediction: str
    within: float
    across: float


# tests/studies/test_mergeability.py holds this against studies/records/mergeability.parquet.
ANSWER = Answer("distance", 0.57, 0.51)


def predicted(first: "State", second: "State") -> float:
    """Return the prediction of a pair, ‖θ_i − θ_j‖ over all tensors of floating-point numbers.

    Example:
        >>> import torch
        >>> predicted({"w": torch.tensor([3.0, 1.0])}, {"w": torch.tensor([0.0, 5.0])})
        5.0
    """
    from mergeflow.analysis.geometry import norm

    return norm({name: value - second[name] for name, value in first.items() if value.is_floating_point()})


def merge_sentence(values: Mapping[str, float]) -> str:
    """Return the expected loss of merging pairs, and its certainty."""
    worst = max(values, key=values.__getitem__)
    sentences = f"{worst} will lose most when merged, as far as weights tell: its {ANSWER.prediction} is the largest."
    if len(values) == 1:
        sentences = (
            f"The {ANSWER.prediction} of a pair can be compared with those of other pairs of the same base alone."
        )
    return (
        f"{sentences} In the study mergeability it ranked pairs by what they lost with a rank correlation of "
        f"{ANSWER.within:.2f} within one way of training and {ANSWER.across:.2f} across ways."
    )


_SHOWN = 4  # pairs in the picture, those with the largest error


def show(pairs: Sequence["Pair"], costs: Mapping[str, float], console: Console) -> None:
    """Print rows for the layers and the pairs, and what to expect: of features, and of merging."""
    from mergeflow.linearity.affine import word
    from mergeflow.linearity.layers import short_names

    names = dict(
        zip(layers := [verdict.layer for verdict in pairs[0].layers], narrow(short_names(layers)), strict=True)
    )
    shared: Any = {"box": box.SIMPLE_HEAD, "pad_edge": False, "padding": (0, 1, 0, 0), "title_justify": "left"}
    table = Table(Column("layer", no_wrap=True), title="By layer, over all pairs", **shared)
    for column in ("1 − cos", "baseline", "share", "coef", "error", "direction", "length"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, *cells in layer_rows(pairs):
        table.add_row(names[name], *cells)
    print_table(console, table)
    table = Table("pair", Column("worst layer", no_wrap=True), title="By pair", **shared)
    for column in ("1 − cos", "baseline", "coef", "LLFC", "CTL"):
        table.add_column(column, justify="right", no_wrap=True)
    for pair in pairs:
        worst = pair.worst
        table.add_row(
            f"{pair.first} – {pair.second}",
            names[worst.layer],
            small(worst.distance[1]),
            small(worst.base),
            f"{worst.coef[1]:.3f}",
            word(pair.verdict["LLFC"]),
            word(pair.verdict["CTL"]),
        )
    print_table(console, table)
    console.print(sentence(pairs), highlight=False)
    table = Table("pair", title="By what merging will cost", **shared)
    table.add_column(ANSWER.prediction, justify="right", no_wrap=True)
    for name, value in sorted(costs.items(), key=lambda item: -item[1]):
        table.add_row(name, f"{value:.4g}")
    print_table(console, table)
    console.print(merge_sentence(costs), highlight=False)


def small(value: float) -> str:
    """Return a number with four decimals, or with two digits where these would all be zeros.

    Example:
        >>> small(0.0372), small(0.000021), small(0.0)
        ('0.0372', '2.1e-05', '0.0000')
    """
    return f"{value:.4f}" if value >= 1e-3 or value == 0 else f"{value:.1e}"


def narrow(names: Sequence[str]) -> list[str]:
    """Return names of layers without the parts between the first and the last that all of them have.

    Example:
        >>> narrow(["encoder.block.0", "decoder.block.11"]), narrow(["layer1.0", "layer2.0"])
        (['encoder.0', 'decoder.11'], ['layer1.0', 'layer2.0'])
    """
    parts = [name.split(".") for name in names]
    same = len({tuple(part[1:-1]) for part in parts}) == 1 and len(parts[0]) > 2
    return [f"{part[0]}.{part[-1]}" for part in parts] if same else list(names)


def layer_rows(pairs: Sequence["Pair"]) -> list[list[str]]:
    """Return the cells of the table by layer: means over pairs, the worst share of the baseline, how many hold."""
    rows = []
    for number, first in enumerate(pairs[0].layers):
        layers = [pair.layers[number] for pair in pairs]
        count = len(layers)
        share = max((layer.distance[1] / layer.base for layer in layers if layer.base), default=0.0)
        coefs = [layer.coef[1] for layer in layers]
        spread = f"{min(coefs):.3f} … {max(coefs):.3f}" if count > 1 else f"{coefs[0]:.3f}"
        rows.append(
            [
                first.layer,
                small(sum(layer.distance[1] for layer in layers) / count),
                small(sum(layer.base for layer in layers) / count),
                f"{share:.2f}",
                spread,
                small(sum(layer.error for layer in layers) / count),
                f"{sum(layer.direction is True for layer in layers)} of {count}",
                f"{sum(layer.length is True for layer in layers)} of {count}",
            ]
        )
    return rows


def sentence(pairs: Sequence["Pair"]) -> str:
    """Sum up the verdicts, with the first layer where a pair breaks."""
    from mergeflow.linearity.affine import TRIVIAL, word

    holding = sum(pair.verdict["CTL"] is True for pair in pairs)
    failing = [pair for pair in pairs if pair.verdict["CTL"] is False]
    near = sum(all(layer.base <= TRIVIAL for layer in pair.layers) for pair in pairs)
    said = f"Features combine as weights do in {holding} of {len(pairs)} pairs"
    if len(pairs) == 1:
        linear = word(pairs[0].verdict["CTL"])
        said = (
            f"That features combine as weights do {'is undecided' if linear == 'undecided' else linear} for this pair"
        )
    if failing:
        worst = max(failing, key=lambda pair: max(layer.error for layer in pair.layers))
        broken = next(layer for layer in worst.layers if False in (layer.direction, layer.length))
        how = "direction" if broken.direction is False else "length"
        said += f"; {worst.first} – {worst.second} breaks first at {broken.layer}, in {how}"
    if near:
        said += f"; {near} {'pair has' if near == 1 else 'pairs have'} features too near to each other to tell"
    return said + "."


def write(pairs: Sequence["Pair"], costs: Mapping[str, float], out: Path) -> None:
    """Write `result.json`, one Parquet row for each pair, α, layer and sample, and the picture of the worst pairs."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from mergeflow.linearity.affine import DIRECTION, LENGTH, TRIVIAL
    from tasks.plotting.drawing import to_svg
    from tasks.plotting.linearity import linearity_figure

    margins = {"direction": DIRECTION, "trivial": TRIVIAL, "length": LENGTH}
    rows = zip(pairs, costs.values(), strict=True)
    content = {"margins": margins, "pairs": [pair.as_json() | {ANSWER.prediction: value} for pair, value in rows]}
    (out / "result.json").write_text(json.dumps(content, indent=1) + "\n")
    pq.write_table(pa.Table.from_pylist([row for pair in pairs for row in pair.rows()]), out / "samples.parquet")
    ranked = sorted(pairs, key=lambda pair: -max(layer.error for layer in pair.layers))[:_SHOWN]
    shown: dict[str, Mapping[str, Linearity]] = {f"{pair.first} – {pair.second}": _middle(pair) for pair in ranked}
    (out / "linearity.svg").write_bytes(to_svg(linearity_figure(shown), "linearity"))


def _middle(pair: "Pair") -> Mapping[str, "Linearity"]:
    return pair.samples[min(pair.samples, key=lambda alpha: abs(alpha - 0.5))]


def add_commands(app: typer.Typer, root: Path) -> None:
    @app.command("linearity")
    def linearity(
        context: typer.Context,
        experts: Annotated[
            list[str] | None,
            typer.Argument(
                help="Two experts or more: checkpoints, or in a project names of tasks; all when none is named."
            ),
        ] = None,
        base: Annotated[str | None, typer.Option(metavar="PATH", help="Their base; a project's by default.")] = None,
        data: Annotated[
            list[str] | None,
            typer.Option(
                metavar="SOURCE", help="suite:, folder:, parquet: … or text:FILE; repeat. In a project each one's task."
            ),
        ] = None,
        architecture: Architecture = None,
        layer: Annotated[list[str] | None, typer.Option(help="A submodule, repeatable; all blocks by default.")] = None,
        alpha: Annotated[list[float] | None, typer.Option(help="α, repeatable; 0.25, 0.5, 0.75 by default.")] = None,
        samples: Annotated[int, typer.Option(min=1, help="Samples of each source, at most.")] = 128,
        batch_size: Annotated[int, typer.Option(min=1, help="Samples in memory at a time.")] = 64,
        out: Annotated[Path | None, typer.Option(help="Folder for result.json, samples.parquet and a picture.")] = None,
    ) -> None:
        """Compare features of averaged weights with averaged features, by layer: will these experts merge?"""
        import torch

        from mergeflow.checkpoints import check_finite
        from mergeflow.linearity.layers import check_layers, find_layers
        from mergeflow.linearity.pairs import check_related, check_samples, measure_pairs

        torch.set_num_threads(1)
        alphas = alpha or [0.25, 0.5, 0.75]
        if wrong := [alpha for alpha in alphas if not 0 < alpha < 1]:
            raise MergeflowError(f"--alpha {wrong[0]:g} is not between 0 and 1.")
        inputs = ExpertInputs(find_project(root), experts or [], base, data or [], architecture, context.obj)
        opened = inputs.open(samples)
        for name, state in {"base": opened.base, **opened.experts}.items():
            check_finite(name, state)
        check_related(opened.base, opened.experts)
        check_samples(opened.sources)
        layers = layer or find_layers(opened.model.module)
        check_layers(opened.model.module, layers)
        if out is not None:
            _make_folder(out)
        on_own_tasks = set(opened.sources) == set(opened.experts)
        from mergeflow.commands.statistics import progress_bar

        with progress_bar("batches") as progress:
            pairs = measure_pairs(
                opened.model,
                opened.sources,
                opened.experts,
                layers,
                alphas,
                on_own_tasks=on_own_tasks,
                batch_size=batch_size,
                report=progress,
            )

        console, states = Console(), opened.experts
        costs = {f"{pair.first} – {pair.second}": predicted(states[pair.first], states[pair.second]) for pair in pairs}
        show(pairs, costs, console)
        if out is not None:
            write(pairs, costs, out)
            console.print(f"[bold]Outputs[/]   {out}", highlight=False)


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MergeflowError(
            f"--out {out} is no folder and none can be made: {error.strerror}. Name another."
        ) from None
