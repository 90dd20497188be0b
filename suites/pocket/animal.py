"""The head and chest of a cat or a dog from the front, part by part.

Lengths are in the pen's object coordinates; `wide`, `high` and `long` are half of a part's.
"""

import math

from suites.pocket.canvas import Colour, Pen, Style, vary


class Animal:
    """A pen, a coat, and how far the face is turned: whatever stands out of the head moves by that much."""

    def __init__(self, pen: Pen, style: Style, coats: tuple[Colour, ...]) -> None:
        self.pen = pen
        self.spread = style.spread
        a, b, c, d = pen.rng.random(4).tolist()
        self.coat = self.hue(coats[int(a * len(coats))])
        self.shade = (int(0.8 * self.coat[0]), int(0.8 * self.coat[1]), int(0.8 * self.coat[2]))
        self.turn, self.nod, self.size = 0.24 * b - 0.12, 0.1 * c - 0.05, 0.9 + 0.2 * d

    def hue(self, colour: Colour) -> Colour:
        """Return the colour varied."""
        return vary(self.pen.rng, colour, 34 * self.spread)

    def chest(self, colour: Colour, wide: float = 0.55) -> None:
        """Draw shoulders and chest below the head."""
        self.pen.oval(-0.5 * self.turn, 0.95, wide, 0.6, colour)

    def head(self, wide: float, high: float, colour: Colour | None = None) -> None:
        """Draw the skull."""
        self.pen.oval(0, 0, wide, high, colour or self.coat)

    def upright_ears(self, x: float, top: float, wide: float, outer: Colour, inner: Colour) -> None:
        """Draw pointed ears.

        Args:
            x: their distance from the middle of the head.
            top: their height above the middle of the head, times the animal's size.
        """
        edge = ((-1.0, -0.28), (0.35, -self.size * top), (0.75, -0.05))
        inside = ((-0.5, -0.3), (0.3, 0.1 - self.size * top), (0.45, -0.2))
        for s in (-1, 1):
            for part, colour in ((edge, outer), (inside, inner)):
                self.pen.polygon([(s * (x + wide * u), v) for u, v in part], colour)

    def hanging_ears(self, x: float, y: float, wide: float, long: float, colour: Colour) -> None:
        """Draw drooping ears.

        Args:
            x: their distance from the middle of the head.
        """
        for s in (-1, 1):
            self.pen.oval(s * x, y, wide * self.size, long * self.size, colour)

    def muzzle(self, wide: float, high: float, colour: Colour, y: float = 0.3) -> None:
        """Draw the muzzle, moved with the face.

        Args:
            y: height of its middle before the nod.
        """
        self.pen.oval(self.turn, y + self.nod, wide, high, colour)

    def eyes(self, colour: Colour, x: float = 0.24, y: float = -0.06, radius: float = 0.09) -> None:
        """Draw two eyes with pupils, moved with the face.

        Args:
            x: their distance from the middle of the face.
            y: their height before the nod.
            radius: of an eye; the pupil has half of it.
        """
        for s in (-1, 1):
            self.pen.disc(0.7 * self.turn + s * x, y + self.nod, radius, colour)
            self.pen.disc(0.7 * self.turn + s * x, y + self.nod, 0.5 * radius, (15, 15, 15))

    def nose(self, colour: Colour, y: float, size: float) -> None:
        """Draw the nose and the line below it, moved with the face.

        Args:
            y: its height before the nod.
        """
        x, y = self.turn, y + self.nod
        self.pen.line([(x, y), (x, y + 1.8 * size)], 0.04, (60, 45, 45))
        self.pen.polygon([(x - size, y - 0.6 * size), (x + size, y - 0.6 * size), (x, y + 0.8 * size)], colour)

    def fringe(self, wide: float, high: float, colour: Colour, tufts: int = 16) -> None:
        """Draw long fur sticking out around the head.

        Args:
            wide, high: mean half width and half height of the fur.
        """
        radii = (1 + 0.14 * self.pen.rng.random(2 * tufts)).tolist()
        steps = [(math.pi * k / tufts, r if k % 2 else 0.86 * r) for k, r in enumerate(radii)]
        self.pen.polygon([(wide * r * math.sin(a), 0.1 + high * r * math.cos(a)) for a, r in steps], colour)

    def spots(self, count: int, radius: float, colour: Colour) -> None:
        """Spot the head and the chest, sparing the face's middle.

        Args:
            count: how many are tried; fewer are drawn.
            radius: of a spot, 0.6 to 1.4 times it.
        """
        for a, b, c in self.pen.rng.random((count, 3)).tolist():
            x, y = 1.1 * a - 0.55, 1.6 * b - 0.5
            if abs(x) > 0.2 or y < -0.15 or y > 0.55:
                self.pen.disc(x, y, radius * (0.6 + 0.8 * c), colour)
