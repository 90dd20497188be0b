"""Tasks on pairs: two statements, two questions, a question and a statement, one or two events and a statement.

The words of a pair say little about its label: words differ as often between sentences that mean the same as between
sentences that do not, since every concept has two words. A negative differs in two or three concepts.
"""

from collections.abc import Sequence

from suites.sentences.clauses import ASKED, question, statement
from suites.sentences.dice import Dice
from suites.sentences.events import Said, alter, draw_event, oppose, reword, reword_some, some_extra, tell
from suites.sentences.words import CORE, EXTRA

_ALTERED = 3  # concepts in which a question, or the event of an answer, is another one
_RETOLD = 2  # concepts in which a statement is not a paraphrase; of three, even the average of experts knew 98 %
SIMILARITIES = 5  # concepts that can agree, the highest similarity


def paraphrase(dice: Dice, label: int) -> tuple[str, str]:
    """Return two statements of other events (label 0) or of one (label 1)."""
    said = tell(draw_event(dice), *some_extra(dice, 2 + dice.below(2)))
    return statement(said, dice), statement(_second(said, tuple(said), _RETOLD, dice, bool(label)), dice)


def _second(said: Said, slots: Sequence[str], altered: int, dice: Dice, same: bool) -> Said:
    """Return the event of the second sentence, with other words in some slots.

    Args:
        slots: from which at least `altered` and up to two more are drawn.
        altered: in so many of these a second sentence that is not the same has another concept.
    """
    differing = dice.some(slots, min(len(slots), altered + dice.below(3)))
    if same:
        return reword(said, differing)
    return reword(alter(said, differing[:altered], dice), differing[altered:])


def similarity(dice: Dice, label: int) -> tuple[str, str]:
    """Return two statements of five concepts each, `label` of which agree."""
    said = tell(draw_event(dice), *some_extra(dice, SIMILARITIES - len(CORE)))
    other = alter(said, dice.some(tuple(said), SIMILARITIES - label), dice)
    return statement(said, dice), statement(reword_some(other, dice, 0.6), dice)


def questions(dice: Dice, label: int) -> tuple[str, str]:
    """Return two questions that ask other things (label 0) or the same (label 1)."""
    event, asked = draw_event(dice), dice.pick(ASKED)
    slots = dice.some([slot for slot in EXTRA if slot != asked], 2)
    said = tell(event, *slots, asked)
    given = [slot for slot in said if slot != asked]
    first = question(said, asked, dice)
    if label or dice.chance(0.7):
        return first, question(_second(said, given, _ALTERED, dice, bool(label)), asked, dice)
    return first, question(_second(said, given, _ALTERED, dice, same=True), dice.pick(slots), dice)


def inference(dice: Dice, label: int) -> tuple[str, str]:
    """Return a statement, and one that follows (label 0), says something new (label 1) or contradicts (label 2)."""
    event, extra = draw_event(dice), some_extra(dice, len(EXTRA))
    premise = tell(event, *extra[:3])
    said = reword_some(tell(event, *(extra[2:] if label == 1 else extra[:2])), dice)
    negated = dice.chance(0.5)
    # A sentence is true of the event if the action is its own and not negated, or the opposite one and negated.
    if negated != (label == 2):
        said = oppose(said)
    return statement(premise, dice), statement(said, dice, negated, general=dice.chance(0.5))


def answers(dice: Dice, label: int) -> tuple[str, str]:
    """Return a question and a statement that leaves it open (label 0) or answers it (label 1)."""
    event, (asked, *slots) = draw_event(dice), some_extra(dice, len(EXTRA))
    said = tell(event, asked, *slots[:2])
    first = question(said, asked, dice)
    if label:
        return first, statement(reword_some(said, dice), dice)
    if dice.chance(0.5):
        return first, statement(reword_some(tell(event, *slots), dice), dice)
    given = [slot for slot in said if slot != asked]
    return first, statement(reword_some(alter(said, dice.some(given, _ALTERED), dice), dice), dice)


def entailment(dice: Dice, label: int) -> tuple[str, str]:
    """Return two events in one text, and a statement of one of them (label 0) or of an event like it (label 1)."""
    events, text = two_events(dice)
    event = dice.pick(events)
    return text, statement(_second(event, tuple(event), _RETOLD, dice, same=not label), dice)


def two_events(dice: Dice, extra: int = 1) -> tuple[tuple[Said, Said], str]:
    """Return two events that share no concept, and a text that tells them."""
    first = tell(draw_event(dice), *some_extra(dice, extra))
    events = (first, alter(first, first, dice))
    return events, ". ".join(statement(event, dice) for event in events) + "."
