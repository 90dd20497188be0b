"""Text of files: UTF-8, with or without its mark."""

from mergeflow.errors import MergeflowError


def decoded(content: bytes, path: str) -> str:
    """Return the text that a file holds.

    Args:
        content: the file's bytes.
        path: what a message calls the file.

    Raises:
        MergeflowError: it is not in UTF-8.

    Example:
        >>> decoded(b"a cat", "cats.txt")
        'a cat'
    """
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        marked = content.startswith((b"\xff\xfe", b"\xfe\xff"))
        found = "it begins as UTF-16 does" if marked else f"byte {error.start} is {content[error.start]:#04x}"
        raise MergeflowError(f"{path} is not a text in UTF-8: {found}. Convert it to UTF-8.") from None
