"""Figures of the study `adaptation`: accuracy per variant, learned coefficients, courses, and memory."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from mergeflow.evaluation.averages import mean_interval
from studies.old.rows import Row
from tasks.plotting.drawing import FULL_WIDTH, SMALL, dress, legend, new_figure, panels, plain, series_style
from tasks.plotting.intervals import curve
from tasks.plotting.palette import INK, MUTED, SURFACE

_KINDS = {
    "attn.in_proj_weight": "qkv",
    "attn.out_proj.weight": "out",
    "mlp.c_fc.weight": "fc",
    "mlp.c_proj.weight": "proj",
}


def accuracy_figure(
    adapted: Mapping[tuple[str, str, str], Sequence[float]],
    static: Mapping[str, Sequence[float]],
    names: Mapping[str, str],
) -> Figure:
    """Draw the accuracy of every variant beside its static start.

    Args:
        adapted: (directions, granularity, images) → test accuracy per seed, in %.
        static: directions → test accuracy per seed, in %.
        names: directions → their name.
    """
    figure, axes = panels(len(static), 2, 3.7, sharey=True)
    for index, (panel, (on, start)) in enumerate(zip(axes, static.items(), strict=True)):
        dress(panel, names[on], "", "mean test accuracy, %" if index == 0 else "")
        panel.axhline(mean_interval(start)[0], color=MUTED, linestyle=(0, (4, 3)), linewidth=1.1)
        curve(panel, {0: start}, "_start" if index else "static start, λ from validation", 0, linestyle="")
        granularities = list(dict.fromkeys(key[1] for key in adapted))
        for number, images in enumerate(dict.fromkeys(key[2] for key in adapted), start=1):
            samples = {
                place + 0.16 * (2 * number - 3): adapted[on, granularity, images]
                for place, granularity in enumerate(granularities, start=1)
            }
            label = f"adapted on {images} images"
            curve(panel, samples, f"_{label}" if index else label, number, linestyle="")
        panel.set_xticks(range(len(granularities) + 1), labels=["static", *(f"per {name}" for name in granularities)])
        panel.margins(x=0.15)
    legend(figure, FULL_WIDTH, loc="outside lower center")
    return figure


def coefficient_figure(learned: Mapping[str, Sequence[Mapping[str, Mapping[str, float]]]]) -> Figure:
    """Draw the learned coefficients as heat maps, task × matrix from first to last layer, mean over seeds.

    Args:
        learned: title → per seed: task → tensor → λ.
    """
    tasks = list(next(iter(learned.values()))[0])
    figure = new_figure(FULL_WIDTH, (0.9 + 0.3 * len(tasks)) * len(learned))
    axes = figure.subplots(len(learned), 1, squeeze=False)[:, 0]
    for panel, (title, seeds) in zip(axes, learned.items(), strict=True):
        columns = [name for name in seeds[0][tasks[0]] if name.endswith(tuple(_KINDS))]
        values = np.mean([[[seed[task][name] for name in columns] for task in tasks] for seed in seeds], axis=0)
        dress(panel, f"λ, {title}", "block and matrix" if panel is axes[-1] else "", grid="x")
        panel.grid(visible=False)
        image = panel.imshow(values, cmap="Blues", aspect="auto")
        middle = (values.min() + values.max()) / 2
        for row, line in enumerate(values):
            for column, value in enumerate(line):
                colour = SURFACE if value > middle else INK
                panel.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=SMALL - 2, color=colour)
        panel.set_yticks(range(len(tasks)), labels=tasks)
        panel.set_xticks(range(len(columns)), labels=[_short(name) for name in columns])
        figure.colorbar(image, ax=panel, pad=0.01).outline.set_visible(False)
    return figure


def course_figure(rows: Sequence[Row], names: Mapping[str, str]) -> Figure:
    """Draw the entropy of the batches and the accuracy over the steps, a line per variant.

    Args:
        rows: with `on`, `granularity`, `images`, `losses` (per step, all tasks' sum) and `course` (step, accuracy).
        names: directions → their name.
    """
    figure, axes = panels(2 * len(names), 2, 3.1, sharex=True)
    for line, (on, name) in enumerate(names.items()):
        entropy, accuracy = axes[2 * line : 2 * line + 2]
        last = line == len(names) - 1
        dress(entropy, f"{name}: entropy", "steps" if last else "", "of a step's batches, nats")
        dress(accuracy, f"{name}: test accuracy", "steps" if last else "", "mean, %")
        for number, row in enumerate(row for row in rows if row["on"] == on):
            label = f"per {row['granularity']}, {row['images']} images"
            style = series_style(number) | {"linestyle": "-" if row["images"] == "test" else ":"}
            smooth = np.convolve(row["losses"], np.ones(5) / 5, mode="valid")
            entropy.plot(range(2, 2 + len(smooth)), smooth, **style | {"marker": ""})
            steps, scores = zip(*((point["step"], point["accuracy"]) for point in row["course"]), strict=True)
            accuracy.plot(steps, scores, label=plain(label) if line == 0 else "_", **style)
    legend(figure, FULL_WIDTH, loc="outside lower center")
    return figure


def memory_figure(rows: Sequence[Row], names: Mapping[str, str]) -> Figure:
    """Draw peak bytes of tensors of a step over the number of tasks.

    Args:
        rows: with `tasks`, `on`, `peak` and `model` (bytes).
        names: directions → their name.
    """
    figure, (memory,) = panels(1, 1, 3.4)
    dress(memory, "Peak of tensors", "tasks", "MB")
    for number, (on, name) in enumerate(names.items()):
        own = [row for row in rows if row["on"] == on]
        curve(memory, {row["tasks"]: [row["peak"] / 1e6] for row in own}, name, number)
    held = {row["tasks"]: [row["tasks"] * row["model"] / 1e6] for row in rows}
    curve(memory, held, "all experts", len(names), color=MUTED, linestyle=":")
    memory.set_ylim(bottom=0)
    memory.set_xticks(sorted(held))
    legend(figure, FULL_WIDTH, loc="outside lower center")
    return figure


def _short(name: str) -> str:
    """Return block and kind of a matrix.

    Example:
        >>> _short("visual.transformer.resblocks.2.mlp.c_fc.weight")
        '2 fc'
    """
    block = next((part for part in name.split(".") if part.isdigit()), "")
    return f"{block} {next(short for end, short in _KINDS.items() if name.endswith(end))}"
