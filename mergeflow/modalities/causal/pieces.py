"""Long texts in pieces: each is stored as one example, and together they are the text again."""

from collections.abc import Iterator

# Every tokenizer gives at most one token a byte, or a few more; a longer piece would waste less of its row, but hold
# more of a text together that is left out as a copy of another split's.
PIECE = 512
# Pieces that go to one split together where a split is carved: what is held out is a whole passage of about 8 KiB.
SECTION = 16


def pieces(text: str, limit: int = PIECE) -> Iterator[str]:
    """Cut a text before white space, so that a tokenizer which puts it before a word gives the whole text's tokens.

    Args:
        text: of any length.
        limit: bytes of a piece in UTF-8, at most; at least 4.

    Yields:
        Its pieces, which joined are the text.

    Example:
        >>> list(pieces("one two three", 8))
        ['one two', ' three']
    """
    start = 0
    while start < len(text):
        window = text[start : start + limit].encode()[:limit].decode(errors="ignore")
        end = start + len(window)
        if end < len(text):
            end = start + (_boundary(window + text[end]) or len(window))
        yield text[start:end]
        start = end


def _boundary(window: str) -> int:
    """Return the last place where white space begins, but not the first; 0 where there is none."""
    found = (at for at in range(len(window) - 1, 0, -1) if window[at].isspace() and not window[at - 1].isspace())
    return next(found, 0)
