"""Stage `select`: the choice on validation; test is not among its inputs."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mergeflow import layout
from mergeflow.checkpoints import fingerprint, open_checkpoint, write_checkpoint
from mergeflow.documents import Chosen, Selection, Sweep, read_document, write_document
from mergeflow.errors import MergeflowError
from mergeflow.evaluation import Judge, at_grid_edge, best_candidate, write_scores
from mergeflow.merging import MethodCall, configure, prepare
from mergeflow.merging.catalog import code_record
from mergeflow.modality import State
from mergeflow.yaml_text import in_words
from tasks.models import choose_device, expert_summary, load_for_experts, load_model, load_states
from tasks.project.stage import StageIO


def run(io: StageIO) -> None:
    """Write the chosen merge of each method, the choices, and the winner's scores example by example.

    `outputs/merged/<method>.safetensors`; `outputs/results/selection.json`; `outputs/results/winner_validation.npz`
    with one float32 array in [0, 1] per task, in the split's order, for the registry's paired bootstrap.

    A method whose best candidate cannot be kept, such as one that overflows, is left out with a warning.
    """
    tasks, grids = list(io.section("tasks")), io.section("sweep")
    base, experts = load_states(io, tasks)
    folder = io.out(layout.MERGED)
    folder.mkdir()
    chosen, unfit = dict[str, Chosen](), list[str]()
    for done, (method, grid) in enumerate(grids.items(), start=1):
        sweep = read_document(io.dep(layout.sweep(method)), Sweep)
        best = best_candidate(sweep["candidates"])
        call = configure(method, best["args"])
        try:
            merged = prepare(call, base, experts).at(call.scale)
        except MergeflowError as error:
            tried = f"sweep.{method}: the best candidate ({in_words(best['args'])})"
            unfit.append(f"{tried} is no model that can be kept: {error} Give other values, or leave the method out.")
            print(f"warning: {unfit[-1]} The choice is among the other methods.", file=sys.stderr)
            continue
        recipe = _recipe(call, base, experts)
        digest = write_checkpoint(folder / f"{method}.safetensors", merged, {"recipe": json.dumps(recipe)})
        chosen[method] = {
            "args": best["args"],
            "recipe": recipe,
            "fingerprint": digest,
            "candidates": len(sweep["candidates"]),
            "at_grid_edge": at_grid_edge(best["args"], grid),
            "validation": {"accuracy": best["accuracy"], "mean": best["mean"], "normalised": best["normalised"]},
        }
        io.report("methods", done, len(grids))
    if not chosen:
        raise MergeflowError("\n".join(unfit))
    winner = max(chosen, key=lambda method: chosen[method]["validation"]["normalised"])
    individual = {task: expert_summary(io, task)["validation_accuracy"] for task in tasks}
    selection: Selection = {"tasks": tasks, "winner": winner, "individual": individual, "methods": chosen}
    write_document(io.out(layout.SELECTION), selection)
    _write_winner_scores(io, folder / f"{winner}.safetensors", tasks)


def _recipe(call: MethodCall, base: State, experts: Mapping[str, State]) -> dict[str, Any]:
    """Return the record that makes the merge again: method, arguments, own code, inputs and fingerprints."""
    return {
        "method": call.name,
        "args": call.args,
        **code_record(call),
        "base": layout.BASE_MODEL,
        "base_fingerprint": fingerprint(base),
        "experts": {task: layout.expert_model(task) for task in experts},
        "fingerprints": {task: fingerprint(state) for task, state in experts.items()},
    }


def _write_winner_scores(io: StageIO, checkpoint: Path, tasks: list[str]) -> None:
    device = choose_device(io)
    model = load_model(io, layout.BASE_MODEL, device)
    with open_checkpoint(checkpoint) as state:
        model.load(state)
    judge = Judge(model, **dict(io.section("evaluation")))
    scores = {
        task: judge.scores(examples) for task, examples in load_for_experts(io, "validation", tasks, device).items()
    }
    write_scores(io.out(layout.WINNER_SCORES), scores)
