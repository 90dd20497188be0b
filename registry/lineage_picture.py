"""The lineage as a picture: a plain SVG of boxes from the version on the left to its data on the right."""

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from registry.lineage import Node

_PAD, _GAP, _CHARACTER = 8, 40, 6.7  # pixels; the last is the width of a letter at 11 px
_LONGEST = 46
_STYLE = """
  .page { fill: #ffffff } .box { fill: #f3f5f8; stroke: #8a94a6 } .link { fill: none; stroke: #8a94a6 }
  text { font: 11px ui-monospace, Menlo, Consolas, monospace; fill: #1c2430 } .lost { fill: #b3261e }
  @media (prefers-color-scheme: dark) {
    .page { fill: #14171c } .box { fill: #1f242c; stroke: #6b7688 } .link { stroke: #6b7688 }
    text { fill: #e6e9ee } .lost { fill: #ff8a80 }
  }"""


@dataclass
class _Box:
    lines: list[str]
    depth: int
    top: float
    parent: "_Box | None"

    @property
    def height(self) -> float:
        return 2 * _PAD + 14 * len(self.lines)

    @property
    def middle(self) -> float:
        return self.top + self.height / 2


def lineage_svg(top: Node) -> str:
    """Return the SVG document; it is readable on a light and on a dark page.

    Args:
        top: what `lineage_nodes` returns.

    Example:
        >>> lineage_svg(Node("version", [Node("recipe"), Node("run")])).count("<rect")
        4
    """
    boxes: list[_Box] = []
    bottom = _place(top, 0, _PAD, None, boxes)
    widths: dict[int, float] = {}
    for box in boxes:
        widths[box.depth] = max(widths.get(box.depth, 0.0), max(map(len, box.lines)) * _CHARACTER + 2 * _PAD)
    lefts = {depth: _PAD + sum(widths[other] + _GAP for other in range(depth)) for depth in widths}
    width = max(lefts[depth] + widths[depth] for depth in widths) + _PAD
    body = [line for box in boxes for line in _draw(box, lefts, widths)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {bottom + _PAD:.0f}" '
            f'width="{width:.0f}" height="{bottom + _PAD:.0f}" role="img">',
            f"<title>Lineage of {escape(top.text)}</title><style>{_STYLE}</style>",
            '<rect class="page" width="100%" height="100%"/>',
            *body,
            "</svg>\n",
        ]
    )


def _place(node: Node, depth: int, top: float, parent: _Box | None, boxes: list[_Box]) -> float:
    """Put the node's box at the height of its children's middle; return where the next one below may begin."""
    box = _Box(list(_wrap(node.text)), depth, top, parent)
    boxes.append(box)
    below, own = top, []
    for child in node.children:
        own.append(len(boxes))
        below = _place(child, depth + 1, below, box, boxes)
    if own:
        box.top = max(top, (boxes[own[0]].middle + boxes[own[-1]].middle - box.height) / 2)
    return max(below, box.top + box.height + _PAD)


def _draw(box: _Box, lefts: dict[int, float], widths: dict[int, float]) -> Iterator[str]:
    left = lefts[box.depth]
    if box.parent is not None:
        start, end = lefts[box.parent.depth] + widths[box.parent.depth], left
        half = (start + end) / 2
        yield (
            f'<path class="link" d="M{start:.0f} {box.parent.middle:.0f} C{half:.0f} {box.parent.middle:.0f} '
            f'{half:.0f} {box.middle:.0f} {end:.0f} {box.middle:.0f}"/>'
        )
    yield (
        f'<rect class="box" x="{left:.0f}" y="{box.top:.0f}" width="{widths[box.depth]:.0f}" '
        f'height="{box.height:.0f}" rx="4"/>'
    )
    lost = ' class="lost"' if box.lines[0].startswith("missing") else ""
    for number, line in enumerate(box.lines):
        y = box.top + _PAD + 11 + 14 * number
        yield f'<text{lost} x="{left + _PAD:.0f}" y="{y:.0f}">{escape(line)}</text>'


def _wrap(text: str) -> Iterator[str]:
    """Break the text after commas, so that no box is wider than it has to be."""
    line = ""
    for part in text.split(", "):
        longer = f"{line}, {part}" if line else part
        if line and len(longer) > _LONGEST:
            yield f"{line},"
            longer = part
        line = longer
    yield line
