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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import pandas as pd
import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor

from mergeflow.checkpoints import open_checkpoint, read_state, write_checkpoint
from mergeflow.errors import unknown_name
from mergeflow.evaluation.accuracy import accuracies
from mergeflow.evaluation.averages import mean
from mergeflow.linearity.affine import Linearity, borrowed
from mergeflow.linearity.layers import find_layers
from mergeflow.linearity.networks import Opened, Sequences, open_network
from mergeflow.linearity.pairs import check_related, check_samples
from mergeflow.merging.files.vectors import extract
from mergeflow.merging.streaming import merge
from mergeflow.modalities.modules import own_generator
from mergeflow.modality import Model, Network, device_of
from studies.lab import Claim, Laboratory, Row, Section, Study, select, table
from studies.lab.linearity import TunedModels, layer_table, layers_figure, rows_of
from studies.lab.plots import side_by_side
from studies.lab.tuning import CosineSteps, drawn_weights, trained
from studies.linearity_edits import claims_on_edits, measure_edits

# The models: a T5 from nothing that learns to edit rows of symbols, and published checkpoints


PAD, END, FIRST = 0, 1, 2  # ids: padding, which also begins an answer as in T5; the end; the first symbol
_IGNORED = -100  # as transformers' losses leave a position out

EDITS: dict[str, Callable[[list[int], int], list[int]]] = {
    "repeated": lambda row, _: row,
    "reversed": lambda row, _: row[::-1],
    "sorted": lambda row, _: sorted(row),
    "shifted": lambda row, symbols: [FIRST + (token - FIRST + 1) % symbols for token in row],
    "rotated": lambda row, _: row[1:] + row[:1],
    "swapped": lambda row, _: [token for n in range(0, len(row), 2) for token in row[n : n + 2][::-1]],
    "halved": lambda row, _: row[::2],
}
"""Task → what is asked and the number of symbols to what is answered."""


class TextWorld(Section):
    """A small T5 and its tasks."""

    # width, blocks, heads, inner: of the model; blocks are those of the encoder, and of the decoder
    width: int = Field(64, ge=4)
    blocks: int = Field(2, ge=1)
    heads: int = Field(4, ge=1)
    inner: int = Field(128, ge=4)
    symbols: int = Field(24, ge=2)  # how many there are
    longest: int = Field(8, ge=4)  # symbols in a row, at least four
    train: int = Field(ge=32)  # train, test: rows of each task
    test: int = Field(ge=32)
    tasks: list[str] = Field(min_length=3)  # names of EDITS; the model is pre-trained on the first
    pretrain: CosineSteps
    tune: CosineSteps

    @field_validator("tasks")
    @classmethod
    def _known(cls, tasks: list[str]) -> list[str]:
        for task in tasks:
            if task not in EDITS:
                raise unknown_name("task of texts", task, EDITS)
        return tasks


@dataclass(frozen=True)
class Answers:
    """Rows of symbols and what is to be answered to them, as examples of a task.

    Attributes:
        asked: Ids and mask.
        labels: int64 [N, T], −100 behind the end.
    """

    task: str
    asked: Sequences
    labels: Tensor
    head: None = field(default=None, init=False)
    metric: None = field(default=None, init=False)

    def __len__(self) -> int:
        return len(self.asked)

    def loss(self, model: Model, rows: Tensor) -> Tensor:
        """Return the mean cross-entropy over the tokens of the answers to `rows`, in nats, a scalar []."""
        loss: Tensor = self._called(model, rows).loss
        return loss

    def scores(self, model: Model, rows: Tensor) -> Tensor:
        """Return 1 where every token is the likeliest after the right ones before it, [n]: greedy answers are right."""
        labels = self.labels[rows].to(device_of(model))
        said = self._called(model, rows).logits.argmax(-1)
        return ((said == labels) | (labels == _IGNORED)).all(1).float()

    def log_p(self, model: Model, rows: Tensor) -> Tensor:
        """Return log-probabilities of every token of the answers, [m, C]."""
        answered = (self.labels[rows] != _IGNORED).to(device_of(model))
        log_p: Tensor = self._called(model, rows).logits.log_softmax(-1)[answered]
        return log_p

    def features(self, model: Model, rows: Tensor, layers: Sequence[str]) -> dict[str, Tensor]:
        """Return the features of the named blocks, [n, width] each."""
        return self.asked.features(model, rows, layers)

    def _called(self, model: Model, rows: Tensor) -> Any:
        device = device_of(model)
        ids, mask, labels = (part[rows].to(device) for part in (self.asked.ids, self.asked.mask, self.labels))
        return model.module(input_ids=ids, attention_mask=mask, labels=labels)


def draw_answers(world: TextWorld, task: str, count: int, seed: int) -> Answers:
    """Return rows of a task; the same seed gives all tasks the same questions.

    Example:
        >>> drawn = draw_answers(TextWorld(train=32, test=32, tasks=["repeated", "reversed", "sorted"],
        ...     pretrain=CosineSteps(learning_rate=1e-3, steps=1), tune=CosineSteps(learning_rate=1e-3, steps=1)),
        ...     "reversed", 4, 0)
        >>> row = drawn.asked.ids[0][drawn.asked.mask[0] == 1]
        >>> bool((drawn.labels[0, : len(row) - 1] == row[:-1].flip(0)).all())
        True
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, world.longest + 1, (count,), generator=generator).tolist()
    symbols = torch.randint(FIRST, FIRST + world.symbols, (count, world.longest), generator=generator).tolist()
    rows = [row[:length] for row, length in zip(symbols, lengths, strict=True)]
    ids = torch.tensor([_padded([*row, END], world.longest + 1, PAD) for row in rows])
    answers = [[*EDITS[task](row, world.symbols), END] for row in rows]
    labels = torch.tensor([_padded(row, world.longest + 1, _IGNORED) for row in answers])
    return Answers(task, Sequences(ids, (ids != PAD).long()), labels)


def _padded(row: list[int], length: int, value: int) -> list[int]:
    return row + [value] * (length - len(row))


def new_model(world: TextWorld, seed: int) -> Network:
    """Return the world's model with weights drawn by a seed, without dropout."""
    from transformers import T5Config, T5ForConditionalGeneration

    config: Any = T5Config(
        vocab_size=FIRST + world.symbols,
        d_model=world.width,
        d_kv=world.width // world.heads,
        d_ff=world.inner,
        num_layers=world.blocks,
        num_heads=world.heads,
        dropout_rate=0.0,
        pad_token_id=PAD,
        eos_token_id=END,
    )
    config.decoder_start_token_id = PAD
    with own_generator(seed):
        return Network(T5ForConditionalGeneration(config).eval())


def train_texts(world: TextWorld, seed: int) -> TunedModels:
    """Pre-train on the first task and tune on each of the others."""
    first, *others = world.tasks
    model = new_model(world, seed)
    start = trained(
        model, drawn_weights(model), draw_answers(world, first, world.train, 2 * seed), world.pretrain, seed
    )
    tuned = {
        task: trained(model, start, draw_answers(world, task, world.train, 2 * seed), world.tune, seed)
        for task in others
    }
    tests = {task: draw_answers(world, task, world.test, 2 * seed + 1) for task in others}
    return TunedModels(model, start, tuned, tests)


class Checkpoints(Section):
    """base: a model folder with config.json. experts: task → checkpoint. texts: task → `text:FILE`, one text a line."""

    base: str
    experts: dict[str, str] = Field(min_length=2)
    texts: dict[str, str]

    @model_validator(mode="after")
    def _same(self) -> Self:
        if set(self.experts) != set(self.texts):
            raise ValueError(
                f"names experts {', '.join(sorted(self.experts))} and texts of {', '.join(sorted(self.texts))}: "
                "expected the same tasks"
            )
        return self


def open_checkpoints(asked: Checkpoints, root: Path, count: int) -> TunedModels:
    """Return the models and the first texts of each task."""
    base = root / asked.base
    opened = open_network(str(base), {})
    start = _read(opened, base)
    tuned = {task: _read(opened, root / path) for task, path in asked.experts.items()}
    check_related(start, tuned)
    texts = {
        task: opened.read(f"text:{root / path.removeprefix('text:')}", count) for task, path in asked.texts.items()
    }
    check_samples(texts)
    return TunedModels(opened.model, start, tuned, texts)


def _read(opened: Opened, path: Path) -> dict[str, Tensor]:
    with open_checkpoint(path) as state:
        return opened.weights(str(path), {name: state[name].clone() for name in state})


TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_TEXTS = 32  # whose features are computed in several ways


class Options(Section):
    world: TextWorld | None = None  # a model from nothing
    checkpoints: Checkpoints | None = None  # published ones in its place
    texts: int = Field(ge=32)  # of each task
    scale: float = Field(gt=0)  # λ at which Equations 2 and 3 are judged
    scales: list[float] = Field(min_length=1)  # λ of 3 and 4
    seeds: list[int] = Field(min_length=1)  # of weights, rows and orders; of checkpoints one

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
        right: dict[str, float] = {}
        for name, state in (("start", done.start), ("expert", done.tuned[task])):
            done.model.load(state)
            right[name] = 100 * mean(accuracies(done.model, {task: test}))
        rows.append({"part": "experts", "seed": seed, "tasks": task, **right})
    return rows


def vector_rows(done: TunedModels, folder: Path, seed: int) -> list[Row]:
    """Return how far θ0 + 1·τ is from θ_t, of each task and type of number, by files.

    Args:
        folder: where files are written, which is empty at the end.
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
            places = distance_in_places(*(read_state(paths[part]) for part in ("base", "expert", "again")))
            rows.append({"part": "vectors", "seed": seed, "tasks": task, "type": name, **places})
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
    """Return how much a block's features of a text depend on what else is in the batch, of the start."""
    model, layers = done.model, find_layers(done.model.module)
    rows = []
    with borrowed(model):
        model.load(done.start)
        for task, data in done.tests.items():
            every = torch.arange(min(_TEXTS, len(data)))
            alone = _features(data, model, [every[n : n + 1] for n in every.tolist()], layers)
            others = {"batches of 7": every.split(7), "all, backwards": [every.flip(0)]}
            for way, batches in others.items():
                features, order = _features(data, model, batches, layers), torch.cat(list(batches))
                about = {"part": "features", "seed": seed, "tasks": task, "way": way}
                for layer in layers:
                    expected = alone[layer][order]
                    apart = (features[layer] - expected).norm(dim=1) / expected.norm(dim=1)
                    rows.append({**about, "layer": layer, "apart": float(apart.max())})
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
    experts = select(rows, part="experts")
    return side_by_side(experts, "tasks", {"start": "start", "expert": "expert"}) if len(experts) else experts


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
        "θ0 + 1·τ against θ_t: entries of the same bits, %": lambda rows: table(
            select(rows, part="vectors"), "type", value="same", digits=2
        ),
    },
    figures=lambda options: {
        "edits": lambda rows: layers_figure(select(rows, part="edits", scale=options.scale), "equation")
    },
)
