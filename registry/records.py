"""What is logged of a pipeline run, as plain values that the caller fills in; nothing here imports MLflow."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from mergeflow.schema import Frozen

Scalar = str | int | float | bool | None
Point = tuple[str, int, float]  # of a curve: metric, step, value


def flat(values: Mapping[str, Any]) -> dict[str, Scalar]:
    """Return the values with dotted keys for what is nested, and lists as text.

    Example:
        >>> flat({"steps": 5, "lora": {"rank": 8, "targets": ["out_proj", "c_fc"]}})
        {'steps': 5, 'lora.rank': 8, 'lora.targets': 'out_proj, c_fc'}
    """
    found: dict[str, Scalar] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= {f"{key}.{below}": one for below, one in flat(value).items()}
        else:
            found[key] = ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
    return found


Params = Annotated[dict[str, Scalar], BeforeValidator(flat)]


class _Record(Frozen, allow_inf_nan=True):
    """A record of what was measured: half an interval of one repetition is infinite."""


class DatasetRecord(_Record):
    """One split of one task.

    Args:
        task: its name.
        split: "train", "validation" or "test".
        digest: SHA-256 of the split's file, hexadecimal.
        path: where it is, relative to the project folder or a URI.
        counts: examples in the split, by class or as {"examples": n}.
    """

    task: str
    split: str
    digest: str
    path: str
    counts: dict[str, int] = Field(default={})


class ChildRecord(_Record):
    """One expert or merge method of the pipeline, or one trial of a sweep, logged as a run below the pipeline's.

    Args:
        kind: "expert", "method" or "trial".
        name: the task of the expert, or the method.
        params: what was chosen, flat.
        metrics: final figures by name.
        steps: curves, as (metric, step, value).
        tags: further text by name.
        artifacts: folder inside the run ("" for its top) to the local files that go there.
    """

    kind: Literal["expert", "method", "trial"]
    name: str
    params: Params = Field(default={})
    metrics: dict[str, float] = Field(default={})
    steps: tuple[Point, ...] = ()
    tags: dict[str, str] = Field(default={})
    artifacts: dict[str, tuple[str, ...]] = Field(default={})


class PipelineRecord(_Record):
    """One run of the pipeline.

    Args:
        name: what the run is called.
        fingerprint: digest of all that decides the results; the same one is logged once.
        params: what was chosen, flat ("train.steps": 500).
        metrics: final figures by name.
        steps: curves, as (metric, step, value).
        tags: further text by name.
        dvc: tracked path to DVC's hash of it.
        datasets: the splits that were read.
        artifacts: folder inside the run ("" for its top) to the local files that go there: plots, the report.
    """

    name: str
    fingerprint: str
    params: Params = Field(default={})
    metrics: dict[str, float] = Field(default={})
    steps: tuple[Point, ...] = ()
    tags: dict[str, str] = Field(default={})
    dvc: dict[str, str] = Field(default={})
    datasets: tuple[DatasetRecord, ...] = ()
    artifacts: dict[str, tuple[str, ...]] = Field(default={})
