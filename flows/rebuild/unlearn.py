"""The criteria of unlearning: Equation 3 in accuracies, for texts also in losses and Rouge-L."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from flows.rebuild.scratch import lay_out, note_rebuild, register_view
from mergeflow import layout
from mergeflow.analysis.provable.criteria import Criterion, all_met, unlearning_criteria
from mergeflow.checkpoints import open_checkpoint, read_state, write_checkpoint
from mergeflow.documents import write_document
from mergeflow.errors import MergeflowError, unknown_name
from mergeflow.evaluation import Judge, mean, normalised, write_scores
from mergeflow.merging import configure, prepare
from mergeflow.merging.catalog import check_inputs, code_record
from mergeflow.modality import Examples, Model
from registry.stage import Rebuilt, register_rebuilt
from registry.store import Store
from registry.versions import find_stored, read_documents
from tasks.models import choose_device, expert_summary, load_for_experts, load_model
from tasks.project.files import read_yaml
from tasks.project.graph import find_stage, load_graph
from tasks.report.texts import keep_unlearned
from tasks.running.runner import open_stage
from tasks.running.scratch_project import scratch_project, write_params

if TYPE_CHECKING:
    from mergeflow.modalities.causal.tokenizer import CausalTokenizer


SLACK = 1e-12  # 0.82 − 0.02 is a little more than 0.80 in floating point


@runtime_checkable
class Written(Protocol):
    """Examples that are texts: of them the loss is the logarithm of the perplexity, and says more than the score.

    A model that has unlearned a book may still name many of its next tokens while the book has become unlikely.
    """

    def token_losses(self, model: Model, rows: Tensor) -> Tensor:
        """Return −log p of each predicted token of `rows`, [m] in nats."""
        ...


def written(data: Mapping[str, Examples]) -> dict[str, Examples]:
    return {task: examples for task, examples in data.items() if isinstance(examples, Written)}


@dataclass(frozen=True)
class Figures:
    """The validation figures of a model.

    Attributes:
        accuracy: Task → accuracy, a fraction.
        loss: Task of texts → mean −log p of its tokens, in nats.
        recall: Task of texts → mean Rouge-L recall of how its passages are gone on with, a fraction.
    """

    accuracy: dict[str, float]
    loss: dict[str, float] = field(default_factory=dict)
    recall: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Bounds:
    """The limits: how much other tasks may lose, and from where a task is forgotten.

    Attributes:
        lose: Largest loss in accuracy of each other task, a fraction.
        rise: What the loss of each other task of texts may rise, in nats: log of the factor of its perplexity.
        at_most: The accuracy down to which the task counts as forgotten; None: that of the base.
        at_least: The loss up to which a task of texts counts as forgotten, in nats; None: that of the base.
        fall: Largest fall of the Rouge-L recall of each other task of texts, a fraction.
        recited: The Rouge-L recall down to which a task of texts counts as forgotten; None: that of the base.
    """

    lose: float = 0.02
    rise: float = 0.05
    at_most: float | None = None
    at_least: float | None = None
    fall: float = 0.05
    recited: float | None = None

    def check(self) -> None:
        for names, allowed, limit in (
            (("--lose", "--at-most"), self.lose, self.at_most),
            (("--fall", "--recited"), self.fall, self.recited),
        ):
            if not 0 <= allowed <= 1 or (limit is not None and not 0 <= limit <= 1):
                raise MergeflowError(
                    f"{names[0]} {allowed:g} and {names[1]} {limit} are fractions: expected 0 to 1, such as 0.02."
                )
        if not self.rise >= 0 or (self.at_least is not None and not self.at_least >= 0):
            raise MergeflowError(
                f"--rise {self.rise:g} and --at-least {self.at_least} are losses in nats: expected 0 or more, "
                "such as 0.05."
            )

    def criteria(self, reached: Figures, before: Figures, base: Figures, task: str) -> list[Criterion]:
        """Return whether a model has forgotten a task and kept each other one, in accuracies, losses and Rouge-L."""
        least = {name: before.accuracy[name] - self.lose - SLACK for name in before.accuracy if name != task}
        at_most = base.accuracy[task] if self.at_most is None else self.at_most
        judged = unlearning_criteria(reached.accuracy, least, {task: at_most}, "accuracy")
        likely = {name: before.loss[name] + self.rise + SLACK for name in before.loss if name != task}
        at_least = {task: base.loss[task] if self.at_least is None else self.at_least} if task in before.loss else {}
        judged += unlearning_criteria(reached.loss, likely, at_least, "loss")
        least_recall = {name: before.recall[name] - self.fall - SLACK for name in before.recall if name != task}
        recited = {task: base.recall[task] if self.recited is None else self.recited} if task in before.recall else {}
        return [*judged, *unlearning_criteria(reached.recall, least_recall, recited, "recall")]


@dataclass(frozen=True)
class Tried:
    """One weight of the task to forget, on validation.

    Attributes:
        criteria: Of Equation 3: in accuracies, and of texts in losses and in Rouge-L.
    """

    scale: float
    figures: Figures
    criteria: list[Criterion]

    @property
    def keeps(self) -> bool:
        """Whether no other task loses more than was allowed."""
        return all_met(criterion for criterion in self.criteria if criterion.kept)

    @property
    def forgotten(self) -> int:
        return sum(criterion.holds for criterion in self.criteria if not criterion.kept)


def choose(tried: Sequence[Tried], task: str) -> Tried:
    """Return the weight below 0 that forgets most among those that keep the other tasks.

    Most: it meets the most criteria of forgetting, of these its accuracy on the task is the lowest, of equal ones it
    is the nearest to 0.
    """
    able = [trial for trial in tried if trial.scale < 0 and trial.keeps]
    if not able:
        nearest = max((trial for trial in tried if trial.scale < 0), key=lambda trial: trial.scale)
        hurt = next(criterion for criterion in nearest.criteria if criterion.kept and not criterion.holds)
        alone = next(trial for trial in tried if trial.scale == 0)
        raise MergeflowError(
            f"no weight below 0 for '{task}' keeps every other task within its bounds: at λ = {nearest.scale:g} "
            f"{hurt.reason}{'' if alone.keeps else ', and leaving it out (λ = 0) breaks a bound already'}. Allow more "
            f"with --lose, --rise or --fall, or take it out with `mergeflow registry unmerge --task {task}`."
        )
    return min(able, key=lambda trial: (-trial.forgotten, trial.figures.accuracy[task], -trial.scale))


SHOWN = 3  # passages of a task, for people to read
RECITED = 256  # at most, whose Rouge-L is taken


@dataclass(frozen=True)
class Passages:
    """Held-out passages of the tasks that are texts.

    Attributes:
        texts: Task → pieces of its validation split, spread evenly over it.
    """

    tokenizer: CausalTokenizer
    texts: dict[str, list[str]]

    @classmethod
    def read(cls, project: Path, tasks: Sequence[str]) -> Passages:
        """Read them from a project.

        Args:
            tasks: texts; those to forget first.
        """
        from mergeflow.modalities.causal.generation import held_out
        from mergeflow.modalities.causal.tokenizer import CausalTokenizer

        with open_checkpoint(project / layout.BASE_MODEL) as base:
            tokenizer = CausalTokenizer(base.metadata["tokenizer"], int(base.metadata["end"]))
        folders = {task: project / layout.split("validation", task) for task in tasks}
        return cls(tokenizer, {task: held_out(folder, RECITED) for task, folder in folders.items()})

    def recall(self, model: Any, batch_size: int) -> dict[str, float]:
        """Return the mean Rouge-L recall of a model's continuations of each task's passages.

        Returns:
            By task, in [0, 1]; tasks whose passages are all too short are left out.
        """
        from mergeflow.modalities.causal.generation import go_on, rouge_l

        means = {}
        for task, texts in self.texts.items():
            parts = (texts[at : at + batch_size] for at in range(0, len(texts), batch_size))
            continuations = [text for part in parts for text in go_on(model.module, self.tokenizer, part)]
            if continuations:
                means[task] = fmean(rouge_l(text.reference, text.written)[0] for text in continuations)
        return means

    def before_and_after(
        self, model: Any, before: Mapping[str, Tensor], after: Mapping[str, Tensor]
    ) -> list[dict[str, Any]]:
        """Return some passages with two states' continuations of their beginnings.

        Returns:
            `task`, `text`, `right` (the words that follow in the passage), `before` and `after` of each.
        """
        from mergeflow.modalities.causal.generation import go_on

        continuations = []
        for state in (before, after):
            model.load(state)
            continuations.append(
                [
                    (task, text)
                    for task, texts in self.texts.items()
                    for text in go_on(model.module, self.tokenizer, texts, most=SHOWN)
                ]
            )
        return [
            {
                "task": task,
                "text": old.prompt,
                "right": old.reference,
                "before": old.written,
                "after": new.written,
            }
            for (task, old), (_, new) in zip(*continuations, strict=True)
        ]


SCALES = (0.0, -0.1, -0.2, -0.3, -0.4, -0.5, -0.6, -0.8, -1.0, -1.25, -1.5, -2.0)
"""Weights of the task to forget that are tried; 0 leaves it out, and shows what unlearning adds to that."""
BOUNDS = Bounds()


@dataclass(frozen=True)
class Unlearnt:
    """The outcome of unlearning.

    Attributes:
        texts: Of causal models, passages with what is written behind them before and after.
    """

    rebuilt: Rebuilt
    chosen: Tried
    tried: list[Tried]
    before: Figures
    texts: list[dict[str, Any]]


def unlearn(
    root: Path,
    store: Store,
    name: str,
    which: str | int,
    task: str,
    *,
    bounds: Bounds = BOUNDS,
    scales: Sequence[float] = SCALES,
    promote: bool = False,
    report: Callable[[str], None] = lambda text: None,
) -> Unlearnt:
    """Merge a version's experts again with a weight λ ≤ 0 for one of them, chosen on validation, and register it.

    λ = argmin_λ A(forget)  subject to  A(j) ≥ A_version(j) − lose for all others, and of texts
    ℓ(j) ≤ ℓ_version(j) + rise and R(j) ≥ R_version(j) − fall;  of equal ones the nearest to 0

    Args:
        scales: the weights to try; 0 is tried too.

    Source:
        Li et al. 2025, Equation 3; Ilharco et al. 2023, Section 3 (the bound on what the others lose).
    """
    stored = find_stored(store, name, which)
    version = str(stored.version)
    recipe, origin = read_documents(store, stored)
    _check(recipe, origin, f"'{name}' version {version}", task)
    bounds.check()
    recipe = weighable(recipe)
    with scratch_project(root, "unlearn") as scratch:
        report("looking for its ancestors")
        lay_out(root, store, stored, origin, scratch)
        values = read_yaml(root / "params.yaml")
        sources = {name: expert["source"] for name, expert in origin["experts"].items()}
        sections = {"model": origin["params"]["model"], "sweep": {recipe["method"]: {}}}
        write_params(scratch, {**values, **sections, "tasks": sources})
        work = _Work(scratch, recipe, list(sources), task)
        try:
            before, base = work.figures(1.0), work.base_figures()
            tried = []
            for scale in sorted({0.0, *scales}, reverse=True):
                figures = work.figures(scale)
                tried.append(Tried(scale, figures, bounds.criteria(figures, before, base, task)))
                hurt = [f"{rule.task} ({rule.figure})" for rule in tried[-1].criteria if rule.kept and not rule.holds]
                losses = f"; too much is lost of {', '.join(hurt)}" if hurt else ""
                report(f"λ = {scale:g}: {task} {100 * figures.accuracy[task]:.2f} %{losses}")
            chosen = choose(tried, task)
            work.write(chosen, tried)
            texts = work.texts(chosen.scale)
        finally:
            work.close()
        origin["unlearned"] = {task: origin["experts"].pop(task) | {"weight": chosen.scale}}
        note_rebuild(root, origin, "unlearn", stored, task)
        write_params(scratch, {**values, **sections, "tasks": {key: sources[key] for key in sources if key != task}})
        rebuilt = register_rebuilt(store, name, register_view(scratch), origin, promote_it=promote)
    if not rebuilt.new:
        report(
            f"these weights are version {rebuilt.version} already, whose gates keep the limit it was registered with"
        )
    if texts:
        facts = {"model": name, "version": rebuilt.version, "parent": version, "task": task, "weight": chosen.scale}
        keep_unlearned(root, {**facts, "texts": texts})
    return Unlearnt(rebuilt, chosen, tried, before, texts)


def weighable(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe with a weight for each expert: the plain average as task arithmetic, which has one.

    θ0 + scale · Σ τ_t / T

    Example:
        >>> weighable({"method": "average", "args": {"scale": 1.0}, "experts": {"a": "a", "b": "b"}})["args"]
        {'scale': 0.5}
    """
    if recipe["method"] != "average" or not recipe["args"].get("normalize", True):
        return dict(recipe)
    scale = recipe["args"].get("scale", 1.0) / len(recipe["experts"])
    return {**recipe, "method": "task_arithmetic", "args": {"scale": scale}}


def _check(recipe: Mapping[str, Any], origin: Mapping[str, Any], version: str, task: str) -> None:
    if task not in origin["experts"]:
        raise unknown_name(f"task of {version}", task, origin["experts"])
    if recipe.get("weights"):
        raise MergeflowError(f"{version} has unlearned a task already; begin from the version that it was made of.")
    if len(origin["experts"]) == 1:
        raise MergeflowError(f"'{task}' is the only task of {version}: without it nothing is left to keep.")
    able = weighable(recipe)
    if configure(able["method"], able["args"]).method.weights != "factors":
        raise MergeflowError(
            f"{version} is merged by {recipe['method']}, which gives no expert a weight below 0. Promote a version of "
            "another method, such as task_arithmetic, and unlearn from that."
        )


class _Work:
    """The version's experts in a scratch project: merged with any weight of the task to forget, scored, written."""

    def __init__(self, scratch: Path, recipe: Mapping[str, Any], tasks: list[str], task: str) -> None:
        self.scratch, self.recipe, self.tasks, self.task = scratch, recipe, tasks, task
        self._io, _ = open_stage(scratch, find_stage(load_graph(scratch), "sweep", recipe["method"]))
        device = choose_device(self._io)
        self._model: Model = load_model(self._io, layout.BASE_MODEL, device)
        self._data: dict[str, Examples] = load_for_experts(self._io, "validation", tasks, device)
        texts = sorted(written(self._data), key=lambda name: name != task)
        self._passages = Passages.read(scratch, texts) if texts else None
        judging = self._io.section("evaluation")
        self._judge, self._batch = Judge(self._model, **dict(judging)), judging.batch_size
        self._base = read_state(scratch / recipe["base"])
        self._experts = {name: read_state(scratch / recipe["experts"][name]) for name in tasks}
        self._call = configure(recipe["method"], recipe["args"])

    def close(self) -> None:
        self._io.holds.close()

    def merged(self, scale: float) -> dict[str, torch.Tensor]:
        """Return the merge in which the task to forget has the weight `scale`; with 0 that of the others alone.

        To methods that count experts, as CART's mean does, one of weight 0 is one of them. With 0 it still is where
        the others are too few to be merged.
        """
        experts, weights = self._experts, {self.task: scale}
        if not scale:
            others = {name: state for name, state in experts.items() if name != self.task}
            with suppress(MergeflowError):
                check_inputs(self._call, others, None)
                experts, weights = others, {}
        return prepare(self._call, self._base, experts, weights=weights).at(self._call.scale)

    def figures(self, scale: float) -> Figures:
        return self._judged(self.merged(scale))

    def base_figures(self) -> Figures:
        """Return the base's figures: what a model scores that never saw a task."""
        return self._judged(self._base)

    @torch.inference_mode()
    def _judged(self, state: Mapping[str, torch.Tensor]) -> Figures:
        self._model.load(state)
        lost = self._judge.losses(written(self._data))
        recall = self._passages.recall(self._model, self._batch) if self._passages else {}
        return Figures(self._judge.accuracies(self._data), lost, recall)

    def texts(self, scale: float) -> list[dict[str, Any]]:
        """Continue passages of the text tasks by the version and by that merge."""
        if self._passages is None:
            return []
        return self._passages.before_and_after(self._model, self.merged(1.0), self.merged(scale))

    def write(self, chosen: Tried, tried: Sequence[Tried]) -> None:
        """Write the files of `sweep` and `select`: candidates, merge, choice, scores of the remaining tasks."""
        method, state = self.recipe["method"], self.merged(chosen.scale)
        remaining = [name for name in self.tasks if name != self.task]
        recipe = {**self.recipe, "weights": {self.task: chosen.scale}, **code_record(self._call)}
        target = self.scratch / layout.merge(method)
        target.parent.mkdir(parents=True, exist_ok=True)
        digest = write_checkpoint(target, state, {"recipe": json.dumps(recipe)})
        individual = {name: expert_summary(self._io, name)["validation_accuracy"] for name in remaining}

        def figures(trial: Tried) -> dict[str, Any]:
            accuracy = {name: trial.figures.accuracy[name] for name in remaining}
            return {"accuracy": accuracy, "mean": mean(accuracy), "normalised": normalised(accuracy, individual)}

        rows = [
            {"args": {**self._call.args, f"weight of {self.task}": trial.scale}, **figures(trial)} for trial in tried
        ]
        sweep = {"method": method, "split": "validation", "individual": individual, "candidates": rows}
        winner = {
            "args": self._call.args,
            "recipe": recipe,
            "fingerprint": digest,
            "candidates": len(tried),
            "at_grid_edge": [],
            "validation": figures(chosen),
            "criteria": [vars(criterion) for criterion in chosen.criteria],
        }
        selection = {"tasks": remaining, "winner": method, "individual": individual, "methods": {method: winner}}
        for path, document in ((layout.sweep(method), sweep), (layout.SELECTION, selection)):
            write_document(self.scratch / path, document)
        self._model.load(state)
        scores = {name: self._judge.scores(self._data[name]) for name in remaining}
        write_scores(self.scratch / layout.WINNER_SCORES, scores)
