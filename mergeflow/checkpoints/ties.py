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
_GENERATING = {"whisper": "proj_out"}
_CLASS = re.compile(r"For(?:CausalLM|ConditionalGeneration)$|LMHeadModel$")
# Embeddings of words in order of preference: T5's and BART's first, whose towers hold copies of their own.
_WORDS = re.compile(r"(?:^|\.)(?:shared|embed_tokens|wte|word_embeddings|embed_in|tok_embeddings|embeddings)\.weight$")
_TOWERS = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


# Modules that transformers 5 names otherwise than the files that it reads and writes.
_LOADED = {"gpt_neox": {"embed_out.": "lm_head."}}


def loaded_name(config: Mapping[str, Any], name: str) -> str:
    """Return the name by which transformers 5 has a tensor of a file in memory.

    Example:
        >>> loaded_name({"model_type": "gpt_neox"}, "embed_out.weight")
        'lm_head.weight'
    """
    for stored, loaded in _LOADED.get(str(config.get("model_type")), {}).items():
        name = loaded + name.removeprefix(stored) if name.startswith(stored) else name
    return name


def copies_of_embedding(config: Mapping[str, Any], names: Collection[str]) -> dict[str, str]:
    """Return the names of weights that transformers ties to a stored one, each with that one's name.

    Args:
        config: config.json.
        names: The names that the model has in memory and that are stored; a head among them is no copy.

    Example:
        >>> config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
        >>> copies_of_embedding(config, ["transformer.wte.weight"])
        {'lm_head.weight': 'transformer.wte.weight'}
    """
    made = config.get("architectures")
    cls = made[0] if isinstance(made, list) and made and isinstance(made[0], str) else ""
    kind = str(config.get("model_type"))
    words = [name for name in names if _WORDS.search(name)]
    source = next((name for name in words if name.endswith("shared.weight")), min(words, default=None))
    if source is None:
        return {}
    masked = _MASKED.get(kind) if cls.endswith("ForMaskedLM") else None
    head = masked or (_GENERATING.get(kind, "lm_head") if _CLASS.search(cls) else None)
    found = {f"{head}.weight": source} if head is not None else {}
    if masked is not None and f"{module_of(masked)}.bias" in names:  # the decoder's bias is its module's
        found[f"{masked}.bias"] = f"{module_of(masked)}.bias"
    if source.endswith("shared.weight"):
        found |= {source.removesuffix("shared.weight") + tower: source for tower in _TOWERS}
    return {name: origin for name, origin in found.items() if name not in names}


def module_of(name: str) -> str:
    """Return the module that holds a tensor, or a module; "" for the model itself.

    Example:
        >>> module_of("lm_head.weight"), module_of("cls_token")
        ('lm_head', '')
    """
    return name.rpartition(".")[0]
