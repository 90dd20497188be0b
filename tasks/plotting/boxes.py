"""Boxes of text with links between them, left to right: where something comes from."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, PathPatch
from matplotlib.path import Path

from tasks.plotting.drawing import SMALL, plain
from tasks.plotting.palette import GRID, INK, MUTED, SERIES, SURFACE

CHARACTER = 5.2  # points that a wide text's mean character takes
_PAD, _LINE = 9.0, 14.0


@dataclass(frozen=True)
class Box:
    """A box of lines, the first of them bold; sizes in points.

    Attributes:
        lines: what stands in it; a line that is too long is shortened in the middle.
        top: of its upper edge, from the top of the figure.
    """

    lines: Sequence[str]
    left: float
    width: float
    top: float
    main: bool = False
    faulty: bool = False

    @property
    def height(self) -> float:
        return 2 * _PAD + _LINE * len(self.lines)

    @property
    def middle(self) -> float:
        return self.top + self.height / 2


def width_of(lines: Iterable[str]) -> float:
    """Return how wide a box is that shows its lines whole."""
    return 2 * _PAD + CHARACTER * max(map(len, lines))


def boxes_figure(
    boxes: Sequence[Box], links: Iterable[tuple[Box, Box]], headings: Iterable[tuple[float, str]] = ()
) -> Figure:
    width, height = max(box.left + box.width for box in boxes) + 2, max(box.top + box.height for box in boxes) + 2
    figure = Figure(figsize=(width / 72, height / 72), facecolor=SURFACE)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    for start, end in links:
        x, y, middle = start.left + start.width, start.middle, (start.left + start.width + end.left) / 2
        curve = Path([(x, y), (middle, y), (middle, end.middle), (end.left, end.middle)], [1, 4, 4, 4])
        axes.add_patch(PathPatch(curve, fill=False, edgecolor=MUTED, alpha=0.5))
    for number, box in enumerate(boxes):
        _draw(axes, box, f"box-{number}")
    for left, text in headings:
        axes.text(left, _LINE - 4, text, fontsize=SMALL, color=MUTED)
    return figure


def _draw(axes: Axes, box: Box, name: str) -> None:
    edge = SERIES[0] if box.main else GRID
    style = "round,pad=0,rounding_size=5"
    patch = FancyBboxPatch((box.left, box.top), box.width, box.height, style, facecolor=SURFACE, edgecolor=edge)
    patch.set_gid(name)
    axes.add_patch(patch)
    room = int((box.width - 2 * _PAD) / CHARACTER) + 1
    for number, line in enumerate(box.lines):
        colour = SERIES[1] if box.faulty else MUTED if number else INK
        place, weight = box.top + _PAD + _LINE * (number + 0.75), "normal" if number else "bold"
        axes.text(box.left + _PAD, place, plain(line, room), fontsize=SMALL, color=colour, fontweight=weight)
