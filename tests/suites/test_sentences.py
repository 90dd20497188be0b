"""The suite sentences8: the recorded rows, splits that share no sentence, and labels that are true of the sentences."""

import hashlib
import itertools
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergeflow.errors import MergeflowError
from suites.sentences.dice import Dice
from suites.sentences.events import draw_event
from suites.sentences.stream import passages
from suites.sentences.suite import TASKS, get_text_suite, home
from suites.sentences.vocabulary import LINKS, word_groups
from suites.sentences.words import ACTIONS, KINDS, NAMES

pytestmark = pytest.mark.slow

# SHA-256 of all rows of all splits, first 16 hex digits. A change here changes the data of every result.
GOLDEN = {
    "acceptability": "de538f05bbc0e7ef",
    "sentiment": "69837408f9776b2d",
    "paraphrase": "0eadb369a15ea407",
    "similarity": "1a53539b3148b240",
    "questions": "2f4c08126a6891ab",
    "inference": "72a198a07f9b6072",
    "answers": "8e34e6197c90dce7",
    "entailment": "33092d0d6bedcfb7",
}


@pytest.fixture(scope="module")
def rows():
    return {name: {split: task.rows(split) for split in task.counts} for name, task in TASKS.items()}


def _words(text):
    return re.findall(r"\w+|[^\w\s]", text)


# What a word says, read off the tables and not off the grammar: (slot, concept).
MEANING = {
    words.split()[-1]: (slot, concept)
    for slot, names in NAMES.items()
    for concept, pair in enumerate(names)
    for words in pair
}
MEANING |= {word: ("action", concept) for concept, pair in enumerate(ACTIONS) for verb in pair for word in verb}


def _meaning(text):
    """Read a sentence into its slots; a kind of thing is `kind`, a negation is `not`."""
    meaning = dict(MEANING[word] for word in _words(text) if word in MEANING)
    meaning.update(("kind", concept) for concept, kind in enumerate(KINDS) if kind in _words(text))
    return meaning | ({"not": True} if "not" in _words(text) else {})


def _asked(text):
    words = _words(text)
    slots = {"who": "agent", "whom": "agent", "person": "agent", "where": "place", "place": "place", "when": "time"}
    slots |= {"time": "time", "size": "size", "big": "size", "colour": "colour"}
    return next(slots[word] for word in words[:4] if word in slots)


@pytest.mark.parametrize("name", TASKS)
def test_rows_are_the_recorded_ones(name, rows):
    text = repr([[tuple(row) for row in split] for split in rows[name].values()])
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == GOLDEN[name]


@pytest.mark.parametrize("name", TASKS)
def test_labels_are_balanced_and_no_text_occurs_twice(name, rows):
    task = TASKS[name]
    assert task.class_names is None or len(task.class_names) == task.labels
    for split, examples in rows[name].items():
        assert len(examples) == task.counts[split]
        assert len({row.text for row in examples}) == len(examples)
        counts = [sum(row.label == label for row in examples) for label in range(task.labels)]
        assert max(counts) - min(counts) <= 1
        assert all((row.text_pair is not None) == task.pair for row in examples)


def test_no_sentence_is_in_two_splits_of_any_task(rows):
    """Neither as first nor as second text, over all tasks together."""
    texts = {
        split: {text for task in rows.values() for row in task[split] for text in row[:2] if text}
        for split in ("train", "validation", "test")
    }
    for first, two in itertools.combinations(texts.values(), 2):
        assert not first & two


def test_pre_training_reads_no_sentence_of_a_test(rows):
    tests = {text for task in rows.values() for row in task["test"] for text in row[:2] if text}
    read = list(itertools.islice(passages(3), 3000))
    assert not tests & {text for passage in read for text in passage[:2]}
    assert {passage.link for passage in read} == {None, *LINKS}


def test_every_word_is_known_and_in_one_group(rows):
    vocabulary = [word for group in word_groups() for word in group]
    assert len(vocabulary) == len(set(vocabulary))
    used = {
        word
        for task in rows.values()
        for split in task.values()
        for row in split
        for text in row[:2]
        for word in _words(text or "")
    }
    assert used <= set(vocabulary)
    assert set(vocabulary) - used == {"so"}  # the word that links a sentence to what follows from it


def test_another_seed_gives_other_rows(rows):
    again = TASKS["sentiment"].rows("validation")
    assert again == rows["sentiment"]["validation"]
    shared = set(again) & set(TASKS["sentiment"].rows("validation", seed=1))
    assert len(shared) < 5  # reviews of one short clause are few


def test_statements_of_one_event_mean_the_same_and_others_differ_in_two_concepts(rows):
    for row in rows["paraphrase"]["test"]:
        first, two = _meaning(row.text), _meaning(row.text_pair)
        assert first.keys() == two.keys()
        assert sum(first[slot] != two[slot] for slot in first) == (0 if row.label else 2)


def test_similarity_counts_the_concepts_that_agree(rows):
    for row in rows["similarity"]["test"]:
        first, two = _meaning(row.text), _meaning(row.text_pair)
        assert len(first) == len(two) == 5
        assert sum(first[slot] == two[slot] for slot in first) == row.label


def test_questions_are_the_same_when_they_ask_one_thing_of_one_event(rows):
    elsewhere = 0
    for row in rows["questions"]["test"]:
        first, two = _meaning(row.text), _meaning(row.text_pair)
        same = _asked(row.text) == _asked(row.text_pair)
        elsewhere += not same
        assert row.label == (same and all(two[slot] == first[slot] for slot in first if slot != _asked(row.text)))
    assert 100 < elsewhere < 200  # of 500 questions that are not the same


def _judge(premise, said):
    """Return the label of inference by what the words mean."""
    if any(slot not in premise for slot in said if slot not in ("not", "kind", "action")):
        return 1
    agrees = premise["action"] == said["action"]
    assert agrees or premise["action"] ^ 1 == said["action"]
    return 0 if agrees != said.get("not", False) else 2


def test_what_follows_adds_or_contradicts_does_so_by_the_meaning_of_its_words(rows):
    for row in rows["inference"]["test"]:
        premise, said = _meaning(row.text), _meaning(row.text_pair)
        assert row.label == _judge(premise, said)
        assert said.get("kind", premise["thing"] // 4) == premise["thing"] // 4
        shared = said.keys() & premise.keys() - {"action", "not"}
        assert all(said[slot] == premise[slot] for slot in shared)


def test_an_answer_tells_what_was_asked_of_the_same_event(rows):
    for row in rows["answers"]["test"]:
        asked, answer = _meaning(row.text), _meaning(row.text_pair)
        slot_asked = _asked(row.text)
        asked = {slot: what for slot, what in asked.items() if slot != slot_asked}
        fits = all(answer.get(slot, what) == what for slot, what in asked.items())
        assert row.label == (fits and slot_asked in answer)


def test_a_statement_of_one_event_follows_and_one_that_differs_in_two_concepts_does_not(rows):
    for row in rows["entailment"]["test"]:
        events = [_meaning(text) for text in row.text.split(". ")]
        assert not set(events[0].items()) & set(events[1].items())
        said = _meaning(row.text_pair)
        shared = [sum(event.get(slot) == said[slot] for slot in said) for event in events]
        assert max(shared) == (2 if row.label else 4)


@given(st.integers(), st.lists(st.integers(), min_size=1, max_size=9), st.data())
def test_dice_draw_what_they_promise(seed, choices, data):
    dice = Dice(seed)
    count = data.draw(st.integers(0, len(choices)))
    drawn = dice.some(range(len(choices)), count)
    assert len(set(drawn)) == count
    assert dice.pick(choices) in choices
    assert dice.other(len(choices) + 1, 0) in range(1, len(choices) + 1)


def test_events_are_drawn_alike_on_every_machine():
    assert draw_event(Dice("any", 7)) == draw_event(Dice("any/7"))
    assert list(draw_event(Dice("any", 7)).values())[:3] == [(6, 1), (11, 1), (19, 0)]


def test_the_suite_is_found_by_name():
    assert len(get_text_suite("sentences8").tasks) == 8
    with pytest.raises(MergeflowError, match="did you mean 'sentences8'"):
        get_text_suite("sentence8")
    with pytest.raises(MergeflowError, match="did you mean 'validation'"):
        TASKS["answers"].rows("valid")
    assert home("bill bought the car") == "validation"


def test_examples_have_the_columns_of_their_task():
    example = next(TASKS["paraphrase"].draw("test"))
    assert set(example.read()) == {"text", "text_pair"}
    assert example.path == "paraphrase/test/00000"
    assert next(TASKS["similarity"].draw("test")).read()["score"] == 0.0
    assert set(next(TASKS["sentiment"].draw("test")).read()) == {"text"}


def test_sentences_need_no_drawings():
    heavy = "[name for name in ('PIL', 'torch', 'sklearn') if name in sys.modules]"
    code = f"import sys, suites.sentences.suite; print({heavy})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
