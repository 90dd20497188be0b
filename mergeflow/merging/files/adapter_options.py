"""What a recipe may say of the adapter that it makes."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer

from mergeflow.schema import Frozen

Rank = Annotated[int, Field(ge=1, le=100_000, strict=True)]


def _pairs(value: Any) -> Any:
    return tuple((str(pattern), rank) for pattern, rank in value.items()) if isinstance(value, Mapping) else value


class AdapterOptions(Frozen):
    """The adapter that a merge makes of its difference from the base.

    Attributes:
        rank: The largest rank of a matrix.
        ranks: Other largest ranks, by patterns of the base's names; the first that fits counts.
        error: With it each matrix gets the smallest rank whose relative Frobenius error is at most this one.
        embeddings: Whether embeddings and heads that changed are stored `whole` or as factors (`lora`).
    """

    rank: Rank
    ranks: Annotated[tuple[tuple[str, Rank], ...], BeforeValidator(_pairs), PlainSerializer(dict)] = ()
    error: float = Field(0.0, ge=0, lt=1)
    embeddings: Literal["whole", "lora"] = "whole"

    def rank_of(self, name: str) -> int:
        """Return the largest rank of one tensor."""
        return next((rank for pattern, rank in self.ranks if fnmatchcase(name, pattern)), self.rank)


def _read(value: Any) -> Any:
    """Take a number as the rank."""
    return {"rank": value} if isinstance(value, int) and not isinstance(value, bool) else value


Adapter = Annotated[AdapterOptions, BeforeValidator(_read)]
