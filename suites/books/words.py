"""The words that all authors have in common, and how the names of people and places are made."""

from suites.sentences.dice import Dice


def _words(listed: str) -> tuple[str, ...]:
    return tuple(listed.split())


ADJECTIVES = _words(
    "old young tall quiet bright dark heavy small broken golden silver wooden narrow wide empty gentle bitter "
    "sudden distant hollow patient proud pale crooked silent hungry weary brave clever secret frozen dusty tender "
    "strange warm cold deep sharp soft plain"
)
NOUNS = _words(
    "lamp boat bridge garden letter door river coat candle mirror basket wheel ladder bell rope stone wall table "
    "window cart field barrel kettle blanket ring map key sail anchor drum flute book shelf saddle spade net oar "
    "fence roof hearth well mill tower gate orchard meadow cellar lantern compass feather needle hammer chest"
)
ACTS = _words(
    "found carried lost mended painted hid sold borrowed counted washed lifted dropped followed guarded forgot "
    "wanted remembered measured covered opened closed burned cleaned watched moved buried stole kept"
)
MOODS = _words(
    "laughed slept waited sang wept travelled listened whispered shivered smiled stumbled dreamed prayed hurried "
    "paused returned vanished danced worked rested"
)
TIMES = _words("morning evening winter summer autumn spring night storm harvest market feast voyage funeral wedding")
TRADES = _words(
    "baker smith weaver sailor hunter farmer teacher doctor carpenter miller painter tailor shepherd fisher "
    "mason printer singer judge soldier gardener"
)
COLOURS = _words("red blue green grey brown black white amber violet")
ANIMALS = _words("dog cat horse goat raven fox hare crow mouse donkey goose pig")
FEARS = _words("thunder water fire wolves darkness heights snakes crowds silence ghosts spiders strangers")
DISHES = _words("bread soup fish cheese apples honey porridge cabbage eggs pears beans walnuts")

_HEADS = _words("ba be bo da de do ka ke ko la le lo ma me mo na ne no ra re ro sa se so ta te to va ve vo")
_TAILS = _words("bar del dor fin gan len lin mar mir nak nel ran rik ros sen tan tor vin wen zor")
_ENDS = _words("ford wick ham holm dale mere stow cliffe")


def person(dice: Dice) -> str:
    """Return a coined name.

    Example:
        >>> person(Dice("a name"))
        'Bafin'
    """
    return (dice.pick(_HEADS) + dice.pick(_TAILS)).capitalize()


def town(dice: Dice) -> str:
    """Return a coined name of a place."""
    return (dice.pick(_HEADS) + dice.pick(_TAILS) + dice.pick(_ENDS)).capitalize()
