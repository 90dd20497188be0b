"""Study `mima` (M1, M2, M4, M6): does merging while tuning, at the same budget, bring the merged model to its experts?

**Question.** S steps of fine-tuning per task are spent in N rounds of {every task tunes K = S/N steps from the average;
average}. N = 1 is ordinary fine-tuning. What does N do to the merged model, to the experts, and to the choice of the
merge method?

**Method.** θ_t^(i) = FineTune(θ̄^(i−1), D_t, K) with θ̄^(i) = (1/T) Σ_t θ_t^(i) and θ̄^(0) = θ0; AdamW, warm-up and
cosine over the whole budget, frozen text head. The experts of the last round are merged from θ0: uniform average,

    θ0 + λ Σ_t τ_t (task arithmetic),    θ0 + λ · TIES(τ_1 … τ_T, keep 20 %),

with λ from validation (0 … 1 in steps of 0.05, 0.2 … 2.8 in steps of 0.1) and, without validation, λ = 0.4 and λ = 1.
The grid is walked from the usual value both ways until validation accuracy has fallen by 1 point. Relative accuracy is
(1/T) Σ_t merged_t / expert_t; the gap is expert_t − merged_t in points.

*Budget.* The paper has S = 2000; what few steps a round do to the experts is a matter of S, so the smallest and a large
N are trained with further budgets too. *Optimiser.* AdamW's moments are forgotten at each merge; one N is also trained
with them kept. These runs may have fewer seeds; a comparison takes those that both sides have. ± is over seeds: the
order of the batches; base and data are the same for all.

**Source.** MIMA, Sections 4 and 5, Tables 1–3, Figures 4, 6, 8 and 9.
"""

from functools import partial
from typing import Any

from pydantic import Field

from mergeflow.merging import configure
from studies.lab.inputs import Laboratory
from studies.old.papers.mima.findings import findings, further_findings
from studies.old.papers.mima.results import FIXED, LARGEST, figures, further_tables, notes, tables, tidy_rows
from studies.old.pieces import choose_scale, grid, kept, kept_all, kept_by_run
from studies.old.results import StudyResult
from studies.old.rows import Row
from tasks.project.declaration import Declaration
from tasks.project.sections import Section
from tasks.project.stage import StageIO


class Options(Section):
    """The study's choices.

    rounds: the N whose runs `mima_N` are read. keep: TIES's share of entries. budgets: further S, of the runs
    `mima_N_S` for each N of `at`. kept: the N of the runs `mima_N_kept`, which keep the optimiser's state.
    """

    rounds: list[int] = Field(min_length=2)
    keep: float
    budgets: list[int]
    at: list[int]
    kept: list[int]


def _further(options: Options) -> list[str]:
    return [
        *(f"mima_{n}_{budget}" for budget in options.budgets for n in options.at),
        *(f"mima_{n}_kept" for n in options.kept),
    ]


DECLARED = Declaration(
    Options,
    runs=lambda options: [*(f"mima_{n}" for n in options.rounds), *_further(options)],
    splits=("validation", "test"),
    systems=("M1", "M2", "M4", "M6"),
)


def run(io: StageIO) -> None:
    """Write `outputs/studies/mima`."""
    inputs = Laboratory(io)
    options = DECLARED.chosen(io)
    base = kept(io, "base", lambda: inputs.accuracy(inputs.base, "test"))
    measures = {
        f"{rounds}_{seed}": partial(measure, inputs, rounds, seed, options.keep)
        for rounds in options.rounds
        for seed in inputs.run(f"mima_{rounds}").seeds
    }
    rows = kept_all(io, measures, "merges")
    further = kept_by_run(inputs, _further(options), partial(measure_briefly, inputs))
    compared = [*rows, *further]
    result = StudyResult(
        [*tables(rows, base), *further_tables(compared, options.at, options.kept)],
        [*findings(rows), *further_findings(compared, options.at, options.kept)],
        notes(rows),
        tidy_rows(compared, base),
    )
    result.write(io, figures(rows, base))


def measure_briefly(inputs: Laboratory, name: str, seed: int) -> Row:
    """Return test accuracy per task of one run's experts and of their average, and how it was trained.

    Args:
        inputs: the study's inputs.
        name: the run.
        seed: of the run.
    """
    run = inputs.run(name)
    experts, settings = run.experts(seed), run.settings(seed)
    average = inputs.scorer(experts).merge(configure("average"))
    return {
        "rounds": settings["iterative"]["rounds"],
        "steps": settings["steps"],
        "optimiser": settings["iterative"]["optimiser"],
        "seed": seed,
        "experts": inputs.individual(experts, "test"),
        "average": inputs.accuracy(average, "test"),
    }


def measure(inputs: Laboratory, rounds: int, seed: int, keep: float) -> Row:
    """Return test accuracy per task of one run's experts and of all its merges, and the chosen λ.

    Args:
        inputs: the study's inputs.
        rounds: N of the run.
        seed: of the run.
        keep: share of entries that TIES keeps.
    """
    experts = inputs.run(f"mima_{rounds}").experts(seed)
    scorer = inputs.blind().scorer(experts)
    ties = {"keep": keep}
    addition = choose_scale(inputs, scorer, "task_arithmetic", grid(0, 1, 0.05), 0.2)
    elected = choose_scale(inputs, scorer, "ties", grid(0.2, LARGEST, 0.1), 1.0, ties)

    def fixed(method: str, args: dict[str, Any]) -> dict[str, float]:
        return inputs.accuracy(scorer.merge(configure(method, args)), "test")

    return {
        **measure_briefly(inputs, f"mima_{rounds}", seed),
        "task_arithmetic": addition.test,
        "ties": elected.test,
        FIXED["task_arithmetic"]: fixed("task_arithmetic", {"scale": 0.4}),
        FIXED["ties"]: fixed("ties", {"scale": 1.0, **ties}),
        "scale": {"task_arithmetic": addition.args["scale"], "ties": elected.args["scale"]},
    }
