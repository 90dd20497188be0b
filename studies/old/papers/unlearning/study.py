"""Study `unlearning`: does a negated task vector make a language model forget one book and leave the others?

**Question.** *When is Task Vector Provably Effective for Model Editing?* fine-tunes a language model on three books,
subtracts the task vector of one of them, and finds that this book is forgotten most, a book of the same author
nearly as far, and one of another author least. Does it hold here, and how does it compare with what people would do
instead?

**Method.** The corpus [books](../books.md): `harbour` and `lighthouse` have one author (style, people, facts),
`orchard` has another; each seed has books of its own. From the embedded base Ψ⁰, a Llama of half a million parameters:
Ψ⁰′ is fine-tuned on all three books, the experts on one each, with a fifth of general text in every fine-tuning; τ is
the difference of the expert of `harbour` and Ψ⁰, of all weights or by adapters of rank 32 on all linear layers.

    Ψ(λ) = Ψ⁰′ + λ τ,   λ ∈ {0, −0.2, … −1}

Measured on chapters that nobody was trained on: the logarithm of the perplexity, of general text too (fluency). Of
passages that come back word by word: 32 greedy tokens behind 16, by Rouge-L (package rouge-score, no stemming) and by
the tokens until the first error. Of people who are in one book alone: the share of facts that the likeliest of four
choices answers (chance 25 %). α̂ is that of Equation 11 on the centred logits of all 1024 tokens at every place of 16
validation blocks a book. Beside it: re-training without the book (the truth), gradient ascent until the book's
perplexity on validation is that of the truth, fine-tuning on the other two books. For the comparison λ is the one
nearest to 0 that reaches the truth's perplexity on validation: of the grid first, then by halving the way to its
neighbour down to 0.02. Ascent ends at the step that reaches it. The rules beside the findings were written before any
run. A pilot on seed 0 with a third of the chapters, of which validation was looked at, showed that three epochs teach
no passage and no fact; epochs are five since, and the rules as they were. The first record compared at λ of the grid
alone, where negation forgot 0.2 to 0.3 nat more than it had to; its claims of P21 did not hold either. So this record
is the second look at test.

**Source.** Li et al. 2025, Section 4.2, Tables 3 to 5, Equation 2 and 11.
"""

from functools import partial
from typing import Any

import torch

from studies.old.papers.unlearning.figures import figures
from studies.old.papers.unlearning.measuring import seed_rows
from studies.old.papers.unlearning.options import Options
from studies.old.papers.unlearning.results import study_result
from studies.old.pieces import kept_by_seed
from studies.old.rows import Row
from tasks.models import choose_device
from tasks.project.declaration import Declaration
from tasks.project.stage import StageIO

DECLARED = Declaration(Options, systems=("P18", "P19", "P20", "P21"))


def run(io: StageIO) -> None:
    """Write `outputs/studies/unlearning`."""
    options = DECLARED.chosen(io)
    pieces = kept_by_seed(io, options.seeds, partial(_measured, io, options, choose_device(io)))
    rows: list[Row] = [row for piece in pieces for row in piece["rows"]]
    study_result(rows, options).write(io, figures(rows, options))


def _measured(io: StageIO, options: Options, device: torch.device, seed: int) -> dict[str, Any]:
    scratch = io.scratch / f"runs_{seed}"
    scratch.mkdir(parents=True, exist_ok=True)
    return {"rows": seed_rows(options, seed, scratch, device)}
