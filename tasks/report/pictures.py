"""The pictures on the page: figures of the run, the gates' decision, and where the winner comes from."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from xml.etree import ElementTree

from matplotlib.figure import Figure

from mergeflow.checkpoints.fingerprint import short
from tasks.plotting.boxes import Box, boxes_figure
from tasks.plotting.drawing import SMALL, dress, new_figure, plain
from tasks.plotting.palette import INK, LIGHT, MUTED, SERIES
from tasks.report.files import Json, RunFiles
from tasks.report.tables import arguments_text

_VARIABLE = {colour: f"var(--{role})" for role, colour in LIGHT.items()}
_COLOUR = re.compile("|".join(_VARIABLE), re.IGNORECASE)
_POINTS_OF_HALF = 500  # a figure narrower than this shares its line of the page with another

# What each figure shows, in the order of the page: (section, caption).
_CAPTIONS = {
    "accuracy": (
        "results",
        "Each grey bar reaches from the base without training to the task's own expert; marks are the merged models. "
        "Test set, one look.",
    ),
    "radar": ("results", "The same test accuracies around a circle; the winner is filled."),
    "cosines": (
        "results",
        "The cosine of every pair of task vectors: near 0 means that the experts moved in unrelated directions.",
    ),
    "scale_curves": (
        "choice",
        "Validation accuracy over the scale λ that multiplies each method's direction, one line per value of its other "
        "arguments. The ring is the candidate that was chosen; a dashed level is a method with a single candidate.",
    ),
    "argument_curves": (
        "choice",
        "Validation accuracy over each other argument, each value at its best scale λ; the ring is the choice.",
    ),
    "training": ("experts", "Each expert's mean training loss and validation accuracy by epoch."),
}


@dataclass(frozen=True)
class Drawing:
    """A figure of the page: its SVG, what it shows, the section it belongs to and whether it takes half a line."""

    name: str
    svg: str
    caption: str
    section: str
    half: bool


def drawings(figures: Mapping[str, str]) -> list[Drawing]:
    """Return the figures in the order of the page; a figure that is not known here comes last, under its own name."""
    order = [name for name in _CAPTIONS if name in figures]
    order += [name for name in figures if name not in _CAPTIONS]
    return [_drawing(name, figures[name]) for name in order]


def inline(name: str, svg: str) -> str:
    """Return an SVG as part of a page: without prolog, colours as variables, identifiers with the figure's name."""
    root = ElementTree.fromstring(svg)
    prefix = re.sub(r"\W", "-", name)
    for parent in list(root.iter()):
        for child in list(parent):
            if _local(child.tag) in ("metadata", "style"):  # the style of a drawing would reach the whole page
                parent.remove(child)
    for element in root.iter():
        element.tag = _local(element.tag)
        attributes = {_local(key): value for key, value in element.attrib.items()}
        element.attrib = {key: _adapt(prefix, key, value) for key, value in attributes.items()}
    for size in ("width", "height", "version"):
        root.attrib.pop(size, None)
    return ElementTree.tostring(root, encoding="unicode")


def _drawing(name: str, svg: str) -> Drawing:
    section, caption = _CAPTIONS.get(name, ("results", name))
    width = re.search(r'viewBox="[\d.]+ [\d.]+ ([\d.]+)', svg)
    half = width is not None and float(width[1]) < _POINTS_OF_HALF
    return Drawing(name, inline(name, svg), caption, section, half)


def _adapt(prefix: str, key: str, value: str) -> str:
    if key == "id":
        return f"{prefix}-{value}"
    if key == "href" and value.startswith("#"):
        return f"#{prefix}-{value[1:]}"
    value = value.replace("url(#", f"url(#{prefix}-")
    return _COLOUR.sub(lambda match: _VARIABLE[match[0].lower()], value) if key == "style" else value


def _local(name: str) -> str:
    return name.rpartition("}")[2]


_WORSE, _BETTER = SERIES[1], SERIES[2]


def decision_figure(decision: Json | None) -> Figure | None:
    """Return the picture; None where there was no champion to compare with."""
    numbers = (decision or {}).get("numbers") or {}
    changes: dict[str, float] = numbers.get("change") or {}
    if "gain" not in numbers or not changes:
        return None
    gain, allowed = numbers["gain"], numbers["settings"]["tolerance"]
    low, high = numbers.get("interval") or [gain, gain]
    reach = 1.15 * max(map(abs, [*changes.values(), low, high, allowed, numbers["settings"]["margin"], 0.005]))
    figure = new_figure(9.0, 0.36 * len(changes) + 1.3)
    axes = figure.subplots()
    dress(axes, "worse ← the champion → better", grid="x")
    axes.set(xlim=(-reach, reach), ylim=(len(changes) + 0.6, -0.6), xticks=[])
    axes.set_yticks(range(len(changes) + 1), labels=map(plain, ["mean, normalised", *changes]), color=INK)
    axes.axvline(0, color=MUTED)
    axes.plot([-allowed, -allowed], [0.5, len(changes) + 0.6], color=_WORSE, linestyle=(0, (5, 4)))
    axes.annotate(f"allowed: {_points(-allowed)}", (-allowed, len(changes) + 0.6), (0, -12), textcoords="offset points",
                  ha="center", fontsize=SMALL, color=MUTED)  # fmt: skip
    axes.errorbar(gain, 0, xerr=[[gain - low], [high - gain]], fmt="o", color=INK, capsize=4, markersize=7)
    for row, change in enumerate(changes.values(), start=1):
        too_much = change < -allowed - 1e-12
        bar = axes.barh(
            row, change, 0.55, color=_BETTER if change >= 0 else _WORSE, alpha=0.6 if change < 0 and not too_much else 1
        )
        bar[0].set_gid("worse" if too_much else f"change-{row}")
    for row, value in enumerate([gain, *changes.values()]):
        axes.annotate(_points(value), (1, row), (8, 0), xycoords=("axes fraction", "data"), textcoords="offset points",
                      va="center", fontsize=SMALL, color=MUTED if row else INK)  # fmt: skip
    return figure


def _points(value: float) -> str:
    """Return a fraction as points with its sign.

    Example:
        >>> _points(-0.0125)
        '−1.25'
    """
    return f"{100 * value:+.2f}".replace("-", "−")


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
