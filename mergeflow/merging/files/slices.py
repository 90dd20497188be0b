"""A model put together from blocks of others: slices of layers, one behind the other. Nothing is copied or read."""

from collections.abc import Sequence

from pydantic import field_validator

from mergeflow.checkpoints.header import TensorInfo
from mergeflow.checkpoints.reader import Entry, LazyStateDict
from mergeflow.errors import MergeflowError
from mergeflow.merging.architectures.architecture import architecture_of
from mergeflow.merging.architectures.blocks import BLOCK, check_alike, count_key, stacked_config
from mergeflow.merging.architectures.depth import depth
from mergeflow.merging.files.fields import Location
from mergeflow.merging.files.output import shards_like
from mergeflow.schema import Frozen


class Slice(Frozen):
    """Blocks of one model.

    Attributes:
        model: The model.
        layers: First block, and the one behind the last, counted from 0; all blocks by default.
    """

    model: Location
    layers: tuple[int, int] | None = None

    @field_validator("layers")
    @classmethod
    def _ascending(cls, layers: tuple[int, int] | None) -> tuple[int, int] | None:
        if layers is not None and not 0 <= layers[0] < layers[1]:
            raise ValueError(f"expected [first, end] with 0 ≤ first < end, such as [0, 8], found {list(layers)}")
        return layers


class _Model:
    """A model whose blocks are taken."""

    def __init__(self, path: str, state: LazyStateDict) -> None:
        if state.is_task_vector:
            raise MergeflowError(f"'{path}' is a task vector or an adapter: layers are taken from whole models.")
        self.path, self.state = path, state
        self.architecture = architecture_of(state)
        self.outside: dict[str, float] = {}
        self.blocks: dict[int, dict[str, str]] = {}
        towers: set[str] = set()
        for name in state:
            found = BLOCK.match(name)
            if found is None:
                self.outside[name] = depth(name, {name: state.infos[name].shape}, self.architecture)
                continue
            towers.add(name[: found.start(2)])
            self.blocks.setdefault(int(found.group(2)), {})[name[found.end() :]] = name
        self.key = count_key(self.architecture, len(self.blocks), path)
        if len(towers) != 1 or sorted(self.blocks) != list(range(len(self.blocks))):
            raise MergeflowError(f"'{path}' does not have one row of blocks 0 … n: its layers cannot be taken.")
        self.tower = towers.pop()

    def taken(self, layers: tuple[int, int] | None) -> range:
        """Return the indices of a slice's blocks."""
        first, end = layers or (0, len(self.blocks))
        if end > len(self.blocks):
            raise MergeflowError(
                f"layers [{first}, {end}] of '{self.path}': it has {len(self.blocks)} blocks, 0 to "
                f"{len(self.blocks) - 1}, so that the end is {len(self.blocks)} at most."
            )
        return range(first, end)


def stacked(slices: Sequence[Slice], states: Sequence[LazyStateDict]) -> LazyStateDict:
    """Return the model of some slices, in their order.

    What comes before the blocks (embeddings, positions) is the first model's, what comes behind them (norm, head) the
    last one's; a head that is tied to the embedding follows it. config.json is the first one's, with the number of
    blocks, and the lists that have an entry per block, as they are now.

    Args:
        slices: The slices.
        states: The opened model of each.

    Raises:
        MergeflowError: An architecture whose blocks are not known to be alike, a slice beyond the last block, models
            that cannot be one (config.json, shapes or names differ), all at once for each kind of fault.
    """
    models = [_Model(one.model, state) for one, state in zip(slices, states, strict=True)]
    chosen = [(model, block) for one, model in zip(slices, models, strict=True) for block in model.taken(one.layers)]
    key = models[0].key
    check_alike({model.path: model.architecture.config for model in models}, key)
    entries: dict[str, Entry] = {}
    infos: dict[str, TensorInfo] = {}

    def put(name: str, model: _Model, source: str) -> None:
        entries[name], infos[name] = model.state.entries[source], model.state.infos[source]

    for name, model in _outside(models[0], models[-1]).items():
        put(name, model, name)
    for index, (model, block) in enumerate(chosen):
        _check_block(chosen[0], (model, block))
        for part, name in model.blocks[block].items():
            put(f"{models[0].tower}{index}.{part}", model, name)
    config = stacked_config(
        [model.architecture.config for model in models], key, [(models.index(model), block) for model, block in chosen]
    )
    return LazyStateDict(
        models[0].state.path,
        entries,
        dict(sorted(infos.items())),
        {},
        tied={name: first for name, first in models[0].state.tied.items() if name in infos and first in infos},
        shards=shards_like(states, infos),
        config=config,
    )


def _outside(first: _Model, last: _Model) -> dict[str, _Model]:
    """Return whose each tensor outside the blocks is."""
    tied = bool(first.architecture.config.get("tie_word_embeddings", False))

    def is_head(name: str, model: _Model) -> bool:
        return model.architecture.role(name, model.state.infos[name].shape) == "head"

    found = {}
    for name, place in first.outside.items():
        follows = place == 0 or name in first.state.tied or (tied and is_head(name, first))
        if not follows and name not in last.outside:
            raise MergeflowError(f"'{last.path}' lacks '{name}', which '{first.path}' has behind its blocks.")
        found[name] = first if follows else last
    extra = sorted(name for name in last.outside.keys() - found.keys() if not (tied and is_head(name, last)))
    if extra:
        raise MergeflowError(f"'{last.path}' has '{extra[0]}' outside its blocks, which '{first.path}' lacks.")
    return found


def _check_block(first: tuple[_Model, int], other: tuple[_Model, int]) -> None:
    """Check that a block has the tensors and shapes of the first one."""
    (model, block), (strange, index) = first, other
    wanted = {part: model.state.infos[name].shape for part, name in model.blocks[block].items()}
    found = {part: strange.state.infos[name].shape for part, name in strange.blocks[index].items()}
    odd = sorted(part for part in wanted.keys() | found.keys() if wanted.get(part) != found.get(part))
    if odd:
        raise MergeflowError(
            f"block {index} of '{strange.path}' does not fit block {block} of '{model.path}': '{odd[0]}' "
            f"is {list(found.get(odd[0], ())) or 'missing'}, there {list(wanted.get(odd[0], ())) or 'missing'}."
        )
