"""What the study stitches: front halves of edited nets, and the back half of their base."""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np
from torch import Tensor

from mergeflow.linearity.affine import combine
from mergeflow.linearity.layers import find_layers
from mergeflow.modality import State
from studies.lab.nets import Tuned
from studies.old.rows import Row
from studies.theory.linearity import front, stitch

BATCH = 1000


class Halves:
    """Front halves of nets edited by task vectors, and the back half of their base, cut at several layers.

    Args:
        done: models tuned from one start.
        layers: where they are cut.
    """

    def __init__(self, done: Tuned, layers: Sequence[str]) -> None:
        self.done, self.layers = done, layers
        self.of_base = cache(lambda on: self._front(done.start, on))
        self.base_alone = cache(lambda layer, on: self.accuracy([(1.0, self.of_base(on)[layer])], layer, on))
        self._alone: dict[tuple[str, float, str, str], float] = {}

    def fronts(self, task: str, scale: float, on: str) -> dict[str, Tensor]:
        """Return layer → f(θ0 + λτ) on a task's examples, [n, …]; for λ = 0 what is kept of the base.

        Args:
            task: whose task vector τ is.
            scale: λ.
            on: whose examples are looked at.
        """
        if not scale:
            return self.of_base(on)
        return self._front(combine([self.done.start, self.done.tuned[task]], [1 - scale, scale]), on)

    def accuracy(self, terms: Sequence[tuple[float, Tensor]], layer: str, on: str) -> float:
        """Return the accuracy of the base's back half on Σ c f, in [0, 1].

        Args:
            terms: (c, f), features of a layer.
            layer: the layer.
            on: whose examples they are features of.
        """
        done = self.done
        return float(stitch(done.model, done.tests[on], done.start, layer, terms, batch_size=BATCH).mean())

    def alone(self, task: str, scale: float, layer: str, on: str, features: Tensor) -> float:
        """Return the accuracy on one edit's features alone, which several pairs ask for and one computes.

        Args:
            task: whose task vector τ is.
            scale: λ.
            layer: the layer.
            on: whose examples they are features of.
            features: f(θ0 + λτ) there, [n, …].
        """
        key = task, scale, layer, on
        if key not in self._alone:
            self._alone[key] = self.accuracy([(1.0, features)], layer, on)
        return self._alone[key]

    def _front(self, state: State, on: str) -> dict[str, Tensor]:
        return front(self.done.model, self.done.tests[on], state, self.layers, batch_size=BATCH)


def stitch_rows(
    done: Tuned, layers: Sequence[str], add: Sequence[float], negate: Sequence[float], **known: Any
) -> list[Row]:
    """Return the rows of additions of all pairs and negations of all tasks, by layer.

    Args:
        done: models tuned from one start.
        layers: where they are stitched; their index counts the model's from 1.
        add: λ of additions.
        negate: λ of negations.
        known: what else is in every row, such as the seed.
    """
    indices = {layer: number for number, layer in enumerate(find_layers(done.model.module), 1) if layer in layers}
    halves = Halves(done, list(indices))
    rows: list[Row] = []
    for i, j in combinations(done.tuned, 2):
        for scale in add:
            known_here = {"what": "addition", "tasks": f"{i} – {j}", "scale": scale}
            rows += [{**known, **known_here, **row} for row in addition(halves, i, j, scale)]
    for task in done.tuned:
        for scale in negate:
            known_here = {"what": "negation", "tasks": task, "scale": scale}
            rows += [{**known, **known_here, **row} for row in negation(halves, task, scale)]
    return sorted(({**row, "index": indices[row["layer"]]} for row in rows), key=lambda row: row["index"])


def addition(halves: Halves, i: str, j: str, scale: float) -> Iterator[Row]:
    """Yield, by layer, accuracies in % of the averaged feature and of the two controls on D_i and D_j.

    Args:
        halves: of the nets of one seed.
        i: the first task.
        j: the second task.
        scale: λ of both task vectors.
    """
    features = {(task, on): halves.fronts(task, scale, on) for task in (i, j) for on in (i, j)}
    for layer in halves.layers:
        found = {
            "average": [
                halves.accuracy([(0.5, features[i, on][layer]), (0.5, features[j, on][layer])], layer, on)
                for on in (i, j)
            ]
        }
        for kind, task in (("only i", i), ("only j", j)):
            found[kind] = [halves.alone(task, scale, layer, on, features[task, on][layer]) for on in (i, j)]
        for kind, (first, second) in found.items():
            yield {"layer": layer, "kind": kind, "first": 100 * first, "second": 100 * second}


def negation(halves: Halves, task: str, scale: float) -> Iterator[Row]:
    """Yield, by layer, accuracies in % of mirrored features and of the negated net's.

    Args:
        halves: of the nets of one seed.
        task: i, whose task vector is negated; `first` is the accuracy on it.
        scale: λ of the task vector; for 0 both kinds are the base.

    Yields:
        Rows whose `second` is the mean over the control tasks.
    """
    controls = halves.done.controls(task)
    found: dict[tuple[str, str, str], float] = {}
    for on in (task, *controls):
        base, plus, minus = (halves.fronts(task, by, on) for by in (0.0, scale, -scale))
        for layer in halves.layers:
            terms = {"mirrored": [(2.0, base[layer]), (-1.0, plus[layer])], "negated": [(1.0, minus[layer])]}
            for kind, own in terms.items():
                value = halves.accuracy(own, layer, on) if scale else halves.base_alone(layer, on)
                found[layer, kind, on] = value
    for layer, kind in dict.fromkeys(key[:2] for key in found):
        second = float(np.mean([found[layer, kind, on] for on in controls]))
        yield {"layer": layer, "kind": kind, "first": 100 * found[layer, kind, task], "second": 100 * second}
