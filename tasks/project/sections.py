"""Parts of params.yaml that no training depends on: a command that needs one of them alone imports no torch."""

from pathlib import Path
from typing import Literal, TypeVar

from pydantic import Field, field_validator

from mergeflow.errors import MergeflowError, check_model_name
from mergeflow.schema import Frozen, validated
from tasks.project.files import read_yaml


class Section(Frozen, strict=True):
    """A frozen part of params.yaml."""


class RegistrySection(Section):
    """The registered model's name and the gates a candidate has to pass to become champion.

    margin: least gain in mean normalised validation accuracy over the champion. tolerance: largest loss of one
    task's validation accuracy, as a fraction. confidence: level of the paired bootstrap interval of the gain, which
    must lie above 0; null asks for none. require_reproducible: replaying the winner's recipe must give the same bytes.
    """

    model: str
    margin: float = Field(0.0, ge=0.0, le=1.0)
    tolerance: float = Field(0.05, ge=0.0, le=1.0)
    confidence: float | None = Field(0.95, gt=0.0, lt=1.0)
    require_reproducible: bool = True

    @field_validator("model")
    @classmethod
    def _fits_an_address(cls, model: str) -> str:
        check_model_name(model)
        return model


class RunSection(Section):
    """How work is placed; no result depends on it."""

    runner: Literal["threads", "processes", "dask", "ray"] = "threads"
    workers: int = Field(2, ge=1)
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")


Part = TypeVar("Part", bound=Section)


def read_section(root: Path, name: str, section: type[Part]) -> Part:
    """Read and validate one section of the project's params.yaml; the others are not looked at.

    Raises:
        MergeflowError: no such section, or all that is wrong in it.
    """
    values = read_yaml(root / "params.yaml")
    if not isinstance(values, dict) or name not in values:
        raise MergeflowError(f"params.yaml in {root} has no section '{name}'.")
    return validated(section, values[name], f"params.yaml, section {name}")
