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

`texts_mima` is the same with S = 96, N = 1 and 4 on a pre-trained encoder and eight real tasks on texts
(worlds/real-texts), `pictures_mima` with the paper's S on a ViT-S/32 and four real tasks on pictures
(worlds/pictures-vit-s).

**Source.** MIMA, Sections 4 and 5, Tables 1–3, Figures 4, 6, 8 and 9.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pandas as pd
from matplotlib.figure import Figure
from pydantic import Field

from studies import alignment
from studies.lab import Claim, Laboratory, Row, Section, Study, accuracy_rows, choose_scale, curves, grid, table
from studies.lab.claims import Samples, needs, with_interval
from studies.lab.plots import listed, scatter
from studies.lab.rows import at, each, ends, least, per_seed, select, steps

GRIDS = {"task_arithmetic": (grid(0, 1, 0.05), 0.2), "ties": (grid(0.2, 2.8, 0.1), 1.0)}  # λ tried, and the first
MERGES = ["average", *GRIDS]
FIXED = ["task_arithmetic λ=0.4", "ties λ=1"]
PAPERS_STEPS = 2000
MANY, SUFFICIENT = 16, 8  # from these N on the paper calls task vectors aligned, and N sufficient
# Twice the shares in the paper's Table 1, ViT-B/32, in % of the headroom, experts less zero-shot: 42.1 points at N = 1
NEAR_ZERO = 1.9  # the gap of the average at N = 16: 0.4 points
AS_EFFECTIVE = 2.5  # the largest lead over the average at N ≥ 16: 0.5 points (TIES)
UNCHANGED = 11.4  # the experts from N = 1 to N = 8: 2.4 points
NEAR_FULL = 95.2  # %: twice what the smallest relative accuracy that is called near 100 %, 97.6 %, lacks
SETTLED = 1.0  # points by which doubling the budget may change what experts lose, to say that it does not decide
NAMES = {"task_arithmetic": "task arithmetic", "ties": "TIES", "experts": "experts, each on its task"}


class Options(Section):
    rounds: list[int] = Field(min_length=1)  # the N whose runs `mima_N` are read
    keep: float  # TIES's share of entries
    budgets: list[int]  # further S, of the runs `mima_N_S` for each N of `at`
    at: list[int]
    kept: list[int]  # the N of the runs `mima_N_kept`, which keep the optimiser's state


def main_runs(options: Options) -> list[str]:
    return [f"mima_{n}" for n in options.rounds]


def further_runs(options: Options) -> list[str]:
    return [*(f"mima_{n}_{s}" for s in options.budgets for n in options.at), *(f"mima_{n}_kept" for n in options.kept)]


def measure(lab: Laboratory, options: Options) -> Iterator[Row]:
    """Yield test accuracy of experts and merges for each run, seed and task, with λ where one was chosen."""
    yield from lab.by_run(main_runs(options), partial(measure_merges, keep=options.keep))
    yield from lab.by_run(further_runs(options), measure_average)
    first = main_runs(options)[0]
    yield from lab.by_run([first], measure_base, lab.run(first).seeds[:1], "base_")


def measure_base(lab: Laboratory, run: str, seed: int) -> list[Row]:
    """Return the accuracy of θ0, which the heads of a run's experts read where tasks have heads of their own."""
    return lab.accuracy_rows(lab.base, "test", model="zero_shot")


def measure_average(lab: Laboratory, run: str, seed: int) -> Iterator[Row]:
    experts, about = lab.run(run).experts(seed), settings(lab, run, seed)
    average = lab.scorer(experts).merge("average")
    yield from accuracy_rows(lab.individual(experts, "test"), **about, model="experts")
    yield from lab.accuracy_rows(average, "test", **about, model="average")


def measure_merges(lab: Laboratory, run: str, seed: int, keep: float) -> Iterator[Row]:
    yield from measure_average(lab, run, seed)
    about, scorer = settings(lab, run, seed), lab.blind().scorer(lab.run(run).experts(seed))
    arguments: dict[str, dict[str, float]] = {"task_arithmetic": {}, "ties": {"keep": keep}}
    for method, (scales, start) in GRIDS.items():
        chosen = choose_scale(lab, scorer, method, scales, start, arguments[method])
        yield from accuracy_rows(chosen.test, **about, model=method, scale=chosen.args["scale"])
    for name, method, scale in zip(FIXED, GRIDS, (0.4, 1.0), strict=True):
        merged = scorer.merge(method, scale=scale, **arguments[method])
        yield from lab.accuracy_rows(merged, "test", **about, model=name)


def settings(lab: Laboratory, run: str, seed: int) -> Row:
    trained = lab.run(run).settings(seed)
    rounds = trained["iterative"]
    return {"seed": seed, "rounds": rounds["rounds"], "steps": trained["steps"], "optimiser": rounds["optimiser"]}


# What the rows are asked


def main(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the runs that have every merge: those of the usual budget and optimiser."""
    trained = select(rows, optimiser="reset")
    return select(trained, steps=int(select(trained, model="ties").steps.iloc[0]))


def over(rows: pd.DataFrame, model: str, **where: str) -> pd.DataFrame:
    return per_seed(main(rows), "rounds", model=model, **where)


def in_headroom(rows: pd.DataFrame, frame: pd.DataFrame) -> pd.DataFrame:
    """Return points in % of the headroom, experts at the smallest N less zero-shot, by seed."""
    zero_shot = float(select(rows, model="zero_shot").accuracy.mean())
    return 100 * frame / (over(rows, "experts").iloc[0] - zero_shot)


def lead(rows: pd.DataFrame, model: str) -> pd.DataFrame:
    return over(rows, model) - over(rows, "average")


def relative(rows: pd.DataFrame, model: str) -> pd.DataFrame:
    wide = main(rows).pivot_table(index=["rounds", "seed", "task"], columns="model", values="accuracy")
    return (100 * wide[model] / wide["experts"]).groupby(["rounds", "seed"]).mean().unstack("seed")


def by_task(rows: pd.DataFrame, model: str, measured: Callable[[pd.DataFrame], Samples]) -> Samples:
    return each(main(rows).task.unique(), lambda task: measured(over(rows, model, task=task)))


def changes_by_task(rows: pd.DataFrame) -> Samples:
    """Return how each task's expert changes, in % of the task's own headroom."""
    zero_shot = select(rows, model="zero_shot").groupby("task").accuracy.mean()
    frames = {task: over(rows, "experts", task=task) for task in main(rows).task.unique()}
    return each(frames, lambda task: from_first(100 * frames[task] / (frames[task].iloc[0] - zero_shot[task])))


def from_first(frame: pd.DataFrame) -> Samples:
    first = frame.index[0]
    return {f"N = {first:g} → {n:g}": frame.loc[n] - frame.loc[first] for n in frame.index[1:]}


def loss_by_budget(rows: pd.DataFrame, few: int, many: int) -> dict[float, pd.Series]:
    """Return, by the budget S, by how much the experts change from N = few to N = many."""
    trained = select(rows, model="experts", optimiser="reset", rounds=[few, many])
    means = {budget: per_seed(group, "rounds") for budget, group in trained.groupby("steps")}
    return {budget: frame.loc[many] - frame.loc[few] for budget, frame in means.items() if len(frame) == 2}


def loss_change(rows: pd.DataFrame, few: int, many: int) -> Samples:
    losses = loss_by_budget(rows, few, many)
    low, high = min(losses), max(losses)
    return {f"S = {low:g} → {high:g}": (losses[high] - losses[low]).dropna()} if low < high else {}


def budget(rows: pd.DataFrame) -> Samples:
    return {"S": main(rows).groupby("seed").steps.first()}


def kept_less_reset(rows: pd.DataFrame, n: int) -> Samples:
    usual = select(rows, optimiser="kept", rounds=n).steps.iloc[0]
    means = per_seed(select(rows, rounds=n, steps=usual), "optimiser", "model")
    return {f"{m}, kept less reset": means.loc["kept", m] - means.loc["reset", m] for m in ("experts", "average")}


def listed_intervals(samples: Samples) -> str:
    return ", ".join(f"{name} {with_interval(values)}" for name, values in samples.items())


# Claims, written before the run
# fmt: off

def claims(options: Options) -> list[Claim]:
    few, many = min(options.at), max(options.at)
    settled = (
        needs(partial(loss_change, few=few, many=many), "change of what experts lose when the budget doubles",
              low=-SETTLED, high=SETTLED)
        if options.budgets
        else needs(budget, "budget", low=PAPERS_STEPS, unit="steps")  # one alone tells where it is the paper's
    )
    to_next, from_average = "paired difference from each N to the next", "paired difference from the average"
    paper_claims = [
        Claim("M2", "The average and task arithmetic improve monotonically with N.",
              lambda rows: each(MERGES[:2], lambda m: steps(over(rows, m))),
              low=0, of=f"{to_next}, λ of task arithmetic from validation,",
              paper="from 65.8 to 88.0 % and from 70.6 to 87.6 %, N = 1 to 20, ViT-B/32"),
        Claim("M2", "With validation sets TIES benefits from more rounds as task arithmetic does.",
              lambda rows: each(["ties"], lambda m: steps(over(rows, m))),
              low=0, of=f"{to_next}, λ of TIES from validation,",
              paper="from 73.6 to 88.4 %, N = 1 to 20, ViT-B/32"),
        Claim("M2", "The average improves uniformly on all tasks as N grows.",
              lambda rows: by_task(rows, "average", steps), low=0, of=f"{to_next}, on each task,",
              also=lambda rows: f"; over all N: {listed_intervals(by_task(rows, 'average', ends))}"),
        Claim("M4", f"The single-task gap of the average shrinks to nearly zero at N ≥ {MANY}.",
              lambda rows: at(in_headroom(rows, lead(rows, "experts")), MANY), low=-NEAR_ZERO, high=NEAR_ZERO,
              unit="% of the headroom", of="gap, twice the paper's share,",
              paper="0.4 points, 0.95 % of the headroom, at N = 16, ViT-B/32"),
        Claim("M4", f"From N = {SUFFICIENT} on merged models have relative accuracies near or above 100 %.",
              lambda rows: each(MERGES, lambda m: at(relative(rows, m), SUFFICIENT)),
              low=NEAR_FULL, of="relative accuracy, which may lack twice what the paper's smallest lacks,", unit="%",
              paper="the smallest called near: 97.6 %, average, ViT-B/16",
              caveat="one budget S and one rate; a round has a fraction of the paper's 250 steps (N = 8)"),
        Claim("M2", "With λ from validation task arithmetic and TIES are more accurate than the average.",
              lambda rows: each(GRIDS, lambda m: at(lead(rows, m))),
              low=0, of=f"{from_average} at every N",
              paper="87.3 % for task arithmetic and 87.6 % for the average at N = 16, ViT-B/32 (Table 1)"),
        Claim("M2", "The advantage of task arithmetic and TIES over the average diminishes as N increases.",
              lambda rows: each(GRIDS, lambda m: ends(lead(rows, m))),
              high=0, of="paired difference of the lead, from the smallest N to the largest,",
              paper="from 4.8 and 7.8 points at N = 1 to −0.4 and 0.4 at N = 20, ViT-B/32"),
        Claim("M2", f"At N ≥ {MANY} averaging is nearly as effective as task arithmetic and TIES.",
              lambda rows: each(GRIDS, lambda m: at(in_headroom(rows, lead(rows, m)), MANY)), high=AS_EFFECTIVE,
              unit="% of the headroom", of="lead over the average, twice the paper's largest share,",
              paper="at most 0.5 points, 1.25 % of the headroom, TIES with ViT-B/32"),
        Claim("M2",
              "Without validation neither task arithmetic nor TIES consistently outperforms the average at large N.",
              lambda rows: each(FIXED, lambda m: least(at(lead(rows, m), MANY))),
              high=0, of=f"{from_average}, at that N of {MANY} and more where it is smallest,"),
        Claim("M2", "Task arithmetic with λ fixed at 0.4 degrades with N.",
              lambda rows: ends(over(rows, FIXED[0])),
              high=-1, of="change from the smallest N to the largest"),
        Claim("M6", "More rounds do not significantly change the accuracy of the experts.",
              lambda rows: from_first(in_headroom(rows, over(rows, "experts"))), low=-UNCHANGED, high=UNCHANGED,
              unit="% of the headroom", of="paired difference, twice the paper's largest share,",
              paper="from 90.2 to 87.8 % at N = 8, 5.7 % of the headroom", needs=settled),
        Claim("M6", "More rounds do not significantly change the accuracy of the expert of any given task.",
              changes_by_task, low=-UNCHANGED, high=UNCHANGED, unit="% of the headroom", needs=settled,
              of="paired difference on each task, twice the paper's largest share of the mean,"),
    ]
    return [
        *paper_claims,
        *(Claim("M6", f"What experts lose from N = {few} to N = {many} shrinks with the budget.",
                lambda rows: loss_change(rows, few, many),
                low=0.5, of="change of the experts' loss from the smallest to the largest budget", ours=True,
                also=lambda rows: "".join(
                    f"; at S = {s:g}: {with_interval(loss)}" for s, loss in loss_by_budget(rows, few, many).items()))
          for _ in options.budgets[:1]),
        *(Claim("M1", f"Forgetting AdamW's moments at the merges costs less than a point (N = {n}).",
                partial(kept_less_reset, n=n), low=-1, high=1, of="paired differences", ours=True)
          for n in options.kept),
    ]


TABLES = {
    "Test accuracy over N, %": lambda rows: table(main(rows), "rounds", "model"),
    "Relative to the experts, %": lambda rows: pd.DataFrame(
        {NAMES.get(m, m): relative(rows, m).mean(axis=1).map("{:.1f}".format) for m in MERGES}),
    "Expert less average, points": lambda rows: pd.DataFrame(
        {"gap": [with_interval(values) for values in at(lead(rows, "experts")).values()]}, lead(rows, "experts").index),
    "λ chosen on validation, one value per seed": lambda rows: table(
        select(main(rows), model=list(GRIDS)), "rounds", "model", value="scale", cell=listed),
    "Single-task accuracy of the experts, %": lambda rows: table(select(main(rows), model="experts"), "task", "rounds"),
    "Accuracy of the average per task, %": lambda rows: table(select(main(rows), model="average"), "task", "rounds"),
    "Zero-shot accuracy, %": lambda rows: select(rows, model="zero_shot").set_index("task")[["accuracy"]].round(1),
    "Budget and optimiser: mean test accuracy, %": lambda rows: table(
        select(rows, model=["experts", "average"]), ["steps", "rounds", "optimiser"], "model"),
}
# fmt: on


def zero_shot(rows: pd.DataFrame) -> pd.Series:
    return select(rows, model="zero_shot").set_index("task").accuracy


def accuracy_figure(models: list[str], title: str, rows: pd.DataFrame) -> Figure:
    """Draw mean accuracy over N (the paper's Figure 4)."""
    return curves(
        select(main(rows), model=models), "rounds", "model", labels=NAMES, title=title, x_label="rounds N",
        y_label="mean test accuracy, %", levels=lambda _: {"zero-shot": zero_shot(rows).mean()}, scale="rounds",
    )  # fmt: skip


def aligned_figure(rows: pd.DataFrame, cosines: pd.DataFrame) -> Figure:
    """Draw the accuracy of two merges over the mean cosine of the task vectors, a point for each N (Figure 1b)."""
    aligned = per_seed(alignment.final(alignment.pairs(cosines)), "N", value="tau").mean(axis=1)
    points = select(main(rows), model=MERGES[:2]).groupby(["model", "rounds"]).accuracy.mean().reset_index()
    return scatter(
        points.assign(cosine=points.rounds.map(aligned)).dropna(), {"cosine": "mean cosine of τ"},
        "accuracy", "model", y_label="mean test accuracy, %", labels=NAMES, height=3.7,
    )  # fmt: skip


def gap_figure(rows: pd.DataFrame) -> Figure:
    """Draw expert − average over N for each task (the paper's Figure 6)."""
    wide = main(rows).pivot_table(index=["rounds", "seed", "task"], columns="model", values="accuracy").reset_index()
    gaps = wide.assign(gap=wide.experts - wide.average)
    return curves(gaps, "rounds", "task", "gap", title="Single-task gap", x_label="rounds N",
                  y_label="expert − average, points", scale="rounds")  # fmt: skip


def task_figure(rows: pd.DataFrame) -> Figure:
    """Draw every task's expert and average over N (the paper's Figures 8 and 9)."""
    return curves(
        select(main(rows), model=["experts", "average"]), "rounds", "model", panel="task", x_label="rounds N",
        y_label="accuracy, %", levels=lambda task: {"zero-shot": zero_shot(rows)[task]}, scale="rounds",
    )  # fmt: skip


def notes(rows: pd.DataFrame, options: Options) -> list[str]:
    elected, tasks = select(rows, model="ties").drop_duplicates(["rounds", "seed"]).scale, main(rows).task.nunique()
    beyond, largest = sum(~elected.between(0.8, 1.8)), max(GRIDS["ties"][0])
    return [
        "The gap closes from both sides: the merge gains, and the last experts lose. Their last round has S/N steps at "
        "the end of the schedule (`alignment` has the lengths).",
        f"In task arithmetic λ multiplies Σ_t τ_t, so 1/T = {1 / tasks:g} is the average; λ = 0.4 lies "
        f"{0.4 * tasks:.1f} times as far.",
        f"TIES's λ multiplies the mean of the agreeing entries; of {len(elected)} choices {beyond} lie outside of the "
        f"paper's grid, 0.8 to 1.8, and {sum(elected == largest)} are the largest λ tried, {largest:g}.",
    ]


STUDY = Study(
    options=Options,
    runs=lambda options: [*main_runs(options), *further_runs(options)],
    splits=("validation", "test"),
    systems=("M1", "M2", "M4", "M6"),
    measure=measure,
    claims=claims,
    tables=TABLES,
    figures={
        "accuracy": partial(accuracy_figure, ["experts", *MERGES], "λ from validation"),
        "accuracy_fixed": partial(accuracy_figure, ["average", *FIXED], "no validation"),
        "gap": gap_figure,
        "tasks": task_figure,
    },
    notes=notes,
)

STUDIES = {
    "mima": replace(STUDY, joined={"aligned": ("alignment", aligned_figure)}),
    "texts_mima": STUDY,
    "pictures_mima": STUDY,
}
