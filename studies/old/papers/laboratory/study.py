"""Study `laboratory`: in the one-layer Transformer of the theory, does what it proves of task vectors hold?

**Question.** *When is Task Vector Provably Effective for Model Editing?* proves for a one-layer Transformer which λ
add a task, which make it forget one, and which reach a task that nobody trained. Each of these statements can be
measured in that model exactly. Which of them hold, and with which constants?

**Method.** Sequences of P = 20 tokens from ±μ and M orthonormal irrelevant patterns (Definition 2, exact counts,
d = 16) and the model of Equation 4 with m = 512, in float64:

    f(X; Ψ) = (1/P) Σ_l aᵀ ReLU(V Σ_s x_s softmax_s(x_sᵀ W x_l)),    ℓ = max(1 − y f(X; Ψ), 0)

W and V are trained by mini-batch SGD (B = 264, η = 0.5, 70 steps) from one small random Ψ^(0) that all tasks of a seed
share; a stays as it is. For two tasks with μ_1ᵀμ_2 = α, Ψ^(0) + ΔΨ_1 + λ ΔΨ_2 is judged on fresh sequences of both. A
task counts as solved up to a hinge loss of 0.05 and as forgotten from 0.5. Tasks that nobody trained have μ = Σ γ_i μ_i
+ κ μ_⊥. Five seeds of the initial weights, the batches and the test sets; verdicts by 95 % intervals over them. Of c
labels one output is measured, for which 1/c of the relevant tokens are left: c varies δ_* too. The error over the batch
is that after 35 steps, two thirds of those that the task needs: after all of them it is 0 for every B, and shows
nothing. The theory gives orders, so the rules leave an exponent much room; an interval inside it can still exclude the
theory's exponent. The rules beside the findings were written before the run, after a look at two of the seeds.

**Source.** Li et al. 2025, Definition 2, Equation 4, Theorems 1 to 3, Corollaries 1 and 2, Lemmas 1 to 5, Appendix F.
"""

from functools import partial
from typing import Any

from studies.old.papers.laboratory.convergence import convergence_rows, row_norm_rows
from studies.old.papers.laboratory.figures import figures
from studies.old.papers.laboratory.options import Options
from studies.old.papers.laboratory.phases import phase_rows
from studies.old.papers.laboratory.results import study_result
from studies.old.papers.laboratory.targets import target_rows
from studies.old.pieces import kept_side_by_side
from studies.old.rows import Row
from tasks.project.declaration import Declaration
from tasks.project.stage import StageIO

PARTS = {"phases": phase_rows, "convergence": convergence_rows, "row_norms": row_norm_rows, "targets": target_rows}
DECLARED = Declaration(Options, systems=("P9", "P11", "P12", "P13", "P14", "P15", "P16", "P17", "P23"))


def run(io: StageIO) -> None:
    """Write `outputs/studies/laboratory`."""
    options = DECLARED.chosen(io)
    measures = {f"{name}_{seed}": partial(_measured, name, options, seed) for seed in options.seeds for name in PARTS}
    rows: list[Row] = [row for piece in kept_side_by_side(io, measures) for row in piece["rows"]]
    study_result(rows, options).write(io, figures(rows, options))


def _measured(name: str, options: Options, seed: int) -> dict[str, Any]:
    return {"rows": list(PARTS[name](options, seed))}
