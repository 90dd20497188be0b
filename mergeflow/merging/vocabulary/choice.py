"""Which vocabulary a merge has, and what the embedding of a token is that a model lacks, as a recipe says it."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, model_validator

from mergeflow.schema import Frozen

BASE, UNION = "base", "union"


class Source(Frozen):
    """Where the embedding of a token comes from.

    Attributes:
        kind: `model`: the token's own row in `model`; `model_token`: the row of another token there; `zero`; `mean`: of
            all models that have the token.
        model: `base` or an expert's name.
        token: The other token, for `model_token`.
        token_id: Its row, where that is easier to say.
    """

    kind: Literal["model", "model_token", "zero", "mean"] = "model"
    model: str | None = None
    token: str | None = None
    token_id: Annotated[int, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _check(self) -> "Source":
        if (self.model is not None) != self.kind.startswith("model"):
            raise ValueError(f"a source of kind '{self.kind}' {'takes no' if self.model else 'needs a'} model")
        if ((self.token is None) == (self.token_id is None)) == (self.kind == "model_token"):
            raise ValueError("`token` or `token_id` says which row a source of kind 'model_token' is, and only there")
        return self


def _source(value: Any) -> Any:
    return {"kind": "model", "model": value} if isinstance(value, str) else value


class TokenChoice(Frozen):
    """What the embedding of one token is.

    Attributes:
        source: Where it comes from in models that lack it; the base's, the only one, or the mean by default.
        force: Whether all models take it from there, those that have the token too.
    """

    source: Annotated[Source | None, BeforeValidator(_source)] = None
    force: bool = False


def _named(value: Any) -> Any:
    return tuple(sorted(value.items())) if isinstance(value, dict) else value


class TokenizerChoice(Frozen):
    """The vocabulary of a merge.

    Attributes:
        source: `base`, `union` (the base's tokens, then those that only experts have) or an expert's name.
        tokens: What single tokens' embeddings are.
        pad_to_multiple_of: The number of rows is rounded up to a multiple of this.
    """

    source: str = BASE
    tokens: Annotated[tuple[tuple[str, TokenChoice], ...], BeforeValidator(_named), PlainSerializer(dict)] = ()
    pad_to_multiple_of: Annotated[int, Field(ge=1, le=2**20)] | None = None


def tokenizer_choice(value: Any) -> Any:
    """Return a recipe's `tokenizer`, which may be the name of its source alone."""
    return {"source": value} if isinstance(value, str) else value
