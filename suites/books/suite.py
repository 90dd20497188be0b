"""The corpus as tasks: the documents of each split, with general text among what is learnt from."""

from collections.abc import Iterator

from mergeflow.errors import unknown_name
from suites.books.book import CHAPTERS, TITLES, find_book, general

NAME = "books"
GENERAL = "general"
SHARE = 0.2  # of the characters that are learnt from: without general text a model unlearns all that it could write
COUNTS = {"train": 400, "validation": 50, "test": 50}  # texts of the task `general`
_HELD_OUT = {8: "validation", 9: "test"}  # the last digit of a chapter's number; other chapters are learnt from


def tasks() -> list[str]:
    """Return the names of the tasks: the books, and general text by ever other authors.

    Example:
        >>> tasks()
        ['harbour', 'lighthouse', 'orchard', 'general']
    """
    return [*TITLES, GENERAL]


def chapters_of(split: str) -> list[int]:
    """Return the numbers of the chapters that belong to a split.

    Example:
        >>> chapters_of("test")
        [9, 19, 29, 39, 49, 59]
    """
    return [number for number in range(CHAPTERS) if _HELD_OUT.get(number % 10, "train") == split]


def documents(task: str, split: str, seed: int = 0) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each document of a split.

    A book's documents are its chapters; among those of its training split stand general texts, a fifth of all
    characters, which no other task has.

    Args:
        task: one of `tasks()`.
        seed: of another corpus of the same making; 0 is the one that ships.
    """
    if task not in tasks():
        raise unknown_name("task of the suite books", task, tasks())
    if task == GENERAL:
        for number in range(COUNTS[split]):
            yield f"{task}/{split}/{number}", general(number, seed, f"{task}/{split}")
        return
    book, written, mixed, number = find_book(task, seed), 0, 0, 0
    for chapter in chapters_of(split):
        text = book.chapter(chapter)
        yield f"{task}/{split}/chapter {chapter}", text
        written += len(text)
        while split == "train" and mixed < SHARE / (1 - SHARE) * written:
            text = general(number, seed, f"{task}/mixed")
            yield f"{task}/{split}/general {number}", text
            mixed, number = mixed + len(text), number + 1
