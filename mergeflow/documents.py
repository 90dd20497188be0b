"""The JSON documents that pass from stage to stage, to the registry and to the report: who writes and reads them agree.

Where each lies is in `mergeflow.layout`.
"""

import json
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypeVar, cast

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from mergeflow.errors import MergeflowError, first_line

Document = TypeVar("Document")
Number = Annotated[float, Field(ge=-1e15, le=1e15)]  # finite, so that pages can show it


class Scores(TypedDict):
    """Accuracies in [0, 1] on one split. `normalised`: mean over tasks of the accuracy divided by the expert's."""

    accuracy: dict[str, Number]
    mean: Number
    normalised: Number


class Expert(TypedDict):
    """What a merge needs to know of an expert: all that a registered version has of its training."""

    task: str
    fingerprint: str
    settings: dict[str, Any]
    validation_accuracy: Number


class Training(Expert):
    """An expert's `training.json`: settings, seed, and `epochs`, a row of the trajectory for each."""

    seed: NotRequired[int]
    steps: int
    examples: int
    epochs: list[dict[str, Any]]
    validation_accuracy_nonlinear: NotRequired[Number]


class Geometry(TypedDict):
    """Of the task vectors: cosines [T, T] in the order of `tasks`, and their norms divided by the base's."""

    tasks: list[str]
    cosine: list[list[Number]]
    relative_norm: dict[str, Number]


class Candidate(Scores):
    """One candidate of a sweep: the arguments that the sweep varies, and its scores on validation."""

    args: dict[str, Any]


class Sweep(TypedDict):
    """All scored candidates of one method; `individual` has each expert's accuracy on its own task."""

    method: str
    split: str
    individual: dict[str, Number]
    candidates: list[Candidate]


class Chosen(TypedDict):
    """A method's best candidate: its recipe, and the names of arguments whose best value ends the grid."""

    args: dict[str, Any]
    recipe: dict[str, Any]
    fingerprint: str
    candidates: int
    at_grid_edge: list[str]
    validation: Scores


class Selection(TypedDict):
    """The choice on validation: every method's best candidate, and the method that won."""

    tasks: list[str]
    winner: str
    individual: dict[str, Number]
    methods: dict[str, Chosen]


class TestRow(Scores):
    """One model's scores on test: the base, the experts each on their task, or a method's chosen merge."""

    name: str
    args: dict[str, Any]


class Test(TypedDict):
    """The one look at test; `examples` counts them by task, `metrics` has the tasks not judged by the accuracy.

    `model` and `sources` are of params.yaml as it was then.
    """

    split: str
    tasks: list[str]
    examples: dict[str, Annotated[int, Field(gt=0, lt=10**15)]]
    metrics: NotRequired[dict[str, str]]
    model: NotRequired[dict[str, Any]]
    sources: NotRequired[dict[str, str]]
    winner: str
    rows: list[TestRow]


class Gate(TypedDict):
    """A gate's answer."""

    name: str
    passed: bool
    reason: str


class Numbers(TypedDict, total=False):
    """What a decision rests on: the settings, and the changes against the champion where there was one."""

    settings: dict[str, Any]
    gain: Number
    change: dict[str, Number]
    interval: Annotated[list[Number], Field(min_length=2, max_length=2)]


class Decision(TypedDict):
    """Whether a version was promoted, and why."""

    promote: bool
    gates: NotRequired[list[Gate]]
    numbers: NotRequired[Numbers]
    reasons: NotRequired[list[str]]


class RunId(TypedDict):
    """A run of the registry."""

    id: str


class Ancestor(TypedDict):
    """An expert of a version; more is known of it."""

    task: str


class Lineage(TypedDict, total=False):
    """What is shown of the ancestors of a version."""

    git_commit: str | None
    run: RunId | None
    experts: list[Ancestor]
    environment: dict[str, Any] | str | None
    missing: list[str]


class Registration(TypedDict):
    """What became of the winner in the registry; `decision` is None where no gate had to decide."""

    model: str
    version: str
    aliases: list[str]
    champion: str | None
    method: str
    fingerprint: NotRequired[str | None]
    lineage: NotRequired[Lineage]
    decision: Decision | None


class StageCost(TypedDict):
    """The cost of a stage's last run: when it started, in seconds since 1970, and how long it took."""

    stage: str
    started: Annotated[float, Field(ge=0, le=2**33)]
    seconds: Annotated[float, Field(ge=0, le=1e9)]
    peak_memory_mib: Number
    training: NotRequired[dict[str, Any] | None]


class Manifest(TypedDict):
    """What is read of a prepared task's manifest: of each split, its `count` among others."""

    splits: dict[str, dict[str, Any]]


def read_document(path: Path, kind: type[Document]) -> Document:
    """Read a document of a kind that a stage wrote."""
    try:
        document = json.loads(path.read_text("utf-8"))
        TypeAdapter(kind).validate_python(document, strict=True)
    except (ValueError, RecursionError) as error:
        reason = first_line(error)
        if isinstance(error, ValidationError):
            first = error.errors(include_url=False, include_input=False)[0]
            reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")
        raise MergeflowError(
            f"{path.name} is not what its stage wrote ({reason}): `mergeflow run` makes it again."
        ) from None
    return cast(Document, document)


def write_document(path: Path, document: Any) -> None:
    """Write one of these documents."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
