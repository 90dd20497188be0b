"""Which files of a folder hold which split: train-*.parquet, data/validation.jsonl, test/part-1.csv and the like."""

import re
from collections.abc import Sequence

from mergeflow.data.arrays import quoted
from mergeflow.data.locations import Location, split_of
from mergeflow.errors import MergeflowError

_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.\w+$")


def list_shards(location: Location, task_name: str, ending: str = "parquet") -> dict[str, list[str]]:
    """Return the files of each split; one file alone is a training split from which the others are carved.

    Args:
        location: a file, or a folder with files named after their split (also val, valid, dev), directly, in `data/`
            or in one folder for each split.
        task_name: the task's name, for the message.
        ending: of the files' names, without a dot.

    Raises:
        MergeflowError: no such files, unknown split names, a split that has only files of another ending, or a numbered
            set that is not whole.
    """
    if location.is_file():
        return {"train": [location.path]}
    shards: dict[str, list[str]] = {}
    others: dict[str, str] = {}
    unknown = []
    for parts in location.list_files():
        inner = parts[1:] if parts[0] == "data" else parts
        split = split_of(re.split(r"[-_.]", inner[-1])[0]) if len(inner) == 1 else split_of(inner[0])
        if not parts[-1].lower().endswith(f".{ending}"):
            others.setdefault(split or "", "/".join(parts))
        elif split is None or len(inner) > 2:
            unknown.append("/".join(parts))
        else:
            shards.setdefault(split, []).append(location.join(parts))
    if shards:
        unknown += [name for split, name in others.items() if split and split not in shards]
    if unknown or "train" not in shards:
        kind = {"parquet": "Parquet"}.get(ending, ending.upper())
        found = quoted(unknown) or ", ".join(shards) or f"no {kind} file"
        found += f", but {quoted(list(others.values()))}" if others and not (unknown or shards) else ""
        raise MergeflowError(
            f"task '{task_name}': {location.path} holds {found}; expected shards of train and, where there are, of "
            f"validation and test: {_layout(ending)}. Rename the files."
        )
    for split, paths in shards.items():
        _check_whole(location, split, paths)
    return shards


def _layout(ending: str) -> str:
    return (
        f"train-*.{ending}, validation-*.{ending} and test-*.{ending}, or train.{ending} ..., or train/*.{ending} ..., "
        "in the folder or in its data/"
    )


def _check_whole(location: Location, split: str, paths: Sequence[str]) -> None:
    """A numbered set must be whole: a download that stopped half-way would otherwise pass as a smaller data set."""
    totals: dict[str, set[int]] = {}
    numbers: dict[tuple[str, int], set[int]] = {}
    for path in paths:
        if match := _SHARD.search(path):
            name, total = path[: match.start()], int(match[2])
            totals.setdefault(name, set()).add(total)
            numbers.setdefault((name, total), set()).add(int(match[1]))
    for (name, total), present in numbers.items():
        missing = sorted(set(range(total)) - present)
        if missing or len(totals[name]) > 1:
            raise MergeflowError(
                f"{location.path}: split '{split}', {name.rsplit('/', 1)[-1]}-*, has {len(present)} of {total} shards; "
                f"missing: {missing[:10]}. Download the snapshot again."
            )
