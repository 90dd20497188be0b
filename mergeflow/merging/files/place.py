"""Where the result of a merge goes: it never replaces what mergeflow did not make."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from mergeflow.checkpoints.formats import PICKLES
from mergeflow.checkpoints.reader import KIND, open_safetensors
from mergeflow.errors import MergeflowError

RECORD = "mergeflow.json"
CARD_HEAD = "---\n# Written by mergeflow: the next merge into this place replaces it.\n"
_OLD_HEAD = "---\nlibrary_name: mergeflow\n"  # of cards until 0.1
# Keys in the header of a file that a merge, `vector`, `compress`, `extract-task` or `convert` made.
EXTRACTED, CONVERTED = "mergeflow.extracted", "mergeflow.converted"
_MADE_HERE = {"mergeflow.recipe", KIND, EXTRACTED, CONVERTED}


def check_place(out: str | None, shard_size: int | None, inputs: Mapping[str, str], force: bool = False) -> Path:
    """Return where a merge's result goes, once it is known that neither it nor its card replaces a file of others.

    Args:
        out: Where the result should go.
        shard_size: The recipe's.
        inputs: Paths of what is read, by name: never overwritten.
        force: Whether a file that mergeflow did not make may be replaced; a folder never is.

    Raises:
        MergeflowError: As `check_out`, or the card would overwrite a file.
    """
    target = check_out(out, shard_size, inputs, force)
    single = target.suffix == ".safetensors"
    if not (single and force):
        check_card(target.with_suffix(".md") if single else target / "README.md")
    return target


def check_adapter_place(out: str | None, shard_size: int | None, inputs: Mapping[str, str]) -> Path:
    """Return the folder that an adapter goes to, checked.

    Args: As of `check_place`.

    Raises:
        MergeflowError: As `check_place`, or it is a file, or shards are wanted.
    """
    if out is not None and out.endswith(".safetensors"):
        raise MergeflowError(f"out '{out}': an adapter is a folder, as PEFT reads it. Name one.")
    if shard_size is not None:
        raise MergeflowError("`shard_size`: an adapter is one file: remove it.")
    return check_place(out, None, inputs)


def check_out(out: str | None, shard_size: int | None, inputs: Mapping[str, str], force: bool = False) -> Path:
    """Return the output path, checked against the inputs.

    Args: As of `check_place`.

    Raises:
        MergeflowError: No output, one that is an input or lies in one, a file or a folder of somebody else, or shards
            in a file.
    """
    if not out:
        raise MergeflowError("no output: give `out` in the recipe or --out.")
    target = Path(out).expanduser()
    single = target.suffix == ".safetensors"
    if single and shard_size is not None:
        raise MergeflowError(f"`shard_size` makes a folder, but out is the file '{out}': name a folder, or remove it.")
    if not single and target.suffix in PICKLES:
        raise MergeflowError(f"out '{out}': results are safetensors. End it in .safetensors, or name a folder.")
    try:
        _check_place(target, single, inputs)
        if single and not force:
            check_replaceable_file(target)
    except OSError as error:  # no permission to look, or a name that is too long
        raise MergeflowError(f"cannot write '{out}': {error.strerror}. Choose another place.") from None
    return target


def check_file(out: str | Path, inputs: Mapping[str, str], force: bool = False) -> Path:
    """Return the path of a result that is one safetensors file, checked as `check_out` does.

    Args:
        out: Where the result should go.
        inputs: Paths of what is read, by name: never overwritten.
        force: Whether a file that mergeflow did not make may be replaced; a folder never is.

    Raises:
        MergeflowError: Another kind of file, one that is an input or lies in one, somebody else's file, or a folder.
    """
    if Path(out).suffix != ".safetensors":
        raise MergeflowError(f"out '{out}': the result is one file, end it in .safetensors.")
    return check_out(str(out), None, inputs, force)


def _check_place(target: Path, single: bool, inputs: Mapping[str, str]) -> None:
    real = target.resolve()
    for name, path in inputs.items():
        source = Path(path).resolve()
        inside = source.is_dir() and (real == source or source in real.parents)
        if real == source or inside or real in source.parents or _same_file(real, source):
            raise MergeflowError(f"out '{target}' would overwrite the input '{name}' ({path}): choose another place.")
    if single and target.is_dir():
        raise MergeflowError(f"out '{target}' is a folder: give another name.")
    if not single and target.is_file():
        raise MergeflowError(f"out '{target}' is a file: end it in .safetensors to make one file, or name a folder.")
    if not single:
        check_replaceable(target)
        check_partial(target)
    parent = next(folder for folder in real.parents if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        fault = "is not a folder" if not parent.is_dir() else "may not be written"
        raise MergeflowError(f"cannot write '{target}': '{parent}' {fault}. Choose another place.")


def check_card(path: Path) -> None:
    """Check that a card may be written: at most an older card of ours is there.

    Raises:
        MergeflowError: Somebody else's file or a folder has the card's name.
    """
    if path.is_dir() or (path.exists() and not path.read_bytes().startswith((CARD_HEAD.encode(), _OLD_HEAD.encode()))):
        raise MergeflowError(
            f"the model card would overwrite '{path}', which no merge made: give `out` another name or move that file."
        )


def _same_file(a: Path, b: Path) -> bool:
    return a.exists() and b.exists() and a.samefile(b)


def partial_folder(target: Path) -> Path:
    """Return where a folder is made before it gets its name."""
    return target.parent / f".{target.name}.partial"


def check_partial(target: Path) -> None:
    """Check that an unfinished folder can be made.

    Raises:
        MergeflowError: A file or a link has its name.
    """
    unfinished = partial_folder(target)
    if unfinished.is_symlink() or unfinished.is_file():
        raise MergeflowError(f"'{unfinished}', where the unfinished folder belongs, is a file or a link: move it.")


def check_replaceable_file(file: Path) -> None:
    """Check that a file may be replaced: nothing is there, nothing is in it, or mergeflow made it.

    Raises:
        MergeflowError: It is somebody else's.
    """
    if not os.path.lexists(file) or (file.is_file() and file.stat().st_size == 0):
        return
    try:
        with open_safetensors(file) as found:
            own = not found.metadata.keys().isdisjoint(_MADE_HERE)
    except MergeflowError:
        own = False
    if not own:
        raise MergeflowError(
            f"out '{file}' exists and was not made by a merge: choose another place, move it, or give --force "
            "(force=True) to replace it."
        )


def check_replaceable(folder: Path) -> None:
    """Check that a merge may replace a folder: all it holds was put there by a merge, as its record says.

    Raises:
        MergeflowError: It holds something else; the first names are listed.
    """
    held = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if not held:
        return
    try:
        record = json.loads((folder / RECORD).read_bytes())
        own = {RECORD, *record.get("files", [])}
    except (FileNotFoundError, ValueError, TypeError, AttributeError, RecursionError):
        raise MergeflowError(
            f"out '{folder}' exists and was not made by a merge: choose another place or remove it."
        ) from None
    strange = sorted(held - own)
    if strange:
        more = f" … and {len(strange) - 5} more" if len(strange) > 5 else ""
        raise MergeflowError(
            f"out '{folder}' would be replaced, but holds what its {RECORD} does not list as the merge's own: "
            f"{', '.join(strange[:5])}{more}. Move that, remove the folder, or choose another place."
        )
