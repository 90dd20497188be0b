"""What the studies of linearity share: rows of the kernel's results, their worst cases, paths of loss, a figure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from mergeflow.evaluation.accuracy import accuracies, losses
from mergeflow.linearity.affine import DIRECTION, LENGTH, TRIVIAL, Linearity, combine
from mergeflow.modality import Examples, Model, State
from studies.lab.claims import Claim, Samples
from studies.lab.plots import table
from studies.lab.rows import Row
from tasks.plotting.drawing import dress, panels, plain, series_style
from tasks.plotting.linearity import finish_layers


@dataclass(frozen=True)
class TunedModels:
    """Models tuned from one start on some tasks; the control of a task are all the others.

    Attributes:
        model: What weights are loaded into.
        start: θ0.
        tuned: Task → θ_t.
        tests: Task → examples, or of a model of sequences what it is asked.
    """

    model: Model
    start: State
    tuned: Mapping[str, State]
    tests: Mapping[str, Any]

    def controls(self, task: str) -> list[str]:
        """Return all the other tasks."""
        return [other for other in self.tuned if other != task]


def rows_of(found: Mapping[str, Mapping[str, Linearity]], **settings: Any) -> list[Row]:
    """Return one row for each combination and layer: means, the quartiles of 1 − cos and coef, and coef's median."""
    rows = []
    for name, layers in found.items():
        for depth, (layer, values) in enumerate(layers.items()):
            low, high = np.quantile(values.distance, [0.25, 0.75])
            coef = np.quantile(values.coef, [0.25, 0.5, 0.75])
            row = {**settings, "combination": name, "layer": layer, "depth": depth, "samples": len(values.coef)}
            row |= {"distance": float(values.distance.mean()), "distance_low": float(low), "distance_high": float(high)}
            row |= {"base": float(values.base.mean()), "coef_low": float(coef[0]), "coef": float(coef[1])}
            rows.append({**row, "coef_high": float(coef[2]), "error": float(values.error.mean())})
    return rows


def worst_share(rows: pd.DataFrame) -> pd.Series:
    """Return by seed the largest 1 − cos in shares of its baseline, over rows that the baseline can decide."""
    share = (rows.distance / rows.base).where(rows.base > TRIVIAL)
    return share.groupby(rows.seed).max()


def worst_length(rows: pd.DataFrame) -> pd.Series:
    """Return by seed the largest |median coef − 1|."""
    return (rows.coef - 1).abs().groupby(rows.seed).max()


def _shares(rows: pd.DataFrame) -> Samples:
    shares = worst_share(rows)
    return {} if shares.isna().any() else {"worst share": shares}


def direction(system: str, says: str, chosen: Callable[[pd.DataFrame], pd.DataFrame], ours: bool = False) -> Claim:
    """Return the claim that features of combined weights point where combined features do; undecided without baseline.

    Args:
        system: of the paper.
        says: the claim.
        chosen: which rows it is about.
        ours: as of `Claim`.
    """
    rule = f"worst 1 − cos, in shares of the baseline where that is above {TRIVIAL},"
    return Claim(
        system, says, lambda rows: _shares(chosen(rows)), high=DIRECTION, of=rule, unit="", digits=2, ours=ours
    )


def length(system: str, says: str, chosen: Callable[[pd.DataFrame], pd.DataFrame], ours: bool = False) -> Claim:
    """Return the claim that features of combined weights are as long as combined features."""
    name = "worst |median coef − 1|"
    return Claim(
        system,
        says,
        lambda rows: {name: worst_length(chosen(rows))},
        high=LENGTH,
        of=name,
        unit="",
        digits=2,
        ours=ours,
    )


def path_rows(
    model: Model, ends: tuple[State, State], examples: Mapping[str, Examples], alphas: Sequence[float], **settings: Any
) -> list[Row]:
    """Return loss and accuracy in % of αθ_i + (1−α)θ_j, a row for each α and task, which the row calls `on`.

    Args:
        model: the network, whose weights are overwritten.
        ends: θ_i and θ_j.
        examples: labelled examples by task.
        alphas: α; 1 is θ_i.
        settings: what else is in every row, such as the seed.
    """
    rows = []
    for alpha in alphas:
        model.load(combine(list(ends), [alpha, 1 - alpha]))
        loss, accuracy = losses(model, examples), accuracies(model, examples)
        rows += [
            {**settings, "alpha": alpha, "on": task, "loss": loss[task], "accuracy": 100 * accuracy[task]}
            for task in examples
        ]
    return rows


def excess(paths: pd.DataFrame) -> pd.DataFrame:
    """Return paths with `chord`, αL(θ_i) + (1 − α)L(θ_j), and `ends`, |L(θ_i) − L(θ_j)|."""
    key = ["seed", "pair", "on"]
    first, second = (paths[paths.alpha == end].set_index(key).loss for end in (1.0, 0.0))
    where = pd.MultiIndex.from_frame(paths[key])
    one, other = first.loc[where].to_numpy(), second.loc[where].to_numpy()
    return paths.assign(chord=paths.alpha * one + (1 - paths.alpha) * other, ends=np.abs(one - other))


def loss_gaps(paths: pd.DataFrame) -> pd.DataFrame:
    """Return how far each path is from linear mode connectivity, in nats: the larger of ends' difference and barrier.

    The barrier is max_α L(θ_α) − [α L(θ_i) + (1 − α) L(θ_j)]. The result has seed, pair, on and gap.
    """
    whole = excess(paths)
    gaps = whole.assign(over=whole.loss - whole.chord).groupby(["seed", "pair", "on"], sort=False)
    return gaps.agg(ends=("ends", "first"), over=("over", "max")).max(axis=1).rename("gap").reset_index()


def layer_table(rows: pd.DataFrame, *index: str) -> pd.DataFrame:
    """Return means of 1 − cos, its baseline, coef and error, and the worst share, by the columns of `index`."""
    columns = {"distance": "1 − cos", "base": "baseline", "coef": "coef", "error": "error"}
    parts = [
        table(rows, list(index), value=value, digits=2 if value == "coef" else 3).rename(columns={value: label})
        for value, label in columns.items()
    ]
    share = rows.assign(share=(rows.distance / rows.base).where(rows.base > TRIVIAL))
    worst = share.groupby([*index, "seed"], sort=False, dropna=False).share.max().reset_index()
    return pd.concat([*parts, table(worst, list(index), value="share", digits=2)], axis=1)


def layers_figure(rows: pd.DataFrame, by: str) -> Figure:
    """Draw mean 1 − cos with quartiles beside the baseline's, and coef's median with quartiles, by layer.

    Args:
        rows: as of `rows_of`; means over what is drawn together.
        by: the column whose values are series.
    """
    layers = list(rows.layer.drop_duplicates())
    figure, (distance, coef) = panels(2, 2, 3.8)
    dress(distance, "Direction", "layer", "1 − cos")
    dress(coef, "Length", "layer", "coef")
    series = list(rows[by].drop_duplicates())
    for number, name in enumerate(series):
        means = rows[rows[by] == name].groupby("layer", sort=False).mean(numeric_only=True).reindex(layers)
        places = np.arange(len(layers)) + (number - (len(series) - 1) / 2) * 0.8 / len(series)
        style = series_style(number) | {"linestyle": ""}
        for panel, middle in ((distance, "distance"), (coef, "coef")):
            bars = [means[middle] - means[f"{middle}_low"], means[f"{middle}_high"] - means[middle]]
            # With a few large values the mean lies outside the quartiles; a bar has no negative length.
            label = plain(str(name)) if panel is distance else f"_{number}"
            drawn = np.maximum(bars, 0)
            panel.errorbar(places, means[middle], yerr=drawn, label=label, capsize=2.5, elinewidth=1.0, **style)
        hollow = style | {"markerfacecolor": "none", "markeredgecolor": style["color"], "markeredgewidth": 1.2}
        distance.plot(places, means.base, **hollow)
    finish_layers(figure, distance, coef, layers)
    return figure
