"""The advice of `mergeflow advise`: what can be computed of it, and a remark for each part that cannot."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from flows.asked import Asked, Ready
from mergeflow.errors import MergeflowError

if TYPE_CHECKING:
    from mergeflow.analysis.provable.advice import PairAdvice
    from mergeflow.analysis.provable.conditions import Interval
    from mergeflow.analysis.provable.correlation import Correlations

Matrix = Sequence[Sequence[float]]
_BATCH = 16  # samples per forward pass: of a language model each gives a vocabulary for every token
Part = TypeVar("Part")


@dataclass(frozen=True)
class Advice:
    """What to try with some experts. A part that could not be computed is None, and a remark says why.

    Attributes:
        names: The experts'.
        cosines: Of their task vectors, [T][T].
        alphas: α̂ of their answers, by Equation 11.
        changes: α̂ of what tuning changed of the base's answers.
        pairs: For each pair what to expect.
        scales: The λ to try for the sum of all task vectors.
        theory: The range of the theory, beside it.
        linear: Pair → whether its features combine as its weights do, as `mergeflow linearity --out` found.
        remarks: What was not computed, and why.
    """

    names: tuple[str, ...]
    cosines: Matrix | None = None
    alphas: "Correlations | None" = None
    changes: "Correlations | None" = None
    pairs: "Sequence[PairAdvice] | None" = None
    scales: Sequence[float] | None = None
    theory: "Interval | None" = None
    linear: Mapping[str, str] | None = None
    remarks: list[str] = field(default_factory=list)

    def costs(self, forget: str) -> list[tuple[str, float]]:
        """Return the other tasks with their cosine to the task to forget, those that will lose most first.

        Args:
            forget: an expert's name.
        """
        if self.cosines is None:
            return []
        row = self.cosines[self.names.index(forget)]
        others = [(name, value) for name, value in zip(self.names, row, strict=True) if name != forget]
        return sorted(others, key=lambda one: -one[1])

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        from mergeflow.analysis.provable.advice import range_json

        return {
            "experts": list(self.names),
            "scales": self.scales,
            "theory": None if self.theory is None else range_json(self.theory),
            "cosines": self.cosines,
            "alphas": None if self.alphas is None else self.alphas.values,
            "changes": None if self.changes is None else self.changes.values,
            "pairs": None if self.pairs is None else [pair.as_json() for pair in self.pairs],
            "unlearning": {name: dict(self.costs(name)) for name in self.names} if self.cosines else None,
            "linearity": self.linear,
            "remarks": self.remarks,
        }


def make_advice(asked: Asked, samples: int, linearity: Path | None) -> Advice:
    """Return all advice that the inputs allow.

    Args:
        asked: the experts.
        samples: how many of each task.
        linearity: the folder that `mergeflow linearity --out` wrote, if there is one.

    Raises:
        MergeflowError: fewer than two experts, or a file that cannot be read: then there is nothing to advise on.
    """
    from mergeflow.analysis.geometry import cosine_matrix, norm
    from mergeflow.analysis.provable.ranges import scales_of_lengths, suggested

    paths = asked.paths()
    if len(paths) < 2:
        raise MergeflowError(f"{len(paths)} expert named; advice is on a merge of at least two.")
    remarks: list[str] = []
    ready = _or_remark("α̂, and with it the verdicts", lambda: asked.open(samples), remarks)
    base, experts = (ready.base, ready.experts) if ready else _states(asked, paths)
    advice = Advice(tuple(paths), remarks=remarks)
    vectors = _or_remark("the task vectors", lambda: _vectors(base, experts), remarks)
    found: dict[str, Any] = {}
    if vectors is not None:
        found["cosines"] = cosine_matrix(vectors)
        lengths = scales_of_lengths([norm(one) for one in vectors], found["cosines"])
        if lengths.empty:
            remarks.append("λ was not suggested: the task vectors are all zero, or cancel each other.")
        else:
            found["scales"] = suggested(lengths)
    if ready is not None:
        found |= (
            _or_remark("α̂, and with it the verdicts", lambda: _answered(ready, found.get("cosines")), remarks) or {}
        )
    if linearity is not None:
        found["linear"] = _or_remark("linearity", lambda: _linearity(linearity), remarks)
    return Advice(**{**vars(advice), **found})


def _or_remark(what: str, compute: Callable[[], Part], remarks: list[str]) -> Part | None:
    try:
        return compute()
    except MergeflowError as error:
        remarks.append(f"{what}: not computed. {error}")
        return None


def _states(asked: Asked, paths: Mapping[str, str]) -> tuple[Mapping[str, Any], dict[str, Mapping[str, Any]]]:
    return asked.read(asked.base_path()), {name: asked.read(path) for name, path in paths.items()}


def _vectors(base: Mapping[str, Any], experts: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    names = [name for name, value in base.items() if value.is_floating_point()]
    for expert, state in experts.items():
        wrong = [one for one in names if one not in state or state[one].shape != base[one].shape]
        if wrong:
            raise MergeflowError(
                f"'{expert}' and the base differ in {len(wrong)} tensors, such as {wrong[0]}: they are not of one "
                "architecture. Name the base that it was tuned from."
            )
    return [{name: state[name].float() - base[name].float() for name in names} for state in experts.values()]


def _answered(ready: Ready, cosines: Matrix | None) -> dict[str, Any]:
    from mergeflow.analysis.provable.advice import advise_pairs
    from mergeflow.analysis.provable.answers import ask
    from mergeflow.analysis.provable.correlation import correlations
    from mergeflow.analysis.provable.ranges import scales_of_theory

    answers = ask(ready.model, ready.base, ready.experts, _assigned(ready), _BATCH)
    alphas, changes = correlations(answers.experts), correlations(answers.changes)
    found: dict[str, Any] = {"alphas": alphas, "changes": changes, "theory": scales_of_theory(changes.values)}
    if cosines is not None:
        found["pairs"] = advise_pairs(alphas, changes, cosines)
    return found


def _assigned(ready: Ready) -> dict[str, Any]:
    """Return samples by expert: the project's own, one source for all, or one source for each in their order."""
    sources, names = ready.sources, list(ready.experts)
    if set(sources) == set(names):
        return {name: _OneEach(sources[name]) for name in names}
    given = [_Outputs(source) for source in sources.values()]
    if len(given) == 1:
        return dict.fromkeys(names, given[0])
    if len(given) != len(names):
        raise MergeflowError(
            f"--data is given {len(given)} times for {len(names)} experts: give one source for all of them, or one for "
            "each in the order of the experts."
        )
    return dict(zip(names, given, strict=True))


@dataclass(frozen=True)
class _OneEach:
    """Examples of a project, one prediction of each: a language model makes one for every token."""

    source: Any

    def __len__(self) -> int:
        return len(self.source)

    def log_p(self, model: Any, rows: Any) -> Any:
        """Return log-probabilities [n, C], spread evenly over the predictions of `rows`."""
        import torch

        lines = self.source.log_p(model, rows)
        return lines[torch.linspace(0, len(lines) - 1, len(rows)).long()] if len(lines) > len(rows) else lines


@dataclass(frozen=True)
class _Outputs:
    """Samples without labels, as far as a module is asked for its outputs."""

    source: Any

    def __len__(self) -> int:
        return len(self.source)

    def outputs(self, model: Any, rows: Any) -> Any:
        """Return the module's outputs [n, D]; of an encoder of texts the mean over the tokens of its last block."""
        from mergeflow.linearity.layers import find_layers
        from mergeflow.linearity.samples import Samples

        layer = "" if isinstance(self.source, Samples) else find_layers(model.module)[-1]
        return self.source.features(model, rows, [layer])[layer].flatten(1)


def _linearity(folder: Path) -> dict[str, str]:
    from mergeflow.linearity.verdict import word

    path = folder / "result.json"
    try:
        pairs = json.loads(path.read_text())["pairs"]
        return {" – ".join(pair["pair"]): word(pair["verdict"]["CTL"]) for pair in pairs}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MergeflowError(f"{path} is not what `mergeflow linearity --out` writes: {error}") from error
