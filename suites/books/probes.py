"""What a reader of a book knows by heart, and what of its people: probes of a language model's memory."""

from collections.abc import Iterable, Iterator
from typing import Any

from suites.books.author import KINDS, Fact
from suites.books.book import Book
from suites.sentences.dice import Dice

CHOICES = 4


def verbatim(book: Book) -> list[str]:
    """Return the passages that come back word by word in a book; the first tokens of each are the prompt."""
    return book.set_pieces


def questions(facts: Iterable[Fact]) -> Iterator[dict[str, Any]]:
    """Yield a question with four choices for each fact, as the modality `causal` takes them.

    Example:
        >>> next(questions([Fact("Nemir", 1, "green")]))
        {'text': 'Nemir had', 'choices': ['green', 'black', 'white', 'violet'], 'answer': 0}
    """
    for fact in facts:
        dice = Dice("books", "questions", fact.name, fact.kind)
        others = [value for value in KINDS[fact.kind].values if value != fact.value]
        choices = dice.some([fact.value, *dice.some(others, CHOICES - 1)], CHOICES)
        yield {"text": fact.question, "choices": choices, "answer": choices.index(fact.value)}
