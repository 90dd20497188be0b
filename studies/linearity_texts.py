"""Study `linearity_texts` (L10–L13, L16, L20): are an encoder-decoder's features linear in edits of its weights?

**Question.** The paper adds and negates task vectors of a T5 that was tuned on six text-to-text tasks, and finds the
features of its encoder and decoder linear. Is it so for a small T5 from nothing? And what every study of linearity
stands on: are a model and its task vector the same thing, does a feature depend on its text alone, and do samples that
are kept in float32 give the tables again?

**Method.** A T5 is pre-trained to repeat rows of symbols and tuned on six edits of them (reversed, sorted, each symbol
replaced by the next, rotated, neighbours swapped, every second one), each with AdamW. *Edits*: Equations 2, 3 and 4 as
in the study linearity_edits, at each block (the rule of Equation 4 has no baseline and is laxer than that of the other
two, by which λ = 0.2 would be undecided): the encoder's features are means over the tokens
that are not padding, the decoder's are those with which it generates the first token. *Vectors* (L10): θ0 + 1·τ_t by
the files that `mergeflow vector` writes, against θ_t, in float32 and bfloat16, in units of the last place of the larger
of |θ0| and |θ_t|. *Features* (L16): of the same texts one at a time and in batches of 7 and of all, backwards; the
largest difference in shares of the feature's length. *Samples* (L20): means of samples
rounded to float32 against the rows. The embedded model shows the arithmetic on T5's code; published checkpoints take
its place by `checkpoints`, as [the example of linearity](../../examples/linearity/studies.yaml) does for T5-base.
Margins are ours and were written before the run.

**Source.** Zhou et al. 2024, Cross-Task Linearity, Section 4.3, B.1.3, Figures 21 and 24; Ni et al. 2022, Sentence-T5.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import pandas as pd
import torch
from pydantic import Field, model_validator
from torch import Tensor

from mergeflow.checkpoints import read_state, write_checkpoint
from mergeflow.evaluation.accuracy import accuracies
from mergeflow.evaluation.averages import mean
from mergeflow.linearity.affine import Linearity, borrowed
from mergeflow.linearity.layers import find_layers
from mergeflow.merging.files.vectors import extract
from mergeflow.merging.streaming import merge
from studies.lab import Claim, Laboratory, Row, Section, Study, select, table
from studies.lab.linearity import TunedModels, layer_table, layers_figure, rows_of
from studies.lab.text_models import Checkpoints, TextWorld, open_checkpoints, train_texts
from studies.linearity_edits import claims_on_edits, measure_edits

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_TEXTS = 32  # whose features are computed in several ways


class Options(Section):
    """The study's choices.

    world: a model from nothing; or checkpoints: published ones. texts: of each task. scale: λ at which Equations 2 and
    3 are judged. scales: λ of 3 and 4. seeds: of weights, rows and orders; of checkpoints one.
    """

    world: TextWorld | None = None
    checkpoints: Checkpoints | None = None
    texts: int = Field(ge=32)
    scale: float = Field(gt=0)
    scales: list[float] = Field(min_length=1)
    seeds: list[int] = Field(min_length=1)

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.world is None) == (self.checkpoints is None):
            raise ValueError("takes either `world` or `checkpoints`")
        return self


def measure(lab: Laboratory, options: Options) -> Iterator[Row]:
    """Yield rows for each seed: `edits` by layer, what `experts` answer, `vectors`, `features`, `samples`."""
    yield from lab.by_seed(partial(measure_seed, lab, options), options.seeds)


def measure_seed(lab: Laboratory, options: Options, seed: int) -> Iterator[Row]:
    if options.checkpoints is not None:
        done = open_checkpoints(options.checkpoints, lab.io.root, options.texts)
    else:
        assert options.world is not None
        done = train_texts(options.world, seed)
    compared: dict[str, dict[str, Linearity]] = {}
    edits = measure_edits(done, options.scale, options.scales, compared, seed=seed)
    yield from ({"part": "edits", **row} for row in edits)
    yield from expert_rows(done, seed)
    yield from vector_rows(done, lab.io.scratch / f"vectors_{seed}", seed)
    yield from feature_rows(done, seed)
    yield from sample_rows(edits, compared, options.scale, seed)


def expert_rows(done: TunedModels, seed: int) -> list[Row]:
    """Return how many answers each expert and the start get right, in %; nothing of texts without answers."""
    rows = []
    for task, test in done.tests.items():
        if not hasattr(test, "scores"):
            continue
        told: dict[str, float] = {}
        for name, state in (("start", done.start), ("expert", done.tuned[task])):
            done.model.load(state)
            told[name] = 100 * mean(accuracies(done.model, {task: test}))
        rows.append({"part": "experts", "seed": seed, "tasks": task, **told})
    return rows


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
            rows.append({"part": "vectors", "seed": seed, "tasks": task, "type": name, **told})
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
                    rows.append(
                        {
                            "part": "features",
                            "seed": seed,
                            "tasks": task,
                            "way": way,
                            "layer": layer,
                            "apart": float(apart.max()),
                        }
                    )
    return rows


def _features(data: Any, model: Any, batches: Sequence[Tensor], layers: list[str]) -> dict[str, Tensor]:
    parts = [data.features(model, rows, layers) for rows in batches]
    return {layer: torch.cat([part[layer].flatten(1).double() for part in parts]) for layer in layers}


def sample_rows(
    edits: Sequence[Row], compared: Mapping[str, Mapping[str, Linearity]], scale: float, seed: int
) -> Iterator[Row]:
    """Yield how far means and medians of samples kept in float32 are from the rows, of each equation's first edit."""
    first: dict[str, str] = {}
    for row in edits:
        if row["scale"] == scale:
            first.setdefault(row["equation"], row["combination"])
    for equation, name in first.items():
        layers = {layer: _in_float32(values) for layer, values in compared[name].items()}
        measured = (row for row in edits if row["combination"] == name and row["equation"] == equation)
        for row, again in zip(measured, rows_of({name: layers}), strict=True):
            for key in ("distance", "base", "coef", "error"):
                apart = abs(row[key] - again[key]) / abs(row[key]) if row[key] else abs(again[key])
                about = {"equation": equation, "layer": row["layer"], "number": key}
                yield {"part": "samples", "seed": seed, **about, "apart": apart}


def _in_float32(values: Linearity) -> Linearity:
    keys = ("distance", "coef", "error", "base")
    return replace(values, **{key: getattr(values, key).astype(np.float32).astype(float) for key in keys})


def largest(rows: pd.DataFrame, column: str, **where: str) -> pd.Series:
    """Return the largest value of a column by seed."""
    return select(rows, **where).groupby("seed")[column].max()


# fmt: off
def claims(options: Options) -> list[Claim]:
    apart = "10⁶ × the largest difference"
    exact: dict[str, Any] = {"unit": "", "digits": 2, "ours": True}
    return [
        Claim("L10", "A model and its task vector are the same: θ0 + 1·τ is θ_t.",
              lambda rows: {name: largest(rows, "places", part="vectors", type=name) for name in TYPES},
              high=1, of="largest difference of any entry", digits=2, ours=True,
              unit="units of the last place of the larger of |θ0| and |θ_t|"),
        *claims_on_edits(options.scale, options.scales),
        Claim("L16",
              "A text's features do not depend on the texts beside it: batches, order and padding change nothing.",
              lambda rows: {apart: 1e6 * largest(rows, "apart", part="features")}, high=10,
              of="10⁶ × the largest difference in shares of the feature's length, any block and task,", **exact),
        Claim("L20", "The samples that a study keeps give its tables again.",
              lambda rows: {apart: 1e6 * largest(rows, "apart", part="samples")}, high=1,
              of="10⁶ × the difference of means and medians from the rows'", **exact),
    ]
# fmt: on


def answers_table(rows: pd.DataFrame) -> pd.DataFrame:
    own = select(rows, part="experts")
    return pd.concat([table(own, "tasks", value=value) for value in ("start", "expert")], axis=1) if len(own) else own


def features_table(rows: pd.DataFrame) -> pd.DataFrame:
    own = select(rows, part="features").assign(apart=1e6 * rows.apart)
    return table(own.groupby(["way", "seed"], sort=False).apart.max().reset_index(), "way", value="apart", digits=2)


def vectors_table(rows: pd.DataFrame) -> pd.DataFrame:
    own = select(rows, part="vectors")
    worst = own.groupby(["type", "seed"], sort=False).places.max().reset_index()
    tables = [table(own, "type", value="same", digits=2), table(worst, "type", value="places", digits=2)]
    return pd.concat(tables, axis=1)


STUDY = Study(
    options=Options,
    systems=("L10", "L11", "L12", "L13", "L16", "L20"),
    measure=measure,
    claims=claims,
    tables={
        "Whole answers that are right, on test, %": answers_table,
        "Edits: means over pairs or tasks": lambda rows: layer_table(
            select(rows, part="edits"), "equation", "scale", "layer"
        ),
        "θ0 + 1·τ against θ_t: same bits in %, largest difference in units of the last place": vectors_table,
        "Features of a text among others against those of the text alone, 10⁶ × the largest difference": features_table,
    },
    figures=lambda options: {
        "edits": lambda rows: layers_figure(select(rows, part="edits", scale=options.scale), "equation"),
    },
)
