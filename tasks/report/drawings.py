"""The figures on the page: each SVG becomes part of it, in the reader's colours and with identifiers of its own."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from xml.etree import ElementTree

from tasks.plotting.palette import LIGHT

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
    """Return an SVG as part of a page: no prolog, colours as variables, identifiers that start with the figure's name.

    Args:
        svg: the file as `tasks.plotting` writes it.
    """
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
