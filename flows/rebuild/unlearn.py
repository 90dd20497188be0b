"""Unlearn: a registered version whose merge takes one task's vector away, as far as the other tasks allow."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flows.rebuild.forgetting import Bounds, Figures, Tried, choose, written
from flows.rebuild.passages import Passages
from flows.rebuild.remerge import lay_out, register_view
from mergeflow import layout
from mergeflow.checkpoints import read_state, write_checkpoint
from mergeflow.documents import write_document
from mergeflow.errors import MergeflowError, unknown_name
from mergeflow.evaluation import accuracies, example_scores, losses, mean, normalised, write_scores
from mergeflow.merging import configure, prepare
from mergeflow.merging.catalog import code_record
from mergeflow.modality import Examples, Model
from registry.environment import environment
from registry.lookup import find_version
from registry.pipeline_records import git_commit
from registry.provenance import read_documents
from registry.rebuilt import Rebuilt, register_rebuilt
from registry.store import Store
from tasks.models import choose_device, expert_summary, load_for_experts, load_model
from tasks.project.beside import project_beside, write_params
from tasks.project.files import read_yaml
from tasks.project.graph import find_stage, load_graph
from tasks.project.runner import open_stage
from tasks.report.texts import keep_unlearned

SCALES = (0.0, -0.1, -0.2, -0.3, -0.4, -0.5, -0.6, -0.8, -1.0, -1.25, -1.5, -2.0)
"""Weights of the task to forget that are tried; 0 leaves it out, and shows what unlearning adds to that."""
BOUNDS = Bounds()


@dataclass(frozen=True)
class Unlearnt:
    """What came of it.

    Attributes:
        rebuilt: The registered candidate and the gates' answer.
        chosen: The weight that was chosen, among `tried`.
        tried: All weights, from 0 down.
        before: Validation figures of the version it began from.
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
        root: the project folder.
        store: the open registry.
        name: of the registered model.
        which: version number or alias.
        task: the task to forget.
        bounds: what the others may lose, and what counts as forgotten.
        scales: the weights to try; 0 is tried too.
        promote: make the result champion if the gates let it.
        report: told what is being done.

    Raises:
        MergeflowError: no such model, version or task; the only task; a method without weights; no λ < 0 keeps the
            others; ancestors that are nowhere.

    Source:
        Li et al. 2025, Equation 3; Ilharco et al. 2023, Section 3 (the bound on what the others lose).
    """
    recipe, origin = read_documents(store, name, which)
    version = find_version(store, name, which).version
    _check(recipe, origin, f"'{name}' version {version}", task)
    bounds.check()
    recipe = weighable(recipe)
    with project_beside(root, "unlearn") as scratch:
        report("looking for its ancestors")
        lay_out(root, store, name, version, origin, scratch)
        values = read_yaml(root / "params.yaml")
        sources = {one: known["source"] for one, known in origin["experts"].items()}
        own = {"model": origin["params"]["model"], "sweep": {recipe["method"]: {}}}
        write_params(scratch, {**values, **own, "tasks": sources})
        work = _Work(scratch, recipe, list(sources), task)
        try:
            before, base = work.figures(1.0), work.base_figures()
            tried = []
            for scale in sorted({0.0, *scales}, reverse=True):
                found = work.figures(scale)
                tried.append(Tried(scale, found, bounds.criteria(found, before, base, task)))
                hurt = [f"{one.task} ({one.figure})" for one in tried[-1].criteria if one.kept and not one.holds]
                told = f"; too much is lost of {', '.join(hurt)}" if hurt else ""
                report(f"λ = {scale:g}: {task} {100 * found.accuracy[task]:.2f} %{told}")
            chosen = choose(tried, task)
            work.write(chosen, tried)
            texts = work.texts(chosen.scale)
        finally:
            work.close()
        origin["unlearned"] = {task: origin["experts"].pop(task) | {"weight": chosen.scale}}
        origin |= {"kind": "unlearn", "parent": {"model": name, "version": version, "task": task}}
        origin |= {"git_commit": git_commit(root), "environment": environment()}
        write_params(scratch, {**values, **own, "tasks": {one: sources[one] for one in sources if one != task}})
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

    Args:
        recipe: of a version.

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
        texts = sorted(written(self._data), key=lambda one: one != task)
        self._passages = Passages.read(scratch, texts) if texts else None
        self._batch = self._io.section("evaluation").batch_size
        self._base = read_state(scratch / recipe["base"])
        self._experts = {one: read_state(scratch / recipe["experts"][one]) for one in tasks}
        self._call = configure(recipe["method"], recipe["args"])

    def close(self) -> None:
        """Give the device back."""
        self._io.holds.close()

    def merged(self, scale: float) -> dict[str, torch.Tensor]:
        """Return the merge in which the task to forget has the weight `scale`."""
        weights = {self.task: scale}
        return prepare(self._call, self._base, self._experts, weights=weights).at(self._call.scale)

    def figures(self, scale: float) -> Figures:
        """Return the validation figures of that merge on every task."""
        return self._judged(self.merged(scale))

    def base_figures(self) -> Figures:
        """Return the base's figures: what a model scores that never saw a task."""
        return self._judged(self._base)

    @torch.inference_mode()
    def _judged(self, state: Mapping[str, torch.Tensor]) -> Figures:
        self._model.load(state)
        lost = losses(self._model, written(self._data), self._batch)
        recall = self._passages.recall(self._model, self._batch) if self._passages else {}
        return Figures(accuracies(self._model, self._data, self._batch), lost, recall)

    def texts(self, scale: float) -> list[dict[str, Any]]:
        """Return how the version and that merge go on from passages of the tasks that are texts."""
        if self._passages is None:
            return []
        return self._passages.before_and_after(self._model, self.merged(1.0), self.merged(scale))

    def write(self, chosen: Tried, tried: Sequence[Tried]) -> None:
        """Write what `sweep` and `select` would: candidates, merge, choice, scores by example of the tasks kept."""
        method, state = self.recipe["method"], self.merged(chosen.scale)
        kept = [one for one in self.tasks if one != self.task]
        recipe = {**self.recipe, "weights": {self.task: chosen.scale}, **code_record(self._call)}
        target = self.scratch / layout.merge(method)
        target.parent.mkdir(parents=True, exist_ok=True)
        digest = write_checkpoint(target, state, {"recipe": json.dumps(recipe)})
        known = {one: expert_summary(self._io, one)["validation_accuracy"] for one in kept}

        def figures(one: Tried) -> dict[str, Any]:
            accuracy = {name: one.figures.accuracy[name] for name in kept}
            return {"accuracy": accuracy, "mean": mean(accuracy), "normalised": normalised(accuracy, known)}

        rows = [{"args": {**self._call.args, f"weight of {self.task}": one.scale}, **figures(one)} for one in tried]
        sweep = {"method": method, "split": "validation", "individual": known, "candidates": rows}
        winner = {
            "args": self._call.args,
            "recipe": recipe,
            "fingerprint": digest,
            "candidates": len(tried),
            "at_grid_edge": [],
            "validation": figures(chosen),
            "criteria": [vars(one) for one in chosen.criteria],
        }
        selection = {"tasks": kept, "winner": method, "individual": known, "methods": {method: winner}}
        for path, document in ((layout.sweep(method), sweep), (layout.SELECTION, selection)):
            write_document(self.scratch / path, document)
        self._model.load(state)
        scores = {one: example_scores(self._model, self._data[one], self._batch) for one in kept}
        write_scores(self.scratch / layout.WINNER_SCORES, scores)
