"""A stage: what dvc.yaml says of it, and what it may touch while it runs."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from posixpath import normpath
from typing import TYPE_CHECKING, Any

from mergeflow.errors import MergeflowError

if TYPE_CHECKING:
    from tasks.project.parameters import Params, StudyParams

MAIN, STUDIES = "dvc.yaml", "studies/dvc.yaml"
CHOICES = "studies/params.yaml"  # what STUDIES is a graph of
RECORDS = "studies/records"  # rows and facts of measured studies: results, never code
STATE, INPUTS = ".mergeflow", "inputs"
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Stage:
    """One stage of dvc.yaml, or one item of a stage that dvc.yaml repeats with `foreach`.

    Attributes:
        module: the module whose function `run` does the work, from dvc.yaml's `meta.run`: its dotted name, or the
            path of a file of the project.
        params: dotted keys of params.yaml that the stage may read; those of another file after its name and ":".
            The digest of its code, which every stage declares as a parameter too, is not among them.
        regime: of a stage that trains, the regime that the parameters name; it decides which code the stage uses.
        digest_by_item: whether the item's code has a digest of its own; else all items of the stage share one.
        systems: of a study, the papers' systems that it covers, from dvc.yaml's `meta.systems`; there may be none.
    """

    name: str
    item: str | None
    module: str
    params: tuple[str, ...]
    deps: tuple[str, ...]
    outs: tuple[str, ...]
    frozen: bool = False
    file: str = MAIN
    regime: str | None = None
    digest_by_item: bool = False
    systems: tuple[str, ...] = ()

    @property
    def address(self) -> str:
        """DVC's address of the stage: `finetune@digits`, `select`, or `studies/dvc.yaml:mima`."""
        name = self.name if self.item is None else f"{self.name}@{self.item}"
        return name if self.file == MAIN else f"{self.file}:{name}"

    @property
    def is_study(self) -> bool:
        """Whether the stage is a study, not a training run that studies share."""
        return self.file == STUDIES and self.item is None

    @property
    def folder_name(self) -> str:
        return file_name(self.address)


def file_name(address: str) -> str:
    """Return an address as one path component."""
    return re.sub(r"[^\w.@-]", "_", address)


@dataclass(frozen=True)
class StageIO:
    """What a stage may touch. A path or parameter that dvc.yaml does not declare is an error in the project.

    Attributes:
        scratch: a folder that outlives a killed run with the same inputs and parameters; for resumable state.
        journals: a folder that outlives every run with the same inputs and parameters, the item's own section apart.
        report: called as `report(what, done, total)` while the stage works.
        holds: what is held until the stage ends, such as a device.
        withheld: inputs that this part of the stage must not read, though the stage declares them.
    """

    stage: Stage
    root: Path
    scratch: Path
    params: "Params"
    studies: "StudyParams | None" = None
    report: Progress = field(default=lambda what, done, total: None)
    costs: dict[str, Any] = field(default_factory=dict)
    holds: ExitStack = field(default_factory=ExitStack)
    withheld: tuple[str, ...] = ()
    journals: Path = Path()

    def __reduce__(self) -> tuple[Any, ...]:
        """Go to another process, where it reports nothing and holds no device."""
        open_again = partial(StageIO, withheld=self.withheld, journals=self.journals)
        return open_again, (self.stage, self.root, self.scratch, self.params, self.studies)

    @property
    def item(self) -> str:
        assert self.stage.item is not None, f"stage {self.stage.name} has no items"
        return self.stage.item

    def dep(self, path: str) -> Path:
        if not any(covers(dep, path) for dep in self.stage.deps):
            raise MergeflowError(
                f"{self.stage.address} does not declare {path}, which it reads. A study names the runs and splits that "
                f"it reads in its `Study(runs=…, splits=…)`, a stage of {MAIN} its deps."
            )
        if any(covers(withheld, path) for withheld in self.withheld):
            raise MergeflowError(
                f"{self.stage.address} reads {path} where it must not: what is chosen may depend on training and "
                "validation data alone. Choose first, and look at test once with what was chosen."
            )
        return self.root / path

    @property
    def building(self) -> Path:
        """Where the outputs are built, each at its path relative to the project."""
        return self.scratch / "building"

    def out(self, path: str) -> Path:
        """Return where to build an output; it is moved to its place when the stage is complete."""
        assert path in self.stage.outs, f"{self.stage.address} does not declare the output {path}"
        target = self.building / path
        target.parent.mkdir(parents=True, exist_ok=True)
        return target

    def cost(self, address: str) -> dict[str, Any]:
        """Return the cost record of another stage; empty if it has none."""
        return read_record(self.root, address)

    def section(self, key: str) -> Any:
        """Return one section of the parameters by its dotted key, for example `sweep.cart`."""
        assert key in self.stage.params, f"{self.stage.address} does not declare the parameter {key}"
        file, _, name = key.rpartition(":")
        return (self.studies if file and self.studies else self.params).lookup(name)


def covers(folder: str, path: str) -> bool:
    """Whether `path` is `folder` or lies below it; both relative to the project, with `/` between names."""
    return f"{path}/".startswith(f"{folder.rstrip('/')}/")


def read_record(root: Path, address: str) -> dict[str, Any]:
    """Return the cost record of the last time a stage really ran; empty if there is none."""
    path = root / STATE / "records" / f"{file_name(address)}.json"
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError):  # there is none, or it is damaged: costs are for people alone
        return {}
    return record if isinstance(record, dict) else {}


def named_inputs(values: Any) -> list[str]:
    """Return the files and folders below `inputs` that parameters name, as paths or as sources of data.

    Example:
        >>> named_inputs({"cats": "folder:inputs/cats?rotate=45", "dtd": "torchvision:DTD", "base": "inputs/b.pt"})
        ['inputs/b.pt', 'inputs/cats', 'inputs/torchvision']
    """
    from mergeflow.data.address import parse_address  # here, because most commands need no numpy

    paths = {normpath(path) for text in _texts(values) for path in parse_address(text).paths if path}
    return [INPUTS] if "." in paths else sorted(path for path in paths if covers(INPUTS, path))


def _texts(values: Any) -> Iterator[str]:
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, list):
        for value in values:
            yield from _texts(value)
    elif isinstance(values, str):
        yield values
