"""Whether every method gives the same bits as in an older checkout: `python -m benchmarks.merging.bits ../before`.

Files of awkward and of larger tensors are merged by both, in float32, bfloat16 and float16, with the arguments of
`EDGE` in tests/merging/helpers.py; fingerprints of results and inputs are compared. It takes some minutes.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

DTYPES = ("float32", "bfloat16", "float16")
_LEAF = 2**17  # elements of a leaf of the fingerprints
# A remainder behind whole leaves, rows that end inside of a leaf, and a tensor that is read twice on the sphere.
SHAPES = {"long": (4 * _LEAF + 9,), "table.weight": (1300, 450), "blocks.2.norm.weight": (_LEAF + 5,)}


def main() -> None:
    """Compare this checkout with the one that is named."""
    older, here = Path(sys.argv[1]).resolve(), Path(__file__).parents[2]
    from tests.merging.helpers import EDGE

    cases = json.dumps([(name, args) for name, several in EDGE.items() for args in [{}, *several]])
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--worker", cases],
            env={**os.environ, "PYTHONPATH": str(checkout)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for checkout in (here, older)
    ]
    printed = [json.loads(process.communicate()[0]) for process in processes]
    differing = [case for case, value in printed[0].items() if printed[1].get(case) != value]
    print(f"{len(printed[0])} merges, {len(differing)} differ")
    print("\n".join(differing))
    sys.exit(bool(differing))


def fingerprints(cases: list[tuple[str, dict[str, Any]]]) -> Iterator[tuple[str, Any]]:
    """Yield the name of each case and the fingerprints of its result and inputs."""
    import torch

    from mergeflow.checkpoints import write_checkpoint
    from mergeflow.errors import MergeflowError
    from mergeflow.merging import make_recipe, merge, methods
    from mergeflow.merging.contract import awkward, statistics

    for dtype in DTYPES:
        with TemporaryDirectory(prefix="bits-") as folder:
            base, experts = awkward(getattr(torch, dtype), experts=9)
            for at, state in enumerate((base, *experts.values())):
                generator = torch.Generator().manual_seed(at)
                for name, shape in SHAPES.items():
                    base_values = torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(shape)
                    noise = torch.randn(shape, generator=generator)
                    state[name] = (base_values + 0.1 * noise * (noise > -0.5)).to(getattr(torch, dtype))
            data = statistics(base, experts)
            stored = {"base": base, **experts}
            stored |= {f"{kind}-{expert}": state for kind, by in data.items() for expert, state in by.items()}
            paths = {name: str(Path(folder, f"{name}.safetensors")) for name in stored}
            for name, state in stored.items():
                write_checkpoint(paths[name], state)
            for name, args in cases:
                method = methods()[name]
                for count in (3, 9) if dtype == "bfloat16" else (3,):
                    chosen = list(experts)[: min(count, method.experts[1] or count)]
                    recipe = {
                        "method": name,
                        "args": args,
                        "base": paths["base"],
                        "experts": {expert: paths[expert] for expert in chosen},
                        "data": {kind: {name: paths[f"{kind}-{name}"] for name in chosen} for kind in method.data},
                        "out": str(Path(folder, "out.safetensors")),
                    }
                    if method.weights != "none" and count == 9:
                        recipe["weights"] = {expert: 0.25 + 0.5 * at for at, expert in enumerate(chosen)}
                    label = f"{name} {json.dumps(args)} of {len(chosen)} in {dtype}"
                    try:
                        made = merge(make_recipe(recipe))
                        yield label, [made.fingerprint, made.inputs]
                    except MergeflowError as error:
                        yield label, str(error).replace(folder, "")
                    print(label, file=sys.stderr)


if __name__ == "__main__":
    if sys.argv[1] == "--worker":
        print(json.dumps(dict(fingerprints(json.loads(sys.argv[2])))))
    else:
        main()
