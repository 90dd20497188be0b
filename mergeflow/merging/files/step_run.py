"""A merge after its steps: those that must be files are written first, and removed when the result is there."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from mergeflow.merging.files.inputs import Inputs
from mergeflow.merging.files.job import Job
from mergeflow.merging.files.opening import open_inputs
from mergeflow.merging.files.plan import make_plan
from mergeflow.merging.files.references import Resolve
from mergeflow.merging.files.step_fields import PREFIX
from mergeflow.merging.files.step_plan import step_folder

Made = TypeVar("Made")
_SHARD = 2 * 10**9  # bytes of a file of a step's result, so that a stopped merge loses little


def after_steps(
    job: Job, resolve: Resolve | None, resume: bool, finish: Callable[[Inputs, dict[str, str]], Made]
) -> Made:
    """Write the steps that must be files, then do what is to be done with them, and remove them when it is.

    Args:
        job: The merge.
        resolve: Turns references into local paths.
        resume: Whether steps and shards of a stopped merge that are done stay.
        finish: Makes the result of the inputs, opened with the steps' files, and the fingerprints of what these read.

    Returns:
        What `finish` returns.
    """
    recipe, made, known = job.recipe, dict[str, Path](), dict[str, str]()
    steps = dict(recipe.steps or ())
    with step_folder(job.target, resume) as folder:
        for name in job.plan.written:
            place, size = folder.path / name, recipe.shard_size or _SHARD
            changes = {"steps": recipe.steps, "device": recipe.device, "out": str(place), "shard_size": size}
            step = steps[name].model_copy(update=changes)
            with open_inputs(step, resolve, made) as inputs:
                piece = job.like(step, inputs, make_plan(step, inputs, job.engine.buffer, ()), place)
                if not folder.kept(name, piece.identity):
                    folder.finish(name, piece.identity, *piece.run(resume))
            made[name] = place
            known |= {f"{PREFIX}{name}/{owner}": found for owner, found in folder.finished[name]["inputs"].items()}
        with open_inputs(recipe, resolve, made) as inputs:
            done = finish(inputs, known)
        folder.remove()
    return done
