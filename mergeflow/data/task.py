"""The types that a data source returns: examples, and a task that lists them split by split."""

import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from mergeflow.data.arrays import SPLITS, quoted
from mergeflow.errors import MergeflowError

# Called once per pass and split with (split, examples done, examples in all or None when the source does not know).
Progress: TypeAlias = Callable[[str, int, int | None], None]


@dataclass(frozen=True)
class Example:
    """One example as its source gives it.

    Its content is what the modality decodes: an encoded image, a text, an array; or a function of no arguments that
    reads it, which lets a pass skip an example without reading it.
    """

    content: Any
    path: str
    label: int = 0  # index into the task's class names; 0 where the task has no classes
    edits: tuple[Callable[[Any], Any], ...] = ()  # what transforms do to the decoded content, in order

    def read(self) -> Any:
        """Return the content, read if it was not yet."""
        return self.content() if callable(self.content) else self.content

    def edited(self, decoded: Any) -> Any:
        """Return decoded content after the edits."""
        for edit in self.edits:
            decoded = edit(decoded)
        return decoded


@dataclass(frozen=True)
class Place:
    """The position of an example, and the seed: a random transform depends on nothing else."""

    split: str
    index: int  # the row in the source's split
    seed: int


@dataclass(frozen=True)
class Transform:
    """One step from a task to a task derived from it.

    `apply` takes an example and its place to the example after it, or None where it is left out. It must be a pure
    function and must not read the content: it adds an edit instead.
    """

    text: str
    class_names: Sequence[str] | None  # after it; None where the task has no classes
    apply: Callable[[Example, Place], Example | None] = lambda example, _: example


@dataclass(frozen=True)
class RawTask:
    """A task before preparation: names, and one fresh iterator of examples per call and split."""

    name: str
    class_names: Sequence[str] | None  # label i is class_names[i]; distinct, not empty; None: there are no classes
    templates: Sequence[str] | None  # prompts with exactly one `{}` where the class name goes; None: there are none
    splits: Mapping[str, Callable[[], Iterator[Example]]]  # `train` and, where there are, `validation` and `test`
    source: str = ""
    seed: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)  # examples per split where known without a pass
    # Per split (path, label) in the order of `splits`, where the source can list them without reading contents.
    keys: Mapping[str, Callable[[], Iterator[tuple[str, int]]]] = field(default_factory=dict)
    ignored_splits: Sequence[str] = ()  # that the source holds and this task does not use
    transforms: Sequence[Transform] = ()  # what derives this task from the source's
    keeps_conflicts: bool = False  # whether one content under two labels is kept and counted, as in published data

    def __post_init__(self) -> None:
        check_names(self.name, self.class_names, self.templates)
        unknown = sorted(set(self.splits) - set(SPLITS))
        if unknown or "train" not in self.splits:
            names = ", ".join(sorted(self.splits)) or "none"
            raise MergeflowError(
                f"task '{self.name}': splits found: {names}; expected train and, where there are, validation and test. "
                "Rename the splits of the source."
            )

    @property
    def strata(self) -> Sequence[str]:
        """The source's classes, by which splits are stratified; one where the task has no classes."""
        return ("",) if self.class_names is None else self.class_names

    @property
    def derived_names(self) -> Sequence[str] | None:
        """The class names after the transforms."""
        return self.transforms[-1].class_names if self.transforms else self.class_names

    def list_keys(self, split: str) -> Iterator[tuple[str, int]]:
        """Yield (path, label) of every example of a split, without reading its content where the source can."""
        if split in self.keys:
            yield from self.keys[split]()
        else:
            for example in self.splits[split]():
                yield example.path, example.label


def transformed(raw: RawTask, example: Example, place: Place) -> Example | None:
    """Return an example after the task's transforms, in order; None where they leave it out."""
    made: Example | None = example
    for transform in raw.transforms:
        made = None if made is None else transform.apply(made, place)
    return made


def check_names(task: str, class_names: Sequence[str] | None, templates: Sequence[str] | None) -> None:
    """Refuse class names and templates from which no classifier can be built; either may be None."""
    if class_names is not None:
        _check_classes(task, class_names)
    wrong = [template for template in templates or () if template.count("{}") != 1]
    if wrong or (templates is not None and not templates):
        text = quoted(wrong) if wrong else "no template"
        raise MergeflowError(
            f"task '{task}': found {text}; expected templates with exactly one '{{}}' for the class name, "
            "such as 'a photo of a {}.'."
        )


def plain(name: str) -> str:
    """Return a class name without spaces around it, its letters composed: what is equal then looks equal.

    Example:
        >>> plain(" Gro\u0308\u00dfe") == plain("Gr\u00f6\u00dfe")
        True
    """
    return unicodedata.normalize("NFC", name.strip())


def _check_classes(task: str, class_names: Sequence[str]) -> None:
    if len(class_names) < 2:
        classes = f"one class only ('{class_names[0]}')" if class_names else "no class names"
        raise MergeflowError(
            f"task '{task}': {classes} found; expected at least two, to tell them apart. Add examples of another class."
        )
    repeated = sorted(name for name, count in Counter(map(plain, class_names)).items() if count > 1 and name)
    if repeated:
        raise MergeflowError(
            f"task '{task}': class names found more than once: {quoted(repeated)}. "
            "Every class needs a name of its own: rename or join the classes."
        )
    blank = [index for index, name in enumerate(class_names) if not name.strip()]
    if blank:
        raise MergeflowError(f"task '{task}': class {blank[0]} has an empty name; give it one.")
