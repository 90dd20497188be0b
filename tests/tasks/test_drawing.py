"""What all figures have in common."""

from tasks.plotting.drawing import legend, panels


def test_a_legend_of_several_panels_names_each_series_once() -> None:
    figure, axes = panels(2, 2, 3.0)
    for panel, labels in zip(axes, (("one", "two"), ("two", "three")), strict=True):
        for label in labels:
            panel.plot([0, 1], [0, 1], label=label)
    legend(figure, 6.0, loc="outside lower center")
    (made,) = figure.legends
    assert [text.get_text() for text in made.get_texts()] == ["one", "two", "three"]
