"""Statements and questions about an event, in several forms."""

from suites.sentences.dice import Dice
from suites.sentences.events import Said, name, verb
from suites.sentences.words import KINDS


def thing(said: Said, general: bool = False) -> str:
    """Return the noun phrase of the thing, in `general` named by its kind."""
    noun = KINDS[said["thing"][0] // 4] if general else name(said, "thing")
    return " ".join(["the", *(name(said, slot) for slot in ("size", "colour") if slot in said), noun])


def where_and_when(said: Said, dice: Dice) -> list[str]:
    """Return the phrases of place and time that are said, in random order."""
    phrases = [f"at the {name(said, 'place')}"] if "place" in said else []
    phrases += [name(said, "time")] if "time" in said else []
    return phrases[::-1] if dice.chance(0.5) else phrases


def statement(said: Said, dice: Dice, negated: bool = False, general: bool = False) -> str:
    """Return an active, passive, fronted or cleft sentence that tells what is said.

    Args:
        said: at least agent, action and thing.
        negated: whether it says that this did not happen; such a sentence is not cleft.
        general: whether the thing is named by its kind.
    """
    agent, (infinitive, past), patient = name(said, "agent"), verb(said), thing(said, general)
    circumstances = where_and_when(said, dice)
    form = dice.below(3 if negated else 4)
    front = [circumstances.pop() + ","] if form == 2 and circumstances else []
    if form == 1:
        words = [patient, "was not" if negated else "was", past, "by", agent]
    elif form == 3:
        words = ["it was", agent, "who", past, patient]
    else:
        words = [agent, *(["did not", infinitive] if negated else [past]), patient]
    return " ".join([*front, *words, *circumstances])


_ASK = {
    "agent": ("who", "which person"),
    "place": ("where", "in which place"),
    "time": ("when", "at what time"),
    "size": ("how big", "of what size"),
    "colour": ("what colour", "of which colour"),
}
ASKED = tuple(_ASK)


def question(said: Said, asked: str, dice: Dice) -> str:
    """Return a question for a slot that tells everything else that is said.

    Args:
        said: at least agent, action and thing; what is asked is left out.
        asked: a slot of `ASKED`.
    """
    given = {slot: value for slot, value in said.items() if slot != asked}
    (infinitive, past), patient = verb(said), thing(given)
    ask, passive = dice.pick(_ASK[asked]), dice.chance(0.5)
    if asked == "agent":
        words = ["by whom was", patient, past] if passive else [ask, past, patient]
    else:
        agent = name(said, "agent")
        words = ["was", patient, past, "by", agent] if passive else ["did", agent, infinitive, patient]
        if asked in ("size", "colour"):
            words = ["was", patient, *(["that was", past, "by", agent] if passive else ["that", agent, past])]
        words = [ask, *words]
    return " ".join([*words, *where_and_when(given, dice)]) + "?"
