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

from functools import partial
from itertools import combinations
from pathlib import Path

from pydantic import Field

from mergeflow.errors import MergeflowError
from mergeflow.linearity.layers import find_layers
from mergeflow.linearity.pairs import measure_pairs
from mergeflow.modalities.subset import Subset
from studies.lab.inputs import Laboratory
from studies.lab.linear_rows import (
    TunedModels,
    path_rows,
    read_samples,
    rows_of,
    samples_file,
    write_samples,
)
from studies.old.papers.linearity_edits.study import measure_edits
from studies.old.papers.linearity_experts.results import findings, tables
from studies.old.papers.linearity_stitches.measuring import stitch_rows
from studies.old.papers.linearity_stitches.study import stitch_figure
from studies.old.pieces import kept_by_seed
from studies.old.results import StudyResult
from studies.old.rows import Row, tidy
from tasks.plotting.linearity import linearity_figure
from tasks.project.declaration import Declaration
from tasks.project.sections import Section
from tasks.project.stage import StageIO

ALPHAS = (0.25, 0.5, 0.75)


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


DECLARED = Declaration(
    Options,
    runs=lambda options: [options.run],
    splits=("test",),
    systems=("L1", "L4", "L11", "L12", "L13", "L14", "L15"),
)


def run(io: StageIO) -> None:
    """Write `outputs/studies/linearity_experts`."""
    inputs = Laboratory(io)
    options = DECLARED.chosen(io)
    seeds = inputs.run(options.run).seeds
    pieces = kept_by_seed(io, seeds, partial(measure, inputs, options))
    rows = {key: [row for piece in pieces for row in piece[key]] for key in pieces[0]}
    found = read_samples(samples_file(io, seeds[0]))
    result = StudyResult(
        tables(rows),
        findings(rows, options.scale, options.scales),
        [],
        tidy({"part": part, **row} for part, own in rows.items() for row in own),
    )
    folder = result.write(io, {"pairs": linearity_figure(found), "stitches": stitch_figure(rows["stitches"])})
    write_samples(found, folder / "samples.parquet")


def measure(inputs: Laboratory, options: Options, seed: int) -> dict[str, list[Row]]:
    """Return the rows of one seed: `pairs`, `paths`, `edits`, `stitches`.

    Args:
        inputs: the study's inputs.
        options: its choices.
        seed: of the experts.

    Raises:
        MergeflowError: the model has fewer blocks than the choices name.
    """
    tests = {task: Subset.first(one, options.images) for task, one in inputs.examples("test").items()}
    done = TunedModels(inputs.model, inputs.base, inputs.run(options.run).experts(seed), tests)
    layers = find_layers(done.model.module)
    if max(options.blocks) > len(layers) or min(options.blocks) < 1:
        raise MergeflowError(
            f"studies.{inputs.io.stage.name}.blocks is {options.blocks}, but the model has {len(layers)} blocks: "
            f"expected 1 to {len(layers)}."
        )
    _, edits, _ = measure_edits(done, options.scale, options.scales, seed=seed)
    blocks = [layers[one - 1] for one in options.blocks]
    return {
        "pairs": _pairs(done, layers, samples_file(inputs.io, seed), seed),
        "paths": _paths(done, options.path, seed),
        "edits": edits,
        "stitches": stitch_rows(done, blocks, options.add, options.negate, seed=seed),
    }


def _pairs(done: TunedModels, layers: list[str], kept: Path, seed: int) -> list[Row]:
    """Return the rows of all pairs; the samples of the nearest and the farthest, at α = ½, go into a file."""
    found = measure_pairs(done.model, done.tests, done.tuned, layers, ALPHAS, own=True)
    middle = {f"{one.first} – {one.second}": one.samples[0.5] for one in found}
    ranked = sorted(middle, key=lambda name: float(middle[name][layers[-1]].base.mean()))
    write_samples({name: middle[name] for name in (ranked[0], ranked[-1])}, kept)
    return [
        row
        for one in found
        for alpha, by_layer in one.samples.items()
        for row in rows_of({f"{one.first} – {one.second}": by_layer}, seed=seed, alpha=alpha)
    ]


def _paths(done: TunedModels, count: int, seed: int) -> list[Row]:
    """Return loss and accuracy at `count` α between every two experts, on both tasks."""
    alphas, rows = [round(step / (count - 1), 6) for step in range(count)], []
    for i, j in combinations(done.tuned, 2):
        both = {task: done.tests[task] for task in (i, j)}
        rows += path_rows(done.model, done.tuned[i], done.tuned[j], both, alphas, seed=seed, pair=f"{i} – {j}")
    return rows
