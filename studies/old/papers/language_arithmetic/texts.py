"""Generated texts that differ in what analogies are about: by whom they are, of which genre, and in which tense.

Authors and forms of sentences are those of the corpus `books`, which the embedded base was trained on.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from suites.books import words
from suites.books.author import SENTENCES, Fact, Style, draw_cast
from suites.sentences.dice import Dice

_PARAGRAPHS, _SENTENCES, _PEOPLE, _TOWNS = 4, 6, 10, 3
_FACT = 0.35  # probability that a sentence tells a fact


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

ATTRIBUTES: Mapping[str, Mapping[tuple[str, str], Manner]] = {
    "authors × genres": {
        (author, genre): Manner(author, genre) for author in ("first", "second") for genre in ("tales", "dialogues")
    },
    "tenses × styles": {
        (tense, style): Manner("narrator", style, tense)
        for tense in ("past", "present")
        for style in ("narrative", "descriptive")
    },
}
"""Two attributes with two values each → the four tasks."""

DOMAINS: Mapping[str, Manner] = {
    "tales": Manner("first", "tales"),
    "dialogues": Manner("second", "dialogues"),
    "annals": Manner("third", "annals"),
}
"""Three tasks that have neither author nor genre in common."""

_PAST = (*words.ACTS, *words.MOODS, "was", "had", "ate", "looked", "asked", "knew", "said")
_PRESENT = (
    "finds carries loses mends paints hides sells borrows counts washes lifts drops follows guards forgets "
    "wants remembers measures covers opens closes burns cleans watches moves buries steals keeps "
    "laughs sleeps waits sings weeps travels listens whispers shivers smiles stumbles dreams prays hurries "
    "pauses returns vanishes dances works rests "
    "is has eats looks asks knows says"
)
_TO_PRESENT = dict(zip(_PAST, _PRESENT.split(), strict=True))
_VERBS = re.compile(rf"\b({'|'.join(_PAST)})\b")


def documents(manner: Manner, split: str, count: int, seed: int) -> Iterator[str]:
    """Yield the first texts of a split, each a pure function of its manner, split, number and seed.

    Args:
        manner: how they are written.
        split: train, validation or test.
        count: of texts.
        seed: of the authors and all choices.

    Example:
        >>> next(documents(Manner("narrator", "narrative", "present"), "test", 1, 0)).partition(".")[0]
        'In the winter Vobar borrows a gate near Radelcliffe'
    """
    style, names, facts, towns = _author(manner.author, seed)
    forms = GENRES[manner.genre]
    style = replace(style, weights=list(accumulate((at in forms) / len(forms) for at in range(len(SENTENCES)))))

    def paragraph(dice: Dice) -> str:
        told = (
            dice.pick(facts).tell(dice) if dice.chance(_FACT) else style.sentence(dice, names, towns)
            for _ in range(_SENTENCES)
        )
        return " ".join(told)

    for number in range(count):
        dice = Dice("language arithmetic", seed, *manner, split, number)
        text = "\n".join(paragraph(dice) for _ in range(_PARAGRAPHS))
        yield in_the_present(text) if manner.tense == "present" else text


def in_the_present(text: str) -> str:
    """Return a text of the suite with every verb in the present.

    Args:
        text: in the past; a verb that depends on another ("had ever found") becomes one of its own.

    Example:
        >>> in_the_present("Everybody knew that Nemir was the shepherd of the village.")
        'Everybody knows that Nemir is the shepherd of the village.'
    """
    return _VERBS.sub(lambda found: _TO_PRESENT[found[1]], text)


@lru_cache
def _author(name: str, seed: int) -> tuple[Style, list[str], list[Fact], list[str]]:
    """Return an author's words, people, facts and places."""
    dice = Dice("language arithmetic", seed, name)
    style = Style.draw(dice)
    return style, *draw_cast(dice, _PEOPLE), [words.town(dice) for _ in range(_TOWNS)]
