"""Sentences that follow the grammar, and sentences with one fault in agreement, form, order or completeness."""

from collections.abc import Sequence
from typing import NamedTuple

from suites.sentences.dice import Dice
from suites.sentences.words import ACTIONS, COLOURS, MEN, PEOPLE, PLACES, SIZES, THINGS, TIMES

_IRREGULAR = {"scarf": "scarves"}


class _Token(NamedTuple):
    word: str
    wrong: str = ""  # the word that would be a fault here
    needed: bool = False  # whether leaving it out, or saying it twice, would be a fault
    noun: bool = False  # whether changing places with the word before would be a fault


def plural(noun: str) -> str:
    """Return the plural of a thing.

    Example:
        >>> [plural(noun) for noun in ("car", "lorry", "box", "scarf")]
        ['cars', 'lorries', 'boxes', 'scarves']
    """
    if noun in _IRREGULAR:
        return _IRREGULAR[noun]
    if noun.endswith("y"):
        return noun[:-1] + "ies"
    return noun + ("es" if noun.endswith(("x", "ch")) else "s")


def acceptability(dice: Dice, label: int) -> tuple[str, None]:
    """Return a sentence with one fault (label 0) or with none (label 1)."""
    tokens = [*_clause(dice), *_circumstances(dice)]
    words = [token.word for token in tokens] if label else _spoil(tokens, dice)
    return " ".join(words), None


def _clause(dice: Dice) -> list[_Token]:
    who, many = dice.below(len(PEOPLE)), dice.chance(0.5)
    name = _Token(dice.pick(PEOPLE[who]))
    infinitive, past = dice.pick(dice.pick(ACTIONS))
    participle = _Token(past, infinitive)
    patient = _patient(dice, many)
    form = dice.below(5)
    if form == 0:
        was = _Token("were", "was", True) if many else _Token("was", "were", True)
        return [*patient, was, participle, _Token("by", needed=True), name]
    if form == 1:
        return [name, _Token("did", needed=True), _Token("not"), _Token(infinitive, past), *patient]
    if form == 2:
        return [name, _Token("has", "have"), participle, *patient]
    if form == 3:
        partner = _Token(dice.pick(PEOPLE[dice.other(len(PEOPLE), who)]))
        return [name, _Token("and"), partner, _Token("have", "has"), participle, *patient]
    reflexives = ("himself", "herself") if who < MEN else ("herself", "himself")
    return [name, _Token(past), *patient, _Token("by"), _Token(*reflexives)]


def _patient(dice: Dice, many: bool) -> list[_Token]:
    noun = dice.pick(dice.pick(THINGS))
    adjectives = [dice.pick(dice.pick(names)) for names in (SIZES, COLOURS) if dice.chance(0.5)]
    words = [*adjectives, plural(noun) if many else noun]
    vowel = words[0][0] in "aeiou"
    if many:
        determiners = [_Token("the"), _Token("some"), _Token("these", "this"), _Token("two", "one")]
    else:
        article = _Token("an", "a", True) if vowel else _Token("a", "an", True)
        determiners = [_Token("the", needed=True), article, _Token("this", "these", True), _Token("one", "two", True)]
    return [dice.pick(determiners), *map(_Token, words[:-1]), _Token(words[-1], noun=True)]


def _circumstances(dice: Dice) -> list[_Token]:
    phrases = [f"at the {dice.pick(dice.pick(PLACES))}"] if dice.chance(0.5) else []
    phrases += [dice.pick(dice.pick(TIMES))] if dice.chance(0.5) else []
    return [_Token(word) for phrase in phrases for word in phrase.split()]


def _spoil(tokens: Sequence[_Token], dice: Dice) -> list[str]:
    """Return the words after one fault of a kind and at a place that are drawn."""
    words = [token.word for token in tokens]
    wrong = [at for at, token in enumerate(tokens) if token.wrong]
    needed = [at for at, token in enumerate(tokens) if token.needed]
    kind = dice.below(5)
    if kind < 2 or not needed:
        at = dice.pick(wrong)
        words[at] = tokens[at].wrong
    elif kind == 2:
        del words[dice.pick(needed)]
    elif kind == 3:
        at = dice.pick(needed)
        words.insert(at, words[at])
    else:
        at = next(at for at, token in enumerate(tokens) if token.noun)
        words[at - 1], words[at] = words[at], words[at - 1]
    return words
