"""Books: chapters of what an author invents, of the facts of a cast, and of set pieces that come back word by word."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from mergeflow.errors import unknown_name
from suites.books import words
from suites.books.author import Fact, Style, draw_cast
from suites.sentences.dice import Dice

CHAPTERS = 60
PARAGRAPHS = 20  # of a chapter
SENTENCES = 6  # of a paragraph
FACT = 0.35  # probability that a sentence of a paragraph tells a fact
SET_PIECES = 30  # of a book; each third paragraph is one of them
_SHARED, _OWN = 10, 6  # people of an author, and of one book alone

TITLES: Mapping[str, str] = {"harbour": "first", "lighthouse": "first", "orchard": "second"}
"""Each book and its author."""


@dataclass(frozen=True)
class Book:
    """A book of the corpus.

    Attributes:
        seed: Of another corpus of the same making; 0 is the one that ships.
    """

    title: str
    seed: int = 0

    @cached_property
    def _world(self) -> tuple[Style, list[str], list[Fact], list[str]]:
        """Return the style, the people, the facts, and the places; style and most people are the author's."""
        author = Dice("books", self.seed, TITLES[self.title])
        style = Style.draw(author)
        names, facts = draw_cast(author, _SHARED)
        towns = [words.town(author) for _ in range(3)]
        dice = Dice("books", self.seed, TITLES[self.title], self.title)
        own_names, own_facts = draw_cast(dice, _OWN)
        new = [name for name in own_names if name not in names]
        facts += [fact for fact in own_facts if fact.name in new]
        return style, names + new, facts, [*towns, words.town(dice)]

    @property
    def facts(self) -> list[Fact]:
        """What the book tells of its people, the author's recurring ones first."""
        return self._world[2]

    @property
    def own_facts(self) -> list[Fact]:
        """The facts about people who are in this book alone."""
        shared = draw_shared(TITLES[self.title], self.seed)
        return [fact for fact in self.facts if fact.name not in shared]

    @cached_property
    def set_pieces(self) -> list[str]:
        """The passages of four sentences that come back word by word."""
        style, names, _, towns = self._world
        dice = Dice("books", self.seed, self.title, "set pieces")
        return [" ".join(style.sentence(dice, names, towns) for _ in range(4)) for _ in range(SET_PIECES)]

    def chapters(self) -> Iterator[str]:
        """Yield the chapters; paragraphs are lines."""
        return (self.chapter(number) for number in range(CHAPTERS))

    def chapter(self, number: int) -> str:
        """Return one chapter, which depends on no other.

        Args:
            number: from 0.
        """
        dice = Dice("books", self.seed, self.title, "chapter", number)
        return "\n".join(
            dice.pick(self.set_pieces) if paragraph % 3 == 2 else self._paragraph(dice)
            for paragraph in range(PARAGRAPHS)
        )

    def _paragraph(self, dice: Dice) -> str:
        style, names, facts, towns = self._world
        sentences = [
            dice.pick(facts).tell(dice) if dice.chance(FACT) else style.sentence(dice, names, towns)
            for _ in range(SENTENCES)
        ]
        return " ".join(sentences)


@lru_cache
def draw_shared(author: str, seed: int) -> Sequence[str]:
    """Return the names of the people who are in all books of an author.

    Args:
        author: one of the values of `TITLES`.
    """
    dice = Dice("books", seed, author)
    Style.draw(dice)
    return draw_cast(dice, _SHARED)[0]


def general(number: int, seed: int = 0, part: str = "general") -> str:
    """Return a short text by an author who writes nothing else: with a style, people, facts and a place of its own.

    Args:
        number: of the text; equal numbers give equal texts.
        part: what it is for: texts of different parts are different.
    """
    dice = Dice("books", seed, part, number)
    style = Style.draw(dice)
    names, facts = draw_cast(dice, 3)
    towns, paragraphs = [words.town(dice)], []
    for _ in range(2):
        sentences = [
            dice.pick(facts).tell(dice) if dice.chance(FACT) else style.sentence(dice, names, towns)
            for _ in range(SENTENCES)
        ]
        paragraphs.append(" ".join(sentences))
    return "\n".join(paragraphs)


def find_book(title: str, seed: int = 0) -> Book:
    """Return a book by its title.

    Args:
        title: one of `TITLES`.

    Example:
        >>> find_book("harbour").chapter(0).partition(".")[0]
        'Everybody knew that Nemir was the shepherd'
    """
    if title not in TITLES:
        raise unknown_name("book", title, TITLES)
    return Book(title, seed)
