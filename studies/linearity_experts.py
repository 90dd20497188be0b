"""Study `linearity_experts`: are the features of the project's own experts linear in their weights?

**Question.** Do vision transformers, tuned from one CLIP, behave as the nets of `linearity_edits` and
`linearity_stitches` do, and do the features of their averages too?

**Method.** The experts of one training run, one for each task, from the project's base. f is a block's output of all
tokens, flattened; test examples, the first of every task. *Edits* and *stitches* as in these two studies; the control
task of a negation are all the other tasks: their mean. *Pairs* (L1): αθ_i + (1 − α)θ_j against αf(θ_i) + (1 − α)f(θ_j),
all pairs, α ∈ {¼, ½, ¾}, examples of both tasks; the baseline is between the two experts. *Modes* (L4): the loss along
the path, on D_i and on D_j, each with its own head. Linear mode connectivity holds where the ends differ by at most 0.1
nat and the barrier is at most 0.1 nat. No path has a barrier above its chord (280 of a pair, a data set and a seed): it
fails because expert i is worse on D_j than expert j, as in the paper. ± is over seeds: of the order of the experts'
batches. The paper prints no thresholds; all margins are ours and were written before the run.

**Source.** Zhou et al. 2024, Cross-Task Linearity, Sections 4.2 and 4.3 and footnote 5, B.1.3, Figures 4 to 10.
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
    ALPHAS,
    ENDS,
    TunedModels,
    direction,
    farthest_pairs,
    layer_table,
    layers_figure,
    length,
    loss_gaps,
    not_connected,
    path_rows,
    rows_of,
    worst_share,
)
from studies.linearity_edits import claims_on_edits, measure_edits
from studies.linearity_stitches import addition_figure, claims_on_stitches, negation_figure, stitch_rows, stitch_table


class Options(Section):
    run: str  # whose experts are looked at
    images: int = Field(ge=32)  # of each task
    path: int = Field(ge=3)  # number of α of the loss between two experts, ends among them
    scale: float = Field(gt=0)  # scale, scales: λ of edits
    scales: list[float] = Field(min_length=1)
    add: list[float] = Field(min_length=1)  # add, negate: λ of stitches
    negate: list[float] = Field(min_length=1)
    blocks: list[int] = Field(min_length=1)  # where they are, from 1


def measure(lab: Laboratory, options: Options) -> Iterator[Row]:
    """Yield rows for each seed: `pairs` by layer and α, `paths` of losses, `edits`, `stitches`."""
    yield from lab.by_run([options.run], partial(measure_seed, options=options))


def measure_seed(lab: Laboratory, run: str, seed: int, options: Options) -> Iterator[Row]:
    tests = {task: Subset.first(examples, options.images) for task, examples in lab.examples("test").items()}
    done = TunedModels(lab.model, lab.base, lab.run(run).experts(seed), tests)
    layers = find_layers(done.model.module)
    if max(options.blocks) > len(layers) or min(options.blocks) < 1:
        raise MergeflowError(
            f"studies.{lab.io.stage.name}.blocks is {options.blocks}, but the model has {len(layers)} blocks: "
            f"expected 1 to {len(layers)}."
        )
    edits = measure_edits(done, options.scale, options.scales, seed=seed)
    for compared in measure_pairs(done.model, done.tests, done.tuned, layers, ALPHAS, on_own_tasks=True):
        name = f"{compared.first} – {compared.second}"
        for alpha, by_layer in compared.samples.items():
            yield from rows_of({name: by_layer}, part="pairs", seed=seed, alpha=alpha)
    alphas = [round(step / (options.path - 1), 6) for step in range(options.path)]
    for i, j in combinations(done.tuned, 2):
        both = {task: done.tests[task] for task in (i, j)}
        ends = done.tuned[i], done.tuned[j]
        yield from path_rows(done.model, ends, both, alphas, part="paths", seed=seed, pair=f"{i} – {j}")
    yield from ({"part": "edits", **row} for row in edits)
    blocks = [layers[block - 1] for block in options.blocks]
    stitched = stitch_rows(done, blocks, options.add, options.negate, seed=seed)
    yield from ({"part": "stitches", **row} for row in stitched)


def pairs(rows: pd.DataFrame) -> pd.DataFrame:
    return select(rows, part="pairs")


def claims_on_experts(options: Options) -> list[Claim]:
    return [
        direction(
            "L1",
            "Features of averaged experts point where their averaged features do, in all pairs, blocks and α.",
            pairs,
        ),
        length("L1", "Features of averaged experts have the length of their averaged features too.", pairs),
        not_connected(
            "on D_i and D_j",
            lambda rows: {"smallest": loss_gaps(select(rows, part="paths")).groupby("seed").gap.min()},
            ENDS,
        ),
        *claims_on_edits(options.scale, options.scales),
        *claims_on_stitches(options.blocks, options.add),
    ]


def pair_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return each pair's worst share, and its smaller gap of the loss of its two tasks."""
    shares = {name: worst_share(features) for name, features in pairs(rows).groupby("combination", sort=False)}
    long = pd.DataFrame(shares).rename_axis(columns="pair").stack().rename("share").reset_index()
    gaps = loss_gaps(select(rows, part="paths")).groupby(["pair", "seed"], sort=False).gap.min().reset_index()
    return pd.concat([table(long, "pair", value="share", digits=3), table(gaps, "pair", value="gap", digits=2)], axis=1)


STUDY = Study(
    options=Options,
    runs=lambda options: [options.run],
    splits=("test",),
    systems=("L1", "L4", "L11", "L12", "L13", "L14", "L15"),
    measure=measure,
    claims=claims_on_experts,
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
        "pairs": lambda rows: layers_figure(farthest_pairs(pairs(rows), [0, 1]), "combination"),
        "addition": addition_figure,
        "negation": negation_figure,
    },
)
