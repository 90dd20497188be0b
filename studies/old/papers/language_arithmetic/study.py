"""Study `language_arithmetic`: do analogies, and sums of three domains, work with task vectors of a language model?

**Question.** "T' is to A as B is to C" of task vectors is defined by the papers and was measured on images; most models
that people merge write texts. Does Δ_A + (Δ_B − Δ_C) write texts that nobody trained on, by an author in a genre, or in
a tense and a style? And what is left of three domains when their experts are merged, by every method that needs no
data?

**Method.** Texts by the grammar of the corpus [books](../books.md), by the authors of each seed: an author has a cast
with facts, places, and a third of all words; a genre or style is a set of forms of sentences; the present tense, which
the base has never seen, replaces every verb. From the embedded base Ψ⁰, a Llama of half a million parameters, an expert
is fine-tuned on each of four tasks: two authors × two genres, and past or present × narrative or descriptive by one
author. Each task is then the target of the other three: A has its first attribute, B its second, C neither. λ in
Ψ⁰ + λ (Δ_A + Δ_B − Δ_C), in the same without C, and of each expert alone, is chosen by the target's validation texts,
and test is looked at once; the nearest expert is the one of the three that is best on validation. Beside it the analogy
with λ = 1, which needs no text of the target, and the expert that was trained on the target.

The three domains are tales, dialogues and annals by three authors. Every method of the catalog that takes three whole
experts and no data merges them; its arguments are chosen on validation, test is looked at once. Beside them the base,
each domain's own expert, and joint training on all three of as many steps as the experts together.

Every figure is the log-likelihood per token, in nats: minus the logarithm of the perplexity, larger is better. A pilot
on seed 0, of which validation alone was looked at, set the length of the training and the grids, and had genres made of
forms that the base knows. The rules beside the findings were planned before the pilot and written down after it, before
any run at this size; the seeds of the study are others, and no test text was read until then.

Of tenses × styles, that taking Δ_C away is worth it comes from the targets in the present tense: 0.50 ± 0.24
(descriptive) and 0.19 ± 0.16 (narrative). In the past tense it is −0.01 ± 0.02 and −0.04 ± 0.05.

**Source.** Li et al. 2025, Section 2.1; Ilharco et al. 2023, Editing models with task arithmetic, Section 5.
"""

from functools import partial
from typing import Any

from studies.old.papers.language_arithmetic.figures import figures
from studies.old.papers.language_arithmetic.measuring import seed_rows
from studies.old.papers.language_arithmetic.options import Options
from studies.old.papers.language_arithmetic.results import study_result
from studies.old.papers.language_arithmetic.world import World, check_places
from studies.old.pieces import kept_by_seed
from tasks.project.declaration import Declaration
from tasks.project.stage import StageIO

DECLARED = Declaration(Options, systems=("P22", "B7"))


def run(io: StageIO) -> None:
    """Write `outputs/studies/language_arithmetic`."""
    options = DECLARED.chosen(io)
    check_places(World.of(options.folders).tasks, io.root)
    pieces = kept_by_seed(io, options.seeds, partial(_measured, options))
    rows = [row for piece in pieces for row in piece["rows"]]
    study_result(rows).write(io, figures(rows))


def _measured(options: Options, seed: int) -> dict[str, Any]:
    return {"rows": seed_rows(options, seed)}
