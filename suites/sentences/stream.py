"""Texts for pre-training: sentences, and pairs of sentences that share facts; none has a label or a test's sentence."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from suites.sentences.acceptability import acceptability
from suites.sentences.clauses import statement
from suites.sentences.dice import Dice
from suites.sentences.events import draw_event, reword_some, some_extra, tell
from suites.sentences.pairs import answers, inference, paraphrase, questions, two_events
from suites.sentences.reviews import judgement, sentiment
from suites.sentences.suite import home
from suites.sentences.vocabulary import LINKS


class Passage(NamedTuple):
    """A text for pre-training: a sentence, and where there is one a second that goes on, linked by a word or not."""

    text: str
    text_pair: str | None
    link: str | None


_SO, _BUT = LINKS[0], LINKS[2]
_Text = tuple[str, str | None, str | None]


def _consequence(dice: Dice) -> _Text:
    relation = dice.below(len(LINKS))
    return (*inference(dice, relation), LINKS[relation])


def _retelling(dice: Dice) -> _Text:
    """Return two short statements of one event, mostly in the same words: what is looked up first in pre-training."""
    said = tell(draw_event(dice), *some_extra(dice, dice.below(2)))
    return statement(said, dice), statement(reword_some(said, dice, 0.25), dice), _SO


def _recounting(dice: Dice) -> _Text:
    """Return two short events and a statement of one, mostly in the same words."""
    events, text = two_events(dice, extra=0)
    return text, statement(reword_some(dice.pick(events), dice, 0.25), dice), _SO


def _two_events(dice: Dice) -> _Text:
    """Return two events, and a statement of one of them or of a mixture that is true of neither."""
    mixed = dice.below(2)
    events, text = two_events(dice)
    first, other = dice.some(events, 2)
    if mixed:
        first = {**first, **{slot: other[slot] for slot in dice.some(tuple(first), 2)}}
    return text, statement(reword_some(first, dice), dice), _BUT if mixed else _SO


def _opinion(dice: Dice) -> _Text:
    """Return a review and a clause that goes along with it or against it."""
    verdict, against = dice.below(2), dice.below(2)
    return sentiment(dice, verdict)[0], judgement(dice, verdict ^ against), _BUT if against else _SO


# What follows from a statement is linked by the same word whether it says less or all of it.
_KINDS: tuple[tuple[int, Callable[[Dice], _Text]], ...] = (
    (3, lambda dice: (*acceptability(dice, 1), None)),
    (2, lambda dice: (*sentiment(dice, dice.below(2)), None)),
    (4, _opinion),
    (4, _retelling),
    (4, lambda dice: (*paraphrase(dice, 1), _SO)),
    (5, _consequence),
    (4, lambda dice: (*answers(dice, 1), None)),
    (3, lambda dice: (*questions(dice, 1), None)),
    (6, _recounting),
    (5, _two_events),
)
_WRITERS = tuple(write for share, write in _KINDS for _ in range(share))


def passages(*seed: int) -> Iterator[Passage]:
    """Yield passages without end; equal seeds give equal passages.

    Example:
        >>> next(passages(0)) == next(passages(0))
        True
    """
    dice = Dice("passages", *seed)
    while True:
        passage = Passage(*dice.pick(_WRITERS)(dice))
        if all(home(text) != "test" for text in passage[:2] if text is not None):
            yield passage
