"""Events of the world, and what a sentence says of one.

An event has seven slots: who did what to which thing (of some size and colour), where and when. A `Said` is the part
of an event that a sentence tells: for each slot the concept, and which of the concept's two words is used.
"""

from collections.abc import Iterable, Mapping

from suites.sentences.dice import Dice
from suites.sentences.words import ACTIONS, CORE, EXTRA, NAMES, SIZE, SLOTS, Verb

Said = Mapping[str, tuple[int, int]]


def draw_event(dice: Dice) -> Said:
    """Return a whole event in random words."""
    return {slot: (dice.below(SIZE[slot]), dice.below(2)) for slot in SLOTS}


def tell(event: Said, *slots: str) -> Said:
    """Return the slots of a sentence on the core of an event and these other slots."""
    return {slot: event[slot] for slot in SLOTS if slot in CORE or slot in slots}


def some_extra(dice: Dice, count: int) -> list[str]:
    """Return `count` of the slots that a sentence may leave out."""
    return dice.some(EXTRA, count)


def reword(said: Said, slots: Iterable[str]) -> Said:
    """Return the same with the other word in the given slots."""
    chosen = set(slots)
    return {slot: (what, 1 - word if slot in chosen else word) for slot, (what, word) in said.items()}


def reword_some(said: Said, dice: Dice, probability: float = 0.5) -> Said:
    """Return the same, with the other word in some slots.

    Args:
        probability: that a slot gets its other word, 0..1.
    """
    return reword(said, [slot for slot in said if dice.chance(probability)])


def alter(said: Said, slots: Iterable[str], dice: Dice) -> Said:
    """Return another event: other concepts in the given slots."""
    changed = {slot: (dice.other(SIZE[slot], said[slot][0]), dice.below(2)) for slot in slots}
    return {**said, **changed}


def oppose(said: Said) -> Said:
    """Return the event with the opposite action."""
    what, word = said["action"]
    return {**said, "action": (what ^ 1, word)}


def name(said: Said, slot: str) -> str:
    """Return the word for a slot other than the action."""
    what, word = said[slot]
    return NAMES[slot][what][word]


def verb(said: Said) -> Verb:
    """Return the verb of the action."""
    what, word = said["action"]
    return ACTIONS[what][word]
