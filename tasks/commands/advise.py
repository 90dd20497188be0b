"""`mergeflow advise`: open experts and samples, and print the advice."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from mergeflow.application import find_project
from mergeflow.commands.options import print_table
from mergeflow.errors import MergeflowError
from mergeflow.late import torch
from tasks.commands.expert_inputs import Architecture, ExpertInputs, OpenedExperts, SamplesError

if TYPE_CHECKING:
    from mergeflow.analysis.provable.advice import Advice
    from mergeflow.analysis.provable.answers import Answers
    from mergeflow.merging import Recipe
    from mergeflow.modalities.classification import Subset


_BATCH = 16  # samples per forward pass: of a language model each gives a vocabulary for every token


def make_advice(inputs: ExpertInputs, samples: int) -> "Advice":
    from mergeflow.analysis.provable.advice import advise, not_computed

    count = len(inputs.several("advice is on a merge of at least two"))
    if len(inputs.data) not in (0, 1, count):
        raise MergeflowError(
            f"--data is given {len(inputs.data)} times for {count} experts: give one source for all of them, or one "
            "for each in the order of the experts."
        )
    remarks: list[str] = []
    base, experts = inputs.states
    ready = None
    try:
        ready = inputs.open(samples)
    except SamplesError:
        raise
    except MergeflowError as error:
        remarks.append(not_computed(error))
    # The task vectors are whole ones: a module that is asked may lack heads, which a merge sums like the rest.
    advice = advise(base, experts, None if ready is None else lambda: _answers(inputs, ready), remarks)
    if inputs.recipe is not None and inputs.recipe.weights:
        advice.remarks.append("`weights` of the recipe are left aside: λ is for the plain sum of the task vectors.")
    return advice


def _answers(inputs: ExpertInputs, ready: OpenedExperts) -> "Answers":
    from mergeflow.analysis.provable.answers import ask

    sources = _assigned(inputs, ready)
    if empty := [f"'{name}'" for name, source in sources.items() if not len(source)]:
        raise MergeflowError(f"{', '.join(empty)}: there are no samples.")
    return ask(ready.model, ready.base, ready.experts, sources, _BATCH)


def _assigned(inputs: ExpertInputs, ready: OpenedExperts) -> dict[str, Any]:
    """Return samples by expert: the project's own, one source for all, or one source for each in their order."""
    from mergeflow.analysis.provable.answers import one_each

    sources, names = ready.sources, list(inputs.paths())
    if not inputs.data:
        return {name: one_each(cast("Subset", sources[name])) for name in names}
    classes = (inputs.architecture or "").startswith("torchvision:")
    given = [(_Classes if classes else _Outputs)(sources[source]) for source in inputs.data]
    if len(given) == 1:
        return dict.fromkeys(names, given[0])
    return dict(zip(names, given, strict=True))


@dataclass(frozen=True)
class _Outputs:
    """Samples without labels, to read a module's outputs."""

    source: Any

    def __len__(self) -> int:
        return len(self.source)

    def outputs(self, model: Any, rows: Any) -> Any:
        """Return the module's outputs [n, D]; of an encoder of texts the mean over the tokens of its last block."""
        from mergeflow.linearity.layers import find_layers
        from mergeflow.linearity.networks import Samples

        layer = "" if isinstance(self.source, Samples) else find_layers(model.module)[-1]
        return self.source.features(model, rows, [layer])[layer].flatten(1)


class _Classes(_Outputs):
    """Samples without labels for a classifier."""

    def log_p(self, model: Any, rows: Any) -> Any:
        """Return the module's log-probabilities [n, C]."""
        return self.outputs(model, rows).log_softmax(1)


def add_commands(app: typer.Typer, root: Path) -> None:
    @app.command("advise")
    def advise(
        context: typer.Context,
        recipe: Annotated[
            Path | None, typer.Argument(help="A recipe: its base and experts. In a project all experts by default.")
        ] = None,
        data: Annotated[
            list[str] | None,
            typer.Option(
                metavar="SOURCE",
                help="Samples without labels, once for all experts or once for each: suite:NAME/TASK, folder:PATH …",
            ),
        ] = None,
        architecture: Architecture = None,
        samples: Annotated[int, typer.Option(min=2, help="Samples of each source, at most.")] = 200,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    ) -> None:
        """Suggest λ for a sum of task vectors, and show how tasks are related."""
        torch.set_num_threads(1)
        chosen = None if recipe is None else _read_recipe(recipe)
        project = find_project(root)
        if recipe is None and project is None:
            raise MergeflowError("name a recipe with `base` and `experts`, or run the command in a project folder.")
        inputs = ExpertInputs(project, [], None, data or [], architecture, context.obj, chosen)
        advice = make_advice(inputs, samples)
        if as_json:
            typer.echo(json.dumps(advice.as_json(), indent=1, ensure_ascii=False))
        else:
            show(advice, "methods" if recipe is not None else "sweep", Console())


def _read_recipe(path: Path) -> "Recipe":
    from mergeflow.merging import load_recipe

    recipe = load_recipe(path)
    if recipe.steps or recipe.task_vectors or recipe.align or not recipe.experts:
        raise MergeflowError(
            f"{path}: advice is on a recipe with `base` and `experts`, without `steps`, `task_vectors` or `align`."
        )
    return recipe


def show(advice: "Advice", key: str, console: Console) -> None:
    """Print the pairs, a block that can be pasted, and what was not computed.

    Args:
        key: what the block's method stands under: `sweep` in params.yaml, `methods` in a sweep file.
    """
    from mergeflow.analysis.provable.advice import range_text

    if advice.pairs is not None:
        shared: Any = {"box": box.SIMPLE_HEAD, "pad_edge": False, "padding": (0, 1, 0, 0), "title_justify": "left"}
        table = Table(Column("pair", no_wrap=True), title="By pair", **shared)
        for column in ("α̂", "change", "cosine", "verdict", "add, λ", "unlearn, λ"):
            table.add_column(column, justify="left" if column == "verdict" else "right", no_wrap=True)
        for pair in advice.pairs:
            figures = [f"{value:+.2f}" for value in (pair.alpha, pair.changes, pair.cosine)]
            ranges = [range_text(scales) for scales in (pair.addition, pair.unlearning)]
            table.add_row(f"{pair.first} – {pair.second}", *figures, pair.relation, *ranges)
        print_table(console, table)
    if advice.scales is not None:
        console.print("To try, by the lengths of the task vectors:", highlight=False)
        block = f"{key}:\n  task_arithmetic:\n    scale: {json.dumps(list(advice.scales))}"
        console.print(block, highlight=False, markup=False)
    for remark in advice.remarks:
        console.print(f"[yellow]![/] {escape(remark)}", highlight=False)
