"""The graph of stages, read from dvc.yaml: the one place that says which stage needs what."""

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from mergeflow.errors import MergeflowError, unknown_name
from mergeflow.layout import CODE
from tasks.project.files import read_yaml
from tasks.project.stage import CHOICES, MAIN, STUDIES, Stage, covers


def load_graph(root: Path, studies: bool = False) -> dict[str, Stage]:
    """Return every stage of the project in `root` by its address, in an order in which they can run."""
    stages: dict[str, Stage] = {}
    common = read_yaml(root / "params.yaml")
    for file in (MAIN, STUDIES) if studies and (root / STUDIES).exists() else (MAIN,):
        values = read_yaml((root / file).with_name("params.yaml"))
        for name, body in _bodies(root / file).items():
            for item in _items(name, body, values) if not body.get("always_changed") else []:
                stage = _stage(file, name, item, body.get("do", body))
                stages[stage.address] = replace(stage, regime=_regime(stage, values, common))
    return _in_order(stages)


def _bodies(path: Path) -> dict[str, Any]:
    content = read_yaml(path)
    bodies = content.get("stages") if isinstance(content, dict) else None
    if not isinstance(bodies, dict) or not all(isinstance(body, dict) for body in bodies.values()):
        raise MergeflowError(
            f"{path} is no graph of stages: expected a mapping `stages` of mappings. Bring it back from git, or from a "
            "project that `mergeflow new` makes."
        )
    return bodies


def removed_items(root: Path, addresses: Iterable[str]) -> list[Stage]:
    """Return the former stages of `addresses`, for items that dvc.yaml repeats a stage over and params.yaml lacks."""
    values, bodies = read_yaml((root / MAIN).with_name("params.yaml")), _bodies(root / MAIN)
    removed = []
    for address in sorted(addresses):
        name, _, item = address.partition("@")
        body = bodies.get(name, {})
        if "foreach" in body and re.fullmatch(r"\w[\w.-]*", item) and item not in _items(name, body, values):
            removed.append(_stage(MAIN, name, item, body["do"]))
    return removed


def find_stage(stages: dict[str, Stage], name: str, item: str | None) -> Stage:
    """Return the stage `name`, or one item of it."""
    address = name if item is None else f"{name}@{item}"
    for candidate in (address, f"{STUDIES}:{address}"):
        if candidate in stages:
            return stages[candidate]
    items = [stage.item for stage in stages.values() if stage.name == name]
    if not items:
        raise unknown_name("stage", name, {stage.name for stage in stages.values()})
    if item is None:
        raise MergeflowError(f"stage '{name}' needs --item, one of: {', '.join(map(str, items))}.")
    raise unknown_name(f"item of stage '{name}'", item, [i for i in items if i is not None])


def upstream(stage: Stage, stages: dict[str, Stage]) -> list[str]:
    """Return the addresses of the stages whose outputs `stage` reads."""
    return [
        other.address
        for other in stages.values()
        if other is not stage and any(covers(out, dep) or covers(dep, out) for out in other.outs for dep in stage.deps)
    ]


def downstream_closure(stale: set[str], stages: dict[str, Stage]) -> list[str]:
    """Return `stale` and everything below it, in running order, without frozen stages."""
    chosen: list[str] = []
    for address, stage in stages.items():
        if not stage.frozen and (address in stale or any(up in chosen for up in upstream(stage, stages))):
            chosen.append(address)
    return chosen


def _items(name: str, body: dict[str, Any], values: dict[str, Any]) -> list[str | None]:
    if "foreach" not in body:
        return [None]
    key = body["foreach"].removeprefix("${").removesuffix("}")
    group: Any = values
    for part in key.split("."):
        if not isinstance(group, dict) or part not in group:
            raise MergeflowError(f"dvc.yaml repeats stage '{name}' over '{key}', but params.yaml has no such key.")
        group = group[part]
    if not isinstance(group, dict) or not group:
        raise MergeflowError(f"params.yaml: '{key}' must be a mapping with at least one entry, found {group!r}.")
    return [str(item) for item in group]


def _stage(file: str, name: str, item: str | None, body: dict[str, Any]) -> Stage:
    def fill(entries: list[Any]) -> tuple[str, ...]:
        names = [text for entry in entries for text in _names(entry)]
        return tuple(text.replace("${key}", item or "") for text in names)

    params, code, of_item = fill(body.get("params", [])), f"{CODE}:{name}", f"{CODE}:{name}.{item}"
    if code not in params and of_item not in params:
        raise MergeflowError(f"{file}: stage '{name}' must depend on its code: add `- {CODE}: [{name}]` to its params.")
    outs = [entry for kind in ("outs", "metrics", "plots") for entry in body.get(kind, [])]
    return Stage(
        name=name,
        item=item,
        module=body["meta"]["run"],
        params=tuple(key for key in params if key not in (code, of_item)),
        deps=fill(body.get("deps", [])),
        outs=fill(outs),
        frozen=bool(body.get("frozen", False)),
        file=file,
        digest_by_item=of_item in params,
        systems=tuple(body["meta"].get("systems", ())),
    )


def _regime(stage: Stage, values: Any, common: Any) -> str | None:
    settings = training_settings(stage, values, common)
    return None if settings is None else str(settings.get("regime"))


def training_settings(stage: Stage, values: Any, common: Any) -> dict[str, Any] | None:
    """Return the settings of a stage that trains: `finetune`, which a training run of the studies may change.

    Args:
        values: of the params.yaml beside its dvc.yaml.

    Returns:
        The settings as they stand in the files; None for a stage that trains nothing.
    """
    is_study_run = f"{CHOICES}:runs.{stage.item}" in stage.params
    if not is_study_run and "finetune" not in stage.params:
        return None
    changed = values["runs"][stage.item] if is_study_run else {}
    parts = [part for part in (common.get("finetune"), changed) if isinstance(part, dict)]  # else validation says so
    return {name: value for part in parts for name, value in part.items()}


def _names(entry: Any) -> list[str]:
    """Return the names in one entry of a list in dvc.yaml: `a`, `a: {cache: false}`, or `file: [key, key]`."""
    if not isinstance(entry, dict):
        return [str(entry)]
    (name, value), *_ = entry.items()
    return [f"{name}:{key}" for key in value] if isinstance(value, list) else [str(name)]


def _in_order(stages: dict[str, Stage]) -> dict[str, Stage]:
    ordered: dict[str, Stage] = {}
    waiting = dict(stages)
    above = {address: upstream(stage, stages) for address, stage in stages.items()}
    while waiting:
        ready = [address for address in waiting if all(up in ordered for up in above[address])]
        if not ready:
            raise MergeflowError(f"dvc.yaml has a cycle among the stages {', '.join(waiting)}.")
        ordered |= {address: waiting.pop(address) for address in ready}
    return ordered


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


def _addresses(target: str, stages: dict[str, Stage]) -> list[str]:
    matching = [address for address, stage in stages.items() if target in (address, stage.name)]
    if not matching:
        raise unknown_name("stage", target, stages)
    return matching
