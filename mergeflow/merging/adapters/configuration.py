"""adapter_config.json of PEFT for a set of factors: short lists of modules where they say the same."""

import re
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from importlib.util import find_spec
from typing import Any

import torch

from mergeflow.checkpoints.lora import PREFIX
from mergeflow.checkpoints.names import module_in_memory
from mergeflow.errors import first_line
from mergeflow.merging.adapters.slots import Contents

# Classes of transformers for which PEFT has a task that adds no module of its own to those that are saved whole.
_TASKS = {"ForCausalLM": "CAUSAL_LM", "LMHeadModel": "CAUSAL_LM", "ForConditionalGeneration": "SEQ_2_SEQ_LM"}


def adapter_config(
    held: Contents,
    whole: Collection[str],
    biases: bool,
    names: Collection[str],
    model: Mapping[str, Any],
    base: str | None,
    revision: str | None,
    in_out: bool,
) -> dict[str, Any]:
    """Return adapter_config.json.

    Args:
        biases: Whether biases of adapted modules are stored.
        in_out: Whether adapted linear weights are stored as [in, out].
    """
    sizes = {
        owner: (rank, alpha_of(rank, factor)) for owner, (rank, factor) in (held.modules | held.parameters).items()
    }
    (rank, alpha), _ = Counter(sizes.values()).most_common(1)[0] if sizes else ((1, 1), 0)
    ends = _ends(held.modules, names)
    ranks = {name: size for name, (size, _) in sizes.items() if (size, sizes[name][1]) != (rank, alpha)}
    return {
        "peft_type": "LORA",
        "task_type": _task(model),
        "base_model_name_or_path": base,
        "revision": revision,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "use_rslora": False,
        "use_dora": False,
        "bias": "lora_only" if biases else "none",
        "fan_in_fan_out": in_out,
        "init_lora_weights": True,
        "target_modules": sorted({ends.get(name, name) for name in held.modules}),
        "target_parameters": sorted(held.parameters) or None,
        "modules_to_save": sorted(whole) or None,
        "rank_pattern": _patterns({name: sizes[name][0] for name in ranks}, sizes, ends, 0),
        "alpha_pattern": _patterns({name: sizes[name][1] for name in ranks}, sizes, ends, 1),
    }


def alpha_of(rank: int, factor: float) -> float:
    """Return α with α / r = s to the last bit where such a number exists; a whole number as an integer."""
    near = factor * rank
    exact = next((x for x in (near, _next(near, 1), _next(near, -1)) if x / rank == factor), near)
    return int(exact) if exact == int(exact) else exact


def _next(value: float, way: int) -> float:
    from math import inf, nextafter

    return nextafter(value, way * inf)


def _task(model: Mapping[str, Any]) -> str | None:
    classes = model.get("architectures")
    name = str(classes[0]) if isinstance(classes, list) and classes else ""
    task = next((task for end, task in _TASKS.items() if name.endswith(end)), None)
    # PEFT's class of a task passes on `input_ids`, also to a model of sounds.
    reads = task and getattr(module_in_memory(model, ""), "main_input_name", "input_ids")
    return task if reads == "input_ids" else None


def _ends(modules: Iterable[str], names: Collection[str]) -> dict[str, str]:
    """Return the last part of a module's name where all modules of the model that end in it are adapted."""
    adapted = set(modules)
    holders = {name.rpartition(".")[0] for name in names}
    inner = {part for holder in holders for part in holder.split(".")[:-1]}
    strange = {holder.rpartition(".")[2] for holder in holders - adapted}
    ends = {}
    for module in adapted:
        end = module.rpartition(".")[2]
        if end not in inner | strange and not end.isdigit():
            ends[module] = end
    return ends


def _patterns(
    values: Mapping[str, Any], sizes: Mapping[str, tuple[int, float]], ends: Mapping[str, str], part: int
) -> dict[str, Any]:
    """Return a pattern for each module of its own size; one for all that share an end and the size."""
    patterns: dict[str, Any] = {}
    for name, value in sorted(values.items()):
        end = ends.get(name)
        alike = {sizes[other][part] for other in ends if ends[other] == end} if end else set()
        patterns[end if end and len(alike) == 1 else re.escape(name)] = value
    return patterns


def loading_notes(
    model: Mapping[str, Any], adapter: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], resized: Collection[str]
) -> list[str]:
    """Say, where transformers and PEFT are installed, why PEFT does not put an adapter's tensors into the model.

    Args:
        model: config.json of the base.
        adapter: adapter_config.json.
        shapes: Those of the tensors in the adapter's file, by name.
        resized: The names of tables with other rows than the base's, which people resize before they load an adapter.
    """
    net = module_in_memory(model, "")
    if net is None or find_spec("peft") is None:
        return []
    import peft

    config = peft.LoraConfig(**{key: value for key, value in adapter.items() if key != "peft_type"})
    tables = {name: net.get_parameter(name.removeprefix(PREFIX)).shape for name in resized}
    tensors = {name: torch.empty(tuple(shape), device="meta") for name, shape in {**shapes, **tables}.items()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wrapped = peft.get_peft_model(deepcopy(net), config, low_cpu_mem_usage=True)
            loaded: Any = peft.set_peft_model_state_dict(wrapped, tensors, low_cpu_mem_usage=True)
        strange = [*loaded.unexpected_keys, *(name for name in loaded.missing_keys if "lora_" in name)]
        # Factors of a weight that the adapter also holds whole are passed over without loss.
        strange = [name for name in strange if f"{name.partition('.lora_')[0]}.weight" not in shapes]
        reason = f"it would pass over or lack '{strange[0]}'" if strange else ""
    except Exception as error:  # whatever PEFT or the class raises then
        line = re.search(r"size mismatch for .*", str(error))
        reason = f"{type(error).__name__}: {line[0] if line else first_line(error)}"
    if not reason:
        return []
    return [
        f"PEFT {peft.__version__} does not load this adapter into {type(net).__name__} ({reason}): write the whole "
        "model, or leave the modules concerned as the base has them (`ignore`)"
    ]
