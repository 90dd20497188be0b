"""Where a base and its tokenizer are: in a folder, embedded, or on the Hugging Face hub; read without a word."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from threading import RLock
from typing import Any, TypeVar

from mergeflow.errors import MergeflowError, unknown_name

# Transformers fills itself in while it is imported: a second thread that imports it meanwhile finds it half done.
_IMPORTING = RLock()
ASSETS = Path(__file__).with_name("assets")
T = TypeVar("T")


def transformers(name: str) -> Any:
    """Return a class of transformers, imported when it is first asked for: that takes seconds.

    Example:
        >>> transformers("AutoConfig").__name__
        'AutoConfig'
    """
    with _IMPORTING:
        return getattr(import_module("transformers"), name)


def find_place(place: str, root: Path, assets: Path = ASSETS) -> str:
    """Return what transformers is given: the path of a folder, or an id of the hub.

    Args:
        place: a folder relative to `root` or absolute, the name of an embedded base, or an id `owner/name`.
        root: the project folder.
        assets: where the embedded bases are.

    Raises:
        MergeflowError: it is none of these.
    """
    if (root / place).is_dir():
        return str(root / place)
    embedded = {folder.name: folder for folder in assets.iterdir() if folder.is_dir()} if assets.is_dir() else {}
    if place in embedded:
        return str(embedded[place])
    if place.startswith((".", "/", "inputs/")) or place.count("/") > 1:
        raise MergeflowError(
            f"there is no folder '{place}'; expected one with config.json, model.safetensors and tokenizer.json."
        )
    if "/" not in place:
        raise unknown_name("base", place, embedded)
    return place


def from_place(what: str, place: str, load: Callable[[], T]) -> T:
    """Read something of transformers', quietly.

    Args:
        what: what an error message calls it, such as "the tokenizer".
        place: as `find_place` returned it.
        load: reads it.

    Raises:
        MergeflowError: it cannot be read; the first line of transformers' own message says why.
    """
    try:
        with quiet():
            return load()
    # Files, the hub's client and the parsers raise errors of many types; all mean that nothing can be read there.
    except Exception as error:
        if isinstance(error, MergeflowError):
            raise
        first = (str(error).strip().splitlines() or [""])[0]
        raise MergeflowError(
            f"{what} of '{place}' cannot be read ({type(error).__name__}: {first}). Name a folder with config.json, "
            "model.safetensors and tokenizer.json; without a network only folders and the local cache can be read."
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' remarks and progress bars off the terminal: what is missing is checked by the caller."""
    with _IMPORTING:
        from transformers.utils import logging
    known: Any = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(known[0])
        if known[1]:
            logging.enable_progress_bar()
