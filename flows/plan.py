"""Which stages a run has to bring up to date. Prefect is not imported here: a run with nothing to do starts none."""

from collections.abc import Iterable
from pathlib import Path

from flows.staleness import stale_stages
from mergeflow import layout
from mergeflow.errors import unknown_name
from tasks.project.graph import downstream_closure, upstream
from tasks.project.stage import Stage

REGISTER = "register"


def stages_to_run(
    root: Path, stages: dict[str, Stage], targets: Iterable[str] | None = None, always: Iterable[str] = ()
) -> list[str]:
    """Return the addresses to run, in running order: what DVC finds stale and what depends on it.

    Args:
        root: the project folder.
        stages: the whole graph.
        targets: only these stages and what they need; `finetune` names all its items, `finetune@digits` one. None: all.
        always: stages to run although their files are up to date.

    Raises:
        MergeflowError: a target is not a stage.
    """
    todo = downstream_closure(stale_stages(root, stages) | set(always), stages)
    if targets is None:
        return todo
    wanted = needed_for(targets, stages)
    return [address for address in todo if address in wanted]


def needed_for(targets: Iterable[str], stages: dict[str, Stage]) -> set[str]:
    """Return the addresses of `targets` and of everything upstream of them."""
    queue = [address for target in targets for address in _addresses(target, stages)]
    wanted: set[str] = set()
    while queue:
        address = queue.pop()
        if address not in wanted:
            wanted.add(address)
            queue += upstream(stages[address], stages)
    return wanted


def are_results_wanted(targets: Iterable[str] | None, stages: dict[str, Stage]) -> bool:
    """Whether a run of these targets registers its results, and not only makes other stages; None: all of dvc.yaml."""
    return targets is None or REGISTER in needed_for(targets, stages)


def registration_lost(root: Path) -> bool:
    """Whether the registry that is configured now lacks the version that this project registered."""
    if not (root / layout.REGISTRATION).exists():
        return False
    from registry.stage import is_registered

    return not is_registered(root)


def _addresses(target: str, stages: dict[str, Stage]) -> list[str]:
    found = [address for address, stage in stages.items() if target in (address, stage.name)]
    if not found:
        raise unknown_name("stage", target, stages)
    return found
