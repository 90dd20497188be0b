"""The tables of docs/study-costs.md: `python -m studies.old.costing docs/study-costs.md` writes them anew.

What was measured comes from `docs/studies/results/costs.json` and `runs.json`. What a study would cost on real models
is counted from the choices in `examples/studies`: images through the model, divided by how many a card takes a second.
"""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from math import comb
from pathlib import Path
from typing import Any

from studies.lab.split_sizes import SPLITS
from studies.old.times import hours, read_costs, read_json
from tasks.project.files import read_yaml

Choices = Mapping[str, Any]

EIGHT = 8
# images a second that an H100 trained in bfloat16, and that an H200 judged in float32, as every evaluation is
# (docs/device.md)
TRAINED = {"ViT-B/32": 3453, "ViT-L/14": 525}
JUDGED = {"ViT-B/32": 4237, "ViT-L/14": 285}
# a step of fewer images counts as one of so many: a card that waits for its next kernel gains nothing by them
FEWEST = {"ViT-B/32": 64, "ViT-L/14": 16}
EXAMPLES = {"ViT-B/32": "vit_b_32", "ViT-L/14": "vit_l_14"}
WORLDS = {"the eight tasks": "", "the twenty": "worlds/pocket20", "the eight on texts": "worlds/sentences8"}
FAMILIES = {"rounds": "the eight tasks", "cart": "the twenty"}
MERGES = 28  # methods of the catalog that merge eight experts and need no data
FORWARD_AND_BACK = 3  # forward passes that a step with gradients is worth
_PLACE = re.compile(r"(<!-- costs: (\w+) -->\n).*?(<!-- end -->)", re.S)


def written(text: str, root: Path) -> str:
    """Return a page with the tables that its places ask for.

    Args:
        text: of the page; a place is `<!-- costs: runs -->`, `real`, `studies` or `sums`, and `<!-- end -->`.
        root: the repository.
    """
    made = {"runs": recorded_runs, "real": real_runs, "studies": studies_table, "sums": sums}
    return _PLACE.sub(lambda found: f"{found[1]}\n{made[found[2]](root)}\n\n{found[3]}", text)


def recorded_runs(root: Path) -> str:
    """Return the table of the training runs on the embedded suites."""
    times = read_json(root / "docs/studies/results/runs.json")
    rows = []
    for label, world in WORLDS.items():
        params = read_yaml(root / world / "studies/params.yaml")
        place = f"{world}/" if world else ""
        known = [times[place + run]["processor_seconds"] for run in params["runs"] if place + run in times]
        where = f"`{place}studies/params.yaml`"
        rows.append([label, where, len(params["runs"]), len(params["seeds"]), len(known), f"{sum(known)} s"])
    return _table(["tasks", "choices", "runs", "seeds", "on record", "processor seconds of these"], rows, "ll--r-")


def real_runs(root: Path) -> str:
    """Return the table of the training runs on real models, estimated from the examples."""
    rows = []
    for family, label in FAMILIES.items():
        spent = [_training(root, family, size) for size in EXAMPLES]
        params, _ = _example(root, family, next(iter(EXAMPLES)))
        told = [len(params["runs"]), len(params["seeds"]), f"{spent[0][0] / 1e6:.0f} million"]
        rows.append([label, f"`examples/studies/{family}_*`", *told, *(_time(seconds) for _, seconds in spent)])
    return _table(["tasks", "choices", "runs", "seeds", "images, forward and back", *EXAMPLES], rows, "ll-----")


def _training(root: Path, family: str, size: str) -> tuple[int, float]:
    """Return how many images the runs of an example train on, and the seconds that this takes."""
    params, common = _example(root, family, size)
    counted = [trained(run, common, len(params["seeds"]), FEWEST[size]) for run in params["runs"].values()]
    return sum(shown for shown, _ in counted), sum(worth for _, worth in counted) / TRAINED[size]


def trained(run: Choices, common: Choices, seeds: int, fewest: int) -> tuple[int, int]:
    """Return how many images a run trains on, and how many it counts for where small batches are slow.

    Args:
        run: as in studies/params.yaml.
        common: the section `finetune` of params.yaml.
        seeds: of the project.
        fewest: images that a step counts for at least.
    """
    asked = {**common, **run}
    sizes = [split[0] for split in list(SPLITS.values())[: asked.get("tasks", EIGHT)]]
    times = {"one_epoch": 1, "epochs": asked.get("epochs", 1)}.get(asked["regime"])
    batch, repeated = asked["batch_size"], asked.get("seeds", seeds)
    if times is None:
        images = asked["steps"] * batch * len(sizes) * repeated
        return images, images
    images = times * sum(sizes) * repeated
    return images, round(images * max(1, fewest / batch))


def studies_table(root: Path) -> str:
    """Return the table of the studies: what each took on the embedded suite, and what it takes on real models."""
    costs = read_costs(root / "docs/studies")
    rows: list[list[str]] = []
    for name in COUNTED:
        judged = {size: _judged(root, name, size) for size in EXAMPLES}
        cells = [
            f"{_millions(images)}, {_time(images / JUDGED[size])}" if images else "" for size, images in judged.items()
        ]
        seconds = f"{costs[name]['seconds']} s" if name in costs else ""
        rows.append([f"[{name}](studies/{name}.md)", COUNTED[name][2], seconds, *cells])
    head = ["study", "rows", "embedded suite, by the clock", *(f"{size}: images, time" for size in EXAMPLES)]
    return _table(head, rows, "ll---")


def _judged(root: Path, name: str, size: str) -> float:
    """Return how many images a study lets through a model; 0 where that is not counted."""
    family, count, _ = COUNTED[name]
    params, _ = _example(root, family, size)
    known = count and name in params["studies"]
    return count(params["studies"][name], params["runs"], len(params["seeds"])) if count and known else 0.0


def sums(root: Path) -> str:
    """Return what the studies of the table took together, and what they would take on real models."""
    costs = {name: one["seconds"] for name, one in read_costs(root / "docs/studies").items()}
    listed, every = (hours(costs[one] for one in names if one in costs) for names in (COUNTED, costs))
    real = []
    for size in EXAMPLES:
        training = sum(_training(root, family, size)[1] for family in FAMILIES)
        judging = sum(_judged(root, name, size) for name in COUNTED) / JUDGED[size]
        real.append(f"{_time(training + judging)} with {size} (judging alone {_time(judging)})")
    return (
        f"By the clock the {len(COUNTED)} studies of this table took {listed}, and all {len(costs)} on record {every}. "
        f"On real models they are estimated, with their training runs, at {' and '.join(real)}."
    )


def _validation(tasks: int = EIGHT, most: int = 10**9) -> int:
    return sum(min(most, split[1]) for split in list(SPLITS.values())[:tasks])


def _test(tasks: int = EIGHT, most: int = 10**9) -> int:
    return sum(min(most, split[2]) for split in list(SPLITS.values())[:tasks])


def _one_epoch(own: Choices, runs: Choices, seeds: int) -> float:
    merged = 1 + len(own["epochs"]) + 2 * len(own["further"])
    return seeds * merged * (20 * _validation() + 2 * _test())


def _gradients(own: Choices, runs: Choices, seeds: int) -> float:
    asked = [runs[name] for name in own["runs"].values()]
    epochs = sum(run["epochs"] * run.get("tasks", EIGHT) * run.get("seeds", seeds) for run in asked)
    descent = len(own["steps"]) * asked[0]["epochs"] * asked[0].get("tasks", EIGHT)
    return float((epochs + descent) * own["images"] * FORWARD_AND_BACK)


def _merge_frequency(own: Choices, runs: Choices, seeds: int) -> float:
    cells = len(own["multiples"]) * (1 + 2 * (len(own["rounds"]) - 1))
    shown = sum(runs[name]["iterative"]["rounds"] for name in own["course"])
    return float(seeds * (cells * (_validation() + _test()) + shown * _validation()))


def _projection(own: Choices, runs: Choices, seeds: int) -> float:
    chosen = MERGES * len(own["factors"]) * _validation(most=own["images"])
    scored = (MERGES + 2 + len(own["paths"])) * 2 * _test(most=own["images"])
    return float(chosen + seeds * (scored + len(own["drops"]) * _test()))


def _mima(own: Choices, runs: Choices, seeds: int) -> float:
    further = len(own["budgets"]) * len(own["at"]) + len(own["kept"])
    return seeds * (len(own["rounds"]) * (48 * _validation() + 6 * _test()) + further * 2 * _test())


def _landscape(own: Choices, runs: Choices, seeds: int) -> float:
    tests = sum(SPLITS[task][2] for pair in own["pairs"] for task in pair)
    grids = len(own["pairs"]) * own["size"] ** 2 * own["images"] * 2
    return float(seeds * len(own["rounds"]) * (grids + 5 * tests))


def _cost(own: Choices, runs: Choices, seeds: int) -> float:
    tried = 31 + 17 * len(own["keep"]) + 10 * len(own["rank_ratio"])
    models = len(own["joint"]) + len(own["iterative"]) + len(own["one_shot"])
    rates = (1 + len(own["rates"])) * _validation()
    return float(seeds * (len(own["one_shot"]) * tried * _validation() + rates + models * _test()))


def _linearity_experts(own: Choices, runs: Choices, seeds: int) -> float:
    stitched = len(own["add"]) * (4 + 3 * len(own["blocks"]))
    of_pair = 2 * (3 + own["path"]) + 6 * len(own["scales"]) + stitched
    of_task = 3 * (1 + len(own["scales"]) + len(own["negate"]))
    return float(seeds * own["images"] * (comb(EIGHT, 2) * of_pair + EIGHT * of_task))


def _mergeability(own: Choices, runs: Choices, seeds: int) -> float:
    names = {*own["runs"], *(f"mima_{count}" for count in own["rounds"])}
    return seeds * len(names) * _of_pairs(EIGHT, own["images"])


def _of_pairs(tasks: int, images: int) -> float:
    """Every expert on its own test, every pair on both tests, and features of its average and of its experts."""
    return _test(tasks) * tasks + images * (2 * comb(tasks, 2) + tasks**2)


def _many_tasks(own: Choices, runs: Choices, seeds: int) -> float:
    tried = sum(_candidates(sweep) for sweep in own["methods"].values())
    found, adapted = 0.0, own["adapted"]
    for count in own["counts"]:
        beside = 2 + sum(count in one["counts"] for one in own["together"].values())
        found += seeds * (tried * _validation(count) + (len(own["methods"]) + beside) * _test(count))
        if count in adapted["counts"]:
            found += len(adapted["directions"]) * _adapted(adapted, count, seeds, 16)
    return found


def _candidates(sweep: Choices) -> int:
    scale = sweep.get("scale")
    found = round((scale["high"] - scale["low"]) / scale["step"]) + 1 if scale else 1
    for values in sweep.get("args", {}).values():
        found *= len(values)
    return found


def _adapted(own: Choices, tasks: int, seeds: int, batch: int) -> float:
    """Every rate with one seed, six looks at validation each; then all seeds with the one that is chosen."""
    steps = own["steps"] * batch * tasks * FORWARD_AND_BACK
    return float(len(own["rates"]) * (steps + 6 * _validation(tasks)) + seeds * (steps + _test(tasks)))


def _rank_curve(own: Choices, runs: Choices, seeds: int) -> float:
    found, scales = 0, sum(len(values) for values in own["scales"].values())
    for suite in own["suites"]:
        looks = 3 * len(suite["ratios"]) + 2 * len(suite["tuned"]) + 3
        found += (1 + len(suite["tuned"])) * scales * _validation(suite["tasks"]) + looks * _test(suite["tasks"])
    return float(seeds * found)


def _adaptation(own: Choices, runs: Choices, seeds: int) -> float:
    tasks = own["tasks"]
    starts = seeds * (35 * _validation(tasks) + 6 * _test(tasks))
    adapted = 4 * _adapted(own, tasks, 2 * seeds, own["batch_size"]) + 8 * seeds * _test(tasks)
    return float(starts + adapted + 4 * len(own["factors"]) * _validation(tasks))


def _compression(own: Choices, runs: Choices, seeds: int) -> float:
    curve = len({own["rank_ratio"], *own["ratios"]})
    tried, looks = 1 + len(own["thresholds"]) + curve, 5 + curve + len(own["ratios"])
    return float(seeds * sum(tried * _validation(count) + looks * _test(count) for count in own["counts"]))


def _subset_scaling(own: Choices, runs: Choices, seeds: int) -> float:
    every = len(SPLITS)
    merged = sum(min(own["most"], comb(every, size)) * size for size in own["sizes"])
    tried = sum(
        _candidates({"args": grid}) * (1 + len(own["wider"].get(method, []))) for method, grid in own["grids"].items()
    )
    looks = len(own["grids"]) + len(own["wider"])
    split = tried * _validation(every, own["validation"]) + looks * _test(every, own["test"])
    return float(seeds * merged * split / every)


def _cart_landscape(own: Choices, runs: Choices, seeds: int) -> float:
    tasks, ranks = own["tasks"], len({*own["ranks"], 0.08, 1.0})
    models = 2 + tasks + len(own["additions"]) + 1 + (1 + ranks) * (len({*own["scales"], 1.0}) + 3)
    measured = models + 2 + len(own["additions"])
    drawn = own["size"] ** 2 + own["near"] ** 2
    return float((seeds * measured + drawn) * _validation(tasks, own["images"]) + seeds * 12 * _test(tasks))


def _adviser_suites(own: Choices, runs: Choices, seeds: int) -> float:
    every = max(own["counts"])
    tasks = sum(own["counts"]) + 2 * own["pairs"] + 3 * own["triples"]
    of_sets = tasks * (33 * own["validation"] + 5 * own["test"])
    unlearned = 2 * every**2 * own["edited"] + 2 * every**2 * own["samples"]
    return float(len(own["runs"]) * seeds * (of_sets + unlearned))


def _mergeability_suites(own: Choices, runs: Choices, seeds: int) -> float:
    return seeds * len(own["runs"]) * _of_pairs(max(own["counts"]), own["images"])


Count = Callable[[Choices, Choices, int], float]
# study → the example that has its real choices, how many images go through the model, and the rows of the papers
COUNTED: dict[str, tuple[str, Count | None, str]] = {
    "equivalence": ("rounds", None, "G1–G4"),
    "one_epoch": ("rounds", _one_epoch, "G5 G9"),
    "gradients": ("rounds", _gradients, "G6"),
    "merge_frequency": ("rounds", _merge_frequency, "G7"),
    "projection": ("rounds", _projection, "G8"),
    "mima": ("rounds", _mima, "M1 M2 M4 M6"),
    "alignment": ("rounds", None, "M3"),
    "landscape": ("rounds", _landscape, "M5"),
    "cost": ("rounds", _cost, "M7"),
    "linearity_experts": ("rounds", _linearity_experts, "L1 L4 L11–L15"),
    "mergeability": ("rounds", _mergeability, "ours"),
    "adviser_regimes": ("rounds", None, "P10"),
    "structure_suite": ("rounds", None, "P16 P17"),
    "many_tasks": ("cart", _many_tasks, "C1 C2 C4 C6"),
    "rank_curve": ("cart", _rank_curve, "C2"),
    "interference": ("cart", None, "C3"),
    "adaptation": ("cart", _adaptation, "C4"),
    "compression": ("cart", _compression, "C5"),
    "subset_scaling": ("cart", _subset_scaling, "C7"),
    "cart_landscape": ("cart", _cart_landscape, "C8"),
    "adviser_suites": ("cart", _adviser_suites, "P10"),
    "mergeability_suites": ("cart", _mergeability_suites, "ours"),
    "bases": ("rounds", None, "control of C1 C2"),
}


def _example(root: Path, family: str, size: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return an example's studies/params.yaml, and the section `finetune` of its params.yaml."""
    folder = root / "examples/studies" / f"{family}_{EXAMPLES[size]}"
    return read_yaml(folder / "studies.yaml"), read_yaml(folder / "params.yaml")["finetune"]


def _millions(images: float) -> str:
    return f"{images / 1e6:.0f} million" if images >= 1e7 else f"{images / 1e6:.1f} million"


def _time(seconds: float) -> str:
    """Return seconds as hours, or as minutes below an hour and a half."""
    return f"{seconds / 3600:.0f} h" if seconds >= 1.5 * 3600 else f"{max(1, seconds / 60):.0f} min"


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]], sides: str) -> str:
    rule = ["---" if side == "l" else "--:" for side in sides]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in (head, rule, *rows))


if __name__ == "__main__":
    for page in map(Path, sys.argv[1:]):
        page.write_text(written(page.read_text(), page.resolve().parents[1]))
