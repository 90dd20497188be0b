"""What a study declares. Its stage in studies/dvc.yaml is written from this and from the project's choices."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from pydantic import BaseModel

from tasks.project.stage import CHOICES, StageIO

Choices = TypeVar("Choices", bound=BaseModel)


def _none(choices: BaseModel) -> Iterable[str]:
    return ()


@dataclass(frozen=True)
class Declaration(Generic[Choices]):
    """What a study chooses and reads; a `studies.lab.Study` says besides what it measures, claims and shows.

    A study that reads runs or splits reads the base as well, and the sections `tasks`, `model` and `evaluation` of the
    parameters. One that reads neither depends on its choices alone.

    Attributes:
        options: the study's section of studies/params.yaml.
        runs: from these choices, the names of the training runs that the study reads.
        splits: the prepared splits that it reads, of train, validation and test.
        systems: which systems of the papers it covers.

    Example:
        >>> class Options(BaseModel):
        ...     rounds: list[int]
        >>> declared = Declaration(Options, lambda options: [f"mima_{n}" for n in options.rounds], ("test",))
        >>> declared.runs(Options(rounds=[1, 4]))
        ['mima_1', 'mima_4']
    """

    options: type[Choices]
    runs: Callable[[Choices], Iterable[str]] = _none
    splits: tuple[str, ...] = ()
    systems: tuple[str, ...] = ()

    def chosen(self, io: StageIO) -> Choices:
        """Return the choices of the study that runs, from its section of studies/params.yaml.

        Args:
            io: the files of the study's stage.
        """
        return self.options.model_validate(io.section(f"{CHOICES}:studies.{io.stage.name}"))
