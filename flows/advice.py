"""The advice of `mergeflow advise`: experts and samples opened, and what can be said of them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from flows.asked import Asked, Ready
from mergeflow.errors import MergeflowError

if TYPE_CHECKING:
    from mergeflow.analysis.provable.advising import Advice
    from mergeflow.analysis.provable.answers import Answers

_BATCH = 16  # samples per forward pass: of a language model each gives a vocabulary for every token


def make_advice(asked: Asked, samples: int, linearity: Path | None) -> "Advice":
    """Return all advice that the inputs allow.

    Args:
        asked: the experts.
        samples: how many of each task.
        linearity: the folder that `mergeflow linearity --out` wrote, if there is one.

    Raises:
        MergeflowError: fewer than two experts, or a file that cannot be read: then there is nothing to advise on.
    """
    from mergeflow.analysis.provable.advising import ANSWERED, advise, or_remark

    paths = asked.several("advice is on a merge of at least two")
    remarks: list[str] = []
    base, experts = asked.states
    ready = or_remark(ANSWERED, lambda: asked.open(samples, fitting=True), remarks)
    # The task vectors are whole ones: a module that is asked may lack heads, which a merge sums like the rest.
    advice = advise(base, experts, None if ready is None else lambda: _answers(asked, ready), remarks)
    if asked.recipe is not None and asked.recipe.weights:
        advice.remarks.append("`weights` of the recipe are left aside: λ is for the plain sum of the task vectors.")
    if linearity is None:
        return advice
    pairs = list(combinations(paths, 2))
    return replace(advice, linear=or_remark("linearity", lambda: _linearity(linearity, pairs), advice.remarks))


def _answers(asked: Asked, ready: Ready) -> "Answers":
    from mergeflow.analysis.provable.questions import ask_all

    return ask_all(ready.model, ready.base, ready.experts, _assigned(asked, ready), _BATCH)


def _assigned(asked: Asked, ready: Ready) -> dict[str, Any]:
    """Return samples by expert: the project's own, one source for all, or one source for each in their order."""
    from mergeflow.analysis.provable.questions import one_each
    from mergeflow.modalities.classification import Subset

    sources, names = ready.sources, list(asked.paths())
    if not asked.data:
        return {name: one_each(cast(Subset, sources[name])) for name in names}
    classes = (asked.architecture or "").startswith("torchvision:")
    given = [(_Classes if classes else _Outputs)(sources[source]) for source in asked.data]
    if len(given) == 1:
        return dict.fromkeys(names, given[0])
    if len(given) != len(names):
        raise MergeflowError(
            f"--data is given {len(given)} times for {len(names)} experts: give one source for all of them, or one for "
            "each in the order of the experts."
        )
    return dict(zip(names, given, strict=True))


@dataclass(frozen=True)
class _Outputs:
    """Samples without labels, as far as a module is asked for its outputs."""

    source: Any

    def __len__(self) -> int:
        return len(self.source)

    def outputs(self, model: Any, rows: Any) -> Any:
        """Return the module's outputs [n, D]; of an encoder of texts the mean over the tokens of its last block."""
        from mergeflow.linearity.layers import find_layers
        from mergeflow.linearity.networks import Samples

        layer = "" if isinstance(self.source, Samples) else find_layers(model.module)[-1]
        return self.source.features(model, rows, [layer])[layer].flatten(1)


class _Classes(_Outputs):
    """Samples without labels for a classifier."""

    def log_p(self, model: Any, rows: Any) -> Any:
        """Return the module's log-probabilities [n, C]."""
        return self.outputs(model, rows).log_softmax(1)


def _linearity(folder: Path, pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    from mergeflow.linearity.affine import word

    path = folder / "result.json"
    try:
        measured = {
            frozenset(pair["pair"]): word(pair["verdict"]["CTL"]) for pair in json.loads(path.read_text())["pairs"]
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MergeflowError(f"{path} is not what `mergeflow linearity --out` writes: {error}") from error
    found = {" – ".join(pair): measured[frozenset(pair)] for pair in pairs if frozenset(pair) in measured}
    if not found:
        there = ", ".join(f"'{name}'" for name in sorted(set().union(*measured)))
        raise MergeflowError(f"{path} is of {there}, and of no pair of these experts: name them alike.")
    return found
