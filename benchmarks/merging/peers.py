"""The same merges by mergekit, from an environment of its own: `--mergekit VENV/bin`.

python -m venv peers && peers/bin/pip install mergekit
python -m benchmarks.merging --only ta ties slerp --mergekit peers/bin
"""

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
        scratch: the folder for configuration and result.
        work: a key of `CONFIGS`.
        base: the base's folder or file.
        experts: the experts'.
    """
    config = CONFIGS[work]
    models: list[dict[str, Any]] = [{"model": path, "parameters": {"weight": 1.0}} for path in experts]
    start = str(base)
    if work == "slerp":  # between its base and one other model
        models, start = [{"model": path} for path in experts], experts[0]
    place = scratch / f"mergekit-{work}.yml"
    place.write_text(yaml.safe_dump({**config, "base_model": start, "models": models, "dtype": "float32"}))
    return [str(binaries / "mergekit-pytorch"), "--quiet", str(place), str(scratch / "mergekit-out")]
