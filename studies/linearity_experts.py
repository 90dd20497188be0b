"""Study `linearity_experts` (L1, L4, L11–L15): are the features of the project's own experts linear in their weights?

**Question.** The paper's vision transformers are tuned from one CLIP on eight tasks. Are their features, at every
block, linear in averages, sums and negations of their weights, and can blocks be stitched together without a layer
that is learned between them?

**Method.** The experts of one training run, one for each task, from the project's base. f is a block's output of all
tokens, flattened; test examples, the first of every task.

- *Pairs* (L1): αθ_i + (1 − α)θ_j against αf(θ_i) + (1 − α)f(θ_j), all pairs, α ∈ {¼, ½, ¾}, examples of both tasks;
  the baseline is between the two experts. *Modes* (L4): the loss along the path, on D_i and on D_j, each with its own
  head. Linear mode connectivity holds where the ends differ by at most 0.1 nat and the barrier is at most 0.1 nat. No
  path has a barrier above its chord (280 of a pair, a data set and a seed): it fails because expert i is worse on D_j
  than expert j, as in the paper. The column "gap of the loss" has the smaller of a pair's two.
- *Edits* (L11–L13): Equations 2, 3 and 4 as in the study linearity_edits.
- *Stitches* (L14, L15): the base's back half on averaged or mirrored features, as in the study linearity_stitches. The
  control task of a negation, which the paper does not name, are all the other tasks: their mean.

± is over seeds, the order of the batches. The paper prints no thresholds; all margins are ours and were written before
the run.

**Source.** Zhou et al. 2024, Cross-Task Linearity, Sections 4.2 and 4.3, B.1.3, Figures 4 to 10.
"""

from collections.abc import Iterator
from functools import partial
from itertools import combinations

import pandas as pd
from pydantic import Field

from mergeflow.errors import MergeflowError
from mergeflow.linearity.layers import find_layers
from mergeflow.linearity.pairs import measure_pairs
from mergeflow.modalities.classification import Subset
from studies.lab import Claim, Laboratory, Row, Section, Study, select, table
from studies.lab.linearity import (
    TunedModels,
    direction,
    layer_table,
    layers_figure,
    length,
    loss_gaps,
    path_rows,
    rows_of,
    worst_share,
)
from studies.lab.rows import Samples
from studies.linearity_edits import claims_on_edits, measure_edits
from studies.linearity_pairs import ENDS
from studies.linearity_stitches import addition_figure, claims_on_stitches, negation_figure, stitch_rows, stitch_table

ALPHAS = (0.25, 0.5, 0.75)
FLAT = 0.1  # nats of LMC


class Options(Section):
    """The study's choices.

    run: whose experts are looked at. images: of each task. path: number of α of the loss between two experts, ends
    among them. scale, scales: λ as in linearity_edits. add, negate: λ of stitches. blocks: where they are, from 1.
    """

    run: str
    images: int = Field(ge=32)
    path: int = Field(ge=3)
    scale: float = Field(gt=0)
    scales: list[float] = Field(min_length=1)
    add: list[float] = Field(min_length=1)
    negate: list[float] = Field(min_length=1)
    blocks: list[int] = Field(min_length=1)


def measure(lab: Laboratory, options: Options) -> Iterator[Row]:
    """Yield rows for each seed: `pairs` by layer and α, `paths` of losses, `edits`, `stitches`."""
    yield from lab.by_seed(partial(measure_seed, lab, options), lab.run(options.run).seeds)


def measure_seed(lab: Laboratory, options: Options, seed: int) -> Iterator[Row]:
    """Yield the rows of one seed's experts.

    Raises:
        MergeflowError: the model has fewer blocks than the choices name.
    """
    tests = {task: Subset.first(one, options.images) for task, one in lab.examples("test").items()}
    done = TunedModels(lab.model, lab.base, lab.run(options.run).experts(seed), tests)
    layers = find_layers(done.model.module)
    if max(options.blocks) > len(layers) or min(options.blocks) < 1:
        raise MergeflowError(
            f"studies.{lab.io.stage.name}.blocks is {options.blocks}, but the model has {len(layers)} blocks: "
            f"expected 1 to {len(layers)}."
        )
    edits = measure_edits(done, options.scale, options.scales, seed=seed)
    for compared in measure_pairs(done.model, done.tests, done.tuned, layers, ALPHAS, own=True):
        name = f"{compared.first} – {compared.second}"
        for alpha, by_layer in compared.samples.items():
            yield from rows_of({name: by_layer}, part="pairs", seed=seed, alpha=alpha)
    alphas = [round(step / (options.path - 1), 6) for step in range(options.path)]
    for i, j in combinations(done.tuned, 2):
        both = {task: done.tests[task] for task in (i, j)}
        ends = done.tuned[i], done.tuned[j]
        yield from path_rows(done.model, ends, both, alphas, part="paths", seed=seed, pair=f"{i} – {j}")
    yield from ({"part": "edits", **row} for row in edits)
    blocks = [layers[one - 1] for one in options.blocks]
    stitched = stitch_rows(done, blocks, options.add, options.negate, seed=seed)
    yield from ({"part": "stitches", **row} for row in stitched)


def pairs(rows: pd.DataFrame) -> pd.DataFrame:
    return select(rows, part="pairs")


def smallest_gap(rows: pd.DataFrame) -> Samples:
    return {"smallest": loss_gaps(select(rows, part="paths")).groupby("seed").gap.min()}


def claims(options: Options) -> list[Claim]:
    return [
        direction(
            "L1",
            "Features of averaged experts point where their averaged features do, in all pairs, blocks and α.",
            pairs,
        ),
        length("L1", "Features of averaged experts have the length of their averaged features too.", pairs),
        Claim(
            "L4",
            "Linear mode connectivity fails between nets tuned on different tasks, on D_i and D_j.",
            smallest_gap,
            low=FLAT,
            of="the larger of (difference of the ends, barrier), for each pair and D,",
            unit="nat",
            digits=2,
            caveat=ENDS,
        ),
        *claims_on_edits(options.scale, options.scales),
        *claims_on_stitches(options.blocks, options.add),
    ]


def pair_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return each pair's worst share, and its smaller gap of the loss of its two tasks."""
    shares = {name: worst_share(own) for name, own in pairs(rows).groupby("combination", sort=False)}
    long = pd.DataFrame(shares).rename_axis(columns="pair").stack().rename("share").reset_index()
    gaps = loss_gaps(select(rows, part="paths")).groupby(["pair", "seed"], sort=False).gap.min().reset_index()
    return pd.concat([table(long, "pair", value="share", digits=3), table(gaps, "pair", value="gap", digits=2)], axis=1)


def ends_of_pairs(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the nearest and the farthest pair at α = ½, by the baseline of the last block."""
    own = select(pairs(rows), alpha=0.5)
    ranked = list(own[own.depth == own.depth.max()].groupby("combination").base.mean().sort_values().index)
    return select(own, combination=[ranked[0], ranked[-1]])


STUDY = Study(
    options=Options,
    runs=lambda options: [options.run],
    splits=("test",),
    systems=("L1", "L4", "L11", "L12", "L13", "L14", "L15"),
    measure=measure,
    claims=claims,
    tables={
        "Pairs: means over pairs and α, by block": lambda rows: layer_table(pairs(rows), "layer"),
        "Pairs, all α: worst share, and gap of the loss in nats": pair_table,
        "Edits: means over pairs or tasks": lambda rows: layer_table(
            select(rows, part="edits"), "equation", "scale", "layer"
        ),
        "Addition of stitched features: accuracy in %, mean over pairs": partial(stitch_table, what="addition"),
        "Negation of stitched features: accuracy in %, mean over tasks": partial(stitch_table, what="negation"),
    },
    figures={
        "pairs": lambda rows: layers_figure(ends_of_pairs(rows), "combination"),
        "addition": addition_figure,
        "negation": negation_figure,
    },
)
