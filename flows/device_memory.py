"""What the stages will take of a device's memory, printed before they start; a batch that cannot fit is refused."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from mergeflow.training.settings import FineTuneSettings
from tasks.project.graph import load_graph
from tasks.project.stage import STUDIES as STUDY_GRAPH

if TYPE_CHECKING:
    from tasks.memory import Forecast
    from tasks.project.parameters import Params
    from tasks.project.stage import Stage

_PARTS = ("weights", "gradients", "optimiser", "course", "activations")


def tell_device_memory(root: Path, params: "Params", addresses: Iterable[str], console: Console) -> None:
    """Say what stages that are about to run will take of a CUDA device; of the processor say nothing.

    Args:
        root: the project folder.
        params: its parameters.
        addresses: of the stages.
        console: where to say it.

    Raises:
        MergeflowError: naming the settings with which it would fit.
    """
    if params.run.device == "cpu":
        return
    from tasks.memory import STUDIES, forecast  # torch comes with it
    from tasks.project.devices import device_names

    if device_names(params.run.device) == ["cpu"]:
        return
    stages = load_graph(root, studies=True)
    wanted = list(addresses)
    chosen = [stages[address] for address in wanted if address in stages]
    names = {address.partition("@")[0] for address in wanted} | {STUDIES for stage in chosen if stage.is_study}
    found = forecast(root, params, stages=names, runs=_runs(root, params, chosen))
    if found.works:
        console.print(memory_table(found))
        found.refuse()


def _runs(root: Path, params: "Params", stages: Iterable["Stage"]) -> dict[str, FineTuneSettings]:
    """Return the settings of the studies' training runs among the stages, but for those that take checkpoints."""
    from tasks.project.parameters import load_study_params

    names = [stage.item for stage in stages if stage.name == "train" and stage.file == STUDY_GRAPH]
    runs = load_study_params(root, params).runs if names else {}
    return {str(name): runs[str(name)].finetune for name in names if not runs[str(name)].checkpoints}


def check_project(root: Path, wanted: str | None, console: Console) -> None:
    """Validate params.yaml and say what each stage will take of the device's memory.

    Args:
        root: the project folder.
        wanted: device, instead of `run.device`.
        console: where to say it.

    Raises:
        MergeflowError: a parameter is wrong, there is no such device, or a batch does not fit it.
    """
    from tasks.memory import forecast
    from tasks.project.parameters import load_params

    params = load_params(root / "params.yaml")
    count = len(params.tasks)
    console.print(
        f"params.yaml is valid: {count} task{'s' * (count > 1)}, regime {params.finetune.regime}.", highlight=False
    )
    found = forecast(root, params, wanted)
    if not found.works:
        console.print("What memory training takes is not known before the stage `base`, or of this modality.")
        return
    console.print(memory_table(found))
    found.refuse()


def memory_table(found: "Forecast") -> Table:
    """Return what is done on the device, a column each, with what takes its memory."""
    from tasks.memory import in_bytes

    free = "" if found.free is None else f", {in_bytes(found.free)} free"
    table = Table(title=f"Memory of {found.devices}{free}", box=None, title_justify="left", pad_edge=False)
    table.add_column("")
    for work in found.works:
        table.add_column(work.name, justify="right")
    rows = {part.replace("course", "trajectory"): [getattr(work.need, part) for work in found.works] for part in _PARTS}
    for name, sizes in rows.items():
        table.add_row(name, *(in_bytes(size) if size else "–" for size in sizes))
    table.add_row("examples at once", *(str(work.need.rows) for work in found.works))
    table.add_row("activations of one", *(in_bytes(work.need.activations / work.need.rows) for work in found.works))
    table.add_row("[bold]peak[/]", *(f"[bold]{in_bytes(work.need.total)}[/]" for work in found.works))
    return table
