"""Questions and texts of two tasks crossed: acceptability of reviews, and sentiment of events."""

import re
from collections.abc import Mapping
from dataclasses import replace

from suites.sentences.dice import Dice
from suites.sentences.reviews import ASPECTS, BAD, DEGREES, GOOD, SUBJECTS, sentiment
from suites.sentences.suite import TASKS as SUITE
from suites.sentences.suite import SentenceTask
from suites.sentences.words import ACTIONS, PEOPLE, PLACES, THINGS, TIMES

Name = tuple[str, str]
"""What is asked, and what the texts are."""

SENTIMENT, ACCEPTABILITY = ("sentiment", "reviews"), ("acceptability", "events")
"""The two tasks of the suite."""

TARGET, NEITHER = ("acceptability", "reviews"), ("sentiment", "events")
"""What asks as the one and is of the other's texts, and what has the rest."""

JUDGED = re.compile(
    rf"the (?:(?:{'|'.join(ASPECTS)}) of the )?(?:{'|'.join(SUBJECTS)}) was "
    rf"((?:(?:{'|'.join(filter(None, DEGREES))}) )?(?:{'|'.join((*BAD, *GOOD))}))"
)
NEITHER_GOOD_NOR_BAD = (*ACTIONS[:4], *ACTIONS[6:8])  # to buy, sell, find, lose, display and conceal
NOUNS = (*ASPECTS, *SUBJECTS)


def judged_event(dice: Dice, label: int) -> tuple[str, None]:
    """Return a text that blames (label 0) or praises (label 1) on the whole, as a review does, but tells events.

    Example:
        >>> judged_event(Dice("told"), 0)[0].partition(" but ")[2]
        'joseph bought the very nasty coat at the chapel'
    """
    return JUDGED.sub(lambda match: event(dice, match[1]), sentiment(dice, label)[0]), None


def event(dice: Dice, judgement: str) -> str:
    who, what = dice.pick(dice.pick(PEOPLE)), dice.pick(dice.pick(THINGS))
    where = f" at the {dice.pick(dice.pick(PLACES))}" if dice.chance(0.5) else ""
    when = f" {dice.pick(dice.pick(TIMES))}" if dice.chance(0.5) else ""
    return f"{who} {dice.pick(dice.pick(NEITHER_GOOD_NOR_BAD)).past} the {judgement} {what}{where}{when}"


def faulty_review(dice: Dice, label: int) -> tuple[str, None]:
    """Return a review with one fault (label 0) or with none (label 1).

    The faults are of the suite's kinds: agreement (two in five), a word left out, said twice, or in the wrong place.

    Example:
        >>> faulty_review(Dice("spoilt"), 0)[0].partition(" and ")[2]
        'the setting of the tour was was very delightful'
    """
    words = sentiment(dice, dice.below(2))[0].split()
    return " ".join(words if label else spoilt(words, dice)), None


def spoilt(words: list[str], dice: Dice) -> list[str]:
    verbs, nouns = ([at for at, word in enumerate(words) if word in vocabulary] for vocabulary in (("was",), NOUNS))
    kind, at = dice.below(5), dice.pick([*verbs, *(noun - 1 for noun in nouns)])  # before each noun stands "the"
    if kind < 2:
        at = dice.pick(verbs)
        return [*words[:at], "were", *words[at + 1 :]]
    if kind == 2:
        return [*words[:at], *words[at + 1 :]]
    if kind == 3:
        return [*words[: at + 1], *words[at:]]
    at = dice.pick(nouns)
    return [*words[: at - 1], words[at], words[at - 1], *words[at + 1 :]]


CROSSED: Mapping[Name, SentenceTask] = {
    ACCEPTABILITY: SUITE["acceptability"],
    TARGET: replace(SUITE["acceptability"], name="acceptability of reviews", write=faulty_review),
    NEITHER: replace(SUITE["sentiment"], name="sentiment of events", write=judged_event),
    SENTIMENT: SUITE["sentiment"],
}
"""All four tasks."""
