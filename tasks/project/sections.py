"""Parts of params.yaml that no training depends on: a command that needs one of them alone imports no torch."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from mergeflow.errors import MergeflowError, check_model_name
from mergeflow.schema import Frozen, Seed, validated
from tasks.project.files import read_yaml


class Section(Frozen, strict=True): ...


class GateSettings(Frozen, strict=True):
    """What a candidate must show to become champion.

    Args:
        margin: least gain in mean normalised validation accuracy over the champion, a fraction (0.002 = 0.2 points).
        tolerance: largest loss in accuracy on any one task, a fraction (0.05 = 5 points).
        confidence: level of the paired bootstrap interval of the gain, whose lower end must be above 0;
            None: no interval is asked for.
        resamples: of that bootstrap.
        seed: of that bootstrap.
        require_reproducible: the recipe must have been replayed to the same bytes.
    """

    margin: float = Field(default=0.0, ge=0.0, le=1.0)
    tolerance: float = Field(default=0.05, ge=0.0, le=1.0)
    confidence: float | None = Field(default=0.95, gt=0.0, lt=1.0)
    resamples: int = Field(default=2000, ge=100)
    seed: Seed = 0
    require_reproducible: bool = True


class RegistrySection(GateSettings):
    """Settings of the registry. model: name of the registered model."""

    model: str

    @field_validator("model")
    @classmethod
    def _fits_an_address(cls, model: str) -> str:
        check_model_name(model)
        return model


ADDRESS = r"^[a-z][a-z0-9+]*://[^@\s]+$"  # without credentials


class RunSection(Section):
    """How work is placed; results depend on the device alone, in their last bits.

    runner: what runs the stages. workers: stages at once. device: `auto` (CUDA where there is some), `cpu`, `cuda` or
    `cuda:N`. store: an address that fsspec opens, through which stages travel to the workers of `dask` or `ray`, or
    `remote`, DVC's; None: the workers see the project under the same path.
    """

    runner: Literal["threads", "processes", "dask", "ray"] = "threads"
    workers: int = Field(2, ge=1)
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    store: str | None = Field(None, pattern=rf"^remote$|{ADDRESS}")

    @model_validator(mode="after")
    def _store_serves_a_cluster(self) -> Self:
        if self.store and self.runner not in ("dask", "ray"):
            raise ValueError(f"store is for the runners dask and ray; '{self.runner}' works in the project folder")
        return self


def read_registry_section(root: Path) -> RegistrySection:
    """Read and validate this section of the project's params.yaml; the others are not looked at."""
    values = read_yaml(root / "params.yaml")
    if not isinstance(values, dict) or "registry" not in values:
        raise MergeflowError(f"params.yaml in {root} has no section 'registry'.")
    return validated(RegistrySection, values["registry"], "params.yaml, section registry")
