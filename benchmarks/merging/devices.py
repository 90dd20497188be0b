"""When a CUDA device is worth it: each method's merge on the processor and on the device, and the cost of moving data.

Both merge the same files. Seconds are those of the merge alone: imports and the start of the device are left out. The
transfer is measured by a method that only moves what the merge moves.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

DEFAULTS: dict[str, dict[str, Any]] = {
    "task_arithmetic": {}, "ties": {}, "dare": {}, "della": {}, "breadcrumbs": {}, "consensus": {}, "pcb": {},
    "slerp": {}, "karcher": {}, "model_stock": {}, "iso_c": {}, "cart": {}, "low_rank": {}, "tsv": {}, "iso_cts": {},
    "knots": {}, "wudi": {},
}  # fmt: skip


def table(
    measure: Callable[[dict[str, Any]], dict[str, Any]], common: dict[str, Any], device: str, methods: Iterable[str]
) -> Iterator[dict[str, Any]]:
    """Print and yield one row for each method.

    Args:
        common: what all jobs share: base, experts, out.
        device: the device beside the processor, such as "cuda".
    """
    print(f"| method | cpu | {device} | cpu / {device} | share of transfers |\n|---|---|---|---|---|")
    for method in methods:
        args = DEFAULTS[method]
        chosen = common["experts"][:2] if method == "slerp" else common["experts"]
        job = {**common, "kind": "device", "method": method, "args": args, "experts": chosen}
        there, here = (measure({**job, "device": place}) for place in (device, "cpu"))
        share = there["passes"] * max(there["moving"] - here["moving"], 0.0) / there["seconds"]
        ratio = here["seconds"] / there["seconds"]
        print(
            f"| `{method}` | {here['seconds']:.1f} s | {there['seconds']:.1f} s | {ratio:.2f} | {share:.0%} |",
            flush=True,
        )
        yield {"method": method, "cpu": here, device: there, "share": share}
    print(f"{device} is {device_name(device)}.")


def merge_there(job: dict[str, Any]) -> dict[str, Any]:
    """Merge once on a device that has been started; returns its seconds, and those of moving the data alone."""
    from mergeflow.merging import check_recipe, make_recipe, merge

    names = {f"e{index:02d}": path for index, path in enumerate(map(str, job["experts"]))}
    values = {"method": job["method"], "args": job["args"], "base": job["base"], "experts": names}
    recipe = make_recipe({**values, "device": job["device"], "out": job["out"]})
    moving(recipe, Path(job["base"]), {})  # starts the device and warms the page cache
    seconds = merge(recipe).seconds
    experts = {name: Path(path) for name, path in names.items()}
    return {
        "seconds": seconds,
        "moving": moving(recipe, Path(job["base"]), experts),
        "passes": check_recipe(recipe).passes,
    }


def moving(recipe: Any, base: Path, experts: dict[str, Path]) -> float:
    """Return the seconds of reading every unit of a merge, moving it to the device, and one tensor of it back.

    Args:
        recipe: its method says which tensors are read whole; its device is moved to.
        experts: files by name; none only starts the device.
    """
    from mergeflow.checkpoints import open_checkpoint
    from mergeflow.merging.catalog import MethodCall
    from mergeflow.merging.execution.engine import Engine
    from mergeflow.merging.execution.reader import Stacks, model_of
    from mergeflow.merging.method import Args, Method

    real = recipe.call()
    mover = Method(
        "moving", lambda stack, args: (stack.base, stack.base), Args, real.method.elementwise, lambda args, dtype: (),
        "θ0", "factors", (0, None), (),
    )  # fmt: skip
    opened = {name: open_checkpoint(path) for name, path in experts.items()}
    with open_checkpoint(base) as start:
        engine = Engine(
            MethodCall(mover, real.arguments), Stacks(start, opened, model_of(start, opened), recipe.device)
        )
        began = time.perf_counter()
        engine.run(lambda unit, stack, result: None if stack is None else result[1].cpu())
        return time.perf_counter() - began


def device_name(device: str) -> str:
    """Return the name of the device."""
    import torch

    return torch.cuda.get_device_name(device) if device.startswith("cuda") else "cpu"
