"""Reviews whose words of praise and blame are turned by negations and outweighed by the clause that counts."""

from suites.sentences.dice import Dice
from suites.sentences.words import PEOPLE

SUBJECTS = ("film", "novel", "hotel", "concert", "meal", "game", "play", "tour")
ASPECTS = ("plot", "music", "service", "ending", "staff", "pace", "setting", "price")
BAD = (
    *("dull", "awful", "terrible", "boring", "dreadful", "poor"),
    *("horrid", "clumsy", "tedious", "stale", "nasty", "weak"),
)
GOOD = (
    *("brilliant", "wonderful", "superb", "charming", "lovely", "delightful"),
    *("excellent", "gripping", "pleasant", "splendid", "clever", "fresh"),
)
_PLAIN = ("", "very", "quite", "rather", "really")
_TURNED = ("not", "hardly", "never", "far from")
DEGREES = (*_PLAIN, *_TURNED)


def sentiment(dice: Dice, label: int) -> tuple[str, None]:
    """Return a review that is negative (label 0) or positive (label 1) on the whole.

    One clause decides: the one after "but", or the one that "although" or "even though" does not introduce.
    """
    verdict, aside, form = judgement(dice, label), judgement(dice, 1 - label), dice.below(10)
    if form < 3:
        text = f"{aside} but {verdict}"
    elif form == 3:
        text = f"although {aside}, {verdict}"
    elif form == 4:
        text = f"{verdict} even though {aside}"
    elif form < 8:
        text = f"{verdict} and {judgement(dice, label)}"
    else:
        text = verdict
    return (f"{dice.pick(dice.pick(PEOPLE))} said that {text}" if dice.chance(0.5) else text), None


def judgement(dice: Dice, good: int) -> str:
    """Return a clause that blames (0) or praises (1); one in five by the opposite word, turned."""
    subject = dice.pick(SUBJECTS)
    whole = f"the {dice.pick(ASPECTS)} of the {subject}" if dice.chance(0.5) else f"the {subject}"
    turned = dice.chance(0.2)
    degree = dice.pick(_TURNED if turned else _PLAIN)
    adjective = dice.pick((BAD, GOOD)[good != turned])
    return " ".join(word for word in (whole, "was", degree, adjective) if word)
