"""The names that a model's tensors have in memory, by which PEFT finds its modules."""

from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import Any

from mergeflow.checkpoints.naming import loaded_name, piece_of_stack
from mergeflow.late import torch


def names_in_memory(config: Mapping[str, Any], names: Iterable[str]) -> dict[str, str]:
    """Return the names that files have for tensors, by the names that these have in memory.

    Where transformers is installed and knows the class that config.json names, its own conversion tables say it: a
    ViT's `vit.encoder.layer.0.…` is `vit.layers.0.…` in memory since transformers 5. Else the renamings known here do.
    A weight of a listed expert that is part of a stack in memory is called so: `mlp.experts.gate_up_proj[3].up`.
    """
    made = config.get("architectures")
    if isinstance(made, list) and made and find_spec("transformers") is not None:
        found = _by_transformers(str(made[0]), config, list(names))
        if found is not None:
            return found
    return {loaded_name(config, name): name for name in names}


def _by_transformers(cls: str, config: Mapping[str, Any], names: list[str]) -> dict[str, str] | None:
    """Ask transformers; None for a version without conversion tables, or a class that it does not have."""
    import transformers

    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming, rename_source_key
    except ImportError:
        return None
    kind: Any = getattr(transformers, cls, None)
    if getattr(kind, "config_class", None) is None:
        return None
    with torch.device("meta"):
        model = kind(kind.config_class.from_dict(dict(config)))
    renamings = [one for one in get_model_conversion_mapping(model) if isinstance(one, WeightRenaming)]
    known = model.state_dict()
    found = {}
    for name in names:
        loaded, _ = rename_source_key(name, renamings, [], model.base_model_prefix, known)
        loaded = loaded if loaded in known else loaded_name(config, name)
        found[piece_of_stack(loaded, known) or loaded] = name
    return found
