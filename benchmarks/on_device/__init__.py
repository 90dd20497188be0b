"""The sections of `benchmarks/device.py`: each measures one thing and returns rows of a table."""

import sys
from importlib.util import find_spec

NEEDED = (
    *("torch", "open_clip", "safetensors", "pydantic", "yaml", "xxhash", "blake3", "numpy", "scipy", "filelock"),
    *("threadpoolctl", "pyarrow", "PIL", "sklearn", "matplotlib", "pytest", "hypothesis"),
)

if missing := [name for name in NEEDED if find_spec(name) is None]:
    sys.exit(f"benchmarks.device needs packages that are not installed here: {', '.join(missing)}. Install them first.")
