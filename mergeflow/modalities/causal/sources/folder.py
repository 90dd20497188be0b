"""The source kind `folder:`: plain text files, a document each."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path, PurePosixPath

from mergeflow.data.address import rooted
from mergeflow.data.arrays import quoted
from mergeflow.data.locations import Location, decoded, split_of
from mergeflow.data.task import RawTask
from mergeflow.errors import MergeflowError
from mergeflow.modalities.causal.sources.texts import text_task

_ENDINGS = (".txt", ".md")
_ABOUT = ("", ".json", ".yaml", ".yml", ".toml", ".cff")  # of files that tell about texts: LICENSE, metadata.json


def open_folder(task: str, place: str, seed: int, root: Path) -> RawTask:
    """Open a text file, or a folder of them, as a task.

    Args:
        place: path or URI. Files named after splits (train.txt), or in folders that are, make these; others are all of
            the training split, from which validation and test are carved, section by section of about 8 KiB.
    """
    location = Location.open(rooted(place, root))
    if location.is_file():
        return text_task(task, {"train": partial(_documents, location, ((),))}, seed)
    endings = {parts: PurePosixPath(parts[-1]).suffix.lower() for parts in location.list_files()}
    if others := ["/".join(parts) for parts, ending in endings.items() if ending not in (*_ENDINGS, *_ABOUT)]:
        raise MergeflowError(
            f"task '{task}': {location.path} holds {quoted(others)}, which is not read as text. Name texts .txt or "
            ".md, and move other files elsewhere."
        )
    files = [parts for parts, ending in endings.items() if ending in _ENDINGS]
    splits: dict[str | None, list[tuple[str, ...]]] = {}
    for parts in files:
        splits.setdefault(split_of(parts[0].partition(".")[0]), []).append(parts)
    if not files or (len(splits) > 1 and None in splits):
        content = "no .txt or .md file"
        if files:
            plain = quoted(["/".join(parts) for parts in splits[None]])
            content = f"{plain} and files of {', '.join(sorted(filter(None, splits)))}"
        raise MergeflowError(
            f"task '{task}': {location.path} holds {content}; expected text files, or folders or files named train "
            "and, where there are, validation and test."
        )
    documents = {split or "train": partial(_documents, location, tuple(parts)) for split, parts in splits.items()}
    return text_task(task, documents, seed)


def _documents(location: Location, files: tuple[tuple[str, ...], ...]) -> Iterator[tuple[str, str]]:
    for parts in files:
        path = location.join(parts) if parts else location.path
        name = "/".join(parts) or path.rsplit("/", 1)[-1]
        yield name, decoded(location.read(path), path)
