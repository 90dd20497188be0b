"""Tasks of texts: documents become pieces, and the task is judged by its next-token accuracy."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

from mergeflow.data.task import Example, Place, RawTask, Transform
from mergeflow.errors import MergeflowError

# Every tokenizer gives at most one token a byte, or a few more; a longer piece would waste less of its row, but hold
# more of a text together that is left out as a copy of another split's.
PIECE = 512
# Pieces that go to one split together where a split is carved: what is held out is a whole passage of about 8 KiB.
SECTION = 16


def pieces(text: str, limit: int = PIECE) -> Iterator[str]:
    """Cut a text before white space, so that a tokenizer which puts it before a word gives the whole text's tokens.

    Args:
        limit: bytes of a piece in UTF-8, at most; at least 4.

    Example:
        >>> list(pieces("one two three", 8))
        ['one two', ' three']
    """
    start = 0
    while start < len(text):
        window = text[start : start + limit].encode()[:limit].decode(errors="ignore")
        end = start + len(window)
        if end < len(text):
            end = start + (_boundary(window + text[end]) or len(window))
        yield text[start:end]
        start = end


def _boundary(window: str) -> int:
    """Return the last place where white space begins, but not the first; 0 where there is none."""
    starts = (at for at in range(len(window) - 1, 0, -1) if window[at].isspace() and not window[at - 1].isspace())
    return next(starts, 0)


# (name, text) of each document of a split, in the same order each time.
Documents = Callable[[], Iterator[tuple[str, str]]]


def _unchanged(example: Example, place: Place) -> Example:
    return example


# A task without classes is judged by a correlation unless it says otherwise; scores here are shares of right answers.
ACCURACY = Transform("metric=accuracy", None, _unchanged)


def text_task(task: str, splits: Mapping[str, Documents], seed: int) -> RawTask:
    """Return the task that documents amount to."""
    examples = {split: partial(_examples, documents) for split, documents in splits.items()}
    return RawTask(task, None, None, examples, seed=seed, transforms=(ACCURACY,))


def _examples(documents: Documents) -> Iterator[Example]:
    """Yield the pieces of documents; a section of a document has one path, so that it stays together when carved."""
    for number, (name, text) in enumerate(documents()):
        if not text.strip():
            raise MergeflowError(f"{name} is empty: give it some words, or remove it.")
        for place, piece in enumerate(pieces(checked(text, name))):
            yield Example({"text": piece, "document": number, "place": place}, f"{name}#{place // SECTION}")


def checked(text: str, name: str) -> str:
    """Return a text that UTF-8 can write."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise MergeflowError(
            f"{name} has the character {text[error.start]!r} at {error.start}, half of a pair that UTF-8 cannot write: "
            "remove it."
        ) from None
    return text
