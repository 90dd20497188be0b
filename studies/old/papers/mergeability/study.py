"""Study `mergeability` (L1): does the linearity of features tell, before anything is merged, what a merge will lose?

**Question.** Cross-task linearity is offered as the reason why averaging weights works. Then pairs of experts whose
features are less linear should lose more when they are averaged. Do they, and more reliably so than what anyone
computes from the weights alone?

**Method.** All pairs of the project's experts, of several ways of training. *Loss of merging*: the experts' accuracies
on their own tests less those of ½θ_i + ½θ_j, mean of the two tasks. *Predictions*, none of which sees a label:

    CTL error       mean over samples of ‖f − g‖² / ‖g‖², f = f(½θ_i + ½θ_j), g = ½f(θ_i) + ½f(θ_j): of the last
                    block, the mean and the largest of all blocks; validation images of both tasks
    cosine          of τ_i and τ_j, negated: the nearer to orthogonal, the less loss is expected of the more similar
    distance        ‖θ_i − θ_j‖
    sign conflict   Σ_k min(|τ_ik|, |τ_jk|) [τ_ik τ_jk < 0] / Σ_k min(|τ_ik|, |τ_jk|)

A prediction is as good as its rank correlation (Spearman) with the loss over all pairs of one way of training; the mean
over the ways is judged, ± is over seeds. *Across*: the same over the pairs of all ways together. *Rounds*: the CTL
error of the last block, mean of all pairs, of the last experts of merge-and-tune over N rounds. *Linearised* experts
are networks in the tangent space of the base, and so are their averages; what they make as ordinary nets is beside it.
Their features are linear to rounding and rank nothing, which counts as a correlation of 0.

**Source.** Ours, beyond Zhou et al. 2024; sign conflicts: Yadav et al. 2023, TIES-Merging, Section 3.
"""

from collections.abc import Mapping
from functools import partial
from itertools import combinations

import torch
from pydantic import Field
from torch import Tensor

from mergeflow.analysis.geometry import dot, norm
from mergeflow.linearity.affine import Combination, Featured, affine, combine
from mergeflow.linearity.layers import find_layers
from mergeflow.modalities.subset import Subset
from mergeflow.modality import State
from mergeflow.training import LinearisedModel
from studies.lab.inputs import Laboratory
from studies.lab.regimes import regime_of
from studies.lab.scales import task_vector
from studies.lab.tangent import TangentFeatures, in_tangent_space
from studies.old.papers.mergeability.figures import figures
from studies.old.papers.mergeability.results import as_nets, findings, tables
from studies.old.pieces import kept_by_run
from studies.old.results import StudyResult
from studies.old.rows import Row
from tasks.project.declaration import Declaration
from tasks.project.sections import Section
from tasks.project.stage import StageIO

ROUNDING = 1e-10
"""A squared relative error that float32's arithmetic makes of features that are linear."""


class Options(Section):
    """The study's choices. runs: run → label, each with one expert a task. rounds: N of `mima_N`; none where nothing
    is tuned in rounds, as with experts that somebody published. images: of each task's validation."""

    runs: dict[str, str] = Field(min_length=1)
    rounds: list[int]
    images: int = Field(ge=32)

    @property
    def iterative(self) -> dict[int, str]:
        """N → run."""
        return {number: f"mima_{number}" for number in self.rounds}


DECLARED = Declaration(
    Options,
    runs=lambda options: dict.fromkeys([*options.runs, *options.iterative.values()]),
    splits=("validation", "test"),
    systems=("L1",),
)


def run(io: StageIO) -> None:
    """Write `outputs/studies/mergeability`."""
    inputs = Laboratory(io)
    options = DECLARED.chosen(io)
    names = list(dict.fromkeys([*options.runs, *options.iterative.values()]))
    pieces = kept_by_run(inputs, names, partial(measure, inputs, options))
    rows: list[Row] = [row for piece in pieces for row in piece["rows"]]
    result = StudyResult(
        tables(rows, options.runs, options.iterative), findings(rows, options.runs, options.iterative), [], rows
    )
    result.write(io, figures(rows, options.runs, options.iterative))


def measure(inputs: Laboratory, options: Options, name: str, seed: int) -> dict[str, list[Row]]:
    """Return a row for each pair of a run's experts: the loss of merging and what predicts it.

    Args:
        inputs: the study's inputs.
        options: its choices.
        name: the run's name.
        seed: of the run.
    """
    experts = inputs.run(name).experts(seed)
    if regime_of(inputs.run(name), seed) != "linearised":
        return {"rows": of_pairs(inputs, experts, options.images, {"seed": seed, "run": name})}
    linear = of_pairs(in_tangent_space(inputs), experts, options.images, {"seed": seed, "run": name})
    return {"rows": [*linear, *of_pairs(inputs, experts, options.images, {"seed": seed, "run": as_nets(name)})]}


def of_pairs(inputs: Laboratory, experts: Mapping[str, dict[str, Tensor]], images: int, known: Row) -> list[Row]:
    """Return a row for each pair.

    Args:
        inputs: the study's inputs, whose model the experts are weights of.
        experts: task → weights.
        images: of each task's validation.
        known: what every row begins with.
    """
    own = inputs.individual(experts, "test")
    errors = ctl_errors(inputs, experts, images)
    vectors = {task: task_vector(state, inputs.base) for task, state in experts.items()}
    rows = []
    for i, j in combinations(experts, 2):
        merged = inputs.accuracy(combine([experts[i], experts[j]], [0.5, 0.5]), "test", [i, j])
        lost = 50 * sum(own[task] - merged[task] for task in (i, j))
        rows.append({**known, "pair": f"{i} – {j}", "loss": lost, **of_weights(vectors[i], vectors[j]), **errors[i, j]})
    return rows


def ctl_errors(inputs: Laboratory, experts: Mapping[str, State], images: int) -> dict[tuple[str, str], Row]:
    """Return each pair's CTL error at every block, as `block_1` and so on; what is below `ROUNDING` as 0.

    Args:
        inputs: the study's inputs, whose model the experts are weights of.
        experts: task → weights.
        images: of each task's validation, without their labels.
    """
    sources: dict[str, Featured] = {
        task: Subset.first(one, images) for task, one in inputs.examples("validation").items()
    }
    module = inputs.model.module
    if isinstance(inputs.model, LinearisedModel):
        module = inputs.model.base.module
        sources = {task: TangentFeatures(one) for task, one in sources.items()}
    layers = find_layers(module)
    asked = {f"{i} – {j}": Combination({i: 0.5, j: 0.5}, on=frozenset({i, j})) for i, j in combinations(experts, 2)}
    found = affine(inputs.model, sources, experts, asked, layers)

    def error(pair: str, layer: str) -> float:
        mean = float(found[pair][layer].error.mean())
        return mean if mean > ROUNDING else 0.0

    return {
        (i, j): {f"block_{n}": error(f"{i} – {j}", layer) for n, layer in enumerate(layers, 1)}
        for i, j in combinations(experts, 2)
    }


def of_weights(first: State, second: State) -> Row:
    """Return what two task vectors tell of each other: cosine, distance and sign conflict.

    Example:
        >>> one, other = {"w": torch.tensor([3.0, 1.0])}, {"w": torch.tensor([3.0, -1.0])}
        >>> {key: round(value, 6) for key, value in of_weights(one, other).items()}
        {'cosine': 0.8, 'distance': 2.0, 'sign_conflict': 0.25}
    """
    smaller = {key: torch.minimum(first[key].abs(), second[key].abs()).double() for key in first}
    opposed = sum(float(value[first[key] * second[key] < 0].sum()) for key, value in smaller.items())
    total = sum(float(value.sum()) for value in smaller.values())
    return {
        "cosine": dot(first, second) / (norm(first) * norm(second)),
        "distance": norm({key: first[key] - second[key] for key in first}),
        "sign_conflict": opposed / total,
    }
