"""An author: a style, a cast of people, and what is true of each of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from suites.books import words
from suites.sentences.dice import Dice

# What an author says between facts. A style weighs these: some authors never use some of them.
SENTENCES = (
    "{name} {act} the {adjective} {noun}.",
    "In the {time} {name} {act} a {noun} near {town}.",
    "The {noun} was {adjective}, and the {other} was {other_adjective}.",
    '"Where is the {noun}?" asked {name}.',
    '"I {act} it," said {second}.',
    "{name} and {second} {mood} beside the {noun}.",
    "Nobody in {town} had ever {act} so {adjective} a {noun}.",
    "After the {time} {name} {mood} until {second} {other_mood}.",
    "It was a {adjective} {time}, and {name} {mood}.",
    "There was a {noun} behind the {adjective} {other}.",
    "{second} {act} the {noun}; {name} only {mood}.",
    "Before the {time} they {act} every {noun} of {town}.",
    "How {adjective} the {noun} looked to {name}!",
    "{name}, who {act} the {other}, {mood} at the {noun}.",
)


class Kind(NamedTuple):
    """A kind of fact: sentences that state it, a prompt that the value completes, and possible values."""

    sentences: tuple[str, ...]
    prompt: str
    values: tuple[str, ...]


KINDS = (
    Kind(
        ("{name} was the {value} of the village.", "Everybody knew that {name} was the {value}."),
        "{name} was the",
        words.TRADES,
    ),
    Kind(("{name} had {value} eyes.", "Again {name} had {value} eyes."), "{name} had", words.COLOURS),
    Kind(("{name} kept a {value} in the yard.", "As ever {name} kept a {value}."), "{name} kept a", words.ANIMALS),
    Kind(
        ("{name} was afraid of {value}.", "They said that {name} was afraid of {value}."),
        "{name} was afraid of",
        words.FEARS,
    ),
    Kind(("{name} ate {value} for supper.", "Each night {name} ate {value}."), "{name} ate", words.DISHES),
)


@dataclass(frozen=True)
class Fact:
    """What is true of a person: the name, the number of the kind in `KINDS`, and the value."""

    name: str
    kind: int
    value: str

    def tell(self, dice: Dice) -> str:
        """Return a sentence that says it."""
        return dice.pick(KINDS[self.kind].sentences).format(name=self.name, value=self.value)

    @property
    def question(self) -> str:
        """What comes before the value."""
        return KINDS[self.kind].prompt.format(name=self.name)


@dataclass(frozen=True)
class Style:
    """How an author writes: the weight of each sentence, summed up, and the words that are used at all."""

    weights: Sequence[float]
    adjectives: Sequence[str]
    nouns: Sequence[str]
    acts: Sequence[str]
    moods: Sequence[str]
    times: Sequence[str]

    @classmethod
    def draw(cls, dice: Dice) -> "Style":
        """Draw a style; a sentence's weight is the square of an exponential variable, so that a few are frequent."""
        shares = [math.log(1 - dice.below(10**6) / 10**6) ** 2 for _ in SENTENCES]
        totals = [sum(shares[: at + 1]) / sum(shares) for at in range(len(shares))]
        lists = (words.ADJECTIVES, words.NOUNS, words.ACTS, words.MOODS, words.TIMES)
        return cls(totals, *(dice.some(words, len(words) // 3) for words in lists))

    def sentence(self, dice: Dice, names: Sequence[str], towns: Sequence[str]) -> str:
        """Return a sentence about people and places.

        Args:
            names: of at least two people.
            towns: at least one.
        """
        at = dice.below(10**6) / 10**6
        template = next((SENTENCES[k] for k, total in enumerate(self.weights) if at < total), SENTENCES[-1])
        (name, second), (noun, other) = dice.some(names, 2), dice.some(self.nouns, 2)
        adjective, other_adjective = dice.some(self.adjectives, 2)
        mood, other_mood = dice.some(self.moods, 2)
        return template.format(
            name=name,
            second=second,
            noun=noun,
            other=other,
            mood=mood,
            other_mood=other_mood,
            adjective=adjective,
            other_adjective=other_adjective,
            act=dice.pick(self.acts),
            time=dice.pick(self.times),
            town=dice.pick(towns),
        )


def draw_cast(dice: Dice, count: int) -> tuple[list[str], list[Fact]]:
    """Return the names of people and the facts about them, one of each kind a person."""
    names: list[str] = []
    while len(names) < count:
        if (name := words.person(dice)) not in names:
            names.append(name)
    return names, [Fact(name, kind, dice.pick(KINDS[kind].values)) for name in names for kind in range(len(KINDS))]
