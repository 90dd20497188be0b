"""Texts of files are UTF-8, and what is not is named."""

import pytest

from mergeflow.data.locations import decoded
from mergeflow.errors import MergeflowError


def test_the_mark_of_an_editor_is_no_part_of_the_text() -> None:
    assert decoded("\ufeffein Bär".encode(), "a.txt") == "ein Bär"


@pytest.mark.parametrize(
    ("content", "fault"),
    [("cats".encode("utf-16"), "it begins as UTF-16 does"), ("caf\u00e9".encode("latin-1"), "byte 3 is 0xe9")],
)
def test_another_encoding_is_refused_by_name(content: bytes, fault: str) -> None:
    with pytest.raises(MergeflowError, match=f"a.txt is not a text in UTF-8: {fault}. Convert it to UTF-8."):
        decoded(content, "a.txt")
