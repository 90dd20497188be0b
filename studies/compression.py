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

`texts_compression` is the same with eight real tasks on texts, tuned on a pre-trained encoder (worlds/real-texts).

**Source.** CART, Appendix C.2, Table 3 (Table 4, on texts, is part of the study `glue`); EMR-Merging (Huang et al.,
NeurIPS 2024); TALL masks (Wang et al., ICML 2024); TSV-C (Gargiulo et al., CVPR 2025).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from pydantic import Field

from mergeflow.evaluation.averages import mean
from mergeflow.merging.matrices import is_matrix, rank_of
from studies.lab import Claim, Laboratory, Row, Section, Study, accuracy_rows
from studies.lab.claims import Parts, Samples, Verdict, all_within, with_interval
from studies.lab.inputs import State
from studies.lab.methods import measure_file
from studies.lab.rows import select, shares
from studies.lab.study import Tables
from tasks.plotting.drawing import FULL_WIDTH, dress, legend, panels
from tasks.plotting.palette import MUTED
from tasks.plotting.panels import curve

RUN = "experts"
SIZES = ("file", "own", "one_task", "all_experts", "needs_base", "formula_bits")
STORAGE = 0.25  # of all experts' bytes
CURVES = {"cart": "CART-Indexing", "tsv_curve": "TSV-C"}

Sizes = Mapping[str, Sequence[int]]


class Options(Section):
    counts: list[int] = Field(min_length=1)  # the first so many tasks
    rank_ratio: float = Field(gt=0, le=1)  # of CART-Indexing in the table
    ratios: list[float]  # of the curves
    thresholds: list[float] = Field(min_length=1)  # of TALL masks, tried on validation
    keep: float = Field(gt=0, le=1)  # of TIES
    target: float = Field(gt=0, le=1)  # the relative accuracy asked of the smallest rank


def measure(lab: Laboratory, options: Options) -> list[Row]:
    """Return accuracy for each number of tasks, seed, way of compressing, split and task; `part` tells rows apart.

    `suites`: accuracy in % of what is read out of the file and of the task's expert, and bytes: of the file, of its
    shared part, of one task's part, of what reading one task takes, of all experts, and of θ0, which may be needed
    beside it. `formula_bits` is a task's part by the paper's formula. `thresholds`: those of TALL masks.
    """
    measured = partial(measure_suite, options=options)
    rows = [row for n in options.counts for row in lab.first(n).by_run([RUN], measured, name=f"{n}_")]
    return sorted(rows, key=lambda row: row["part"] == "thresholds")


def measure_suite(lab: Laboratory, run: str, seed: int, options: Options) -> Iterator[Row]:
    """Yield the rows of all ways of compressing the experts of a run."""
    experts, count = lab.run(run).experts(seed), len(lab.tasks)
    individual = {split: lab.individual(experts, split) for split in ("validation", "test")}
    sizes = {name: list(tensor.shape) for name, tensor in lab.base.items()}
    tall = {"of": "ties", "keep": options.keep}
    tried = {cut: mask_accuracy(lab, experts, {**tall, "threshold": cut}) for cut in options.thresholds}
    best = max(tried, key=lambda threshold: mean(tried[threshold]))
    ways: list[tuple[str, str, tuple[str, ...], dict[str, Any]]] = [
        ("own", "cart_indexing", ("test",), {"rank_ratio": options.rank_ratio, "non_matrices": "own"}),
        ("emr", "emr", ("test",), {}),
        ("tall", "tall_mask", ("test",), {**tall, "threshold": float(best)}),
        ("tsv", "tsv_compress", ("test",), {}),
        *(
            ("cart", "cart_indexing", ("validation", "test"), {"rank_ratio": ratio})
            for ratio in sorted({options.rank_ratio, *options.ratios})
        ),
        *(("tsv_curve", "tsv_compress", ("test",), {"rank_ratio": ratio}) for ratio in options.ratios),
    ]
    for kind, name, splits, args in ways:
        accuracy, size = measure_file(lab, experts, name, args, splits)
        about = {"part": "suites", "seed": seed, "tasks": count, "kind": kind}
        about |= {argument: args.get(argument) for argument in ("rank_ratio", "threshold")}
        about |= {**file_shares(size), **size, "formula_bits": formula_bits(kind, args, sizes)}
        for split in splits:
            for row in accuracy_rows(accuracy[split], **about, split=split):
                yield row | {"expert": 100 * individual[split][row["task"]]}
    for threshold, measured in tried.items():
        about = {"part": "thresholds", "seed": seed, "tasks": count, "threshold": threshold}
        about |= {"chosen": threshold == best, "kind": "tall", "split": "validation"}
        yield from accuracy_rows(measured, **about)


def mask_accuracy(lab: Laboratory, experts: Mapping[str, State], args: dict[str, Any]) -> dict[str, float]:
    """Return the accuracy on validation of TALL masks with one threshold; test cannot be read."""
    return measure_file(lab.blind(), experts, "tall_mask", args, ("validation",))[0]["validation"]


def file_shares(size: Row) -> Row:
    """Return the file's share of all experts' bytes, alone and with θ0 where it is needed.

    Example:
        >>> file_shares({"file": 20, "base": 10, "needs_base": True, "all_experts": 100})
        {'file_share': 0.2, 'with_base_share': 0.3}
    """
    base = size["base"] if size["needs_base"] else 0
    whole = float(size["all_experts"])
    return {"file_share": size["file"] / whole, "with_base_share": float(size["file"] + base) / whole}


def mask_bits(sizes: Sizes) -> int:
    """Return the bits of one task's mask by the paper's formula, one an entry.

    Example:
        >>> mask_bits({"a.mlp.weight": [4, 3], "b": [3]})
        15
    """
    return sum(prod(shape) for shape in sizes.values())


def low_rank_bits(sizes: Sizes, ratio: float) -> int:
    """Return the bits of one task's low-rank part by the paper's formula, Σ 32 (m + n) k over the treated matrices."""
    treated = [shape for name, shape in sizes.items() if is_matrix(name, shape, "attn_mlp")]
    return sum(32 * sum(shape) * rank_of(shape, ratio, "ceil") for shape in treated)


def formula_bits(kind: str, args: Mapping[str, Any], sizes: Sizes) -> int | None:
    """Return the bits of one task's part by the paper's formula; None for what has none."""
    if kind == "cart":
        return low_rank_bits(sizes, args["rank_ratio"])
    return mask_bits(sizes) if kind in ("emr", "tall") else None


# What the rows are asked


def suites(rows: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each number of tasks, seed, way of compressing and split: mean and relative accuracy in %."""
    measured = select(rows, part="suites")
    key = ["tasks", "kind", "rank_ratio", "split", "seed"]
    groups = measured.assign(relative=shares(measured.accuracy, measured.expert)).groupby(key, sort=False, dropna=False)
    first = groups[["threshold", *(c for c in measured if "share" in c or c in SIZES)]].first()
    return first.join(groups[["accuracy", "expert", "relative"]].mean()).reset_index()


def of(rows: pd.DataFrame, kind: str, count: int, ratio: float | None = None, split: str = "test") -> pd.DataFrame:
    """Return one row for each seed; of a curve, those with a rank ratio."""
    of_kind = select(suites(rows), kind=kind, tasks=count, split=split)
    return (select(of_kind, rank_ratio=ratio) if kind in CURVES and ratio is not None else of_kind).set_index("seed")


def counts(rows: pd.DataFrame) -> list[int]:
    return sorted(rows.tasks.unique())


def relative(rows: pd.DataFrame, ratio: float) -> Samples:
    return {f"{n} tasks": of(rows, "cart", n, ratio).relative for n in counts(rows)}


def smallest(rows: pd.DataFrame, count: int, target: float) -> float | None:
    """Return the smallest rank ratio of CART-Indexing that keeps the target on validation, mean over seeds."""
    means = of(rows, "cart", count, split="validation").groupby("rank_ratio").relative.mean()
    enough = means.index[means >= 100 * target]
    return float(min(enough)) if len(enough) else None


def at_the_smallest(target: float, rows: pd.DataFrame) -> Samples:
    ratios = {n: smallest(rows, n, target) for n in counts(rows)}
    curves_at = {n: of(rows, "cart", n, ratio).relative for n, ratio in ratios.items() if ratio}
    return (
        {f"{n} tasks, rank ratio {ratios[n]:g}": values for n, values in curves_at.items()}
        if len(curves_at) == len(ratios)
        else {}
    )


def ahead(kind: str, ratio: float, rows: pd.DataFrame) -> Samples:
    return {f"{n} tasks": of(rows, "cart", n, ratio).relative - of(rows, kind, n).relative for n in counts(rows)}


def in_a_quarter(ratio: float, rows: pd.DataFrame) -> tuple[Verdict, str]:
    storage = {n: float(of(rows, "cart", n, ratio).file_share.iloc[0]) for n in counts(rows)}
    shares_kept = relative(rows, ratio)
    words = [
        f"{name}: {with_interval(values)} % in {100 * size:.1f} %"
        for (name, values), size in zip(shares_kept.items(), storage.values(), strict=True)
    ]
    small = all(size <= STORAGE for size in storage.values())
    parts: Parts = {name: (values, 98, math.inf) for name, values in shares_kept.items()}
    return all_within(parts) if small else False, "; ".join(words)


def change_of_emr(rows: pd.DataFrame) -> Samples:
    few, many = counts(rows)[0], counts(rows)[-1]
    change = of(rows, "emr", many).relative - of(rows, "emr", few).relative
    return {f"{few} → {many} tasks": change} if few < many else {}


# Claims, written before the run
# fmt: off

def claims(options: Options) -> list[Claim]:
    ratio, target, rank = options.rank_ratio, 100 * options.target, f"{100 * options.rank_ratio:g} % rank"
    always, relative_ahead = "at every number of tasks", "paired difference of relative accuracy"
    return [
        Claim("C5", f"CART-Indexing at {rank} keeps {target:g} % of individual accuracy.",
              lambda rows: relative(rows, ratio),
              low=target, of=f"relative accuracy {always}", unit="%", paper="99.6 % with 8 tasks"),
        Claim("C5", f"CART-Indexing at {rank} keeps 98 % of individual accuracy in a quarter of the storage.",
              of=f"relative accuracy ≥ 98 % and file ≤ {100 * STORAGE:g} % of all experts, {always}", ours=True,
              decide=partial(in_a_quarter, ratio)),
        Claim("C5", f"CART-Indexing keeps {target:g} % of individual accuracy at the rank that does so on validation.",
              partial(at_the_smallest, options.target),
              low=target - 0.1, of=f"relative accuracy on test {always}", unit="%", ours=True),
        Claim("C5", "CART-Indexing keeps more accuracy than EMR.", partial(ahead, "emr", ratio),
              low=0, of=f"{relative_ahead} {always}", paper="1.3, 3.5, 3.8 points of accuracy with 8, 14, 20 tasks"),
        Claim("C5", "CART-Indexing comes within a point of TALL masks on TIES.", partial(ahead, "tall", ratio),
              low=-1, of=f"{relative_ahead} {always}",
              paper="−0.7, −0.4, −0.1 points of accuracy with 8, 14, 20 tasks"),
        Claim("C5", "EMR loses more accuracy with more tasks.", change_of_emr, high=0, of=relative_ahead, ours=True),
    ]

# fmt: on


def labels(ratio: float) -> dict[str, str]:
    return {
        "cart": f"CART-Indexing, {100 * ratio:g} %",
        "own": f"CART-Indexing, {100 * ratio:g} %, own",
        "emr": "EMR",
        "tall": "TALL mask + TIES",
        "tsv": "TSV-C",
    }


def accuracy_table(ratio: float, rows: pd.DataFrame) -> pd.DataFrame:
    """Return accuracy and storage of every method and number of tasks (the paper's Table 3)."""
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for count in counts(rows):
        about = f"{count} tasks"
        lines[about, "individual"] = {"test accuracy, %": with_interval(of(rows, "emr", count).expert)}
        lines[about, "individual"] |= dict.fromkeys(
            ("relative, %", "file, %", "with θ0, %", "to read one task, %"), "100.0"
        )
        for kind, label in labels(ratio).items():
            measured = of(rows, kind, count, ratio)
            first = measured.iloc[0]
            lines[about, label] = {
                "test accuracy, %": with_interval(measured.accuracy),
                "relative, %": with_interval(measured.relative),
                "file, %": f"{100 * first.file_share:.1f}",
                "with θ0, %": f"{100 * first.with_base_share:.1f}",
                "to read one task, %": f"{100 * first.one_task * count / first.all_experts:.1f}",
            }
    return pd.DataFrame(lines).T


def bits_table(ratio: float, rows: pd.DataFrame) -> pd.DataFrame:
    """Return the counted bits of each part beside the paper's formulas, of the fewest tasks and the first seed."""
    count, lines = counts(rows)[0], {}
    shared = select(rows, part="suites", tasks=count).groupby("kind").shared.first()
    for kind, label in labels(ratio).items():
        row = of(rows, kind, count, ratio).iloc[0]
        lines[label] = {
            "a task's part, kbit": f"{8e-3 * row.own:.0f}",
            "by the formula, kbit": "" if pd.isna(row.formula_bits) else f"{1e-3 * row.formula_bits:.0f}",
            "part / expert, %": f"{100 * row.own * count / row.all_experts:.2f}",
            "shared part, kbit": f"{8e-3 * shared[kind]:.0f}",
            "file, kbit": f"{8e-3 * row.file:.0f}",
            "needs θ0": "yes" if row.needs_base else "no",
        }
    return pd.DataFrame(lines).T


def tables(options: Options) -> Tables:
    ratio, few = options.rank_ratio, min(options.counts)
    percent = "file and θ0 in % of all experts, what reading one task takes in % of one expert"
    return {
        f"Accuracy and storage; {percent}": partial(accuracy_table, ratio),
        f"Bits counted in the file of {few} tasks, first seed": partial(bits_table, ratio),
    }


def storage_figure(options: Options, rows: pd.DataFrame) -> Figure:
    """Draw relative accuracy over storage, a panel per number of tasks; a rank's curve is a line, a mask a point."""
    figure, axes = panels(len(counts(rows)), 3, 3.7, sharey=True)
    for index, (panel, count) in enumerate(zip(axes, counts(rows), strict=True)):
        dress(panel, f"{count} tasks", "with θ0, % of all experts", "relative accuracy, %" if index == 0 else "")
        measured = select(suites(rows), split="test", tasks=count)
        for number, (kind, label) in enumerate({**CURVES, **labels(options.rank_ratio)}.items()):
            if kind in (*CURVES, "emr", "tall") and (number < 2 or kind not in CURVES):
                groups = select(measured, kind=kind).groupby("rank_ratio", dropna=False)
                points = {100 * group.with_base_share.iloc[0]: list(group.relative) for _, group in groups}
                style = {"linestyle": "-", "markersize": 5.5} if len(points) > 1 else {"linestyle": "", "markersize": 8}
                curve(panel, points, label, number, **style)
        panel.axhline(100, color=MUTED, linestyle=(0, (4, 3)), linewidth=1.1)
        panel.axhline(98, color=MUTED, linestyle=":", linewidth=1.1)
        panel.set_xscale("log")
        ticks = [tick for tick in (5, 10, 20, 40, 80, 160) if tick >= 80 * measured.with_base_share.min()]
        panel.set_xticks([], minor=True)
        panel.set_xticks(ticks, labels=[str(tick) for tick in ticks])
    legend(figure, FULL_WIDTH, loc="outside lower center")
    return figure


def notes(rows: pd.DataFrame, options: Options) -> list[str]:
    ratio, few, most = options.rank_ratio, counts(rows)[0], counts(rows)[-1]
    first = {kind: of(rows, kind, few, ratio).iloc[0] for kind in ("cart", "emr")}
    part = {kind: row.own * few / row.all_experts for kind, row in first.items()}
    chosen, own_less_mean = select(suites(rows), kind="tall"), []
    for count in counts(rows):
        separate, shared = (of(rows, kind, count, ratio) for kind in ("own", "cart"))
        gained = separate.relative.mean() - shared.relative.mean()
        more = 100 * (separate.file_share.iloc[0] - shared.file_share.iloc[0])
        own_less_mean.append(f"{count} tasks {gained:+.1f} points for {more:.1f} % more")
    return [
        f"Per task, {100 * ratio:g} % rank costs {100 * part['cart']:.1f} % of an expert and a mask "
        f"{100 * part['emr']:.1f} %. The paper's formulas give 32 · 2Mk bits for k = ρM against M² for a mask: their "
        "ratio is 64ρ for a square matrix of any width (5.1 at 8 %), so a wider model does not bring a rank that grows "
        "with it nearer to a mask; what the width decides is a fixed rank, which beats a mask of such a matrix from "
        "M = 64k on. The printed break-even at M ≈ 1024 holds for k = 16, a ratio of 1.6 %. Other shapes differ.",
        f"The shared part is paid once: a mean or a merged vector is {100 / few:.1f} % of {few} experts and "
        f"{100 / most:.1f} % of {most}. The masks and TSV-C need θ0 beside the file, CART-Indexing does not.",
        "With each task's own tensors beside the matrices in place of the mean's (the row `own`): "
        f"{'; '.join(own_less_mean)}.",
        "TALL's threshold, from validation: "
        + ", ".join(f"{row.threshold:g} ({row.tasks} tasks)" for row in chosen.itertuples())
        + ".",
    ]


STUDY = Study(
    options=Options,
    runs=lambda options: [RUN],
    splits=("validation", "test"),
    systems=("C5",),
    measure=measure,
    claims=claims,
    tables=tables,
    figures=lambda options: {"storage": partial(storage_figure, options)},
    notes=notes,
)

STUDIES = {"compression": STUDY, "texts_compression": STUDY}
