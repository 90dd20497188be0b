"""What a data source hands over: examples, and a task that can list them split by split."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from PIL import Image

from mergeflow.errors import MergeflowError

SPLITS = ("train", "validation", "test")
DEFAULT_TEMPLATES = ("a photo of a {}.",)

ImageInput: TypeAlias = bytes | Image.Image
# Called once per pass and split with (split, images done, images in all or None when the source does not know).
Progress: TypeAlias = Callable[[str, int, int | None], None]


@dataclass(frozen=True)
class Example:
    """One labelled image as its source gives it.

    Args:
        image: an encoded file (PNG, JPEG, WebP, PPM, ... as bytes), a drawn PIL image, or a function of no arguments
            that reads either. The function lets a pass skip an example without reading it.
        path: the name of the image in its source; error messages print it and Parquet stores it.
        label: index into the task's class names.
    """

    image: ImageInput | Callable[[], ImageInput]
    path: str
    label: int

    def read(self) -> ImageInput:
        """Return the image, read if it was not yet."""
        return self.image() if callable(self.image) else self.image


@dataclass(frozen=True)
class RawTask:
    """A task before preparation: names, and one fresh iterator of examples per call and split.

    Args:
        name: task name.
        class_names: label i is class_names[i]; distinct, not empty.
        templates: prompts with exactly one `{}` where the class name goes.
        splits: `train` and, where the source has them, `validation` and `test`.
        source: the address given to `open_source`; goes into the manifest.
        seed: decides which training images become the splits that the source lacks.
        counts: images per split where the source knows it without a pass; serves progress and the disk check.
        keys: per split a cheap iterator of (path, label) in the order of `splits`, where the source can list its
            examples without reading images.
        ignored_splits: names of splits that the source holds and this task does not use.

    Raises:
        MergeflowError: less than two classes, duplicated class names, a bad template, an unknown split or no `train`.
    """

    name: str
    class_names: Sequence[str]
    templates: Sequence[str]
    splits: Mapping[str, Callable[[], Iterator[Example]]]
    source: str = ""
    seed: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)
    keys: Mapping[str, Callable[[], Iterator[tuple[str, int]]]] = field(default_factory=dict)
    ignored_splits: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_names(self.name, self.class_names, self.templates)
        unknown = sorted(set(self.splits) - set(SPLITS))
        if unknown or "train" not in self.splits:
            found = ", ".join(sorted(self.splits)) or "none"
            raise MergeflowError(
                f"task '{self.name}': splits found: {found}; expected train and, where there are, validation and test. "
                "Rename the splits of the source."
            )

    def list_keys(self, split: str) -> Iterator[tuple[str, int]]:
        """Yield (path, label) of every example of a split, without reading images where the source can."""
        if split in self.keys:
            yield from self.keys[split]()
        else:
            for example in self.splits[split]():
                yield example.path, example.label


def check_names(task: str, class_names: Sequence[str], templates: Sequence[str]) -> None:
    """Refuse class names and templates from which no zero-shot head can be built.

    Example:
        >>> check_names("pets", ["cat", "dog", "cat"], ["a photo of a {}."])
        Traceback (most recent call last):
            ...
        mergeflow.errors.MergeflowError: task 'pets': class names found more than once: 'cat'. Every class needs a name of its own: rename or join the classes.
    """  # noqa: E501
    if len(class_names) < 2:
        found = f"one class only ('{class_names[0]}')" if class_names else "no class names"
        raise MergeflowError(
            f"task '{task}': {found} found; expected at least two, to tell them apart. Add the images of another class."
        )
    repeated = sorted(name for name, count in Counter(class_names).items() if count > 1)
    if repeated:
        raise MergeflowError(
            f"task '{task}': class names found more than once: {_quoted(repeated)}. "
            "Every class needs a name of its own: rename or join the classes."
        )
    blank = [index for index, name in enumerate(class_names) if not name.strip()]
    if blank:
        raise MergeflowError(f"task '{task}': class {blank[0]} has an empty name; give it one.")
    wrong = [template for template in templates if template.count("{}") != 1]
    if wrong or not templates:
        found = _quoted(wrong) if wrong else "no template"
        raise MergeflowError(
            f"task '{task}': found {found}; expected templates with exactly one '{{}}' for the class name, "
            f"such as '{DEFAULT_TEMPLATES[0]}'."
        )


def _quoted(names: Sequence[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:5])
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")
