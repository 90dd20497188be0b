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

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import Field

from mergeflow.evaluation import CandidateScorer
from mergeflow.evaluation.averages import mean
from mergeflow.merging import configure
from mergeflow.modalities.classification import Classification
from mergeflow.modalities.vision.heads import build_head
from mergeflow.modalities.vision.models import ClipModel, image_model
from mergeflow.training import FineTuneSettings
from studies.lab.inputs import Laboratory
from studies.old.papers.bases.arms import Arm, make_base
from studies.old.papers.bases.ranks import ranks_of
from studies.old.papers.bases.results import result
from studies.old.papers.bases.tuned import Bench, State, experts, merged_in_rounds
from studies.old.pieces import choose_scale, grid, kept_all
from studies.old.rows import Row
from suites.pocket import TEMPLATES
from tasks.models import load_base_head, load_examples
from tasks.project.declaration import Declaration
from tasks.project.sections import Section
from tasks.project.stage import StageIO

SCALES = {
    "task_arithmetic": (grid(0.05, 1.0, 0.05), 0.3),
    "ties": (grid(0.2, 2.4, 0.2), 1.0),
    "tsv": (grid(0.2, 3.0, 0.2), 1.2),
    "iso_c": (grid(0.2, 3.0, 0.2), 1.2),
    "cart": ([0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0], 1.5),
}


class Options(Section):
    """The study's choices.

    seeds: of the order of the batches. suite: whose classes the bases see. arms: name → base. passes: images shown to
    each. steps, batch_size, learning_rate: of every expert and, with rounds, of MIMA. ratios: of CART, k / r. keep: of
    TIES.
    """

    seeds: list[int] = Field(min_length=1)
    suite: str
    arms: dict[str, Arm] = Field(min_length=2)
    passes: int = Field(ge=1)
    steps: int = Field(ge=1)
    batch_size: int = Field(ge=1)
    learning_rate: float = Field(gt=0)
    rounds: int = Field(ge=1)
    ratios: list[float] = Field(min_length=2)
    keep: float = Field(gt=0, le=1)

    def settings(self, **more: Any) -> FineTuneSettings:
        """Return how experts are tuned, or with `more` MIMA."""
        own: dict[str, Any] = {"regime": "steps", "steps": self.steps, "batch_size": self.batch_size}
        own |= {"learning_rate": self.learning_rate, "precision": "float32", "save_every": 100}
        return FineTuneSettings.model_validate(own | more)


DECLARED = Declaration(Options, splits=("train", "validation", "test"), systems=("C1", "C2"))


def run(io: StageIO) -> None:
    """Write `outputs/studies/bases`."""
    inputs = Laboratory(io)
    options = DECLARED.chosen(io)
    for name in options.arms:
        open_base(inputs, options, name)  # one after the other: each pre-training takes two cores
    asked = [(name, seed) for name in options.arms for seed in options.seeds]
    measures = {f"{name}_{seed}": partial(measure, inputs, options, name, seed) for name, seed in asked}
    rows = kept_all(io, measures, "bases and seeds")
    labels = {name: arm.label for name, arm in options.arms.items()}
    asked_about = [name for name, arm in options.arms.items() if arm.style == "prints"]
    written, figures = result(rows, labels, asked_about, tried(options))
    written.write(io, figures)


def tried(options: Options) -> dict[str, dict[str, Sequence[float]]]:
    """Return method → argument → the values that are tried of it."""
    found: dict[str, dict[str, Sequence[float]]] = {method: {"scale": scales} for method, (scales, _) in SCALES.items()}
    found["cart"]["rank_ratio"] = options.ratios
    return found


def folder_of(inputs: Laboratory, name: str) -> Path:
    """Return where a base and what is tuned from it lie, in the stage's scratch.

    Args:
        inputs: the study's inputs.
        name: of the base.
    """
    return inputs.io.scratch / "bases" / name


def open_base(inputs: Laboratory, options: Options, name: str) -> ClipModel:
    """Return a base; it is pre-trained once.

    Args:
        inputs: the study's inputs.
        options: its choices.
        name: of the base.
    """
    return make_base(
        options.arms[name],
        options.suite,
        options.passes,
        folder_of(inputs, name) / "base.safetensors",
        inputs.io.params.run.workers,
        lambda what, done, total: inputs.io.report(f"{name}, {what}", done, total),
    )


def measure(inputs: Laboratory, options: Options, name: str, seed: int) -> Row:
    """Return one base and seed: test accuracy by model, what was chosen, the rank curve, and ranks of what was undone.

    Args:
        inputs: the study's inputs.
        options: its choices.
        name: of the base.
        seed: of the order of the batches.
    """
    clip = open_base(inputs, options, name)
    bench = open_bench(inputs.blind(), clip, folder_of(inputs, name))

    def told(what: str, done: int, total: int) -> None:
        inputs.io.report(f"{name}, seed {seed}, {what}", done, total)

    tuned = experts(bench, options.settings(), seed, partial(told, "experts"))
    together = options.settings(regime="iterative", iterative={"rounds": options.rounds})
    mima = merged_in_rounds(bench, together, seed, partial(told, "rounds"))
    chosen = choose_merges(inputs.blind(), options, bench, tuned)
    return {
        "arm": name,
        "seed": seed,
        "args": {label: args for label, (args, _) in chosen.items()},
        "validation": {label: value for label, (_, value) in chosen.items()},
        "test": look(inputs, clip, bench, tuned, mima, chosen),
        "ranks": ranks_of(bench, tuned),
    }


def open_bench(inputs: Laboratory, clip: ClipModel, folder: Path) -> Bench:
    """Return a base with the training and validation examples, judged with its own heads.

    Args:
        inputs: the study's inputs.
        clip: the base with its text tower.
        folder: of this base, in the stage's scratch.
    """
    model = image_model(clip)
    model.module.to(inputs.device)
    base = {name: tensor.to("cpu", copy=True) for name, tensor in model.state().items()}
    splits = [opened(inputs, clip, split) for split in ("train", "validation")]
    return Bench(model, base, splits[0], splits[1], folder)


def opened(inputs: Laboratory, clip: ClipModel, split: str) -> dict[str, Classification]:
    """Return one split of every task with a head of this base: the same class names, the suite's templates.

    Args:
        inputs: the study's inputs.
        clip: the base with its text tower.
        split: train, validation or test.
    """
    found = {}
    for task in inputs.tasks:
        there = load_base_head(inputs.io, task, inputs.device)
        assert there is not None, "image tasks have heads"
        head = build_head(clip, there.class_names, TEMPLATES).to(inputs.device)
        examples = load_examples(inputs.io, split, task, inputs.device, head)
        assert isinstance(examples, Classification), "image tasks are tasks of classes"
        found[task] = examples
    return found


def choose_merges(
    inputs: Laboratory, options: Options, bench: Bench, tuned: Mapping[str, State]
) -> dict[str, tuple[dict[str, Any], float]]:
    """Return for each method, and for CART at each ratio, the arguments that are best on validation and its accuracy.

    Args:
        inputs: the study's inputs, which cannot read test.
        options: the study's choices.
        bench: the base and the tasks.
        tuned: θ_t by task.

    Returns:
        `average`, `task_arithmetic`, `ties`, `tsv`, `iso_c`, `cart` (the best of all ratios) and `cart RATIO`.
    """
    scorer = CandidateScorer(bench.model, bench.validation, bench.base, tuned)
    scorer.renew_cache(1.0)
    found: dict[str, tuple[dict[str, Any], float]] = {"average": ({}, mean(scorer.candidate(configure("average"))))}
    others: list[tuple[str, str, dict[str, Any]]] = [
        ("task_arithmetic", "task_arithmetic", {}),
        ("ties", "ties", {"keep": options.keep}),
        ("tsv", "tsv", {}),
        ("iso_c", "iso_c", {}),
    ]
    others += [(f"cart {ratio:g}", "cart", {"rank_ratio": ratio}) for ratio in options.ratios]
    for label, method, args in others:
        scales, start = SCALES[method]
        best = choose_scale(inputs, scorer, method, scales, start, args, test=False)
        found[label] = (best.args, mean(best.validation))
    curve = [found[f"cart {ratio:g}"] for ratio in options.ratios]
    return {**found, "cart": max(curve, key=lambda one: one[1])}


def look(
    inputs: Laboratory,
    clip: ClipModel,
    bench: Bench,
    tuned: Mapping[str, State],
    mima: State,
    chosen: Mapping[str, tuple[dict[str, Any], float]],
) -> dict[str, dict[str, float]]:
    """Look at test once: accuracy by model and task.

    Args:
        inputs: the study's inputs.
        clip: the base with its text tower.
        bench: the same, and the tasks.
        tuned: θ_t by task.
        mima: MIMA's last average.
        chosen: as of `choose_merges`.
    """
    test = opened(inputs, clip, "test")
    scorer = CandidateScorer(bench.model, test, bench.base, tuned)
    scorer.renew_cache(1.0)
    found = {"zero_shot": scorer.state(bench.base)}
    found["individual"] = {task: scorer.state(state, {task: test[task]})[task] for task, state in tuned.items()}
    found["mima"] = scorer.state(mima)
    for label, (args, _) in chosen.items():
        method = label.partition(" ")[0]
        if label != "cart":  # one of the ratios, which is looked at as such
            found[label] = scorer.candidate(configure(method, args))
    return {**found, "cart": found[f"cart {chosen['cart'][0]['rank_ratio']:g}"]}
