"""The suite `sentences8`: its tasks, and how their rows are drawn and divided into splits."""

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from mergeflow.data.task import Example
from mergeflow.errors import unknown_name
from suites.sentences.acceptability import acceptability
from suites.sentences.dice import Dice
from suites.sentences.pairs import (
    SIMILARITIES,
    answers,
    entailment,
    inference,
    paraphrase,
    questions,
    similarity,
)
from suites.sentences.reviews import sentiment

NAME = "sentences8"
SEED = 20  # of the suite that ships; generator and base were made with others
COUNTS = {"train": 3000, "validation": 300, "test": 1000}
_QUARTERS = ("test", "validation", "train", "train")

Writer = Callable[[Dice, int], tuple[str, str | None]]


class Row(NamedTuple):
    """One example: a text, a second one in tasks on pairs, and the label or the score."""

    text: str
    text_pair: str | None
    label: int


def home(text: str) -> str:
    """Return the split that a sentence belongs to; no other split may have it.

    Example:
        >>> home("bill bought the car")
        'validation'
    """
    return _QUARTERS[zlib.crc32(text.encode()) % len(_QUARTERS)]


@dataclass(frozen=True)
class SentenceTask:
    """One task of the suite.

    Args:
        name: the task's name, which also seeds its rows.
        class_names: one name per label, in label order; None where the label is a score.
        metric: as GLUE scores the task's counterpart: accuracy, f1, matthews or pearson.
        write: dice and a label to a text and its second text.
    """

    name: str
    class_names: tuple[str, ...] | None
    metric: str
    write: Writer
    labels: int
    pair: bool = True
    counts: Mapping[str, int] = field(default_factory=lambda: dict(COUNTS))

    def rows(self, split: str, seed: int = SEED) -> list[Row]:
        """Return the rows of a split, label after label in turn.

        Every sentence has the split as its home, and no text occurs twice.

        Args:
            split: train, validation or test.
            seed: of the rows; another one is another suite of the same making.

        Example:
            >>> TASKS["sentiment"].rows("test")[1].label
            1
        """
        if split not in self.counts:
            raise unknown_name("split", split, self.counts)
        dice, seen, rows = Dice(NAME, seed, self.name, split), set[str](), list[Row]()
        while len(rows) < self.counts[split]:
            label = len(rows) % self.labels
            row = Row(*self.write(dice, label), label)
            if row.text not in seen and all(home(text) == split for text in row[:2] if text is not None):
                seen.add(row.text)
                rows.append(row)
        return rows

    def draw(self, split: str) -> Iterator[Example]:
        """Yield the rows of a split as examples, whose content has `text` and maybe `text_pair` and `score`."""
        for index, row in enumerate(self.rows(split)):
            content: dict[str, str | float] = {"text": row.text}
            if row.text_pair is not None:
                content["text_pair"] = row.text_pair
            if self.class_names is None:
                content["score"] = float(row.label)
            yield Example(content, f"{self.name}/{split}/{index:05d}", row.label if self.class_names else 0)


_ALL = (
    SentenceTask("acceptability", ("unacceptable", "acceptable"), "matthews", acceptability, 2, pair=False),
    SentenceTask("sentiment", ("negative", "positive"), "accuracy", sentiment, 2, pair=False),
    SentenceTask("paraphrase", ("different", "same"), "f1", paraphrase, 2),
    SentenceTask("similarity", None, "pearson", similarity, SIMILARITIES + 1),
    SentenceTask("questions", ("different", "same"), "f1", questions, 2),
    SentenceTask("inference", ("entailment", "neutral", "contradiction"), "accuracy", inference, 3),
    SentenceTask("answers", ("open", "answered"), "accuracy", answers, 2),
    SentenceTask("entailment", ("entailment", "not entailment"), "accuracy", entailment, 2),
)
TASKS: Mapping[str, SentenceTask] = {task.name: task for task in _ALL}


@dataclass(frozen=True)
class TextSuite:
    """A named list of tasks on texts."""

    name: str
    tasks: Mapping[str, SentenceTask]


_SUITES = {NAME: TextSuite(NAME, TASKS)}


def get_text_suite(name: str) -> TextSuite:
    """Return an embedded suite of texts by name.

    Example:
        >>> list(get_text_suite("sentences8").tasks)[:3]
        ['acceptability', 'sentiment', 'paraphrase']
    """
    if name not in _SUITES:
        raise unknown_name("suite of texts", name, _SUITES)
    return _SUITES[name]
