"""Whether experts will merge, and at which layer they will not: every pair of them, on samples without labels."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from torch import Tensor

from mergeflow.errors import MergeflowError
from mergeflow.linearity.affine import Combination, Featured, LayerVerdict, Linearity, affine, judge, overall
from mergeflow.modality import Model, State

FEWEST = 32  # samples: with fewer the interval of coef's median is wider than its margin
RELATED = 0.1  # smallest cosine of an expert's matrices with the base's; weights trained apart have about 0


@dataclass(frozen=True)
class Pair:
    """What a pair θ_i, θ_j gives."""

    first: str
    second: str
    layers: list[LayerVerdict]  # a verdict for each layer, at the α where its error is largest
    verdict: Mapping[str, bool | None]  # `LLFC` (direction) and `CTL` (direction and length), True, False or None
    samples: Mapping[float, Mapping[str, Linearity]]  # α → layer → values

    @property
    def worst(self) -> LayerVerdict:
        """The layer with the largest 1 − cos in shares of the baseline's."""
        return max(self.layers, key=lambda layer: layer.distance[1] / layer.base if layer.base else 0.0)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield one row for each α, layer and sample."""
        for alpha, layers in self.samples.items():
            for layer, measured in layers.items():
                where = {"first": self.first, "second": self.second, "alpha": alpha, "layer": layer}
                for number, origin in enumerate(measured.origin):
                    values = {key: getattr(measured, key)[number] for key in ("distance", "coef", "error", "base")}
                    yield {**where, "origin": str(origin), "sample": number, **values}

    def as_json(self) -> dict[str, Any]:
        """Return all but the samples."""
        return {
            "pair": [self.first, self.second],
            "verdict": dict(self.verdict),
            "layers": [asdict(layer) for layer in self.layers],
        }


def check_related(base: State, experts: Mapping[str, State]) -> None:
    """Refuse experts that were not tuned from this base, by the cosine of all their matrices with the base's."""
    faults = [
        f"expert '{name}' has a cosine of {cosine:.2f} with the base"
        for name, state in experts.items()
        if (cosine := _cosine(base, state)) < RELATED
    ]
    if faults:
        raise MergeflowError(
            f"{'; '.join(faults)}; expected at least {RELATED} of weights that were tuned from it. "
            "Name the base that these experts started from."
        )


def check_samples(sources: Mapping[str, Featured]) -> None:
    """Refuse fewer samples than decide anything."""
    count = sum(len(source) for source in sources.values())
    if count < FEWEST:
        raise MergeflowError(
            f"{count} samples found in {', '.join(sources)}; expected at least {FEWEST}: name more with --data, "
            "or raise --samples."
        )


def measure_pairs(
    model: Model,
    sources: Mapping[str, Featured],
    experts: Mapping[str, State],
    layers: Sequence[str],
    alphas: Sequence[float] = (0.25, 0.5, 0.75),
    *,
    on_own_tasks: bool = False,
    batch_size: int = 64,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> list[Pair]:
    """Compare, for every pair of experts and every α in (0, 1), f(αθ_i + (1−α)θ_j) with αf(θ_i) + (1−α)f(θ_j).

    A pair is looked at on all sources, or `on_own_tasks` on the two that have the experts' names.
    """
    pairs = list(combinations(experts, 2))
    asked = {
        (first, second, alpha): Combination(
            {first: alpha, second: 1 - alpha}, on=frozenset({first, second}) if on_own_tasks else None
        )
        for first, second in pairs
        for alpha in alphas
    }
    named = {repr(key): combination for key, combination in asked.items()}
    measured = affine(model, sources, experts, named, layers, batch_size=batch_size, report=report)
    return [
        _pair(first, second, {alpha: measured[repr((first, second, alpha))] for alpha in alphas})
        for first, second in pairs
    ]


def _pair(first: str, second: str, measured: Mapping[float, Mapping[str, Linearity]]) -> Pair:
    # One sample at several α is not several samples, so a layer is judged at one α: where its error is largest.
    worst = {
        layer: max((at_alpha[layer] for at_alpha in measured.values()), key=lambda values: float(values.error.mean()))
        for layer in next(iter(measured.values()))
    }
    verdicts = judge(worst)
    return Pair(first, second, verdicts, overall(verdicts), measured)


def _cosine(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    names = [name for name, value in a.items() if value.ndim >= 2 and value.is_floating_point()]
    if not names:
        return 1.0

    def dot(x: Mapping[str, Tensor], y: Mapping[str, Tensor]) -> float:
        return sum(float((x[name].double() * y[name].double()).sum()) for name in names)

    size = (dot(a, a) * dot(b, b)) ** 0.5
    return dot(a, b) / size if size else 1.0
