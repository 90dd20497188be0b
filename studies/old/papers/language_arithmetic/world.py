"""The tasks of the study `language_arithmetic`: written by the embedded grammar, or read from folders of your own."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby, islice
from pathlib import Path
from typing import NamedTuple

from pydantic import Field, field_validator

from mergeflow.data.arrays import SPLITS
from mergeflow.data.task import Example
from mergeflow.errors import MergeflowError
from mergeflow.modalities.causal.sources.folder import open_folder
from studies.old.papers.language_arithmetic.texts import ATTRIBUTES, DOMAINS, Manner, documents
from tasks.project.sections import Section

Task = Manner | str
"""How generated texts are written, or a place `folder:PATH` with files or folders train, validation and test."""

_KIND = "folder:"


class Folders(Section):
    """Texts of your own.

    Attributes:
        attributes: two attributes, in words → a value of the first → a value of the second → the place of that task's
            texts, `folder:PATH`; two values each.
        domains: name → place, of three domains.
    """

    attributes: dict[str, dict[str, dict[str, str]]] = Field(min_length=1)
    domains: dict[str, str] = Field(min_length=3, max_length=3)

    @field_validator("attributes")
    @classmethod
    def _two_by_two(cls, attributes: dict[str, dict[str, dict[str, str]]]) -> dict[str, dict[str, dict[str, str]]]:
        for name, first in attributes.items():
            if (
                len(first) != 2
                or {len(second) for second in first.values()} != {2}
                or len(set().union(*first.values())) != 2
            ):
                found = "; ".join(f"{one}: {', '.join(second)}" for one, second in first.items())
                raise ValueError(
                    f"'{name}' has {found or 'nothing'}; expected two values of the first attribute, each with the "
                    "same two of the second"
                )
        return attributes


class World(NamedTuple):
    """The tasks of a study.

    Attributes:
        attributes: Two attributes with two values each → the four tasks.
        domains: Three tasks that have nothing in common.
    """

    attributes: Mapping[str, Mapping[tuple[str, str], Task]]
    domains: Mapping[str, Task]

    @classmethod
    def of(cls, folders: Folders | None) -> "World":
        """Return the tasks of these folders; without any, the generated ones."""
        if folders is None:
            return cls(ATTRIBUTES, DOMAINS)
        attributes = {
            name: {(one, two): place for one, second in first.items() for two, place in second.items()}
            for name, first in folders.attributes.items()
        }
        return cls(attributes, folders.domains)

    @property
    def tasks(self) -> list[Task]:
        """All tasks, each once."""
        four = (task for tasks in self.attributes.values() for task in tasks.values())
        return list(dict.fromkeys([*self.domains.values(), *four]))


def check_places(tasks: Iterable[Task], root: Path) -> None:
    """Refuse, before anything is trained, folders that a study cannot read.

    Args:
        tasks: of the study.
        root: what relative paths start from.

    Raises:
        MergeflowError: listing every place that is missing, or lacks a split.
    """
    faults = []
    for place in (task for task in tasks if isinstance(task, str)):
        try:
            lacking = [split for split in SPLITS if split not in _splits(place, root)]
        except MergeflowError as error:
            faults.append(str(error))
            continue
        if lacking:
            faults.append(f"'{place}' has no texts of the split {' and '.join(lacking)}")
    if faults:
        raise MergeflowError(
            "the study language_arithmetic cannot read its texts:\n"
            + "\n".join(f"  {fault}" for fault in faults)
            + "\nName each task's texts folder:PATH, a folder with train.txt, validation.txt and test.txt, or with "
            "folders of these names."
        )


def written(task: Task, split: str, count: int, seed: int, root: Path) -> Iterator[str]:
    """Yield the first texts of a split of a task.

    Args:
        task: whose texts.
        split: train, validation or test.
        count: of texts, at most.
        seed: of generated texts.
        root: what a relative path of a folder starts from.
    """
    if not isinstance(task, str):
        yield from documents(task, split, count, seed)
        return
    pieces = (example.read() for example in _splits(task, root)[split]())
    whole = (list(one) for _, one in groupby(pieces, key=lambda piece: piece["document"]))
    yield from islice(("".join(piece["text"] for piece in one) for one in whole), count)


def _splits(place: str, root: Path) -> Mapping[str, Callable[[], Iterator[Example]]]:
    if not place.startswith(_KIND):
        raise MergeflowError(f"'{place}' is not a folder of texts")
    return open_folder(place, place.removeprefix(_KIND), 0, root).splits
