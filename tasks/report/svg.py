"""A few SVG elements for pictures that are drawn for the page itself, in its colours and its font."""

from xml.etree import ElementTree

CHARACTER = 6.7  # width in pixels of a wide text's mean character at the page's 12 pixels


class Picture:
    """An SVG that grows element by element; sizes in pixels.

    Args:
        width, height: of the drawing; on the page it is as wide as there is room.
        label: what it shows, for those who do not see it.
    """

    def __init__(self, width: float, height: float, label: str) -> None:
        self._root = ElementTree.Element("svg", viewBox=f"0 0 {width:g} {height:g}", role="img")
        self._root.set("aria-label", label)

    def rect(self, x: float, y: float, width: float, height: float, style: str, radius: float = 7) -> None:
        """Draw a rectangle with round corners.

        Args:
            x, y: its upper left corner.
            width, height: its size.
            style: class of the page's style sheet.
            radius: of the corners.
        """
        sizes = {"x": x, "y": y, "width": width, "height": height, "rx": radius}
        ElementTree.SubElement(self._root, "rect", {**_numbers(sizes), "class": style})

    def line(self, x1: float, y1: float, x2: float, y2: float, style: str) -> None:
        """Draw a straight line.

        Args:
            x1, y1: where it begins.
            x2, y2: where it ends.
            style: class of the page's style sheet.
        """
        ElementTree.SubElement(
            self._root, "line", {**_numbers({"x1": x1, "y1": y1, "x2": x2, "y2": y2}), "class": style}
        )

    def curve(self, start: tuple[float, float], end: tuple[float, float], style: str) -> None:
        """Draw a line that leaves and arrives level.

        Args:
            start: its point x, y on the left.
            end: its point x, y on the right.
            style: class of the page's style sheet.
        """
        (x1, y1), (x2, y2) = start, end
        middle = (x1 + x2) / 2
        path = f"M{x1:g} {y1:g}C{middle:g} {y1:g} {middle:g} {y2:g} {x2:g} {y2:g}"
        ElementTree.SubElement(self._root, "path", {"d": path, "class": style})

    def text(
        self, x: float, y: float, text: str, style: str = "", room: float | None = None, end: str = "start"
    ) -> None:
        """Write one line.

        Args:
            x, y: of its anchor, on the base line.
            text: what it says.
            style: class of the page's style sheet.
            room: pixels it may take; what does not fit is cut in the middle and shown whole on hover.
            end: which end the anchor is: start, middle or end.
        """
        shown = text if room is None else clip(text, int(room / CHARACTER))
        attributes = {**_numbers({"x": x, "y": y}), "class": style, "text-anchor": end}
        element = ElementTree.SubElement(self._root, "text", attributes)
        element.text = shown
        if shown != text:
            ElementTree.SubElement(element, "title").text = text

    def markup(self) -> str:
        return ElementTree.tostring(self._root, encoding="unicode")


def clip(text: str, longest: int) -> str:
    """Return the text with its middle left out where it is longer than `longest` characters.

    Example:
        >>> clip("folder:inputs/photographs/of/birds", 20)
        'folder:inp…/of/birds'
    """
    if len(text) <= longest:
        return text
    return f"{text[: longest // 2]}…{text[len(text) - (longest - longest // 2 - 1) :]}"


def _numbers(values: dict[str, float]) -> dict[str, str]:
    return {name: f"{value:g}" for name, value in values.items()}
