"""Where the winner comes from, as one picture: data → experts → merge → registered version."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mergeflow.checkpoints.fingerprint import short
from tasks.report.files import Json, RunFiles
from tasks.report.svg import Picture
from tasks.report.tables import arguments_text

_WIDTH, _PITCH, _HEIGHT, _TOP = 1120.0, 60.0, 48.0, 26.0
_DATA, _EXPERT, _MERGE, _VERSION = (0.0, 280.0), (326.0, 280.0), (652.0, 210.0), (908.0, 212.0)  # (left, width)


@dataclass(frozen=True)
class Box:
    """One ancestor: a bold line, and quiet lines below it."""

    title: str
    lines: tuple[str, ...]
    style: str = "box"


def lineage_picture(run: RunFiles) -> str:
    """Return the picture as SVG: a row per expert and one for the base; what the registry knows where there is one."""
    tasks = run.selection["tasks"]
    known = {expert["task"]: expert for expert in lineage_of(run).get("experts") or []}
    base = _base_box(run)
    first = _TOP + max(_PITCH, _size(base) + _PITCH - _HEIGHT)  # where the experts' rows begin
    height = first + _PITCH * len(tasks)
    picture = Picture(_WIDTH, height, "Lineage: data, experts, merge, registered version")
    _headings(picture, run.registration is not None)
    middle = _TOP + (height - _TOP) / 2 - (_PITCH - _HEIGHT) / 2
    merge, version = _merge_box(run), _version_box(run)
    port = (_MERGE[0], middle)
    picture.curve((sum(_EXPERT), _TOP + _size(base) / 2), port, "link")
    _draw(picture, base, _EXPERT, _TOP)
    for row, task in enumerate(tasks):
        top = first + row * _PITCH
        picture.curve((sum(_EXPERT), top + _HEIGHT / 2), port, "link")
        picture.curve((sum(_DATA), top + _HEIGHT / 2), (_EXPERT[0], top + _HEIGHT / 2), "link")
        _draw(picture, _data_box(run, task), _DATA, top)
        _draw(picture, _expert_box(run, task, known.get(task, {})), _EXPERT, top)
    if version is not None:
        picture.curve((sum(_MERGE), middle), (_VERSION[0], middle), "link")
        _draw(picture, version, _VERSION, middle - _size(version) / 2)
    _draw(picture, merge, _MERGE, middle - _size(merge) / 2)
    return picture.markup()


def lineage_of(run: RunFiles) -> Json:
    """Return what the registry wrote down of the version's ancestors; empty where it wrote nothing."""
    found: Json = (run.registration or {}).get("lineage") or {}
    return found


def origin(run: RunFiles) -> list[tuple[str, str]]:
    """Return what stands beside the picture, in pairs of word and value: commit, environment, what is missing."""
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


def _headings(picture: Picture, registered: bool) -> None:
    columns = [("data", _DATA), ("base and experts", _EXPERT), ("merge", _MERGE)]
    for text, (left, _) in columns + ([("registered version", _VERSION)] if registered else []):
        picture.text(left + 1, 12, text, "quiet")


def _draw(picture: Picture, box: Box, column: tuple[float, float], top: float) -> None:
    left, width = column
    picture.rect(left + 0.5, top + 0.5, width - 1, _size(box) - 1, box.style)
    picture.text(left + 12, top + 20, box.title, "strong", width - 40)
    for number, line in enumerate(box.lines, start=1):
        picture.text(left + 12, top + 20 + 18 * number, line, "quiet", width - 12)


def _size(box: Box) -> float:
    return 30 + 18 * len(box.lines)


def _data_box(run: RunFiles, task: str) -> Box:
    splits = run.manifests.get(task, {}).get("splits", {})
    counts = " · ".join(f"{facts['count']} {split}" for split, facts in splits.items() if "count" in facts)
    source = str(run.params.get("tasks", {}).get(task, "?"))
    return Box(source, (counts or f"{run.test['examples'].get(task, '?')} test",))


def _base_box(run: RunFiles) -> Box:
    model = run.params.get("model", {})
    return Box(f"base: {model.get('modality', 'vision')}", tuple(base_facts(model)))


def base_facts(model: Mapping[str, Any]) -> list[str]:
    """Return what the section `model` of params.yaml says beside the modality.

    Example:
        >>> base_facts({"modality": "toy", "widths": [8, 4], "activation": "tanh"})
        ['widths [8, 4]', 'activation tanh']
    """
    return [f"{key} {value}" for key, value in model.items() if key != "modality"]


def _expert_box(run: RunFiles, task: str, known: Mapping[str, Any]) -> Box:
    expert = run.experts.get(task, {})
    regime = known.get("regime") or expert.get("settings", {}).get("regime")
    seed = known.get("seed", expert.get("seed", run.params.get("seed", 0)))
    fingerprint = str(expert.get("fingerprint") or known.get("fingerprint") or "?")
    words = [str(regime)] if regime else []
    return Box(task, (" · ".join([*words, f"seed {seed}", f"weights {short(fingerprint)}"]),))


def _merge_box(run: RunFiles) -> Box:
    winner = run.selection["winner"]
    choice = run.selection["methods"][winner]
    arguments = [arguments_text({name: value}) for name, value in choice["args"].items()]
    return Box(winner, (*arguments, f"weights {short(choice['fingerprint'])}"), "box main")


def _version_box(run: RunFiles) -> Box | None:
    found = run.registration
    if found is None:
        return None
    aliases = " ".join(f"@{alias}" for alias in found["aliases"]) or "no alias"
    commit = str(lineage_of(run).get("git_commit") or "").partition(" ")[0]
    lines = [f"version {found['version']}", aliases, *([f"commit {commit[:12]}"] if commit else [])]
    return Box(found["model"], tuple(lines), "box main" if "champion" in found["aliases"] else "box")
