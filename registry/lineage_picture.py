"""The lineage as a picture: boxes from the version on the left to its data on the right."""

from collections.abc import Iterator
from dataclasses import replace

from registry.lineage import Node
from tasks.plotting.boxes import Box, boxes_figure, width_of
from tasks.plotting.drawing import to_svg

_GAP, _BELOW, _LONGEST = 40.0, 8.0, 46  # points between columns and between rows; characters of a line


def lineage_svg(top: Node) -> str:
    """Return the SVG document of what `lineage_nodes` returns.

    Example:
        >>> lineage_svg(Node("version", [Node("recipe"), Node("run")])).count('id="box-')
        3
    """
    depths: dict[int, int] = {}
    boxes: list[Box] = []
    links: list[tuple[int, int]] = []

    def place(node: Node, depth: int, begin: float) -> tuple[int, float]:
        """Put a node halfway down its children; return its number, and where the next one below may begin."""
        number = len(boxes)
        lines = list(_wrapped(node.text))
        boxes.append(Box(lines, 0.0, width_of(lines), begin, faulty=lines[0].startswith("missing")))
        depths[number], below, children = depth, begin, []
        for child in node.children:
            placed, below = place(child, depth + 1, below)
            children.append(placed)
        if children:
            middle = (boxes[children[0]].middle + boxes[children[-1]].middle) / 2
            boxes[number] = replace(boxes[number], top=max(begin, middle - boxes[number].height / 2))
        links.extend((number, child) for child in children)
        return number, max(below, boxes[number].top + boxes[number].height + _BELOW)

    place(top, 0, 1.0)
    widths = [max(boxes[n].width for n in depths if depths[n] == depth) for depth in range(max(depths.values()) + 1)]
    lefts = [1 + sum(widths[:depth]) + _GAP * depth for depth in range(len(widths))]
    placed = [replace(box, left=lefts[depths[n]], width=widths[depths[n]]) for n, box in enumerate(boxes)]
    figure = boxes_figure(placed, [(placed[start], placed[end]) for start, end in links])
    return to_svg(figure, f"Lineage of {top.text}").decode()


def _wrapped(text: str) -> Iterator[str]:
    """Break the text after commas, so that no box is wider than it has to be."""
    line = ""
    for part in text.split(", "):
        longer = f"{line}, {part}" if line else part
        if line and len(longer) > _LONGEST:
            yield f"{line},"
            longer = part
        line = longer
    yield line
