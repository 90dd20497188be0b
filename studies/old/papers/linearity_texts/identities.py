"""What every study of linearity stands on, measured: task vectors, features of one text, samples that are kept."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mergeflow.checkpoints import read_state, write_checkpoint
from mergeflow.linearity.affine import borrowed
from mergeflow.linearity.layers import find_layers
from mergeflow.merging.files.vectors import extract
from mergeflow.merging.streaming import merge
from studies.lab.linear_rows import TunedModels, read_samples, rows_of
from studies.old.rows import Row

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_TEXTS = 32  # whose features are computed in several ways


def vector_rows(done: TunedModels, folder: Path, seed: int) -> list[Row]:
    """Return how far θ0 + 1·τ is from θ_t, of each task and type of number, by files.

    Args:
        done: models tuned from one start.
        folder: where files are written, which is empty at the end.
        seed: in every row.
    """
    rows = []
    for name, dtype in TYPES.items():
        for task, state in done.tuned.items():
            folder.mkdir(parents=True, exist_ok=True)
            paths = {part: folder / f"{part}.safetensors" for part in ("base", "expert", "vector", "again")}
            for part, weights in (("base", done.start), ("expert", state)):
                write_checkpoint(paths[part], {key: _typed(value, dtype) for key, value in weights.items()})
            extract(paths["base"], paths["expert"], paths["vector"])
            again = {"method": "task_arithmetic", "args": {"scale": 1.0}, "base": str(paths["base"])}
            merge({**again, "experts": {task: str(paths["vector"])}, "out": str(paths["again"])})
            told = distance_in_places(*(read_state(paths[part]) for part in ("base", "expert", "again")))
            rows.append({"seed": seed, "tasks": task, "type": name, **told})
            shutil.rmtree(folder)
    return rows


def _typed(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype).contiguous() if value.is_floating_point() else value


def distance_in_places(base: Mapping[str, Tensor], expert: Mapping[str, Tensor], again: Mapping[str, Tensor]) -> Row:
    """Return how many entries are the same bits, in %, and the largest difference in units of the last place.

    A unit is that of the larger of |θ0| and |θ_t|: no difference of two numbers is known better than they are.

    Args:
        base: θ0.
        expert: θ_t.
        again: θ0 + 1·τ.

    Example:
        >>> one, other = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([1.5, 4.0])}
        >>> distance_in_places(one, other, {"w": torch.tensor([1.5, 4.0 + 2**-21])})
        {'same': 50.0, 'places': 1.0}
    """
    same, total, largest = 0, 0, 0.0
    for key, value in expert.items():
        if not value.is_floating_point():
            continue
        unit = torch.finfo(value.dtype).eps * torch.exp2(
            torch.maximum(base[key].double().abs(), value.double().abs()).clamp_min(1e-38).log2().floor()
        )
        apart = (again[key].double() - value.double()).abs() / unit
        same, total, largest = same + int((apart == 0).sum()), total + apart.numel(), max(largest, float(apart.max()))
    return {"same": 100 * same / total, "places": largest}


@torch.no_grad()
def feature_rows(done: TunedModels, seed: int) -> list[Row]:
    """Return how much a block's features of a text depend on what else is in the batch, of the start.

    Args:
        done: models tuned from one start.
        seed: in every row.
    """
    model, layers = done.model, find_layers(done.model.module)
    rows = []
    with borrowed(model):
        model.load(done.start)
        for task, data in done.tests.items():
            every = torch.arange(min(_TEXTS, len(data)))
            alone = _features(data, model, [every[n : n + 1] for n in every.tolist()], layers)
            others = {"batches of 7": every.split(7), "all, backwards": [every.flip(0)]}
            for way, batches in others.items():
                found, order = _features(data, model, batches, layers), torch.cat(list(batches))
                for layer in layers:
                    expected = alone[layer][order]
                    apart = (found[layer] - expected).norm(dim=1) / expected.norm(dim=1)
                    rows.append({"seed": seed, "tasks": task, "way": way, "layer": layer, "apart": float(apart.max())})
    return rows


def _features(data: Any, model: Any, batches: Sequence[Tensor], layers: list[str]) -> dict[str, Tensor]:
    parts = [data.features(model, rows, layers) for rows in batches]
    return {layer: torch.cat([part[layer].flatten(1).double() for part in parts]) for layer in layers}


def sample_rows(found: Mapping[str, Mapping[str, Any]], kept: Path, seed: int) -> list[Row]:
    """Return how far the numbers of the kept samples are from those of the measurement.

    Args:
        found: equation → layer → values, as they were measured.
        kept: the file that they were written to.
        seed: in every row.
    """
    return list(_compared(rows_of(found), rows_of(read_samples(kept)), seed))


def _compared(measured: Sequence[Row], again: Sequence[Row], seed: int) -> Iterator[Row]:
    for one, other in zip(measured, again, strict=True):
        for key in ("distance", "base", "coef", "error"):
            apart = abs(one[key] - other[key]) / abs(one[key]) if one[key] else abs(other[key])
            yield {"seed": seed, "equation": one["combination"], "layer": one["layer"], "number": key, "apart": apart}
