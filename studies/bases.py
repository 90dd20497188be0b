"""Study `bases` (C1, C2): which part of what merging shows here comes from how the base was pre-trained?

**Question.** The suite's first base saw drawings of the tasks' own style, and a share of the classes under wrong names.
What do the merge methods show on bases of the same pre-training with right names, with right names in another style,
and with right names and few drawings? Undoing a permutation of names may itself be of low rank: is it?

**Method.** Every base has the architecture, steps, batches and schedule of the embedded one and differs in one thing:
*confused* names (`pocket8`: an image of a confused class mostly carries the next class's name), *right* names, right
names in *another style* (`pocket8-prints`: other typefaces, pale colours on tinted paper, dark outlines, hatching, few
levels of colour; no task has any of these), and right names with *few* drawings, shown as often. From each base one
expert a task is tuned, merged by average, task arithmetic, TIES, TSV-M, Iso-C and CART over its rank, and MIMA is run
with as many steps a task. Every scale is chosen on validation, CART's for each rank; then one look at test. Heads are
those of the base's own text tower.

*What fine-tuning undoes.* For the matrices of attention and MLP, the share of ‖τ_t‖² in the leading 8 % of the rank,
and the rank, as a share, that holds 90 % of it. For the features, the change of the class means Δ = mean(f(x; θ_t) | y)
− mean(f(x; θ0) | y), a C × D matrix, and the share of its rank C that holds 90 % of ‖Δ‖².

*The rule*, written before the run: where experts are at least 15 points above their average, and CART and TSV-M are
above task arithmetic, on the base of right names in another style, that base shows the field's gaps without a planted
error and should be the suite's. ± is over three seeds: the order of the batches; every base is trained once.

**Source.** CART, Table 1 and Figure 1, for what is looked at; the bases and the rule are ours.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from pydantic import Field
from torch import Tensor

from mergeflow.checkpoints import read_state, write_checkpoint
from mergeflow.evaluation import CandidateScorer, accuracies
from mergeflow.evaluation.averages import mean
from mergeflow.merging import configure
from mergeflow.merging.matrices import is_matrix, rank_of
from mergeflow.modalities.classification import Classification
from mergeflow.modalities.vision.models import POCKET, ClipModel, build_head, image_model, load_clip
from mergeflow.modality import Model
from mergeflow.training import FineTuneSettings, IterativeRun, fine_tune
from studies.lab import Claim, Laboratory, Row, Section, Study, accuracy_rows, choose_scale, grid
from studies.lab.claims import Samples, with_interval, within
from studies.lab.inputs import State
from studies.lab.methods import USED, arguments_of, at_end, ends_note
from studies.lab.plots import curves
from studies.lab.rows import samples, select
from studies.lab.study import Tables
from suites.pocket import TEMPLATES
from suites.pocket.pretraining import PretrainSettings, pretrain
from tasks.models import load_base_head, load_examples

NAMES = {
    "zero_shot": "zero-shot",
    "individual": "experts",
    "average": "average",
    "task_arithmetic": "task arithmetic",
    "ties": "TIES",
    "cart": "CART",
    "tsv": "TSV-M",
    "iso_c": "Iso-C",
    "mima": "MIMA",
}
GAP = 15.0  # points between experts and average that the field's suites have
MOST = 0.9  # of a squared norm
METHODS = ("task_arithmetic", "ties", "cart", "tsv", "iso_c")
LEVELS = ("individual", "task_arithmetic", "average")
SCALES = {
    "task_arithmetic": (grid(0.05, 1.0, 0.05), 0.3),
    "ties": (grid(0.2, 2.4, 0.2), 1.0),
    "tsv": (grid(0.2, 3.0, 0.2), 1.2),
    "iso_c": (grid(0.2, 3.0, 0.2), 1.2),
    "cart": ([0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0], 1.5),
}


class Arm(Section):
    label: str  # for readers
    pretrained: str | None = None  # a shipped base, which is this pre-training already made
    # the probability of the next class's caption, for classes that are confused at all
    confusion: float = Field(0.0, ge=0, le=1)
    style: Literal["own", "prints"] = "own"  # of the drawings, as in `PretrainSettings`
    images: int = Field(112_000, ge=1)  # how many are drawn; they are shown as often as `passes` says

    def settings(self, suite: str, passes: int) -> PretrainSettings:
        return PretrainSettings(
            suite=suite, images=self.images, passes=passes, style=self.style, confusion=self.confusion
        )


class Options(Section):
    seeds: list[int] = Field(min_length=1)  # of the order of the batches
    suite: str  # whose classes the bases see
    arms: dict[str, Arm] = Field(min_length=2)  # name → base
    passes: int = Field(ge=1)  # images shown to each
    steps: int = Field(ge=1)  # steps, batch_size, learning_rate: of every expert and, with rounds, of MIMA
    batch_size: int = Field(ge=1)
    learning_rate: float = Field(gt=0)
    rounds: int = Field(ge=1)
    ratios: list[float] = Field(min_length=2)  # of CART, k / r
    keep: float = Field(gt=0, le=1)  # of TIES

    def settings(self, **more: Any) -> FineTuneSettings:
        values: dict[str, Any] = {"regime": "steps", "steps": self.steps, "batch_size": self.batch_size}
        values |= {"learning_rate": self.learning_rate, "precision": "float32", "save_every": 100}
        return FineTuneSettings.model_validate(values | more)


def measure(lab: Laboratory, options: Options) -> list[Row]:
    """Return one row for each base, seed and: model and task; method; task.

    `model`: test accuracy on a task in %. `choice`: a method's arguments, and the mean accuracy on validation in % that
    chose them. `rank`: shares from 0 to 1, `kept` of ‖τ‖² in the leading 8 % of the rank, `weights` and `features` of
    the rank that holds 90 % of the change of weights and of class means.
    """
    for name in options.arms:
        open_base(lab, options, name)  # one after the other: each pre-training takes two cores
    pieces = {f"{n}_{s}": partial(measure_base, lab, options, n, s) for n in options.arms for s in options.seeds}
    return lab.cached(pieces, "bases and seeds")


def folder_of(lab: Laboratory, name: str) -> Path:
    """Return where a base and what is tuned from it lie, in the stage's scratch."""
    return lab.io.scratch / "bases" / name


def open_base(lab: Laboratory, options: Options, name: str) -> ClipModel:
    """Return a base; it is pre-trained once, and its file appears whole or not at all."""
    arm, path = options.arms[name], folder_of(lab, name) / "base.safetensors"
    if arm.pretrained is not None:
        return load_clip(POCKET, arm.pretrained)
    if not path.exists():

        def report(what: str, done: int, total: int) -> None:
            lab.io.report(f"{name}, {what}", done, total)

        pretrain(arm.settings(options.suite, options.passes), path, report, lab.io.params.run.workers)
    return load_clip(POCKET, str(path))


def measure_base(lab: Laboratory, options: Options, name: str, seed: int) -> Iterator[Row]:
    """Yield one base and seed: test accuracy by model, what was chosen, and the ranks of what was undone."""
    clip = open_base(lab, options, name)
    bench = open_bench(lab.blind(), clip, folder_of(lab, name))

    def report(what: str, done: int, total: int) -> None:
        lab.io.report(f"{name}, seed {seed}, {what}", done, total)

    tuned = experts(bench, options.settings(), seed, partial(report, "experts"))
    together = options.settings(regime="iterative", iterative={"rounds": options.rounds})
    mima = merged_in_rounds(bench, together, seed, partial(report, "rounds"))
    chosen = choose_merges(lab.blind(), options, bench, tuned)
    about = {"seed": seed, "base": name}
    for model, accuracy in look_at_test(lab, clip, bench, tuned, mima, chosen).items():
        yield from accuracy_rows(accuracy, part="model", **about, model=model)
    for model, (args, value) in chosen.items():
        yield {"part": "choice", **about, "model": model, "validation": 100 * value, **args}
    for task, state in tuned.items():
        ranks = {**weight_ranks(bench.base, state), "features": feature_rank(bench, state, task)}
        yield {"part": "rank", **about, "task": task, **ranks}


@dataclass(frozen=True)
class Bench:
    """A base and the tasks, judged with the heads of the base's own text tower."""

    model: Model
    base: State
    train: Mapping[str, Classification]
    validation: Mapping[str, Classification]
    folder: Path


def experts(
    bench: Bench, settings: FineTuneSettings, seed: int, report: Callable[[int, int], None]
) -> dict[str, State]:
    """Return θ_t of every task; those that are kept are not tuned again."""
    states = {}
    for done, (task, data) in enumerate(bench.train.items()):
        report(done, len(bench.train))
        path = bench.folder / f"seed_{seed}" / f"{task}.safetensors"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            bench.model.load(bench.base)
            fine_tune(bench.model, [data], settings, seed, path.with_suffix(".resume"), lambda: 0.0)
            write_checkpoint(path, bench.model.state())
        states[task] = read_state(path)
    return states


def merged_in_rounds(bench: Bench, settings: FineTuneSettings, seed: int, report: Callable[[int, int], None]) -> State:
    """Return MIMA's last average; rounds and tasks that are kept are not tuned again.

    Args:
        settings: with `regime="iterative"`.
    """
    base = bench.folder / "tower.safetensors"
    if not base.exists():
        write_checkpoint(base, bench.base)
    run = IterativeRun(bench.folder / f"mima_{seed}", base, tuple(bench.train), settings, seed)
    for number in range(1, run.rounds + 1):
        report(number - 1, run.rounds)
        for task in run.waiting(number):
            judged = {task: bench.validation[task]}
            run.tune(number, bench.model, bench.train[task], lambda j=judged, t=task: accuracies(bench.model, j)[t])  # type: ignore[misc]
        run.merge(number)
    return read_state(run.merged(run.rounds))


def class_means(bench: Bench, state: State, task: str) -> Tensor:
    """Return the mean feature of each class on validation images, float64 [C, D], on the processor."""
    data = bench.validation[task]
    bench.model.load(state)
    with torch.inference_mode():
        parts = [data.embeddings(bench.model, rows) for rows in torch.arange(len(data)).split(256)]
    features = torch.cat(parts).double()
    labels = data.labels.unique()
    return torch.stack([features[data.labels == label].mean(dim=0) for label in labels]).cpu()


def open_bench(lab: Laboratory, clip: ClipModel, folder: Path) -> Bench:
    """Return a base with the training and validation examples, judged with its own heads."""
    model = image_model(clip)
    model.module.to(lab.device)
    base = {name: tensor.to("cpu", copy=True) for name, tensor in model.state().items()}
    splits = [opened(lab, clip, split) for split in ("train", "validation")]
    return Bench(model, base, splits[0], splits[1], folder)


def opened(lab: Laboratory, clip: ClipModel, split: str) -> dict[str, Classification]:
    """Return one split of every task with a head of this base: the same class names, the suite's templates."""
    tasks = {}
    for task in lab.tasks:
        base_head = load_base_head(lab.io, task, lab.device)
        assert base_head is not None, "image tasks have heads"
        head = build_head(clip, base_head.class_names, TEMPLATES).to(lab.device)
        examples = load_examples(lab.io, split, task, lab.device, head)
        assert isinstance(examples, Classification), "image tasks are tasks of classes"
        tasks[task] = examples
    return tasks


def choose_merges(
    lab: Laboratory, options: Options, bench: Bench, tuned: Mapping[str, State]
) -> dict[str, tuple[dict[str, Any], float]]:
    """Return for each method, and for CART at each ratio, the arguments that are best on validation and its accuracy.

    Returns:
        `average`, `task_arithmetic`, `ties`, `tsv`, `iso_c`, `cart` (the best of all ratios) and `cart RATIO`.
    """
    scorer = CandidateScorer(bench.model, bench.validation, bench.base, tuned)
    scorer.renew_cache(1.0)
    chosen: dict[str, tuple[dict[str, Any], float]] = {"average": ({}, mean(scorer.candidate(configure("average"))))}
    others: list[tuple[str, str, dict[str, Any]]] = [
        ("task_arithmetic", "task_arithmetic", {}),
        ("ties", "ties", {"keep": options.keep}),
        ("tsv", "tsv", {}),
        ("iso_c", "iso_c", {}),
    ]
    others += [(f"cart {ratio:g}", "cart", {"rank_ratio": ratio}) for ratio in options.ratios]
    for label, method, args in others:
        scales, start = SCALES[method]
        best = choose_scale(lab, scorer, method, scales, start, args, test=False)
        chosen[label] = (best.args, mean(best.validation))
    curve = [chosen[f"cart {ratio:g}"] for ratio in options.ratios]
    return {**chosen, "cart": max(curve, key=lambda choice: choice[1])}


def look_at_test(
    lab: Laboratory,
    clip: ClipModel,
    bench: Bench,
    tuned: Mapping[str, State],
    mima: State,
    chosen: Mapping[str, tuple[dict[str, Any], float]],
) -> dict[str, dict[str, float]]:
    """Look at test once: accuracy by model and task."""
    test = opened(lab, clip, "test")
    scorer = CandidateScorer(bench.model, test, bench.base, tuned)
    scorer.renew_cache(1.0)
    accuracies = {"zero_shot": scorer.state(bench.base)}
    accuracies["individual"] = {task: scorer.state(state, {task: test[task]})[task] for task, state in tuned.items()}
    accuracies["mima"] = scorer.state(mima)
    for label, (args, _) in chosen.items():
        method = label.partition(" ")[0]
        if label != "cart":  # one of the ratios, which is looked at as such
            accuracies[label] = scorer.candidate(configure(method, args))
    return {**accuracies, "cart": accuracies[f"cart {chosen['cart'][0]['rank_ratio']:g}"]}


def weight_ranks(base: State, tuned: State) -> dict[str, float]:
    """Return the means over the matrices, each weighted by its share of ‖τ‖²."""
    retained, shares, sizes = [], [], []
    for name, start in base.items():
        if is_matrix(name, start.shape, "attn_mlp"):
            squares = torch.linalg.svdvals((tuned[name] - start).double()).square()
            retained.append(float(squares[: rank_of(tuple(start.shape), USED, "ceil")].sum()))
            sizes.append(float(squares.sum()))
            shares.append(rank_share(squares) * sizes[-1])
    return {"kept": sum(retained) / sum(sizes), "weights": sum(shares) / sum(sizes)}


def rank_share(squares: Tensor, most: float = MOST) -> float:
    """Return the smallest share of all values, falling, whose sum is at least `most` of the whole.

    Args:
        squares: σ², falling, [r], not all 0.
        most: of their sum.

    Example:
        >>> rank_share(torch.tensor([6.0, 3.5, 0.5, 0.0]))
        0.5
    """
    running = np.asarray(squares.cumsum(dim=0)) / float(squares.sum())
    return float((int(np.searchsorted(running, most - 1e-12)) + 1) / len(squares))


def feature_rank(bench: Bench, state: State, task: str) -> float:
    change = class_means(bench, state, task) - class_means(bench, bench.base, task)
    return rank_share(torch.linalg.svdvals(change).square())


# What the rows are asked


def reached(rows: pd.DataFrame, base: str, model: str) -> pd.Series:
    """Return mean test accuracy in %, by seed; the model is a key of `NAMES`, or `cart RATIO`."""
    return samples(rows, part="model", base=base, model=model)


def lead(rows: pd.DataFrame, base: str, better: str, worse: str) -> pd.Series:
    return reached(rows, base, better) - reached(rows, base, worse)


def curve_of(rows: pd.DataFrame, base: str) -> pd.DataFrame:
    """Return CART's accuracy, λ chosen for each rank: a row for each ratio, a column for each seed."""
    ratios = sorted(float(model.partition(" ")[2]) for model in rows.model.dropna().unique() if "cart " in model)
    return pd.DataFrame({ratio: reached(rows, base, f"cart {ratio:g}") for ratio in ratios}).T


def bells(labels: Mapping[str, str], rows: pd.DataFrame) -> Samples:
    curves = {base: curve_of(rows, base) - reached(rows, base, "average") for base in labels}
    highest = {f"{label}, highest": curves[base][curves[base].index < 1].max() for base, label in labels.items()}
    return highest | {f"{label}, at 8 %": curves[base].loc[USED] for base, label in labels.items()}


def keeps_rule(rows: pd.DataFrame, base: str) -> bool:
    leads = [(("individual", "average"), GAP), (("cart", "task_arithmetic"), 0.0), (("tsv", "task_arithmetic"), 0.0)]
    return all(within(lead(rows, base, *pair), low=low) for pair, low in leads)


# Claims, written before the run
# fmt: off

def labels_of(options: Options) -> dict[str, str]:
    return {name: arm.label for name, arm in options.arms.items()}


def chosen_bases(options: Options) -> list[str]:
    """Return the bases that the rule is about."""
    return [name for name, arm in options.arms.items() if arm.style == "prints"]


def claims(options: Options) -> list[Claim]:
    labels = labels_of(options)
    rule = [claim for base in chosen_bases(options) for claim in of_base(base, labels[base])]
    return [
        *rule,
        Claim("C1", "CART beats task arithmetic, whatever the base.",
              lambda rows: {label: lead(rows, base, "cart", "task_arithmetic") for base, label in labels.items()},
              low=0, of="paired difference on every base", ours=True),
        Claim("C2", "CART's curve over the rank is a bell, whatever the base.", partial(bells, labels),
              low=1, of="accuracy less the average's on every base, at the highest point as at one that no test chose,",
              ours=True),
    ]


def of_base(base: str, label: str) -> list[Claim]:
    gap = f"Experts are {GAP:g} points above their average."
    return [
        Claim("C1", gap, lambda rows: {"experts less average": lead(rows, base, "individual", "average")},
              low=GAP, of="paired difference", ours=True, setting=label),
        *(Claim("C1", f"{NAMES[m]} beats task arithmetic.",
                lambda rows, m=m: {f"{NAMES[m]} less task arithmetic": lead(rows, base, m, "task_arithmetic")},  # type: ignore[misc]
                low=0, of="paired difference", ours=True, setting=label) for m in ("cart", "tsv")),
    ]

# fmt: on


def accuracy_table(labels: Mapping[str, str], rows: pd.DataFrame) -> pd.DataFrame:
    cells = {
        label: {
            **{name: with_interval(reached(rows, base, model)) for model, name in NAMES.items()},
            "experts less average": with_interval(lead(rows, base, "individual", "average")),
        }
        for base, label in labels.items()
    }
    return pd.DataFrame(cells)


def rank_table(labels: Mapping[str, str], rows: pd.DataFrame) -> pd.DataFrame:
    words = {
        "kept": "of ‖τ‖² in the leading 8 % of the rank, %",
        "weights": "rank that holds 90 % of ‖τ‖², % of the full",
        "features": "rank that holds 90 % of the change of class means, % of the classes",
    }
    cells = {
        label: {text: with_interval(100 * samples(rows, name, part="rank", base=base)) for name, text in words.items()}
        for base, label in labels.items()
    }
    return pd.DataFrame(cells)


def choice_table(labels: Mapping[str, str], rows: pd.DataFrame) -> pd.DataFrame:
    choices = select(rows, part="choice", model=list(METHODS))
    choices = choices.assign(words=arguments_of(choices), base=choices.base.map(labels), model=choices.model.map(NAMES))
    wide = choices.sort_values("seed").groupby(["model", "base"]).words.agg("; ".join).unstack("base")
    return wide.loc[[NAMES[method] for method in METHODS], list(labels.values())]


def tables(options: Options) -> Tables:
    labels = labels_of(options)
    return {
        "Mean test accuracy by base, %": partial(accuracy_table, labels),
        "The rank of what fine-tuning changes, mean over tasks": partial(rank_table, labels),
        "Chosen on validation, one value per seed": partial(choice_table, labels),
    }


def rank_figure(options: Options, rows: pd.DataFrame) -> Figure:
    """Draw CART over its rank with the levels of other models, a panel for each base."""
    points = rows[rows.model.str.startswith("cart ", na=False) & (rows.part == "model")]
    points = points.assign(ratio=points.model.str.removeprefix("cart ").astype(float), model=NAMES["cart"])
    return curves(
        points, "ratio", "model", panel="base", labels=labels_of(options), columns=2, height=3.2, scale="log",
        ticks=options.ratios, x_label="rank ratio k / r", y_label="mean test accuracy, %",
        levels=lambda base: {NAMES[model]: reached(rows, base, model).mean() for model in LEVELS},
    )  # fmt: skip


def notes(rows: pd.DataFrame, options: Options) -> list[str]:
    """Return whether the bases asked about keep the rule, what CART gains on each, and which choices may go on."""
    labels = labels_of(options)
    keeping = [labels[base] for base in chosen_bases(options) if keeps_rule(rows, base)]
    gains = [f"{label} {with_interval(lead(rows, b, 'cart', 'task_arithmetic'))}" for b, label in labels.items()]
    verdict = (
        f"By the rule the suite's base should be: {', '.join(keeping)}."
        if keeping
        else "By the rule no base without a planted error shows the gaps of the field."
    )
    return [f"{verdict} CART less task arithmetic, points: {'; '.join(gains)}.", *ends_note(at_ends(rows, options))]


def at_ends(rows: pd.DataFrame, options: Options) -> Iterator[str]:
    tried: dict[str, dict[str, Sequence[float]]] = {method: {"scale": scales} for method, (scales, _) in SCALES.items()}
    tried["cart"]["rank_ratio"] = options.ratios
    for base, label in labels_of(options).items():
        for model in METHODS:
            choices = select(rows, part="choice", base=base, model=model)
            for name, values in tried[model].items():
                if count := int(choices[name].map(lambda value, values=values: at_end(value, values)).sum()):
                    yield f"{NAMES[model]}'s {name} with {label} ({count} of {len(choices)} seeds)"


STUDY = Study(
    options=Options,
    splits=("train", "validation", "test"),
    systems=("C1", "C2"),
    measure=measure,
    claims=claims,
    tables=tables,
    figures=lambda options: {"ranks": partial(rank_figure, options)},
    notes=notes,
)
