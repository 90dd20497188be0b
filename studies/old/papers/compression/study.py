"""Study `compression` (C5): how much of every expert's accuracy does a fraction of their storage keep?

**Question.** One model per task is the most accurate answer, and T times the storage. How good is every task's model
when all of them are kept in one file of a fraction of that size, and what does each method pay per further task?

**Method.** All T experts go into one file; each task's model is read back out of it and tested on its own task.

- *CART-Indexing*: θ̄ + SVD_k(θ_t − θ̄), k = ⌈ρ · smaller side⌉ of every matrix in attention and MLP, the mean elsewhere
  (or, `own`, each task's);
- *TSV-C*: θ0 + SVD_k(τ_t) of every matrix, k = ⌊smaller side / T⌋, the mean elsewhere;
- *EMR*: θ0 + λ_t · m_t ⊙ τ, an elected vector, a bit mask and a factor per task;
- *TALL mask + TIES*: θ0 + m_t ⊙ τ with τ from TIES and m_t = [|τ_t| > a · |τ − τ_t|], a from validation.

Storage is the size of the file, header included, as a share of all experts' bytes; what needs θ0 is shown with it too.
*Relative* is (1/T) Σ_t compressed_t / expert_t. Beside the file stand the paper's formulas for a task's part: 1 bit an
entry for a mask, 32 (m + n) k bits for an m × n matrix of rank k. The smallest ρ that keeps 99 % is chosen on
validation. ± is over seeds: the order of the batches; sizes are the same for all.

**Source.** CART, Appendix C.2, Table 3 (Table 4, on texts, is part of the study `glue`); EMR-Merging (Huang et al.,
NeurIPS 2024); TALL masks (Wang et al., ICML 2024); TSV-C (Gargiulo et al., CVPR 2025).
"""

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

from pydantic import Field

from mergeflow.evaluation.averages import mean, normalised
from studies.lab.compressing import measure
from studies.lab.inputs import Laboratory, State
from studies.old.papers.compression.results import figures, result
from studies.old.pieces import kept_all
from studies.old.rows import Row
from tasks.project.declaration import Declaration
from tasks.project.sections import Section
from tasks.project.stage import StageIO

RUN = "experts"


class Options(Section):
    """The study's choices.

    counts: the first so many tasks.
    rank_ratio: of CART-Indexing in the table. ratios: of the curves. thresholds: of TALL masks, tried on validation.
    keep: of TIES. target: the relative accuracy asked of the smallest rank.
    """

    counts: list[int] = Field(min_length=1)
    rank_ratio: float = Field(gt=0, le=1)
    ratios: list[float]
    thresholds: list[float] = Field(min_length=1)
    keep: float = Field(gt=0, le=1)
    target: float = Field(gt=0, le=1)


DECLARED = Declaration(Options, runs=lambda options: [RUN], splits=("validation", "test"), systems=("C5",))


def run(io: StageIO) -> None:
    """Write `outputs/studies/compression`."""
    inputs = Laboratory(io)
    options = DECLARED.chosen(io)
    measures = {
        f"{count}_{seed}": partial(suite, inputs, options, count, seed)
        for count in options.counts
        for seed in inputs.run(RUN).seeds
    }
    found = kept_all(io, measures, "suites")
    rows, tried = ([row for one in found for row in one[part]] for part in ("rows", "thresholds"))
    sizes = {name: list(tensor.shape) for name, tensor in inputs.base.items()}
    written = result(rows, tried, sizes, options.rank_ratio, options.target)
    folder = written.write(io, figures(rows, options.rank_ratio))
    (folder / "suites.json").write_text(json.dumps(rows, indent=1) + "\n")


def suite(whole: Laboratory, options: Options, count: int, seed: int) -> Row:
    """Return `rows`, one for each way of compressing the experts of one seed, and the `thresholds` that were tried.

    Args:
        whole: the study's inputs.
        options: its choices.
        count: how many tasks are compressed, the first ones.
        seed: of the experts.
    """
    inputs = whole.first(count)
    experts = inputs.run(RUN).experts(seed)
    individual = {split: inputs.individual(experts, split) for split in ("validation", "test")}

    def row(kind: str, name: str, splits: Sequence[str] = ("test",), **args: Any) -> Row:
        measured = measure(inputs, experts, name, args, splits)
        relative = {split: normalised(measured[split], individual[split]) for split in splits}
        told = {"kind": kind, "args": args, "tasks": len(experts), "seed": seed, "experts": individual}
        return {**told, **measured, "relative": relative}

    ratios = sorted({options.rank_ratio, *options.ratios})
    tried = _thresholds(inputs, experts, options)
    best = _best(tried)
    tall: dict[str, Any] = {"of": "ties", "keep": options.keep, "threshold": best}
    suite_of = {"tasks": len(experts), "seed": seed}
    return {
        "rows": [
            row("own", "cart_indexing", rank_ratio=options.rank_ratio, non_matrices="own"),
            row("emr", "emr"),
            row("tall", "tall_mask", **tall),
            row("tsv", "tsv_compress"),
            *(row("cart", "cart_indexing", ("validation", "test"), rank_ratio=ratio) for ratio in ratios),
            *(row("tsv_curve", "tsv_compress", rank_ratio=ratio) for ratio in options.ratios),
        ],
        "thresholds": [{**suite_of, **one, "chosen": one["threshold"] == best} for one in tried],
    }


def _thresholds(inputs: Laboratory, experts: dict[str, State], options: Options) -> list[Row]:
    """Return the accuracy on validation of every threshold of TALL masks; test cannot be read."""

    def accuracy(threshold: float) -> Row:
        args = {"of": "ties", "keep": options.keep, "threshold": threshold}
        found: Row = measure(inputs.blind(), experts, "tall_mask", args, ("validation",))["validation"]
        return found

    return [{"threshold": threshold, "validation": accuracy(threshold)} for threshold in options.thresholds]


def _best(tried: Sequence[Row]) -> float:
    """Return the threshold that is best on validation."""
    return float(max(tried, key=lambda one: mean(one["validation"]))["threshold"])
