"""Study `adviser`: does what `mergeflow advise` predicts save candidates of a sweep, and tell what unlearning costs?

**Question.** From a few hundred samples without labels and the task vectors alone, `mergeflow advise` suggests four λ
for a sum of task vectors and says what unlearning one task will cost the others. The theory of task vectors offers
one rule for each, the lengths and cosines of the task vectors another. Which predicts better, and is either good
enough to stand instead of a sweep?

**Method.** Experts on coloured digits at many r_o (a small vision transformer that has learnt the ten digits in
white), tuned for several lengths. For every pair and every triple of them, λ in Ψ^(0) + λ Σ ΔΨ_i is chosen on
validation, by mean accuracy, and looked at once on test:

- `grid`: all λ from 0.1 to 2.0 by 0.1;
- `theory`: four λ from 1 / min_i Σ_j α̂_ij to twice that, α̂ by Equation 11 on what tuning changed of the logits; where
  the theory sees no λ, 0.4 alone;
- `lengths`: four λ from 0.8 to 1.6 times λ° = mean ‖τ_i‖ / ‖Σ τ_i‖;
- `optuna`: four trials of TPE over the same range;
- `fixed`: λ = 0.4, as Ilharco et al. 2023 recommend.

Unlearning: for every ordered pair, what task 1 loses on test in Ψ^(0) + ΔΨ_1 − ΔΨ_2, in points below its expert. Its
rank correlation over the pairs of a seed and a length is held against four predictions: α̂ of the logits as printed,
α̂ of what tuning changed, the response A_12 (how far expert 2 moves the answers to task 1 along the way of expert 1),
and the cosine of the task vectors. Logits are taken less their mean over the classes; with two classes a sample's
cosine is then the agreement in sign. Rules and ranges were written before the first run; the settings of the training
were chosen on validation with another seed, by the experts' accuracies alone, and then made shorter for the time at
hand.

**Source.** Li et al. 2025, Theorems 1 and 2, Equation 11; Ilharco et al. 2023, Editing models with task arithmetic.
"""

from functools import partial
from typing import Any

from pydantic import Field

from studies.lab.coloured import ColouredWorld, Digits, open_digits, pretrained, tuned
from studies.old.papers.adviser.figures import figures
from studies.old.papers.adviser.measuring import measured_rows
from studies.old.papers.adviser.results import findings, tables
from studies.old.pieces import Once, kept_by_seed
from studies.old.results import StudyResult
from studies.old.rows import tidy
from tasks.project.declaration import Declaration
from tasks.project.sections import Section
from tasks.project.stage import StageIO


class Options(Section):
    """The study's choices.

    seeds: of the net, the orders and Optuna. world: digits, net and training. colours: r_o of the tasks. lengths: steps
    of tuning. samples: without labels, of each task. sizes: how many tasks are added at a time.
    """

    seeds: list[int] = Field(min_length=1)
    world: ColouredWorld
    colours: list[float] = Field(min_length=3)
    lengths: list[int] = Field(min_length=1)
    samples: int = Field(200, ge=8)
    sizes: list[int] = Field([2, 3], min_length=1)


DECLARED = Declaration(Options, systems=("P10",))


def run(io: StageIO) -> None:
    """Write `outputs/studies/adviser`."""
    options = DECLARED.chosen(io)
    digits = Once(partial(open_digits, options.world, io.root))
    pieces = kept_by_seed(io, options.seeds, partial(measure, options, digits))
    sets, edits = ([row for piece in pieces for row in piece[part]] for part in ("sets", "edits"))
    result = StudyResult(tables(sets, edits), findings(sets, edits), [], tidy([*sets, *edits]))
    result.write(io, figures(sets, edits))


def measure(options: Options, digits: Any, seed: int) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of one seed: `sets` of tasks that are added, and `edits` that take one away.

    Args:
        options: the study's choices.
        digits: gives the splits.
        seed: of the net, the orders and Optuna.
    """
    splits: dict[str, Digits] = digits()
    base = pretrained(options.world, splits, seed)
    found: dict[str, list[dict[str, Any]]] = {"sets": [], "edits": []}
    for steps in options.lengths:
        experts = tuned(options.world, base, splits["train"], options.colours, steps, seed)
        rows = measured_rows(base, experts, splits, options.colours, options.samples, options.sizes, seed)
        for part, own in rows.items():
            found[part] += [{"part": part, "seed": seed, "steps": steps, **row} for row in own]
    return found
