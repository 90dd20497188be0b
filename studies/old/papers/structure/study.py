"""Study `structure`: how much of a task vector is needed to add, to unlearn and to reach a third task?

**Question.** In the theory a task vector has rank 1, and the small rows of its MLP can be left out. Is a task vector of
a real network as empty? The paper measures neither: its low-rank task vectors are tuned as LoRA, and it prunes none.

**Method.** Coloured digits and the small vision transformer of the study coloured_digits, 120 steps of tuning; experts
for r_o = 0.95, 0.5, 0.9, 0.05, 0.85. Task vectors are taken whole; with every matrix at its best approximation of a
rank (other tensors whole); tuned as LoRA on all matrices; and with a share of their MLPs' matrices: the largest rows,
the smallest rows as a control, the largest entries as TIES trims them, and random entries, rescaled, as DARE thins
them; everything outside of the MLPs stays whole there. Each variant does three things, with λ chosen on validation and
one look at test:

- addition: λ from −1 to 2 by 0.25 in Ψ^(0) + ΔΨ_1 + λ ΔΨ_2, by the sum of both accuracies, with T2 irrelevant, aligned
  or contradictory; the score is the mean accuracy;
- unlearning: λ by the difference of both accuracies, with T2 irrelevant or contradictory; the score is how many points
  T1 stays above T2;
- a third task (r_o = 0.9) from r_o = 0.85 and 0.05, λ_1 and λ_2 from −1 to 2 by 0.5; the score is its accuracy.

Of λ that are equally good on validation the lowest is taken.

Storage counts factors, kept rows with an index, kept entries with a bit for each place, and of DARE the entries alone,
whose places a seed tells. The memory of a step is foretold on tensors without values. The learning rate of LoRA was
chosen by two experts' validation accuracies with a seed that is not among these. Rules were written before the first
run.

**Source.** Li et al. 2025, Corollaries 1 and 2, Section 4; Hu et al. 2022 (LoRA); Yadav et al. 2023 (TIES); Yu et al.
2024 (DARE).
"""

from functools import partial
from typing import Any

from pydantic import Field, field_validator

from studies.lab.coloured import ColouredWorld, Digits, open_digits, pretrained, tuned
from studies.lab.scales import task_vector
from studies.old.papers.structure.figures import figures
from studies.old.papers.structure.measuring import COLOURS, Bench, lora_vectors, measured_rows, memory_rows
from studies.old.papers.structure.results import HALF, findings, tables
from studies.old.pieces import Once, kept_by_seed
from studies.old.results import StudyResult
from studies.old.rows import Row, tidy
from tasks.project.declaration import Declaration
from tasks.project.sections import Section
from tasks.project.stage import StageIO


class Options(Section):
    """The study's choices.

    seeds: of the net, the orders and what is dropped. world: digits, net and training. steps: of tuning. ranks: of the
    reduced matrices. lora: ranks of the adapters. lora_rate: their learning rate. keeps: shares of the MLPs' rows and
    entries; 0.5 is judged.
    """

    seeds: list[int] = Field(min_length=1)
    world: ColouredWorld
    steps: int = Field(120, ge=1)
    ranks: list[int] = Field([1, 2, 4, 8], min_length=1)
    lora: list[int] = Field([2, 8], min_length=1)
    lora_rate: float = Field(gt=0)
    keeps: list[float] = Field([0.05, 0.1, 0.2, HALF, 0.8], min_length=1)

    @field_validator("world")
    @classmethod
    def _has_rows_and_adapters(cls, world: ColouredWorld) -> ColouredWorld:
        if world.clip is not None:
            raise ValueError("this study prunes and adapts the transformer; leave `clip` out")
        return world


DECLARED = Declaration(Options, systems=("P16", "P17"))


def run(io: StageIO) -> None:
    """Write `outputs/studies/structure`."""
    options = DECLARED.chosen(io)
    digits = Once(partial(open_digits, options.world, io.root))
    pieces = kept_by_seed(io, options.seeds, partial(measure, options, digits))
    rows = [{"seed": seed, **row} for seed, piece in zip(options.seeds, pieces, strict=True) for row in piece["rows"]]
    rows += memory_rows(options.world, options.lora)
    StudyResult(tables(rows), findings(rows), [], tidy(rows)).write(io, figures(rows))


def measure(options: Options, digits: Any, seed: int) -> Row:
    """Return the rows of one seed.

    Args:
        options: the study's choices.
        digits: gives the splits.
        seed: of the net, the orders and what is dropped.
    """
    splits: dict[str, Digits] = digits()
    base = pretrained(options.world, splits, seed)
    experts = tuned(options.world, base, splits["train"], COLOURS, options.steps, seed)
    vectors = {task: task_vector(state, base.start) for task, state in experts.items()}
    tune = partial(lora_vectors, options.world, base, splits["train"])
    adapted = {rank: tune(rank, options.lora_rate, options.steps, seed) for rank in options.lora}
    lora, shares = ({rank: found[part] for rank, found in adapted.items()} for part in (0, 1))
    bench = Bench(base, splits)
    return {"rows": measured_rows(bench, vectors, lora, shares, options.ranks, options.keeps, seed)}  # type: ignore[arg-type]
