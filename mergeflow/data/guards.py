"""Check a prepared task: no content in two splits or under two labels, and no class without a test example."""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

import numpy as np

from mergeflow.data.arrays import SPLITS, quoted
from mergeflow.data.splits import PlannedSplit
from mergeflow.data.task import RawTask
from mergeflow.errors import MergeflowError

SHOWN = 50


class Faults:
    """Rows that cannot be used: all are counted, the first fifty are named."""

    def __init__(self, what: str) -> None:
        self.count = 0
        self._what = what
        self._shown: list[str] = []

    def add(self, fault: str) -> None:
        """Note one fault."""
        self.count += 1
        if len(self._shown) < SHOWN:
            self._shown.append(fault)

    def check(self) -> None:
        """Refuse the task if there was any fault."""
        if self.count:
            raise MergeflowError(_listed(self._what, self._shown, self.count))


def _listed(what: str, shown: Sequence[str], count: int) -> str:
    if count == 1:
        return shown[0]
    rest = [f"  and {count - len(shown)} more"] if count > len(shown) else []
    return "\n".join([f"{count} {what}:", *(f"  {fault}" for fault in shown), *rest])


class Copies:
    """Finds equal contents in a task by the digests of the source's content, before transforms.

    Memory: the digest and 13 bytes for each example.
    """

    def __init__(self, raw: RawTask, plans: Mapping[str, PlannedSplit]) -> None:
        self._raw, self._plans = raw, plans
        self._first: dict[bytes, int] = {}
        self._splits, self._rows, self._labels = array("b"), array("q"), array("i")
        self._conflicts: list[tuple[int, str, str, int]] = []
        self.conflicts = 0

    def first_split(self, digest: bytes, split: str, row: int, label: int, path: str) -> str:
        """Return the split that had this content first, which is `split` where the content is new."""
        number = self._first.setdefault(digest, len(self._rows))
        if number == len(self._rows):
            self._splits.append(SPLITS.index(split))
            self._rows.append(row)
            self._labels.append(label)
        elif self._labels[number] != label:
            self.conflicts += 1
            if len(self._conflicts) < SHOWN:
                self._conflicts.append((number, split, path, label))
        return SPLITS[self._splits[number]]

    def distinct(self, split: str) -> int:
        """Return how many contents a split had first."""
        return self._splits.count(SPLITS.index(split))

    def check(self) -> None:
        """Refuse the same content under two labels, unless the task keeps it."""
        if self._raw.keeps_conflicts or not self.conflicts:
            return
        task, names, faults = self._raw.name, self._raw.strata, []
        for (number, split, path, label), first_path in zip(self._conflicts, self._first_paths(), strict=True):
            first = f"'{first_path}' ({SPLITS[self._splits[number]]}, '{names[self._labels[number]]}')"
            faults.append(f"task '{task}': '{path}' ({split}, '{names[label]}') has the content of {first}")
        what = f"examples of task '{task}' have the content of another under a different label"
        raise MergeflowError(
            f"{_listed(what, faults, self.conflicts)}\nRemove the wrong ones, or write `conflicts=keep` after the "
            "source (SOURCE?conflicts=keep) if it is meant to be so."
        )

    def _first_paths(self) -> Iterator[str]:
        """Yield the path of the first of each pair; paths are not kept while reading, so they are listed again."""
        for number, *_ in self._conflicts:
            origin = self._plans[SPLITS[self._splits[number]]].origin
            path, _label = next(islice(self._raw.list_keys(origin), self._rows[number], None))
            yield path


def check_filled(raw: RawTask, split: str, read: int, left_out: int, remaining: int) -> None:
    """Refuse a split that is empty, of which transforms leave nothing, or whose examples are all copies."""
    source = raw.source or "the source"
    if not read and split not in raw.splits:
        raise MergeflowError(
            f"task '{raw.name}': {source} has no split '{split}', and too few examples to take one from train, of each "
            "class at least one more than splits are taken. Add examples, or the split."
        )
    if not read:
        raise MergeflowError(f"task '{raw.name}': split '{split}' of {source} is empty; add examples to it.")
    if read == left_out:
        raise MergeflowError(
            f"task '{raw.name}': none of the {read} examples of split '{split}' is left by the transforms of {source}. "
            "Choose other values."
        )
    if not remaining:
        raise MergeflowError(
            f"task '{raw.name}': all {read} examples of split '{split}' of {source} are also in a split that comes "
            "before it (test, then validation, then train). Remove the copies from the source."
        )


def check_classes(raw: RawTask, per_class: Mapping[str, np.ndarray]) -> list[str]:
    """Refuse a class without a training or test example; return a warning where validation lacks some."""
    names = raw.derived_names or ()
    lacking = {split: [name for name, n in zip(names, per_class[split], strict=True) if not n] for split in SPLITS}
    source, faults = raw.source or "the source", []
    if lacking["train"]:
        faults.append(
            f"task '{raw.name}': {len(lacking['train'])} of {len(names)} classes have no training example in {source}: "
            f"{quoted(lacking['train'], 10)}. Add examples or remove the classes."
        )
    if lacking["test"]:
        faults.append(
            f"task '{raw.name}': {len(lacking['test'])} of {len(names)} classes have no test example in {source}: "
            f"{quoted(lacking['test'], 10)}. Their accuracy would never be measured: add examples to test (where it is "
            "taken from train, a class needs at least two examples), or leave the classes out "
            f"({_example_of_classes(names, lacking['test'])})."
        )
    if faults:
        raise MergeflowError("\n".join(faults))
    if lacking["validation"]:
        return [
            f"{len(lacking['validation'])} of {len(names)} classes have no validation example: "
            f"{quoted(lacking['validation'], 10)}. What is chosen on validation is chosen without them."
        ]
    return []


def _example_of_classes(names: Sequence[str], lacking: Sequence[str]) -> str:
    labels = [str(label) for label, name in enumerate(names) if name not in lacking]
    return f"SOURCE?classes={','.join(labels)}" if 2 <= len(labels) <= 20 else "SOURCE?classes= and the labels to keep"
