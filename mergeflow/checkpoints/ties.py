"""Weights that transformers makes of another one when it loads a model: a head that is the embedding once more."""

import re
from collections.abc import Collection, Mapping
from typing import Any

# Names of the head by `model_type`, for the classes whose head has another name than `lm_head`.
_MASKED = {
    "bert": "cls.predictions.decoder",
    "deberta-v2": "cls.predictions.decoder",
    "deberta": "cls.predictions.decoder",
    "roberta": "lm_head.decoder",
    "xlm-roberta": "lm_head.decoder",
    "distilbert": "vocab_projector",
    "electra": "generator_lm_head",
    "albert": "predictions.decoder",
    "modernbert": "decoder",
}
_GENERATING = {
    "whisper": "proj_out",
    "moonshine": "proj_out",
    "modernbert-decoder": "decoder",
    "biogpt": "output_projection",
    "trocr": "output_projection",
    "t5gemma": "lm_head.out_proj",
    "t5gemma2": "lm_head.out_proj",
    "gpt_neox_japanese": "embed_out",
    "xlm": "pred_layer.proj",
    "flaubert": "pred_layer.proj",
}
_CLASS = re.compile(r"For(?:CausalLM|ConditionalGeneration)$|LMHeadModel$")
# Embeddings of words in order of preference: T5's and BART's first, whose towers hold copies of their own.
_WORDS = re.compile(r"(?:^|\.)(?:shared|embed_tokens|wte|word_embeddings|embed_in|tok_embeddings|embeddings)\.weight$")
_TOWERS = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


def head_and_embedding(config: Mapping[str, Any], names: Collection[str]) -> tuple[str, str] | None:
    """Return the names in memory of a language model's head and of the embedding that transformers may tie it to.

    Args:
        config: config.json.
        names: The names that the model has in memory and that are stored.

    Example:
        >>> config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
        >>> head_and_embedding(config, ["transformer.wte.weight"])
        ('lm_head.weight', 'transformer.wte.weight')
    """
    made = config.get("architectures")
    cls = made[0] if isinstance(made, list) and made and isinstance(made[0], str) else ""
    kind = str(config.get("model_type"))
    embedding = _embedding(names)
    masked = _MASKED.get(kind) if cls.endswith("ForMaskedLM") else None
    head = masked or (_GENERATING.get(kind, "lm_head") if _CLASS.search(cls) else None)
    return (f"{head}.weight", embedding) if head is not None and embedding is not None else None


def _embedding(names: Collection[str]) -> str | None:
    words = [name for name in names if _WORDS.search(name)]
    return next((name for name in words if name.endswith("shared.weight")), min(words, default=None))


_HEADS = {"lm_head", "output", "head", *_MASKED.values(), *_GENERATING.values()}


def may_be_tied(a: str, b: str) -> bool:
    """Whether two names are among a language model's head, embeddings of words, and biases of the head.

    Example:
        >>> may_be_tied("lm_head.weight", "model.embed_tokens.weight"), may_be_tied("h.0.ln.weight", "h.1.ln.weight")
        (True, False)
    """
    return _is_table(a) and _is_table(b)


def _is_table(name: str) -> bool:
    module, _, end = name.rpartition(".")
    head = any(f".{module}".endswith(f".{one}") for one in _HEADS)
    biased = any(f".{one}".endswith(f".{module}.decoder") or f".{module}".endswith(f".{one}") for one in _HEADS)
    return bool(_WORDS.search(name)) or (head and end == "weight") or (biased and end == "bias")


def copies_of_embedding(config: Mapping[str, Any], names: Collection[str]) -> dict[str, str]:
    """Return the names of weights that transformers ties to a stored one, each with that one's name.

    Args:
        config: config.json.
        names: The names that the model has in memory and that are stored; a head among them is not a copy.

    Example:
        >>> config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
        >>> copies_of_embedding(config, ["transformer.wte.weight"])
        {'lm_head.weight': 'transformer.wte.weight'}
    """
    found: dict[str, str] = {}
    pair, embedding = head_and_embedding(config, names), _embedding(names)
    if pair is not None:
        found[pair[0]] = pair[1]
        decoder = module_of(pair[0])
        if f"{module_of(decoder)}.bias" in names:  # the bias of a masked model's decoder is its module's
            found[f"{decoder}.bias"] = f"{module_of(decoder)}.bias"
    if embedding is not None and embedding.endswith("shared.weight"):
        found |= {embedding.removesuffix("shared.weight") + tower: embedding for tower in _TOWERS}
    return {name: origin for name, origin in found.items() if name not in names}


def module_of(name: str) -> str:
    """Return the module that holds a tensor, or a module; "" for the model itself.

    Example:
        >>> module_of("lm_head.weight"), module_of("cls_token")
        ('lm_head', '')
    """
    return name.rpartition(".")[0]
