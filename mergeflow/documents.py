"""The JSON documents that pass from stage to stage, to the registry and to the report: who writes and reads them agree.

Where each lies is in `mergeflow.layout`.
"""

import json
from pathlib import Path
from typing import Any, NotRequired, TypedDict, TypeVar, cast

from mergeflow.errors import MergeflowError, first_line

Document = TypeVar("Document")


class Scores(TypedDict):
    """Accuracies in [0, 1] on one split. `normalised`: mean over tasks of the accuracy divided by the expert's."""

    accuracy: dict[str, float]
    mean: float
    normalised: float


class Training(TypedDict):
    """An expert's `training.json`: settings, seed, and `epochs`, a row of the trajectory for each."""

    task: str
    fingerprint: str
    settings: dict[str, Any]
    seed: int
    steps: int
    examples: int
    validation_accuracy: float
    epochs: list[dict[str, Any]]
    validation_accuracy_nonlinear: NotRequired[float]


class Geometry(TypedDict):
    """Of the task vectors: cosines [T, T] in the order of `tasks`, and their norms divided by the base's."""

    tasks: list[str]
    cosine: list[list[float]]
    relative_norm: dict[str, float]


class Candidate(Scores):
    """One candidate of a sweep: the arguments that the sweep varies, and its scores on validation."""

    args: dict[str, Any]


class Sweep(TypedDict):
    """All scored candidates of one method; `individual` has each expert's accuracy on its own task."""

    method: str
    split: str
    individual: dict[str, float]
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
    individual: dict[str, float]
    methods: dict[str, Chosen]


class TestRow(Scores):
    """One model's scores on test: the base, the experts each on their task, or a method's chosen merge."""

    name: str
    args: dict[str, Any]


class Test(TypedDict):
    """The one look at test; `examples` counts them by task, `metrics` has the tasks not judged by the accuracy."""

    split: str
    tasks: list[str]
    examples: dict[str, int]
    metrics: NotRequired[dict[str, str]]
    winner: str
    rows: list[TestRow]


class Registration(TypedDict):
    """What became of the winner in the registry; `decision` is None where no gate had to decide."""

    model: str
    version: str
    aliases: list[str]
    champion: str | None
    method: str
    fingerprint: str | None
    lineage: dict[str, Any]
    decision: dict[str, Any] | None


def read_document(path: Path, kind: type[Document]) -> Document:
    """Read a document of a kind that a stage wrote."""
    try:
        document = json.loads(path.read_text("utf-8"))
        if not isinstance(document, dict):
            raise ValueError("it holds no record")
    except ValueError as error:
        raise MergeflowError(
            f"{path.name} is not what its stage wrote ({first_line(error)}): `mergeflow run` makes it again."
        ) from None
    return cast(Document, document)


def write_document(path: Path, document: Any) -> None:
    """Write one of these documents."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
