"""The colours of the figures and of the report: one table, light and dark.

Figures are drawn with the light values. The report puts them on its page and replaces each value by a CSS variable,
so that the same drawing follows the reader's theme. Every series colour has a contrast of 3:1 or more against its
background, the order keeps neighbours apart for colour-blind readers (after Okabe and Ito 2008), and the figures add
a marker shape per series, so that no line is told by colour alone.
"""

# Values are unique: the report finds a role by its colour.
LIGHT = {
    "surface": "#ffffff",
    "ink": "#1b1f27",
    "muted": "#5a6270",
    "grid": "#d8dce3",
    "series-1": "#0072b2",
    "series-2": "#d55e00",
    "series-3": "#008f68",
    "series-4": "#b5478f",
    "series-5": "#94700f",
    "series-6": "#2d8fc9",
    "series-7": "#6753cf",
    "series-8": "#9e4b42",
}
DARK = {
    "surface": "#161a21",
    "ink": "#e7eaf0",
    "muted": "#a2abb9",
    "grid": "#353c48",
    "series-1": "#4aa8ea",
    "series-2": "#ff8b4a",
    "series-3": "#2bc79a",
    "series-4": "#e487c8",
    "series-5": "#d8b13f",
    "series-6": "#9bd7fb",
    "series-7": "#a99cff",
    "series-8": "#e08a80",
}

SURFACE, INK, MUTED, GRID = (LIGHT[role] for role in ("surface", "ink", "muted", "grid"))
SERIES = tuple(colour for role, colour in LIGHT.items() if role.startswith("series"))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p")
