"""Tasks of texts: documents become pieces, and the task is judged by its next-token accuracy."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

from mergeflow.data.task import Example, Place, RawTask, Transform
from mergeflow.errors import MergeflowError
from mergeflow.modalities.causal.pieces import SECTION, pieces

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
    """Return a text that UTF-8 can write.

    Raises:
        MergeflowError: it has half of a surrogate pair, as JSON may.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise MergeflowError(
            f"{name} has the character {text[error.start]!r} at {error.start}, half of a pair that UTF-8 cannot write: "
            "remove it."
        ) from None
    return text
