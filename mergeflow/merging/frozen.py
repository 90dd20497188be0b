"""Values from YAML as hashable ones, and back: mappings become sorted pairs, lists become tuples."""

from collections.abc import Mapping
from typing import Any


def frozen(value: Any) -> Any:
    """Return the value with every mapping as pairs in order of name and every list as a tuple.

    Example:
        >>> frozen({"keep": 0.2, "matrices": ["a", "b"]})
        (('keep', 0.2), ('matrices', ('a', 'b')))
    """
    if isinstance(value, Mapping):
        named = {str(key): frozen(item) for key, item in value.items()}
        return tuple((key, named[key]) for key in sorted(named))
    return tuple(frozen(item) for item in value) if isinstance(value, list | tuple) else value


def thawed(value: Any) -> Any:
    """Return pairs of a name and a value as the mapping they were frozen from, inside of tuples too."""
    if not isinstance(value, tuple):
        return value
    if all(isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) for item in value):
        return {key: thawed(item) for key, item in value}
    return tuple(thawed(item) for item in value)
