"""Texts by an author, in a genre or style and in a tense, each of which may change without the others."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from suites.books import words
from suites.books.author import SENTENCES, Fact, Style, draw_cast
from suites.sentences.dice import Dice

PARAGRAPHS, SENTENCES_EACH, PEOPLE, TOWNS = 4, 6, 10, 3
FACT = 0.35  # probability that a sentence tells a fact


class Manner(NamedTuple):
    """How the texts of a task are written.

    Attributes:
        author: Whose they are: a cast with its facts, places, and a third of all words.
        genre: Which forms of sentences they have, one of `GENRES`.
        tense: Of every verb: past or present.
    """

    author: str
    genre: str
    tense: str = "past"


GENRES: Mapping[str, tuple[int, ...]] = {
    "tales": (0, 5, 9, 13),
    "dialogues": (3, 4, 6, 12),
    "annals": (1, 7, 8, 11),
    "narrative": (0, 1, 5, 7, 10, 13),
    "descriptive": (2, 8, 9, 12),
}
"""Genre or style → the numbers of its forms among those of the suite, all as frequent."""

PAST = (*words.ACTS, *words.MOODS, "was", "had", "ate", "looked", "asked", "knew", "said")
PRESENT = (
    "finds carries loses mends paints hides sells borrows counts washes lifts drops follows guards forgets "
    "wants remembers measures covers opens closes burns cleans watches moves buries steals keeps "
    "laughs sleeps waits sings weeps travels listens whispers shivers smiles stumbles dreams prays hurries "
    "pauses returns vanishes dances works rests "
    "is has eats looks asks knows says"
)
TO_PRESENT = dict(zip(PAST, PRESENT.split(), strict=True))
VERBS = re.compile(rf"\b({'|'.join(PAST)})\b")


def documents(manner: Manner, split: str, count: int, seed: int) -> Iterator[str]:
    """Yield the first texts of a split, each a pure function of its manner, split, number and seed.

    Example:
        >>> next(documents(Manner("narrator", "narrative", "present"), "test", 1, 0)).partition(".")[0]
        'In the winter Vobar borrows a gate near Radelcliffe'
    """
    style, names, facts, towns = author_of(manner.author, seed)
    forms = GENRES[manner.genre]
    style = replace(style, weights=list(accumulate((at in forms) / len(forms) for at in range(len(SENTENCES)))))

    def paragraph(dice: Dice) -> str:
        sentences = (
            dice.pick(facts).tell(dice) if dice.chance(FACT) else style.sentence(dice, names, towns)
            for _ in range(SENTENCES_EACH)
        )
        return " ".join(sentences)

    for number in range(count):
        dice = Dice("language arithmetic", seed, *manner, split, number)
        text = "\n".join(paragraph(dice) for _ in range(PARAGRAPHS))
        yield in_the_present(text) if manner.tense == "present" else text


def in_the_present(text: str) -> str:
    """Return a text of the suite with every verb in the present.

    Example:
        >>> in_the_present("Everybody knew that Nemir was the shepherd of the village.")
        'Everybody knows that Nemir is the shepherd of the village.'
    """
    return VERBS.sub(lambda match: TO_PRESENT[match[1]], text)


@lru_cache
def author_of(name: str, seed: int) -> tuple[Style, list[str], list[Fact], list[str]]:
    """Return an author's words, people, facts and places."""
    dice = Dice("language arithmetic", seed, name)
    style = Style.draw(dice)
    return style, *draw_cast(dice, PEOPLE), [words.town(dice) for _ in range(TOWNS)]
