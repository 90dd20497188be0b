"""The corpus of books: the same on every machine, two books of one author, and probes that the books answer."""

import hashlib

import pytest

from mergeflow.errors import MergeflowError
from suites.books.author import KINDS, Fact
from suites.books.book import CHAPTERS, TITLES, find_book, general
from suites.books.probes import questions, verbatim
from suites.books.suite import SHARE, chapters_of, documents, tasks

DIGESTS = {
    "harbour": "f5e91162a89882b7",
    "lighthouse": "c70c8d97df88d7ca",
    "orchard": "21d8fc0bf8112307",
    "general": "e15f86f7dc7f39ad",
}


def digest(task: str) -> str:
    texts = ("\n\n".join(text for _, text in documents(task, split)) for split in ("train", "validation", "test"))
    return hashlib.sha256("\n\n\n".join(texts).encode()).hexdigest()[:16]


@pytest.mark.parametrize("task", DIGESTS)
def test_the_corpus_is_the_same_everywhere(task: str) -> None:
    assert digest(task) == DIGESTS[task]


def test_each_chapter_is_in_one_split() -> None:
    assert sorted(chapter for split in ("train", "validation", "test") for chapter in chapters_of(split)) == list(
        range(CHAPTERS)
    )
    assert [len(chapters_of(split)) for split in ("train", "validation", "test")] == [48, 6, 6]


@pytest.mark.parametrize("title", TITLES)
def test_a_fifth_of_what_is_learnt_from_is_general_text(title: str) -> None:
    sizes = {"chapter": 0, "general": 0}
    for name, text in documents(title, "train"):
        sizes[name.split("/")[2].split()[0]] += len(text)
    assert sizes["general"] / sum(sizes.values()) == pytest.approx(SHARE, abs=0.003)
    assert not [name for split in ("validation", "test") for name, _ in documents(title, split) if "general" in name]


def test_two_books_have_one_author_and_the_third_has_another() -> None:
    first, second, third = (find_book(title) for title in TITLES)
    shared = set(first.facts) & set(second.facts)
    assert len(shared) == 10 * len(KINDS)
    assert not {fact.name for fact in third.facts} & {fact.name for fact in shared}
    for book in (first, second, third):
        assert len(book.own_facts) >= 4 * len(KINDS)
        assert set(book.own_facts) <= set(book.facts)
    assert not set(first.own_facts) & set(second.facts)
    assert not set(first.set_pieces) & set(second.set_pieces)


@pytest.mark.parametrize("title", TITLES)
def test_books_tell_what_probes_ask_for(title: str) -> None:
    book = find_book(title)
    learnt = "\n".join(text for name, text in documents(title, "train") if "chapter" in name)
    assert all(learnt.count(passage) >= 2 for passage in verbatim(book))
    asked = list(questions(book.facts))
    assert len({fact.question for fact in book.facts}) == len(asked)
    for question in asked:
        assert len(set(question["choices"])) == 4
        learnt_choices = [choice for choice in question["choices"] if f"{question['text']} {choice}" in learnt]
        assert learnt_choices == [question["choices"][question["answer"]]]
    places = [question["answer"] for question in asked]
    assert all(0.1 < places.count(k) / len(places) < 0.45 for k in range(4))


def test_another_seed_gives_other_books() -> None:
    assert find_book("harbour", 1).chapter(0) != find_book("harbour").chapter(0)
    assert find_book("harbour", 1).chapter(0) == find_book("harbour", 1).chapter(0)
    assert general(3, 1) != general(3)


def test_unknown_books_and_tasks_are_named() -> None:
    with pytest.raises(MergeflowError, match=r"unknown book 'harbor': did you mean 'harbour'"):
        find_book("harbor")
    with pytest.raises(MergeflowError, match=r"did you mean 'orchard'"):
        next(documents("orchad", "train"))
    assert Fact("Nemir", 0, "miller").question == "Nemir was the"
    assert tasks()[-1] == "general"
