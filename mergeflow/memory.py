"""What work will take of a device's memory, found before it starts; whether it fits, and with which setting it would.

The work runs as it is on torch's fake tensors, which have shapes and no values: that takes seconds and no memory, with
a card or without one. They lie on the processor, because autograd has no queue for a device that is not there. What
CUDA's kernels lay out otherwise is a few per cent (docs/performance.md), and `with_torch` leaves room for them.
torch's `MemTracker` counts alike, but stops at each number that a training loop asks of a tensor.
"""

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self, cast

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mergeflow.data import load_manifest
from mergeflow.errors import MergeflowError
from mergeflow.merging.execution.device import fits, free_bytes, in_bytes, with_torch
from mergeflow.modalities.catalog import is_recorded, read_record
from mergeflow.modalities.served import SERVED, Loaded
from mergeflow.modality import Examples, Modality, Model
from mergeflow.training.loop import Span, fine_tune
from mergeflow.training.settings import FineTuneSettings

_aten = torch.ops.aten
_NUMBERS = (_aten._local_scalar_dense.default, _aten.item.default)  # in inference mode `item` comes whole
_MATH, _FLASH = 0, 1  # of torch's SDPBackend


class Tally(TorchDispatchMode):
    """Count the bytes of the tensors that operations make, as long as something holds them.

    Each number that is asked of a tensor is 1, a mask lets everything through, and attention takes the kernel that
    devices have.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0
        self._elsewhere = False
        self._counted: set[int] = set()

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Count nothing of what is made inside, now or later."""
        self._elsewhere = True
        try:
            yield
        finally:
            self._elsewhere = False

    def add(self, tensor: Tensor) -> None:
        """Count the storage of a tensor [...] until nothing holds it, unless it is counted already."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, 0 if self._elsewhere else storage.nbytes()
        if key not in self._counted:
            self._counted.add(key)
            self.held += size
            self.peak = max(self.peak, self.held)
            weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._counted.remove(key)
        self.held -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _NUMBERS:
            return 1.0 if args[0].is_floating_point() else 1
        if func is _aten._fused_sdp_choice.default:
            return _FLASH if torch.backends.cuda.flash_sdp_enabled() else _MATH
        if func is _aten.index.Tensor:
            args = (args[0], [place for index in args[1] for place in _places(index)])
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, FakeTensor):
                self.add(leaf)
        return result


def _places(index: Tensor | None) -> list[Tensor | None]:
    """Return an index, and instead of a mask [...] of booleans the places of all its elements, a tensor a dimension."""
    if index is None or index.dtype != torch.bool:
        return [index]
    return [torch.empty(index.numel(), dtype=torch.int64) for _ in range(index.ndim)]


class _Leaving(TorchFunctionMode):
    """Let `cpu()` leave the device, which fake tensors are not on."""

    def __init__(self, tally: Tally) -> None:
        super().__init__()
        self._tally = tally

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.cpu:
            return func(*args, **(kwargs or {}))
        with self._tally.elsewhere():
            return args[0].clone()


@contextmanager
def tallied() -> Iterator[Tally]:
    """Have every tensor that is made inside be one without values, counted.

    Example:
        >>> with tallied() as tally:
        ...     one, other = torch.ones(1000), torch.ones(1000)
        ...     both = one + other
        ...     del one, other
        >>> tally.peak, tally.held
        (12000, 4000)
    """
    with FakeTensorMode(), Tally() as tally, _Leaving(tally):
        yield tally


@dataclass(frozen=True)
class Need:
    """Bytes of a device at the moment of the peak.

    Attributes:
        sums: over the examples of a statistic; of a run of training its record: the trained weights at its start, and
            sums of gradients.
        activations: everything else: what the backward pass needs of each example, and temporaries.
        merging: base, task vectors and the method's working copies of the tensors that are merged at once.
        rows: examples that are on the device at once; 0 where work has none.
    """

    weights: int
    gradients: int = 0
    optimiser: int = 0
    sums: int = 0
    activations: int = 0
    merging: int = 0
    rows: int = 1

    @property
    def total(self) -> int:
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        return {part.name: getattr(self, part.name) for part in fields(self) if part.name != "rows"}

    def in_words(self) -> str:
        """Say what takes the memory."""
        text = ", ".join(f"{name} {in_bytes(size)}" for name, size in self.parts().items() if size)
        if not self.rows:
            return text
        return f"{text} ({in_bytes(self.activations / self.rows)} for each of {self.rows} examples)"


@dataclass(frozen=True)
class Workload:
    """A model and examples, as they can be built without values."""

    build: Callable[[], Model]
    blank: Callable[[Model, int], Examples]

    @classmethod
    def of(
        cls, modality: Modality, section: Any, record: Mapping[str, str], data: Any, classes: int
    ) -> "Workload | None":
        """Return the models and examples of a project; None for a modality without blank examples."""
        make = modality.blank
        if make is None:
            return None
        return cls(
            lambda: modality.build(section, record), lambda model, count: make(model, section, data, count, classes)
        )

    def need(self, work: Callable[[Model, Any], Any], rows: int, sums: float = 0) -> Need:
        """Predict what any work with the model takes.

        Args:
            sums: how many bytes of sums the device holds for each byte of tensors that the work returns.
        """
        model = blank_model(self.build)
        with tallied() as tally:
            with tally.elsewhere():
                _drop_values(model.module)
                examples = self.blank(model, rows)
            summed = int(sums * _bytes(work(model, examples)))
            weights = _bytes([model.module, examples.head])
            return Need(weights, sums=summed, activations=tally.peak - summed, rows=rows)

    def judging(self, rows: int) -> Need:
        """Predict what one forward pass takes, as sweeps, selections, evaluations and servers do it."""
        return self.need(_judge, rows)

    def training(self, settings: FineTuneSettings, judged: int = 1, tasks: int = 1) -> tuple[Need, Need]:
        """Predict what the steps of `fine_tune` take at their peak, and its validations at theirs.

        Two epochs of two steps are run (of `one_epoch` one, of `full_batch_gd` one step each): in the last step
        optimiser and trajectory hold all that they ever hold. Two parts stand for a batch that is split, two tasks for
        those of `joint`, and a batch of one task, the worst case, for one that is drawn from all. A compiled model
        takes about as much, or less.

        Args:
            tasks: of the run; more than one for `joint` alone.
        """
        regime = settings.regime if settings.regime in ("joint", "full_batch_gd", "one_epoch") else "steps"
        full, steps = regime == "full_batch_gd", 2 if regime in ("full_batch_gd", "one_epoch") else 4
        rows, parts = settings.batch_size, 2
        if not full:
            rows, parts = -(-settings.batch_size // settings.accumulate), min(settings.accumulate, 2)
        changes = {"regime": regime, "steps": steps, "epochs": 2, "sampling": "sum", "compile": False, "save_every": 5}
        changes |= {} if full else {"batch_size": parts * rows, "accumulate": parts}
        peaks = [0, 0]
        model = blank_model(self.build)
        with tallied() as tally:
            with tally.elsewhere():
                _drop_values(model.module)
                stored = parts * rows * (1 if full else 2)
                data = [self.blank(model, stored) for _ in range(min(tasks, 2) if regime == "joint" else 1)]
                judge = self.blank(model, judged)

            def validate() -> float:
                peaks[0], tally.peak = max(peaks[0], tally.peak), tally.held
                _judge(model, judge)
                return 1.0

            def close(epoch: int) -> None:
                peaks[1], tally.peak = max(peaks[1], tally.peak), tally.held

            span, shortened = Span(0, steps, 0, steps), settings.model_copy(update=changes)
            outcome = fine_tune(model, data, shortened, 0, Path("none"), validate, span=span, each_epoch=close)
        modules = [model.module, *(task.head for task in data if task.head is not None)]
        trained = sum(p.nbytes for module in modules for p in module.parameters() if p.requires_grad)
        weights, optimiser = _bytes(modules), _bytes(outcome.optimiser)
        # The weights at the start, the sum of an epoch's gradients, and from the second epoch on the first one's mean.
        sums = trained * (2 if regime == "one_epoch" else 3)
        step = Need(weights, trained, optimiser, sums, peaks[0] - trained - optimiser - sums, rows=rows)
        return step, Need(weights, 0, optimiser, sums, peaks[1] - optimiser - sums, rows=judged)


def blank_model(build: Callable[[], Model]) -> Model:
    """Build a model without values where its code allows that, which saves its memory and the time to draw weights."""
    try:
        with torch.device("meta"):
            return build()
    except (RuntimeError, NotImplementedError):  # it draws from a generator of the processor, or looks at its numbers
        return build()


def _drop_values(module: nn.Module) -> None:
    """Replace weights by fake tensors, inside `tallied`; those that parts share stay shared."""
    replaced: dict[Tensor, Tensor] = {}  # it keeps the old ones, whose places new ones could take otherwise
    for part in module.modules():
        tables: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for table in tables:
            for name, value in table.items():
                if value is not None and value not in replaced:
                    bare = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
                    trained = isinstance(value, nn.Parameter)
                    replaced[value] = nn.Parameter(bare, value.requires_grad) if trained else bare
                table[name] = value if value is None else replaced[value]


@torch.inference_mode()
def _judge(model: Model, examples: Examples) -> None:
    examples.scores(model, torch.arange(len(examples)))


def _bytes(thing: Any) -> int:
    """Return the bytes of the tensors in modules, or in anything nested; shared ones count once."""
    tensors: dict[int, Tensor] = {}
    for leaf in tree_leaves(thing):
        values = (*leaf.parameters(), *leaf.buffers()) if isinstance(leaf, nn.Module) else (leaf,)
        tensors |= {id(value): value for value in values if isinstance(value, Tensor)}
    return sum(value.nbytes for value in tensors.values())


def described(architecture: str, folders: Iterable[str | Path] = (), classes: int = 1) -> Workload | None:
    """Return the model that a command's inputs describe; None for a modality without blank examples.

    Args:
        architecture: of an image encoder; or the file of a base that says itself what it is.
        classes: of a task at least, where some are not prepared yet.
    """
    manifests = [load_manifest(folder) for folder in folders]
    most = max([classes, *(len(manifest["class_names"]) for manifest in manifests)])
    if is_recorded(architecture):
        stored = {name: value for manifest in manifests for name, value in manifest["decoding"].items()}
        return Workload.of(*read_record(architecture), SimpleNamespace(**stored), most)
    from mergeflow.modalities.vision.modality import blank
    from mergeflow.modalities.vision.models import image_model, load_clip

    def pictured(model: Any, count: int) -> Examples:
        section, data = cast(Any, None), cast(Any, SimpleNamespace(image_size=model.module.visual.image_size[0]))
        return blank(model, section, data, count, most)

    return Workload(lambda: image_model(load_clip(architecture)), pictured)


@dataclass(frozen=True)
class Work:
    """A piece of work on a device, and what it takes.

    Attributes:
        needs: examples at once to what they take.
        rows: examples at once, as they are set now; 0 where work has none.
        way_out: the number of examples that fits, to what has to be set; 0 where work has none.
        no_way: what to do where not even one example fits.
    """

    name: str
    needs: Callable[[int], Need]
    rows: int
    way_out: Callable[[int], str]
    no_way: str = "take a smaller model or a larger device"

    @cached_property
    def need(self) -> Need:
        """What it takes as it is set now."""
        return self.needs(self.rows)

    def fault(self, devices: str, free: int) -> str | None:
        """Return the message that it does not fit into free bytes, with the way out; None where it fits."""
        if fits(self.need.total, free):
            return None
        rows = self.rows and largest(self.rows, self.needs, free)
        way_out = (
            f"Not even one example at a time fits: {self.no_way}" if self.rows and not rows else self.way_out(rows)
        )
        return (
            f"{self.name} needs about {in_bytes(with_torch(self.need.total))} of {devices}, where {in_bytes(free)} are "
            f"free: {self.need.in_words()}; torch itself takes the rest. {way_out}."
        )


def same_result(setting: str) -> Callable[[int], str]:
    """Return the way out by a setting that changes the result by rounding alone."""
    return lambda rows: f"Set {setting} to {rows}: the result is the same but for rounding"


@dataclass(frozen=True)
class Forecast:
    """What is going to be done on a device.

    Attributes:
        free: free bytes of the fullest of them; None for the processor, which is never too small here.
    """

    devices: str
    free: int | None
    works: tuple[Work, ...]

    @classmethod
    def on(cls, device: str, *works: Work) -> Self:
        return cls(device, None if device == "cpu" else free_bytes(device), works)

    def announce(self, console: Console | None = None) -> None:
        """Print what will be taken, and refuse what cannot fit."""
        if self.works:
            (console or Console()).print(self._table())
            self.refuse()

    def refuse(self) -> None:
        if self.free is not None:
            faults = [fault for work in self.works if (fault := work.fault(self.devices, self.free))]
            if faults:
                raise MergeflowError("\n".join(faults))

    def _table(self) -> Table:
        """Return a table of the work on the device, a column each, and of the memory that it takes."""
        free = "" if self.free is None else f", {in_bytes(self.free)} free"
        table = Table(title=f"Memory of {self.devices}{free}", box=None, title_justify="left", pad_edge=False)
        table.add_column("")
        for work in self.works:
            table.add_column(work.name, justify="right")
        needs = [work.need for work in self.works]
        for name in needs[0].parts():
            sizes = [need.parts()[name] for need in needs]
            if any(sizes):
                table.add_row(name, *(in_bytes(size) if size else "–" for size in sizes))
        if any(need.rows for need in needs):
            table.add_row("examples at once", *(str(need.rows or "–") for need in needs))
            each = (in_bytes(need.activations / need.rows) if need.rows else "–" for need in needs)
            table.add_row("activations of one", *each)
        table.add_row("[bold]peak[/]", *(f"[bold]{in_bytes(need.total)}[/]" for need in needs))
        return table


def largest(most: int, need: Callable[[int], Need], free: int) -> int:
    """Return the largest number of examples, at most `most`, that fits into free bytes; 0 where not even one does.

    Memory is linear in the number but for rounding, so that three predictions are enough.
    """
    single = need(1).total
    if not fits(single, free):
        return 0
    slope = max((need(most).total - single) / max(most - 1, 1), 1.0)
    rows = min(most, 1 + int((free - with_torch(single)) / (with_torch(slope) - with_torch(0))))
    while rows > 1 and not fits(need(rows).total, free):
        rows = min(rows - 1, int(0.98 * rows))
    return rows


def answering_need(loaded: Loaded) -> Need | None:
    """Predict what a registered model takes while it answers; None of a modality without blank examples."""
    classes = max(1, *(len(names) for names in loaded.class_names.values()))
    data = SimpleNamespace(**loaded.decoding)
    workload = Workload.of(loaded.modality, loaded.section, loaded.record, data, classes)
    return None if workload is None else workload.judging(SERVED.get(loaded.modality.name).rows)


def placed(loaded: Loaded) -> Loaded:
    """Return a registered model on the CUDA device, where there is one with room; else as it is, with a warning."""
    if not torch.cuda.is_available():
        return loaded
    need, free = answering_need(loaded), free_bytes("cuda")
    if need is not None and not fits(need.total, free):
        warnings.warn(
            f"the model answers on the processor: it needs about {in_bytes(with_torch(need.total))} of cuda, where "
            f"{in_bytes(free)} are free: {need.in_words()}.",
            stacklevel=2,
        )
        return loaded
    device = torch.device("cuda")
    loaded.model.module.to(device)
    return replace(loaded, device=device)
