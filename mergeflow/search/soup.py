"""Averages of the checkpoints of one training run: a window, rising weights, or those that help on validation."""

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from mergeflow.checkpoints.formats import PICKLES, expanded
from mergeflow.checkpoints.lora import ADAPTER_CONFIG
from mergeflow.errors import MergeflowError
from mergeflow.merging import Recipe, check_recipe, make_recipe, merge, prepare
from mergeflow.merging.files.output import identity_of
from mergeflow.merging.files.plan import open_inputs
from mergeflow.search.candidates import Journal
from mergeflow.search.scorer import Candidate, CandidateModel, open_scorer
from mergeflow.search.sweep_file import ScorePart, read_score
from mergeflow.version import version

if TYPE_CHECKING:
    from torch import Tensor

Weights = Literal["uniform", "linear", "greedy"]
_ENDS = "|".join(map(re.escape, (".safetensors", ".pth.tar", *PICKLES)))
# Lightning writes `epoch=3-step=120.ckpt`.
_CHECKPOINT = re.compile(rf"(?:epoch=\d+-)?(?:checkpoint|step|epoch|iter|model)[-_=]?(\d+)(?:{_ENDS})?$")


@dataclass(frozen=True)
class Soup:
    """An average that was made.

    Attributes:
        weights: Of the checkpoints in it, by name, in the order of the run; they sum to 1.
        scores: Mean score on validation of each checkpoint and of the `soup`; empty without a scorer.
        warnings: What speaks against averaging, a sentence each.
    """

    path: Path
    fingerprint: str
    weights: dict[str, float]
    scores: dict[str, float] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def checkpoints_of(run: Path, window: int | None = None) -> dict[str, Path]:
    """Return the last checkpoints of a run by name, the oldest first: folders or files named like `checkpoint-N`."""
    if not run.is_dir():
        raise MergeflowError(
            f"run '{run}' is not a folder: give the one that holds `checkpoint-100`, `checkpoint-200`, …"
        )
    steps = {path: int(match.group(1)) for path in run.iterdir() if (match := _CHECKPOINT.match(path.name))}
    ordered = sorted(steps, key=lambda path: (steps[path], path.name))
    if window is not None and not 2 <= window <= len(ordered):
        raise MergeflowError(
            f"--window {window}: '{run}' holds {len(ordered)} checkpoints, so a window is 2 to {len(ordered)} of them."
        )
    if len(ordered) < 2:
        held = ", ".join(sorted(path.name for path in run.iterdir())[:5]) or "nothing"
        raise MergeflowError(
            f"run '{run}' holds {len(ordered)} checkpoints named like `checkpoint-100`, two at least are needed: "
            f"found {held}."
        )
    return {path.name: path for path in ordered[-(window or len(ordered)) :]}


def soup(
    run: str | Path,
    out: str | Path,
    window: int | None = None,
    weights: Weights = "uniform",
    score: str | dict[str, Any] | ScorePart | None = None,
    *,
    force: bool = False,
) -> Soup:
    """Average the last checkpoints of one run, out of core.

    θ = Σ w_t θ_t;  uniform: w_t = 1/k;  linear: w_t = 2t / (k(k + 1)), so that the last weighs most;  greedy: from the
    best checkpoint down, each is added if the mean then scores no less

    With a scorer, the midpoint of the window's first and last checkpoint is scored too: where it is worse than both,
    a barrier lies between them, and averages across it lose what training won.

    Scores are saved at once, next to the output in `.NAME.scores`, from which a killed soup continues.

    Args:
        run: A folder of `checkpoint-N`.
        out: A `.safetensors` file, or a folder, which gets the last checkpoint's configuration and tokenizer.
        window: How many of the last checkpoints, k, at least 2; all by default.
        score: The scorer on validation, as in a sweep's file; greedy needs it.
        force: Replace an output file even if mergeflow did not make it.

    Source:
        Wortsman et al., Model soups (ICML 2022), recipe 1; linear weights as in averages of late checkpoints (WSM).
    """
    places = checkpoints_of(expanded(run), window)
    if weights not in ("uniform", "linear", "greedy"):
        raise MergeflowError(f"weights '{weights}': expected uniform, linear or greedy.")
    if weights == "greedy" and score is None:
        raise MergeflowError("greedy weights choose on validation: give a scorer, as --score scorers.py:perplexity.")
    rising = {name: float(place + 1) if weights == "linear" else 1.0 for place, name in enumerate(places)}
    if score is None:
        return _made(places, rising, out, {}, (), force)
    check_recipe(_recipe(places, rising, out), force=force)
    with _SoupScores(places, score, Path(out)) as judged:
        scores = {name: judged.of({name: 1.0}) for name in places}
        warnings = judged.barrier(scores)
        chosen = dict.fromkeys(judged.greedy(scores), 1.0) if weights == "greedy" else rising
        scores["soup"] = judged.of(chosen)
        best = max(places, key=lambda name: scores[name])
        if scores["soup"] < scores[best]:
            warnings = (*warnings, f"the average scores {scores['soup']:.6g}, '{best}' alone {scores[best]:.6g}.")
        made = _made(places, chosen, out, scores, warnings, force)
        judged.forget()
    return made


def _made(
    places: Mapping[str, Path],
    chosen: Mapping[str, float],
    out: str | Path,
    scores: dict[str, float],
    warnings: tuple[str, ...],
    force: bool,
) -> Soup:
    """Write the average, with those shards of a killed one that are done."""
    made = merge(_recipe(places, chosen, out), force=force, resume=True)
    total = sum(chosen.values())
    shares = {name: chosen[name] / total for name in places if name in chosen}
    return Soup(made.path, made.fingerprint, shares, scores, (*made.notes, *made.warnings, *warnings))


def _recipe(places: Mapping[str, Path], chosen: Mapping[str, float], out: str | Path) -> Recipe:
    """Return the recipe of an average; of adapters it has the base that they name."""
    # The last checkpoint comes first: its configuration and tokenizer go with the result.
    listed = {name: str(places[name]) for name in reversed(list(chosen))}
    weights = {name: chosen[name] for name in listed}
    recipe = make_recipe({"method": "average", "experts": listed, "weights": weights, "out": str(out)})
    adapter = next((path for path in listed.values() if (Path(path) / ADAPTER_CONFIG).is_file()), None)
    if recipe.base is None and adapter is not None:
        raise MergeflowError(
            f"checkpoint '{adapter}' is an adapter that names no base, so there is no model to average: say in its "
            f"{ADAPTER_CONFIG}, as `base_model_name_or_path`, which model it was trained on."
        )
    return recipe


class _SoupScores:
    """Scores checkpoints and averages of them on validation, each once, also after a kill."""

    def __init__(self, places: Mapping[str, Path], score: str | dict[str, Any] | ScorePart, out: Path) -> None:
        self.places, self.out = dict(places), out
        self._score, facts = open_scorer(read_score(score), "cpu")
        facts["version"] = version()
        facts["checkpoints"] = identity_of({name: str(path) for name, path in self.places.items()})
        self._journal = _journal(expanded(out).parent / f".{out.name}.scores", facts)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._journal.entries:
            self.forget()
        self._journal.close()

    def forget(self) -> None:
        """Remove the scores that were written down."""
        self._journal.path.unlink(missing_ok=True)

    def of(self, weights: Mapping[str, float]) -> float:
        """Return the mean score of an average."""
        return float(self._journal.cached(json.dumps(dict(weights)), lambda: self._scored(weights)))

    def _scored(self, weights: Mapping[str, float]) -> float:
        recipe = _recipe(self.places, weights, self.out)
        with open_inputs(recipe) as inputs, tempfile.TemporaryDirectory(prefix="mergeflow-soup-") as scratch:
            merged: Mapping[str, Tensor] = inputs.base
            if len(weights) > 1 or recipe.base is not None:
                merged = prepare(inputs.call, inputs.base, inputs.experts, weights).at(1.0)
            model = CandidateModel(merged, Path(inputs.base.path), Path(scratch))
            scores = self._score(model, Candidate("+".join(weights)))
        return sum(scores.values()) / len(scores)

    def greedy(self, scores: Mapping[str, float]) -> Sequence[str]:
        """Return the names that a greedy soup takes, in the order of the run."""
        ranked = sorted(self.places, key=lambda name: -scores[name])
        taken, best = [ranked[0]], scores[ranked[0]]
        for name in ranked[1:]:
            tried = self.of(dict.fromkeys([*taken, name], 1.0))
            if tried >= best:
                taken, best = [*taken, name], tried
        return [name for name in self.places if name in taken]

    def barrier(self, scores: Mapping[str, float]) -> tuple[str, ...]:
        """Return a warning where the middle between the window's ends scores worse than both."""
        first, *_, last = self.places
        middle, worse = self.of({first: 1.0, last: 1.0}), min(scores[first], scores[last])
        if middle >= worse:
            return ()
        return (
            f"a barrier of {worse - middle:.6g} lies between '{first}' ({scores[first]:.6g}) and '{last}' "
            f"({scores[last]:.6g}): halfway the score is {middle:.6g}. Take a smaller window of later checkpoints.",
        )


def _journal(path: Path, facts: dict[str, Any]) -> Journal:
    """Open the scores of a soup that was killed; those of other checkpoints or another scorer are thrown away."""
    journal = Journal(path)
    if journal.recorded() not in ({}, facts):
        path.unlink()
        journal.close()
        journal = Journal(path)
    journal.begin(facts)
    return journal
