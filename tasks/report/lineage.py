"""Where the winner comes from, as one picture: data → experts → merge → registered version."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from matplotlib.figure import Figure

from mergeflow.checkpoints.fingerprint import short
from tasks.plotting.boxes import Box, boxes_figure
from tasks.report.files import Json, RunFiles
from tasks.report.tables import arguments_text

_GAP, _TOP = 10.0, 22.0  # points between rows, and above the first
_DATA, _EXPERT, _MERGE, _VERSION = (1.0, 260.0), (301.0, 260.0), (601.0, 190.0), (831.0, 190.0)  # (left, width)
_HEADINGS = ((_DATA, "data"), (_EXPERT, "base and experts"), (_MERGE, "merge"), (_VERSION, "registered version"))


def lineage_figure(run: RunFiles) -> Figure:
    """Return the picture: a row per expert and one for the base; what the registry knows where there is one."""
    records = {expert["task"]: expert for expert in lineage_of(run).get("experts") or []}
    base = _base_box(run)
    boxes, links, bottom = [base], [], base.top + base.height
    merge, version = _merge_box(run), _version_box(run)
    pairs = []
    for task in run.selection["tasks"]:
        data = replace(_data_box(run, task), top=bottom + _GAP)
        expert = replace(_expert_box(run, task, records.get(task, {})), top=data.top)
        pairs.append((data, expert))
        bottom = data.top + data.height
    middle = (_TOP + bottom) / 2
    merge = replace(merge, top=middle - merge.height / 2)
    boxes += [box for pair in pairs for box in pair] + [merge]
    links = [*pairs, *((expert, merge) for expert in (base, *(expert for _, expert in pairs)))]
    if version is not None:
        version = replace(version, top=middle - version.height / 2)
        boxes.append(version)
        links.append((merge, version))
    headings = [(left + 1, text) for (left, _), text in _HEADINGS[: 4 if version else 3]]
    return boxes_figure(boxes, links, headings)


def lineage_of(run: RunFiles) -> Json:
    """Return the registry's record of the version's ancestors; empty where there is none."""
    lineage: Json = (run.registration or {}).get("lineage") or {}
    return lineage


def origin(run: RunFiles) -> list[tuple[str, str]]:
    """Return the notes beside the picture, in pairs of word and value: commit, environment, missing ancestors."""
    tree = lineage_of(run)
    pairs = []
    if tree.get("git_commit"):
        pairs.append(("Git commit", str(tree["git_commit"])))
    if tree.get("run"):
        pairs.append(("MLflow run", str(tree["run"]["id"])))
    environment = tree.get("environment")
    if isinstance(environment, Mapping):
        words = [f"Python {environment['python']}"] if environment.get("python") else []
        words += [str(environment[key]) for key in ("system", "processor", "accelerator") if environment.get(key)]
        words += [f"{name} {version}" for name, version in (environment.get("packages") or {}).items()]
        pairs.append(("Environment", ", ".join(words)))
    return pairs + [("Missing", str(text)) for text in tree.get("missing") or []]


def _data_box(run: RunFiles, task: str) -> Box:
    splits = run.manifests.get(task, {}).get("splits", {})
    counts = " · ".join(f"{facts['count']} {split}" for split, facts in splits.items() if "count" in facts)
    source = str(run.params.get("tasks", {}).get(task, "?"))
    return Box([source, counts or f"{run.test['examples'].get(task, '?')} test"], *_DATA, _TOP)


def _base_box(run: RunFiles) -> Box:
    model = run.params.get("model", {})
    return Box([f"base: {model.get('modality', 'vision')}", *base_facts(model)], *_EXPERT, _TOP)


def base_facts(model: Mapping[str, Any]) -> list[str]:
    """Return the section `model` of params.yaml without the modality.

    Example:
        >>> base_facts({"modality": "toy", "widths": [8, 4], "activation": "tanh"})
        ['widths [8, 4]', 'activation tanh']
    """
    return [f"{key} {value}" for key, value in model.items() if key != "modality"]


def _expert_box(run: RunFiles, task: str, recorded: Mapping[str, Any]) -> Box:
    expert = run.experts.get(task, {})
    regime = recorded.get("regime") or expert.get("settings", {}).get("regime")
    seed = recorded.get("seed", expert.get("seed", run.params.get("seed", 0)))
    fingerprint = str(expert.get("fingerprint") or recorded.get("fingerprint") or "?")
    words = [str(regime)] if regime else []
    return Box([task, " · ".join([*words, f"seed {seed}", f"weights {short(fingerprint)}"])], *_EXPERT, _TOP)


def _merge_box(run: RunFiles) -> Box:
    winner = run.selection["winner"]
    choice = run.selection["methods"][winner]
    arguments = [arguments_text({name: value}) for name, value in choice["args"].items()]
    return Box([winner, *arguments, f"weights {short(choice['fingerprint'])}"], *_MERGE, _TOP, main=True)


def _version_box(run: RunFiles) -> Box | None:
    registration = run.registration
    if registration is None:
        return None
    aliases = " ".join(f"@{alias}" for alias in registration["aliases"]) or "no alias"
    commit = str(lineage_of(run).get("git_commit") or "").partition(" ")[0]
    lines = [
        registration["model"],
        f"version {registration['version']}",
        aliases,
        *([f"commit {commit[:12]}"] if commit else []),
    ]
    return Box(lines, *_VERSION, _TOP, main="champion" in registration["aliases"])
