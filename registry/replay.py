"""Replay a recipe: merge again from its inputs and say whether the bytes are the same."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mergeflow.checkpoints.fingerprint import scheme_of
from mergeflow.merging import make_recipe, merge


@dataclass(frozen=True)
class Replay:
    """What came of a merge made again.

    Attributes:
        path: the new file.
        fingerprint: of the new weights, in the scheme of the recorded ones.
        other_inputs: inputs ("base" or a task) whose fingerprint is not the recorded one, sorted.
        seconds: wall time of the merge.
    """

    path: Path
    fingerprint: str
    other_inputs: tuple[str, ...]
    seconds: float


def replay(recipe: Mapping[str, Any], root: Path, out: Path) -> Replay:
    """Merge by a recorded recipe, piece by piece, from inputs below `root`.

    The engine differs from that of the stage `select` (streaming against in memory), so equal bytes say more than that
    a computation was repeated.

    Args:
        recipe: `method`, `args`, `weights` where they are not all 1, `code` of methods from outside the package, `base`
            and `experts` (paths below `root`), `fingerprints` of the experts and `base_fingerprint`, as the stage
            `select` records them.
        root: folder that the paths start from.
        out: the `.safetensors` file to write.

    Raises:
        MergeflowError: an input is missing or damaged, or a method is made of other code now.
    """
    experts = {task: str(root / path) for task, path in recipe["experts"].items()}
    same = {key: recipe[key] for key in ("method", "args", "weights", "code") if key in recipe}
    again = make_recipe({**same, "base": str(root / recipe["base"]), "experts": experts}, "the version's recipe")
    known = {**recipe["fingerprints"], "base": recipe["base_fingerprint"]}
    made = merge(again, out, scheme=scheme_of(recipe["base_fingerprint"]))
    other = sorted(name for name, fingerprint in made.inputs.items() if known[name] != fingerprint)
    return Replay(made.path, made.fingerprint, tuple(other), made.seconds)
