"""The colours: the same roles in both themes, told apart by the report, readable on their background."""

from tasks.plotting.palette import DARK, LIGHT


def luminance(colour):
    """Relative luminance (WCAG 2.2)."""
    parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first, other):
    high, low = sorted((luminance(first), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_both_themes_have_the_same_roles_and_no_colour_has_two():
    assert LIGHT.keys() == DARK.keys()
    assert len(set(LIGHT.values())) == len(LIGHT)


def test_text_and_lines_are_readable():
    for theme in (LIGHT, DARK):
        assert contrast(theme["ink"], theme["surface"]) >= 7
        assert contrast(theme["muted"], theme["surface"]) >= 4.5
        for role, colour in theme.items():
            if role.startswith("series"):
                assert contrast(colour, theme["surface"]) >= 3, role
