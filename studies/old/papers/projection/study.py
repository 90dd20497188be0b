"""Study `projection` (G8): where do the merges of every method and the iterative trajectory lie?

**Question.** Seen on a plane, the paper finds merges by TIES and by Breadcrumbs close to each other, one by DARE apart,
and the trajectory of iterative merging ends elsewhere, at a lower loss. Is it so, and is it so off the plane?

**Method.** For each seed: the base, experts tuned once, the merge of these experts by every method of the catalog that
needs no data (its own default arguments; its scale from validation, first seed, ¼ to 2 times the default), the merged
model after each round of the iterative runs, and a jointly trained model. All training has the same budget. With
G = ⟨θ_i − θ̄, θ_j − θ̄⟩ = U Λ Uᵀ the coordinates are U √Λ; distances ‖θ_i − θ_j‖ and cosines of θ − θ0 are those of the
whole space. Planes are fitted to all models, to those with the paper's methods only, and to these without DARE. The
size of DARE's mask can be told beforehand: E ‖θ_DARE − θ_TA‖² = λ² p/(1 − p) Σ_t ‖τ_t‖² for the same λ and drop p.
Two merges share a basin where no barrier lies between them: with L the mean loss over tasks, B(a, b) is the largest of
L((1 − s) θ_a + s θ_b) − (1 − s) L(θ_a) − s L(θ_b) over s = ¼, ½, ¾.
The findings on DARE, TIES and Breadcrumbs compare these and task arithmetic alone: methods that keep few directions
lie further from all others than DARE does. Where a scale is ¼ or 2 times the default, one beyond may do better.
Test accuracy and loss are those of the first images of every task. ± is over seeds: the order of the batches.

**Source.** Zhou et al. 2025, On Task Vectors and Gradients, Section 5.3 and Figure 4.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import combinations
from math import sqrt

import numpy as np
import torch
from pydantic import Field, field_validator

from mergeflow.evaluation import losses
from mergeflow.evaluation.averages import mean
from mergeflow.evaluation.scoring import CandidateScorer
from mergeflow.merging import configure, methods
from mergeflow.modalities.subset import Subset
from mergeflow.modality import Examples
from mergeflow.search.candidates import best_on_line, line, score_all
from studies.lab.inputs import Laboratory, State, mean_accuracy
from studies.old.papers.projection.findings import findings
from studies.old.papers.projection.results import OTHERS, figures, notes, tables
from studies.old.papers.projection.rows import tidy_rows
from studies.old.pieces import kept, kept_by_seed
from studies.old.results import StudyResult
from studies.old.rows import Row
from studies.theory.landscape import centred_gram, distances
from tasks.project.declaration import Declaration
from tasks.project.sections import Section
from tasks.project.stage import StageIO

AGAINST = "task_arithmetic"  # what DARE is, but for its mask
BETWEEN = (0.25, 0.5, 0.75)  # where on the line between two merges a barrier is looked for


class Options(Section):
    """The study's choices.

    one_shot: the run whose experts are merged. paths: the iterative runs. joint: the joint run. factors: of a method's
    default scale, tried on validation. images: per task, of validation for that choice and of test for the accuracies.
    drops: of DARE, compared with what is expected. methods: which are merged; without any, all that need no data.
    """

    one_shot: str
    paths: list[str] = Field(min_length=1)
    joint: str
    factors: list[float] = Field(min_length=1)
    images: int = Field(ge=1)
    drops: list[float]
    methods: list[str] = Field(default_factory=list)

    @field_validator("methods")
    @classmethod
    def _compared(cls, names: list[str]) -> list[str]:
        missing = [name for name in OTHERS if name not in names]
        wrong = [name for name in names if name not in methods() or methods()[name].given]
        if names and (missing or wrong):
            raise ValueError(
                f"found {', '.join(names)}; expected methods of the catalog that need no data, "
                f"{', '.join(OTHERS)} among them: the findings compare these"
            )
        return names


DECLARED = Declaration(
    Options,
    runs=lambda options: [options.one_shot, *options.paths, options.joint],
    splits=("validation", "test"),
    systems=("G8",),
)


def run(io: StageIO) -> None:
    """Write `outputs/studies/projection`."""
    inputs = Laboratory(io)
    options = DECLARED.chosen(io)
    scales = kept(io, "scales", lambda: choose_scales(inputs, options))
    rows = kept_by_seed(io, inputs.seeds, partial(measure, inputs, options, scales))
    across = kept(io, "across", lambda: across_seeds(inputs, options, scales))
    result = StudyResult(tables(rows, across), findings(rows, across), notes(rows, across), tidy_rows(rows, across))
    result.write(io, figures(rows))


def mergeable(experts: int) -> list[str]:
    """Return the methods that merge this many experts and take no data."""
    return [
        name
        for name, method in methods().items()
        if not method.given and method.experts[0] <= experts <= (method.experts[1] or experts)
    ]


def choose_scales(inputs: Laboratory, options: Options) -> dict[str, float]:
    """Return each method's best scale on a subsample of the validation images, with the first seed's experts."""
    blind = inputs.blind()
    scorer = blind.scorer(inputs.run(options.one_shot).experts(inputs.seeds[0]))
    examples = {task: Subset.first(data, options.images) for task, data in blind.examples("validation").items()}
    chosen = {}
    for name in options.methods or mergeable(len(inputs.tasks)):
        default = configure(name).scale
        scales = sorted(default * factor for factor in options.factors)
        found = score_all(
            name, line("scale", scales, default), lambda call: scorer.state(scorer.merge(call), examples), mean
        )
        chosen[name] = best_on_line(found, "scale").varied["scale"]
    return chosen


def measure(inputs: Laboratory, options: Options, scales: dict[str, float], seed: int) -> Row:
    """Return one seed's models: Gram matrix, test accuracies, and DARE's distance over its drop.

    Args:
        inputs: the study's inputs.
        options: its choices.
        scales: the chosen scale of each method.
        seed: of the experts and paths.
    """
    experts = inputs.run(options.one_shot).experts(seed)
    scorer = inputs.scorer(experts)
    merges = {name: scorer.merge(configure(name, {"scale": scale})) for name, scale in scales.items()}
    paths = {run: _path(inputs, run, seed) for run in options.paths}
    ends = {run: list(states.values())[-1] for run, states in paths.items()}
    joint = {options.joint: inputs.run(options.joint).model(seed)}
    steps = {name: state for states in paths.values() for name, state in states.items()}
    points = {"base": inputs.base, **experts, **merges, **steps, **joint}
    scored = {"base": inputs.base, **merges, **joint, **ends}
    examples = {task: Subset.first(data, options.images) for task, data in inputs.examples("test").items()}
    loss = {name: _loss(inputs, state, examples) for name, state in scored.items()}
    return {
        "seed": seed,
        "scales": scales,
        "experts": list(experts),
        "merges": list(merges),
        "random": [name for name in merges if "seed" in methods()[name].args.model_fields],
        "paths": {run: list(states) for run, states in paths.items()},
        "joint": options.joint,
        "names": list(points),
        "gram": centred_gram(points).tolist(),
        "loss": loss,
        "barriers": _barriers(inputs, merges, loss, examples),
        "accuracy": {name: mean_accuracy(scorer.state(state, examples)) for name, state in scored.items()},
        "drops": _drops(scorer, options.drops, scales[AGAINST]),
    }


def _barriers(
    inputs: Laboratory, merges: Mapping[str, State], loss: Mapping[str, float], examples: Mapping[str, Examples]
) -> dict[str, float]:
    """Return the barrier of the mean loss over tasks between every two of the merges that the paper names."""
    found = {}
    for one, other in combinations(OTHERS, 2):
        between = [_loss(inputs, _at(merges[one], merges[other], share), examples) for share in BETWEEN]
        found[f"{one} – {other}"] = barrier([loss[one], *between, loss[other]]) / len(inputs.tasks)
    return found


def barrier(line: Sequence[float]) -> float:
    """Return how far losses at equal steps between two models rise above the chord between the ends; below it, < 0.

    Example:
        >>> barrier([1.0, 2.5, 2.0]), barrier([1.0, 1.25, 2.0])
        (1.0, -0.25)
    """
    last = len(line) - 1
    chord = [line[0] + (line[-1] - line[0]) * place / last for place in range(last + 1)]
    return max(value - height for value, height in list(zip(line, chord, strict=True))[1:-1])


def _at(one: State, other: State, share: float) -> State:
    """Return (1 − share) θ_one + share θ_other."""
    return {name: torch.lerp(tensor, other[name], share) for name, tensor in one.items()}


def _loss(inputs: Laboratory, state: State, examples: Mapping[str, Examples]) -> float:
    """Return the multi-task loss Σ_t L_t."""
    inputs.model.load(state)
    return sum(losses(inputs.model, examples, inputs.io.section("evaluation").batch_size).values())


def across_seeds(inputs: Laboratory, options: Options, scales: dict[str, float]) -> Row:
    """Return how far models of different seeds lie from each other: a merge of each kind, and the paths' ends.

    Args:
        inputs: the study's inputs.
        options: its choices.
        scales: the chosen scale of each method.
    """
    found = {}
    for name in (AGAINST, "ties"):
        states = {}
        for seed in inputs.seeds:
            scorer = inputs.scorer(inputs.run(options.one_shot).experts(seed))
            states[str(seed)] = scorer.merge(configure(name, {"scale": scales[name]}))
        found[name] = _pairs(states)
    for run in options.paths:
        found[run] = _pairs({str(seed): list(_path(inputs, run, seed).values())[-1] for seed in inputs.seeds})
    return found


def _pairs(states: dict[str, State]) -> list[float]:
    """Return the distance of every pair."""
    found: list[float] = distances(centred_gram(states))[np.triu_indices(len(states), 1)].tolist()
    return found


def _path(inputs: Laboratory, run: str, seed: int) -> dict[str, State]:
    trained = inputs.run(run)
    rounds = [row["round"] for row in trained.rounds(seed)]
    return {f"{run} round {number}": trained.merged(seed, number) for number in rounds}


def _drops(scorer: CandidateScorer, drops: Sequence[float], scale: float) -> list[Row]:
    """Return DARE's distance from task arithmetic at the same scale, and what is expected of it."""
    plain = scorer.merge(configure(AGAINST, {"scale": scale}))
    squares = sum(
        distances(centred_gram({"base": scorer.merger.base, "expert": e}))[0, 1] ** 2
        for e in scorer.merger.experts.values()
    )
    rows = []
    for drop in drops:
        masked = scorer.merge(configure("dare", {"drop": drop, "scale": scale}))
        rows.append(
            {
                "drop": drop,
                "distance": float(distances(centred_gram({"plain": plain, "masked": masked}))[0, 1]),
                "expected": scale * sqrt(drop / (1 - drop) * squares),
                "accuracy": mean_accuracy(scorer.state(masked)),
            }
        )
    return rows
