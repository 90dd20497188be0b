"""Study `equivalence` (G1–G4): are task vectors gradients, and is task arithmetic joint gradient descent?

**Question.** Fine-tune T tasks by full-batch gradient descent with step η for k epochs and merge with scale α; train
one model on Σ_t L_t with step αη for as long. Are the two the same model, and how far apart are they if not?

**Method.** Everything is in float64: random three-layer nets (tanh and ReLU, no biases) on T = 3 random tasks with
several seeds, and the project's own model, its base, on the first training examples of some of its tasks. Experts are
trained by torch's SGD on accumulated micro-batches; gradients, Hessian-vector products and the nets' whole Hessians
come from autograd.

*G1, G2.* τ_t^(1) = −η ∇L_t(θ0), and θ_TA^(1) = θ_MT^(1): both are identities and hold to rounding.

*G3.* For k > 1, with r_t(θ) = α Σ_t' ∇L_t'(θ) − ∇L_t(θ) at the joint iterates θ^(e),

    θ_TA − θ_MT = −α η² Σ_t Σ_{e=1}^{k−1} ∇²L_t(θ^(e)) Σ_{m=0}^{e−1} r_t(θ^(m)) + O(η³).

Theorem 1 prints +η² C with C = Σ_t Σ_{e=0}^{k−2} ∇²L_t(θ^(e)) Σ_{m=0}^{e} r_t(θ^(m)). What is left of the gap after
subtracting a term must fall as η³ if the term is right and falls as η² if it is not. To leading order the gap is −α η²
k(k−1)/2 Σ_t ∇²L_t(θ0) r_t(θ0): it grows with the number of pairs of epochs. Slopes over η leave out the step sizes at
which a ReLU unit has switched sides (rows with `switched` > 0). The coefficient is measured at the smallest η alone.

*G4.* Theorem 2 bounds ‖C‖₂ by T · pairs · (task factor) · H · G. What is printed and what can be derived is in
`studies.theory.equivalence`; here both are put beside the measured norm, over α and over the size of the
weights. What is called the appendix's bound has the task factor |α(T+1) − 1| of Equations 24 and 25, the end of its
proof; the theorem as the appendix restates it has |αT − 1|.

**Source.** Zhou et al. 2025, On Task Vectors and Gradients, Theorems 1 and 2. The signs, factors and bounds called
derived are derived in `studies/theory/equivalence.py` and `bounds.py`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import pandas as pd
from matplotlib.figure import Figure
from pydantic import Field

from mergeflow.errors import MergeflowError, unknown_name
from mergeflow.modalities.classification import Classification
from studies.lab import Claim, Laboratory, Row, Section, Study, curves, select
from studies.theory.equivalence import (
    coefficient_rows,
    epoch_rows,
    factor_rows,
    gap_rows,
    joint_rows,
    network_row,
    one_epoch_rows,
    slope_row,
)
from studies.theory.gradient_descent import Problem, feed_forward_problem, model_problem
from tasks.models import load_base_head, load_examples

ACTIVATIONS = ("tanh", "relu")
EXACT = 1e-12
SLOPES = {"gap": "gap", "after_derived": "less derived", "after_halved": "less half", "after_printed": "less printed"}
NOTES = [
    "Theorem 1, equation 2, is wrong in sign and lacks a factor: the gap is −αη²C, not +η²C. The last line of the "
    "paper's own proof has −α; the ½ in its Taylor step is the one of the loss's expansion, not of the gradient's.",
    "Theorem 2, task factor: |αT − 1| (statement) holds for αT ≥ 2 and is 0 at α = 1/T, the average, where C is not; "
    "|α(T+1) − 1| (last line of the proof) holds for α(T+1) ≥ 2 and is then larger than needed; max(1, |αT − 1|) holds "
    "always, and by algebra no smaller factor does. The number of pairs of epochs, C(h+2, 2) or (h+1)(h+2)/2, is the "
    "same and right.",
    "Theorem 2, network constants: the printed G lacks the sum over layers, √(Σ_l s_l^−2); the printed H is 0 where "
    "φ'' = 0, and for ReLU drops the products of two layers' weights. For weights of usual size both are far above ‖C‖ "
    "and the error does not show; for small weights they are below it. The main text's ReLU line takes H·G for H and "
    "multiplies by G again.",
    "For ReLU the expansion ends at the step size at which a hidden unit switches side: the gradient jumps there, and "
    "the theorem's Taylor step has no Hessian. Beyond it the gap falls at no single rate.",
]


class Options(Section):
    scale: float = Field(0.7, gt=0)  # α of most tables
    epochs: int = Field(3, ge=2)  # k of most tables
    widths: list[int] = Field([8, 16, 16, 4], min_length=2)  # input width, hidden widths and classes of the nets
    samples: int = Field(32, ge=1)  # inputs per task of the nets
    seeds: list[int] = Field([0, 1, 2], min_length=1)  # of the nets and their tasks
    net_step: float = Field(0.1, gt=0)  # η of the nets in G1, G2 and G4
    # η of the nets in G3, ascending
    net_steps: list[float] = Field([1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1], min_length=2)
    # α where it varies
    scales: list[float] = Field([0.1, 0.2, 0.25, 1 / 3, 0.5, 0.7, 0.85, 1.0, 1.25, 1.5], min_length=1)
    # factors on the nets' initial weights
    gains: list[float] = Field([0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 4.0], min_length=1)
    model_tasks: list[str]  # tasks of the project, for its own model; none: the nets alone
    examples: int = Field(12, ge=1)  # training examples of each of these tasks
    # η of that model in G3, ascending; the last also in G1 and G2
    model_steps: list[float] = Field([1e-6, 1e-5, 1e-4, 3e-4], min_length=2)
    model_scales: list[float] = Field([1 / 3, 0.7], min_length=1)  # its α where it varies


@dataclass(frozen=True)
class Case:
    """One model in the study: a problem, its seed (of nets), η of the exact tables, η of G3, and α where it varies."""

    problem: Problem
    seed: int | None
    step: float
    steps: Sequence[float]
    scales: Sequence[float]


def measure(lab: Laboratory, options: Options) -> Iterator[Row]:
    """Yield the rows of every table (`table`), for each model and seed."""
    works: dict[str, Callable[[], Iterable[Row]]] = {
        f"{case.problem.name} {case.seed}": partial(measure_case, options, case) for case in _nets(options)
    }
    if options.model_tasks:
        works["model"] = partial(measure_model, lab, options)
    works |= {f"weights {seed}": partial(measure_networks, options, seed) for seed in options.seeds}
    yield from lab.cached(works, "models")


def measure_model(lab: Laboratory, options: Options) -> list[Row]:
    """Return the rows of the project's own model on its first training examples."""
    for task in options.model_tasks:
        if task not in lab.tasks:
            raise unknown_name("task", task, lab.tasks)
    problem = model_problem(lab.model, [_few(lab, task, options.examples) for task in options.model_tasks])
    case = Case(problem, None, options.model_steps[-1], options.model_steps, options.model_scales)
    return measure_case(options, case)


def _few(lab: Laboratory, task: str, count: int) -> Classification:
    """Return a task's first training examples, in memory."""
    head = load_base_head(lab.io, task, lab.device)
    whole = load_examples(lab.io, "train", task, lab.device, head)
    if not isinstance(whole, Classification):
        raise MergeflowError(f"task '{task}' is not one of classes, which the theorems are measured on: name another.")
    return replace(whole, inputs=whole.inputs[:count], labels=whole.labels[:count])


def measure_case(options: Options, case: Case) -> list[Row]:
    return [
        {"table": table, "seed": case.seed, **row} for table, rows in rows_of(case, options).items() for row in rows
    ]


def _nets(options: Options) -> list[Case]:
    size = {"widths": tuple(options.widths), "samples": options.samples}
    return [
        Case(
            feed_forward_problem(activation, seed=seed, **size),  # type: ignore[arg-type]
            seed,
            options.net_step,
            options.net_steps,
            options.scales,
        )
        for activation in ACTIVATIONS
        for seed in options.seeds
    ]


def rows_of(case: Case, options: Options) -> dict[str, list[Row]]:
    problem, scale, epochs = case.problem, options.scale, options.epochs
    gaps = list(gap_rows(problem, scale, case.steps, epochs))
    growth = epoch_rows(problem, scale, case.steps[0], (2, 3, 5, 8)) if problem.net else ()
    return {
        "one_epoch": list(one_epoch_rows(problem, case.step)),
        "joint": list(joint_rows(problem, case.step, case.scales, epochs)),
        "gap": gaps,
        "slopes": [slope_row(gaps)],
        "coefficient": list(coefficient_rows(problem, case.scales, case.steps[0], epochs)),
        "growth": list(growth),
        "task_factor": list(factor_rows(problem, case.scales, case.step, epochs if problem.net else 2)),
    }


def measure_networks(options: Options, seed: int) -> Iterator[Row]:
    """Yield bounds over the size of the weights, and softmax regression from zero, which the printed ones call flat."""
    size, about = {"samples": options.samples, "seed": seed}, {"table": "network", "seed": seed}
    for activation in ACTIVATIONS:
        for gain in options.gains:
            problem = feed_forward_problem(activation, tuple(options.widths), gain=gain, **size)
            yield about | network_row(problem, gain, options.scale, options.net_step, options.epochs)
    ends = (options.widths[0], options.widths[-1])
    flat = replace(feed_forward_problem("relu", ends, gain=0.0, **size), name="softmax regression")
    yield about | network_row(flat, 0.0, options.scale, options.net_step, 2)


# What the rows are asked: one exception refutes an identity or a bound, so no interval decides


def part(rows: pd.DataFrame, table: str) -> pd.DataFrame:
    return select(rows, table=table)


def span(values: pd.Series, form: str) -> str:
    """Return the values' range as text, one number where both ends print the same."""
    low, high = f"{values.min():{form}}", f"{values.max():{form}}"
    return low if low == high else f"{low} to {high}"


Decision = tuple[bool | None, str]


def one_epoch(rows: pd.DataFrame) -> Decision:
    gaps = part(rows, "one_epoch")
    return bool(gaps.error.max() <= EXACT), f"largest difference {gaps.error.max():.1e} over {len(gaps)} experts"


def joint_step(rows: pd.DataFrame) -> Decision:
    gaps = part(rows, "joint")
    first, later = select(gaps, epochs=1).error.max(), gaps[gaps.epochs > 1].error.min()
    text = f"largest difference {first:.1e} after one epoch; after more at least {later:.1e}"
    return bool(first <= EXACT < later), text


def slope(name: str, expected: int, rows: pd.DataFrame) -> Decision:
    values = part(rows, "slopes")[name]
    text = f"log–log slopes {span(values, '.2f')} over {len(values)} models and seeds"
    return bool(((values - expected).abs() <= 0.1).all()), text


def coefficient(rows: pd.DataFrame) -> Decision:
    measured, first = part(rows, "coefficient"), part(rows, "gap").groupby(["model", "seed"], dropna=False).first()
    worst = ((measured.measured - measured.derived).abs() / measured.scale).max()
    text = (
        f"at α = {first.scale.iloc[0]:g} measured {span(first.coefficient, '.5f')}; over all α within "
        f"{100 * worst:.4f} % of −α"
    )
    return bool(worst <= 0.01), text


def growth(rows: pd.DataFrame) -> Decision:
    measured = part(rows, "growth")
    off = (measured.ratio / measured.derived - 1).abs().max()
    return bool(off <= 0.02), f"within {100 * off:.3f} % up to k = {measured.epochs.max():g}"


def derived_bounds(rows: pd.DataFrame) -> Decision:
    factors, networks = part(rows, "task_factor"), part(rows, "network")
    worst, slack = (factors.measured / factors.derived).max(), (networks.norm / networks.derived).max()
    text = f"at most {worst:.2f} of the bound with measured H and G, {slack:.1e} of the one in spectral norms"
    return bool(worst <= 1 and slack <= 1), text


def usual_weights(rows: pd.DataFrame) -> Decision:
    usual = select(part(rows, "network"), gain=1.0)
    below = [(usual.norm / usual[name]).max() for name in ("statement", "appendix")]
    return bool(max(below) <= 1), f"‖C‖ / bound {below[0]:.1e} (main text) and {below[1]:.1e} (appendix)"


def task_factor(name: str, rows: pd.DataFrame) -> Decision:
    factors = part(rows, "task_factor")
    failing = sorted(factors[factors.measured > factors[name]].scale.unique())
    at = ", ".join(f"{scale:.3g}" for scale in failing)
    return not failing, f"fails at α = {at}" if failing else "holds at all tried α"


def spectral_bound(name: str, rows: pd.DataFrame) -> Decision:
    networks = part(rows, "network")
    failing = networks[networks.norm > networks[name]]
    text = "; ".join(
        f"{model} ×{gain:g}: {span(nets.norm / nets[name], '.1e')} ({len(nets)} seeds)"
        for (model, gain), nets in failing.groupby(["model", "gain"], sort=False)
    )
    return not len(failing), f"‖C‖ / bound, where above 1: {text or 'nowhere'}"


# fmt: off
def claims(options: Options) -> list[Claim]:
    slopes = {
        "gap": ("The gap falls as η².", 2),
        "after_derived": ("Less the derived −αη²C′ it falls as η³.", 3),
        "after_halved": ("Less half of that (the ½ of the proof's Taylor step) it falls as η³.", 3),
        "after_printed": ("Less the printed +η²C (Theorem 1) it falls as η³.", 3),
    }
    factors = {"statement": "|αT − 1| (statement)", "proof": "|α(T+1) − 1| (last line of the proof)"}
    return [
        Claim("G1", "After one epoch the task vector is −η∇L(θ0), to 1e-12.", decide=one_epoch,
              of=f"every expert of every model and seed ≤ {EXACT:g}: one exception refutes it"),
        Claim("G2",
              "One-epoch task arithmetic with scale α is one joint step αη, to 1e-12; with more epochs it is not.",
              decide=joint_step, of=f"one epoch ≤ {EXACT:g} < more epochs, for every model and seed"),
        *(Claim("G3", says, decide=partial(slope, name, expected),
                of=f"slope within 0.1 of {expected}, for every model and seed")
          for name, (says, expected) in slopes.items()),
        Claim("G3", "The coefficient along C is the derived −α, not the printed +1 or the halved −α/2.",
              decide=coefficient, of="within 1 % of −α, for every model, seed and α"),
        Claim("G3", "The gap grows with k as the number of pairs of epochs, k(k−1)/2.", decide=growth,
              of="within 2 %, for every model, seed and k", ours=True),
        Claim("G4", "‖C‖₂ is below the derived bounds everywhere.", decide=derived_bounds,
              of="measured / bound ≤ 1 everywhere", ours=True),
        Claim("G4", f"At α = {options.scale:g} and weights of usual size ‖C‖₂ is below both printed bounds.",
              decide=usual_weights, of="‖C‖ / bound ≤ 1 for every net and seed"),
        *(Claim("G4", f"The task factor {words} bounds C.", decide=partial(task_factor, name),
                of="at every α, model and seed") for name, words in factors.items()),
        *(Claim("G4", f"The bound in the weights' spectral norms as printed in the {words} holds.",
                decide=partial(spectral_bound, name),
                of="‖C‖ / bound ≤ 1 for every net, size of weights and seed: one exception refutes it")
          for name, words in {"statement": "main text", "appendix": "appendix"}.items()),
    ]
# fmt: on


def exact_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the largest difference in any weight: τ and −η∇L after one epoch, θ_TA and θ_MT after k."""
    single = part(rows, "one_epoch").assign(compared="τ and −η∇L", epochs=1, moved=rows.largest)
    both = pd.concat([single, part(rows, "joint").assign(compared="θ_TA and θ_MT")])
    largest = both.groupby(["model", "compared", "epochs", "step"], sort=False)[["moved", "error"]].max()
    return largest.map("{:.1e}".format)


def spans(table: str, index: list[str], values: dict[str, str], form: str) -> Callable[[pd.DataFrame], pd.DataFrame]:
    """Return the table of ranges over seeds."""

    def made(rows: pd.DataFrame) -> pd.DataFrame:
        groups = part(rows, table).groupby(index, sort=False)
        return pd.DataFrame({label: groups[name].agg(span, form) for name, label in values.items()})

    return made


def side_by_side(
    table: str, key: str, value: str, form: str, claimed: list[str]
) -> Callable[[pd.DataFrame], pd.DataFrame]:
    """Return the table of what each model measured, as a range over seeds, then what is claimed, by `key`."""

    def made(rows: pd.DataFrame) -> pd.DataFrame:
        chosen = part(rows, table).sort_values(key)
        measured = chosen.groupby([key, "model"], sort=False)[value].agg(span, form).unstack("model").fillna("")
        claims = chosen.groupby(key)[claimed].first().map(lambda number: f"{number:{form}}")
        return pd.concat([measured, claims], axis=1)

    return made


def gap_table(rows: pd.DataFrame) -> pd.DataFrame:
    gaps = first_seed(part(rows, "gap")).set_index(["model", "step"])
    sizes = gaps[list(SLOPES)].rename(columns=SLOPES).map("{:.2e}".format)
    return sizes.assign(coefficient=gaps.coefficient.round(4), aligned=gaps.aligned.round(4), switched=gaps.switched)


def first_seed(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of each model's first seed."""
    first = rows.groupby("model", sort=False).seed.transform("first")
    return rows[(rows.seed == first) | first.isna()]


def log_figure(rows: pd.DataFrame, x: str, y_label: str, x_label: str, values: list[str]) -> Figure:
    """Draw values of each model's first seed on logarithmic axes."""
    long = rows.melt([x, "model"], values, "of", "size").assign(seed=0)
    return curves(
        long, x, "of", "size", "model", labels=NETWORK, x_label=x_label, y_label=y_label, scale="log", log_y=True,
        columns=3,
    )  # fmt: skip


NETWORK = {"norm": "‖C‖", "statement": "main text", "appendix": "appendix", "derived": "derived"}
NETWORK |= {"gradient": "G, measured", "gradient_printed": "G, printed", "gradient_derived": "G, derived"}
NETWORK |= {"hessian": "H, measured", "hessian_printed": "H, printed", "hessian_derived": "H, derived"}

STUDY = Study(
    options=Options,
    splits=("train",),
    systems=("G1", "G2", "G3", "G4"),
    measure=measure,
    claims=claims,
    tables={
        "G1, G2: the largest difference in any weight": exact_table,
        "G3: log–log slopes over η, range over seeds": spans("slopes", ["model", "epochs", "scale"], SLOPES, ".3f"),
        "G3: the coefficient of η²C in the gap, range over seeds": side_by_side(
            "coefficient", "scale", "measured", ".4f", ["derived", "halved", "printed"]
        ),
        "G3: the gap after k epochs over that after two, range over seeds": side_by_side(
            "growth", "epochs", "ratio", ".3f", ["derived"]
        ),
        "G3: the gap and what is left of it, first seed": gap_table,
        "G4: ‖C‖ / (T · pairs · H · G), range over seeds, and the task factors claimed": side_by_side(
            "task_factor", "scale", "measured", ".3f", ["statement", "proof", "derived"]
        ),
        "G4: bounds in the weights' spectral norms, range over seeds": spans(
            "network", ["model", "gain"], NETWORK, ".1e"
        ),
    },
    figures={
        "gap": lambda rows: log_figure(first_seed(part(rows, "gap")), "step", "‖gap‖", "η", list(SLOPES)),
        "bounds": lambda rows: log_figure(
            first_seed(part(rows, "network")).query("gain > 0"), "gain", "norm", "weights ×", list(NETWORK)[:4]
        ),
    },
    notes=lambda rows, options: NOTES,
)
