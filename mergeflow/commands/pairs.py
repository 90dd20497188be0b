"""Options of the form NAME=VALUE that may be repeated."""

from mergeflow.errors import MergeflowError


def read_pairs(entries: list[str], option: str, form: str = "NAME=VALUE") -> dict[str, str]:
    """Return the values by name.

    Args:
        entries: what was given, for example `["digits=digits.safetensors"]`.
        option: the option's name, for messages.
        form: what an entry looks like, for messages.

    Raises:
        MergeflowError: an entry of another form, or a name given twice.

    Example:
        >>> read_pairs(["a=1", "b=x=y"], "--set")
        {'a': '1', 'b': 'x=y'}
    """
    values: dict[str, str] = {}
    for entry in entries:
        name, equals, value = entry.partition("=")
        if not equals or not name or not value:
            raise MergeflowError(f"{option} '{entry}' is not of the form {form}.")
        if name in values:
            raise MergeflowError(f"{option} names '{name}' twice.")
        values[name] = value
    return values
