"""The same merges by mergekit and sd-mecha, each from an environment of its own, and by an older checkout.

python -m venv peers && peers/bin/pip install mergekit sd-mecha
python -m benchmarks.merging --only ta ties slerp --mergekit peers/bin --sd-mecha peers/bin --older ../mergeflow-before
"""

import json
from pathlib import Path
from typing import Any

import yaml

# Its names of our methods' arguments, as `mergeflow convert` reads them; `lambda` is our scale.
CONFIGS: dict[str, dict[str, Any]] = {
    "ta": {"merge_method": "task_arithmetic", "parameters": {"lambda": 0.3, "normalize": False}},
    "ties": {"merge_method": "ties", "parameters": {"density": 0.2, "normalize": True}},
    "slerp": {"merge_method": "slerp", "parameters": {"t": 0.5}},
}


def mergekit_command(binaries: Path, scratch: Path, work: str, base: Path, experts: list[str]) -> list[str]:
    """Write its configuration and return the command of its script for plain state dicts.

    TIES of mergekit trims each tensor by itself, which needs one reading less than the whole vector.

    Args:
        binaries: the folder of its scripts.
        work: a key of `CONFIGS`.
    """
    config = CONFIGS[work]
    models: list[dict[str, Any]] = [{"model": path, "parameters": {"weight": 1.0}} for path in experts]
    start = str(base)
    if work == "slerp":  # between its base and one other model
        models, start = [{"model": path} for path in experts], experts[0]
    place = scratch / f"mergekit-{work}.yml"
    place.write_text(yaml.safe_dump({**config, "base_model": start, "models": models, "dtype": "float32"}))
    return [str(binaries / "mergekit-pytorch"), "--quiet", str(place), str(scratch / "mergekit-out")]


# Programs for its Python: the formula from base `b`, experts `e` and task vectors; TIES trims each tensor by itself.
MECHA: dict[str, str] = {
    "ta": "add(b, m.n_average(*taus), alpha=0.3 * len(e))",
    "ties": "add(b, m.ties_sum(*taus, k=0.2), alpha=1.0)",
    "slerp": "m.slerp(*e, alpha=0.5)",
}
_MECHA = """
import json, sys, torch, sd_mecha as m
from sd_mecha.extensions.builtin.merge_methods.linear import add_difference as add
base, experts, out = json.loads(sys.argv[1])
b, e = m.model(base), [m.model(path) for path in experts]
taus = [m.subtract(one, b) for one in e]
m.merge({formula}, output=out, merge_device="cpu", merge_dtype=torch.float32, output_dtype=torch.float32,
        threads=2, strict_mandatory_keys=False)
"""


def mecha_command(binaries: Path, scratch: Path, work: str, base: Path, experts: list[str]) -> list[str]:
    """Return the command of sd-mecha's merge.

    Args:
        binaries: the folder of its environment's programs.
        work: a key of `MECHA`.
    """
    names = json.dumps([str(base), experts, str(scratch / "mecha-out.safetensors")])
    return [str(binaries / "python"), "-c", _MECHA.replace("{formula}", MECHA[work]), names]
