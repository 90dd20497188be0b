"""Merge files into files: streaming, atomic, resumable, with the record that makes the result again."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from mergeflow.merging.adapters.job import AdapterJob, Made
from mergeflow.merging.execution.engine import BUFFER
from mergeflow.merging.files.job import Fill, Job, Part, after_steps, check_parts, find_parts
from mergeflow.merging.files.plan import Inputs, check_target, choose_device, make_plan, open_inputs, twice
from mergeflow.merging.files.recipe import AnyRecipe, Recipe, Resolve, as_recipe, fix_references
from mergeflow.merging.preflight import counter_findings
from mergeflow.version import version

Progress = Callable[[int, int], None]
"""Called with the bytes of inputs done and in all, from any thread, one call at a time."""


@dataclass(frozen=True)
class Merged:
    """The result of a merge.

    Attributes:
        inputs: Fingerprint per input.
        notes: What an adapter holds and loses, and what was done to make the inputs fit each other, a line each.
        warnings: What to know of: settings, tokens, templates, licences of the inputs that differ.
    """

    path: Path
    fingerprint: str
    inputs: dict[str, str]
    recipe: Recipe
    seconds: float
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def merge(
    recipe: AnyRecipe,
    out: str | Path | None = None,
    progress: Progress | None = None,
    resume: bool = False,
    *,
    resolve: Resolve | None = None,
    workers: int | None = None,
    buffer: int = BUFFER,
    force: bool = False,
    part: str | None = None,
    join: str | Path | Sequence[str | Path] = (),
    fill: Fill | None = None,
) -> Merged:
    """Merge the checkpoints of a recipe into a file or folder, reading and writing piece by piece.

    Args:
        recipe: A record, a mapping, or the path of a file; it is checked whole, with the headers of all files, before
            any weight is read.
        out: Where to write instead of the recipe's `out`: a `.safetensors` file, or a folder.
        progress: Called with the bytes that are read and those to read.
        resume: Continue a stopped sharded merge and keep its finished shards; without it an unfinished merge starts
            again.
        resolve: Turns references such as models:/name@alias into local paths; the version it means now is recorded.
        workers: Threads, by default one per core; the result does not depend on it.
        buffer: Bytes held at most beyond base, task vectors and workspace of the largest tensor that is treated whole.
        force: Replace the output file even if mergeflow did not make it (never an input, never a folder).
        part: Such as "2/4": write the second quarter of the result's files only, into `OUT.part-2-of-4`, so that four
            machines merge at once. Each reads what its files need, and everything where the method looks at the whole
            model first.
        join: The folders of all parts, or one that holds them: their files, verified, become the result; nothing is
            merged again.
        fill: Has the folder's shards merged on other machines and puts them there; what it leaves is merged here.

    Returns:
        Path and fingerprints, which are also in the file's metadata and in the model card next to it.

    Raises:
        MergeflowError: Anything wrong with the recipe or its files, NaN or infinity, a full disk, another merge at work
            on the same folder, a folder that holds files of others. Nothing half-written is left under the output's
            name.
    """
    began, recipe = time.monotonic(), as_recipe(recipe)
    if out is not None:
        recipe = recipe.model_copy(update={"out": str(out)})
    some, joined = Part.parse(part) if part is not None else None, find_parts(join, recipe.out or "")
    elsewhere = bool(joined) or fill is not None  # nothing is merged here
    if some is not None or elsewhere:
        check_parts(recipe, some, joined)
    recipe = fix_references(recipe, resolve)
    recipe, chosen = (recipe, ()) if elsewhere else choose_device(recipe, resolve)
    with open_inputs(recipe, resolve) as inputs:
        target = check_target(recipe if some is None else some.recipe(recipe), inputs, force)
        plan = make_plan(recipe, inputs, buffer, workers=workers)
        on_read = counted(progress, plan.bytes_read)
        device = "cpu" if elsewhere else recipe.device
        job = Job(recipe, inputs, plan, target, on_read, workers, buffer, device=device)

        def finish(opened: Inputs, fingerprints: dict[str, str]) -> Made:
            if recipe.adapter is not None:
                return AdapterJob(recipe, opened, plan, on_read, workers, buffer, version(), fingerprints).write(target)
            last = job if opened is inputs else job.like(recipe, opened, plan, target, fingerprints)
            return Made(*last.run(resume, some, joined, fill))

        made = after_steps(job, resolve, resume, finish) if plan.written else finish(inputs, {})
        if progress is not None:
            progress(plan.bytes_read, plan.bytes_read)
        all_inputs = (inputs, *(step.inputs for step in inputs.steps.values()))
        counters = [note.text for each in all_inputs for note in counter_findings(each.base, each.experts)]
    seconds = time.monotonic() - began
    experts = {name: made.inputs[name] for name in inputs.experts if name in made.inputs}
    warnings = tuple(dict.fromkeys((*inputs.warnings, *counters, *twice(experts))))
    return Merged(
        target, made.fingerprint, made.inputs, recipe, seconds, (*chosen, *made.notes, *inputs.notes), warnings
    )


def counted(progress: Progress | None, total: int) -> Callable[[int], None]:
    """Return a callback that sums bytes from any thread and reports the sum, one call at a time."""
    done, lock = 0, Lock()

    def advance(count: int) -> None:
        nonlocal done
        if progress is not None:
            with lock:
                done += count
                progress(min(done, total), total)

    return advance
