"""Parts of params.yaml that no training depends on: a command that needs one of them alone imports no torch."""

from pathlib import Path
from typing import Literal, TypeVar

from pydantic import Field, field_validator

from mergeflow.errors import MergeflowError, check_model_name
from mergeflow.gate_settings import GateSettings
from mergeflow.schema import Frozen, validated
from tasks.project.files import read_yaml


class Section(Frozen, strict=True):
    """A frozen part of params.yaml."""


class RegistrySection(GateSettings):
    """The registered model's name, beside what a candidate has to show to become champion."""

    model: str

    @field_validator("model")
    @classmethod
    def _fits_an_address(cls, model: str) -> str:
        check_model_name(model)
        return model


class RunSection(Section):
    """How work is placed; results depend on the device alone, in their last bits."""

    runner: Literal["threads", "processes", "dask", "ray"] = "threads"
    workers: int = Field(2, ge=1)
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")


Part = TypeVar("Part", bound=Frozen)


def read_section(root: Path, name: str, section: type[Part]) -> Part:
    """Read and validate one section of the project's params.yaml; the others are not looked at.

    Args:
        root: the project folder.
        name: the section's key.
        section: what it may say.

    Raises:
        MergeflowError: no such section, or all that is wrong in it.
    """
    values = read_yaml(root / "params.yaml")
    if not isinstance(values, dict) or name not in values:
        raise MergeflowError(f"params.yaml in {root} has no section '{name}'.")
    return validated(section, values[name], f"params.yaml, section {name}")
