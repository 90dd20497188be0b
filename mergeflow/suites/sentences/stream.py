"""Texts for pre-training: sentences, and pairs of sentences that share facts; none has a label or a test's sentence."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from mergeflow.suites.sentences.acceptability import acceptability
from mergeflow.suites.sentences.clauses import statement
from mergeflow.suites.sentences.dice import Dice
from mergeflow.suites.sentences.events import draw_event, reword_some, some_extra, tell
from mergeflow.suites.sentences.pairs import answers, entailment, inference, paraphrase, questions
from mergeflow.suites.sentences.reviews import sentiment
from mergeflow.suites.sentences.suite import home
from mergeflow.suites.sentences.vocabulary import LINKS


class Passage(NamedTuple):
    """A text for pre-training: a sentence, and where there is one a second that goes on, linked by a word or not."""

    text: str
    text_pair: str | None
    link: str | None


def _consequence(dice: Dice) -> tuple[str, str | None, str | None]:
    relation = dice.below(len(LINKS))
    return (*inference(dice, relation), LINKS[relation])


def _retelling(dice: Dice) -> tuple[str, str | None, str | None]:
    """Return two short statements of one event, mostly in the same words: what is looked up first in pre-training."""
    said = tell(draw_event(dice), *some_extra(dice, dice.below(2)))
    return statement(said, dice), statement(reword_some(said, dice, 0.25), dice), LINKS[0]


# What follows from a statement is linked by the same word whether it says less or all of it.
_KINDS: tuple[tuple[int, Callable[[Dice], tuple[str, str | None, str | None]]], ...] = (
    (2, lambda dice: (*acceptability(dice, 1), None)),
    (3, lambda dice: (*sentiment(dice, dice.below(2)), None)),
    (5, _retelling),
    (5, lambda dice: (*paraphrase(dice, 1), LINKS[0])),
    (5, _consequence),
    (4, lambda dice: (*answers(dice, 1), None)),
    (3, lambda dice: (*questions(dice, 1), None)),
    (4, lambda dice: (*entailment(dice, 0), LINKS[0])),
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
