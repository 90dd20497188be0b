"""What the stages will take of a device's memory, printed before they start; a batch that cannot fit is refused."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from mergeflow.training.settings import FineTuneSettings
from tasks.project.graph import load_graph
from tasks.project.stage import CHOICES
from tasks.project.stage import STUDIES as STUDY_GRAPH
from tasks.project.validate_params import validate_params

if TYPE_CHECKING:
    from tasks.project.parameters import Params
    from tasks.project.stage import Stage


def print_device_memory(root: Path, params: "Params", addresses: Iterable[str], console: Console) -> None:
    """Say what stages that are about to run will take of a CUDA device; of the processor say nothing."""
    if params.run.device == "cpu":
        return
    from mergeflow.commands.device_memory import print_forecast
    from tasks.memory import STUDIES, forecast  # torch comes with it
    from tasks.project.devices import device_names

    if device_names(params.run.device) == ["cpu"]:
        return
    stages = load_graph(root, studies=True)
    wanted = list(addresses)
    chosen = [stages[address] for address in wanted if address in stages]
    names = {address.partition("@")[0] for address in wanted} | {STUDIES for stage in chosen if stage.is_study}
    needs = forecast(root, params, stages=names, runs=_runs(root, params, chosen))
    print_forecast(needs, console)


def _runs(root: Path, params: "Params", stages: Iterable["Stage"]) -> dict[str, FineTuneSettings]:
    """Return the settings of the studies' training runs among the stages, but for those that take checkpoints."""
    from tasks.project.parameters import load_study_params

    names = [stage.item for stage in stages if stage.name == "train" and stage.file == STUDY_GRAPH]
    runs = load_study_params(root / CHOICES, params).runs if names else {}
    return {str(name): runs[str(name)].finetune for name in names if not runs[str(name)].checkpoints}


def check_project(root: Path, wanted: str | None, console: Console) -> None:
    """Validate params.yaml and say what each stage will take of the device's memory."""
    from mergeflow.commands.device_memory import print_forecast
    from tasks.memory import forecast

    params = validate_params(root)
    count = len(params.tasks)
    console.print(
        f"params.yaml is valid: {count} task{'s' * (count > 1)}, regime {params.finetune.regime}.", highlight=False
    )
    needs = forecast(root, params, wanted)
    if not needs.works:
        console.print("What memory training takes is not known yet: the stage `base` tells it (not of every modality).")
        return
    print_forecast(needs, console)
