"""Make plain weights of a checkpoint: quantised ones dequantised, any of them in another type. Streaming and atomic."""

import json
import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor

from mergeflow.checkpoints.checks import not_finite
from mergeflow.checkpoints.fingerprint import BLOCK
from mergeflow.checkpoints.folders import config_of, named_base
from mergeflow.checkpoints.formats import open_checkpoint, read_json, read_json_if_whole
from mergeflow.checkpoints.header import FLOAT32, FLOATS, DType, TensorInfo
from mergeflow.checkpoints.lora import ADAPTER_CONFIG, PREFIX
from mergeflow.checkpoints.quantised import Quantised, dequantise, dequantised_info, quantised
from mergeflow.checkpoints.reader import LazyStateDict
from mergeflow.checkpoints.sniff_format import GGUF
from mergeflow.checkpoints.writer import StreamWriter
from mergeflow.errors import MergeflowError
from mergeflow.merging.files.card import public_name
from mergeflow.merging.files.output import (
    CONVERTED,
    OutputFolder,
    check_out,
    copy_companions,
    fingerprint_of,
    identity_of,
    output_infos,
    removed_on_failure,
    shard_file,
    shard_names,
    tie_notes,
    weights_stem,
    write_index,
)
from mergeflow.merging.vocabulary.companions import write_json


@dataclass(frozen=True)
class Converted:
    """The result of a conversion; `dequantised` tensors were codes, warnings tell what else the file holds."""

    path: Path
    fingerprint: str
    tensors: int
    dequantised: int
    warnings: tuple[str, ...] = ()


def convert(
    source: str | Path,
    out: str | Path,
    dtype: str | None = None,
    shard_size: int | None = None,
    *,
    force: bool = False,
) -> Converted:
    """Write a checkpoint with plain weights, tensor by tensor.

    Read are int8 and float8 codes with scales per tensor, row, group or block (compressed-tensors, fp8 as DeepSeek's),
    bitsandbytes' LLM.int8 and 4-bit layouts (nf4, fp4, nested), GPTQ (2, 4, 8 bits), AWQ, compressed-tensors' packed
    integers, and MXFP4 of stacked experts. No library of these formats is needed. A GGUF file is read by transformers
    and the package gguf, an adapter other than LoRA is made part of its base by PEFT, both whole in memory, as float32.

    Args:
        source: A checkpoint, as `open_checkpoint` takes it, a GGUF file, or the folder of an adapter.
        out: A `.safetensors` file, or a folder, which gets the model's other files too; its config.json says the new
            type and no `quantization_config`.
        dtype: float64, float32, float16 or bfloat16 for all weights; by default each keeps its own, and codes become
            the type that config.json names (float32 without one).
        shard_size: Largest file of a folder, in bytes.
        force: Replace an output file even if mergeflow did not make it.
    """
    if dtype is not None and dtype not in FLOATS:
        raise MergeflowError(f"dtype '{dtype}': expected one of {', '.join(FLOATS)}.")
    if save := _saver(Path(source)):
        target = check_out(str(out), shard_size, {"source": str(source)}, force)
        scratch = target.parent / f".{target.name}.unpacked"
        shutil.rmtree(scratch, ignore_errors=True)  # of a killed conversion
        try:
            save(Path(source), scratch / Path(source).name)
            return convert(scratch / Path(source).name, out, dtype, shard_size, force=force)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    with open_checkpoint(source) as state:
        if state.is_task_vector:
            raise MergeflowError(f"'{source}' is a task vector or an adapter: convert the model, or merge it first.")
        config = config_of(state)
        codes = quantised(state.infos, config)
        if codes.formats:
            raise MergeflowError(
                f"'{source}' has packed weights that cannot be made plain here: {'; '.join(codes.formats[:3])}. "
                "Use the original weights."
            )
        target = check_out(str(out), shard_size, {"source": state.path}, force)
        named = str(config.get("dtype") or config.get("torch_dtype"))
        job = _Job(state, codes, FLOATS.get(dtype or ""), FLOATS.get(named, FLOAT32))
        single = target.suffix == ".safetensors"
        made = job.into_file(target) if single else job.into_folder(target, shard_size)
        return Converted(target, made, len(job.infos), len(codes.weights), state.notes)


def _saver(source: Path) -> Callable[[Path, Path], None] | None:
    """Choose what makes a model folder of a source that is none: a GGUF file, or an adapter other than LoRA."""
    if source.is_file():
        with source.open("rb") as file:
            return _save_gguf if file.read(len(GGUF)) == GGUF else None
    kind = read_json(source / ADAPTER_CONFIG).get("peft_type") if (source / ADAPTER_CONFIG).is_file() else "LORA"
    return _save_adapted if isinstance(kind, str) and kind != "LORA" else None


def _check_packages(source: Path, what: str, extra: str, *packages: str) -> None:
    if missing := [name for name in packages if find_spec(name) is None]:
        needs = " and ".join(missing)
        raise MergeflowError(f"'{source}' is {what}, which needs {needs}: pip install 'mergeflow[{extra}]'")


def _save_gguf(source: Path, folder: Path) -> None:
    """Save a GGUF file's weights, config and tokenizer as transformers reads them."""
    _check_packages(source, "a GGUF file", "gguf", "transformers", "gguf", "accelerate")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    place = {"pretrained_model_name_or_path": str(source.parent.resolve()), "gguf_file": source.name}
    try:
        plain = GgufConfig(dequantize=True)
        options: dict[str, Any] = {"quantization_config": plain, "dtype": torch.float32, "output_loading_info": True}
        loaded: Any = AutoModelForCausalLM.from_pretrained(**place, **options)
        tokenizer = AutoTokenizer.from_pretrained(**place)
    except Exception as error:  # its readers raise whatever they meet: an unknown architecture, a file cut short
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise MergeflowError(f"'{source}': transformers cannot read this GGUF file: {reason}") from error
    model, loading = loaded
    if missing := sorted(loading["missing_keys"]):  # transformers draws them
        raise MergeflowError(
            f"'{source}' lacks {len(missing)} of the model's tensors, such as '{missing[0]}': a file of several parts "
            "(-00001-of-00002) is joined by `llama-gguf-split --merge` first; else download it again."
        )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# The class that PEFT gives an adapter of a task; without a task it names the class itself.
_CLASSES = {
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
}


def _save_adapted(source: Path, folder: Path) -> None:
    """Save the model that PEFT makes of an adapter and the base that it names, with the base's other files."""
    config, named = read_json(source / ADAPTER_CONFIG), named_base(source)
    kind, base = config.get("peft_type"), named.folder() if named else None
    _check_packages(source, f"an adapter of the type {kind}", "lora", "transformers", "peft")
    if base is None:
        where = f"'{named.path}'" if named else "which its adapter_config.json does not name"
        raise MergeflowError(
            f"the base of '{source}', {where}, is not on this machine: say in adapter_config.json "
            "(base_model_name_or_path) where it is."
        )
    import peft
    import transformers

    classes = read_json_if_whole(base / "config.json").get("architectures") or ["AutoModel"]
    mapping = config.get("auto_mapping")
    plain = mapping.get("base_model_class", classes[0]) if isinstance(mapping, dict) else classes[0]
    cls = getattr(transformers, _CLASSES.get(str(config.get("task_type")), str(plain)), transformers.AutoModel)
    try:
        with warnings.catch_warnings():
            for start in ("Found missing adapter keys", "Unexpected keyword arguments"):
                warnings.filterwarnings("error", start)
            if kind not in peft.PeftType.__members__:
                raise ValueError(f"PEFT {peft.__version__} knows no such type")
            _save_merged(source, cls, base, folder)
    except Exception as error:  # its classes raise whatever they meet
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise MergeflowError(f"PEFT cannot make '{source}', of the type {kind}, part of its base: {reason}") from error
    copy_companions(base, folder, config=read_json(folder / "config.json"))


def _save_merged(source: Path, cls: Any, base: Path, folder: Path) -> None:
    """Save what PEFT makes of an adapter and its base.

    Args:
        cls: The base's class in transformers.

    Raises:
        ValueError: No weights can hold the adapter, or PEFT passes over a part of it.
    """
    import torch
    from peft import PeftConfig, PeftModel, get_peft_model_state_dict

    config = PeftConfig.from_pretrained(str(source))
    if config.is_prompt_learning or config.is_adaption_prompt:
        raise ValueError("prompts and prefixes are no change of weights")
    unseeded = getattr(config, "proj_seed", 0) is None and not getattr(config, "save_indices", False)
    if config.peft_type == "XLORA" or getattr(config, "sample_at_inference", False) or unseeded:
        raise ValueError("its change depends on the input or is drawn anew each time, so that no weights can hold it")
    model, loading = cls.from_pretrained(base, dtype=torch.float32, output_loading_info=True)
    names = set(model.state_dict())
    adapted = PeftModel.from_pretrained(model, source, torch_device="cpu")
    if unread := adapted.load_adapter(source, "default", torch_device="cpu").unexpected_keys:
        raise ValueError(f"its file holds '{unread[0]}', which its settings do not name, so that PEFT passes over it")
    stored = get_peft_model_state_dict(adapted)
    if drawn := sorted(name for name in loading["missing_keys"] if PREFIX + name not in stored):
        raise ValueError(f"the base lacks '{drawn[0]}'")
    merged = adapted.merge_and_unload(safe_merge=True)
    # Some kinds leave modules that are saved whole in their wrappers.
    whole = {name: value for name, value in merged.state_dict().items() if ".original_module." not in name}
    state = {name.replace(".modules_to_save.default.", "."): value for name, value in whole.items()}
    if strange := sorted(names ^ state.keys()):
        raise ValueError(f"it leaves '{strange[0]}', which is no weight of the base, or takes it away")
    merged.save_pretrained(folder, state_dict=state)


class _Job:
    def __init__(self, state: LazyStateDict, codes: Quantised, dtype: DType | None, default: DType) -> None:
        self.state, self.codes = state, codes
        self.config_dtype = (dtype or default).name if dtype or codes.weights else None
        plain = [name for name in state if name not in codes.parts and name not in codes.weights]
        self.infos = output_infos({name: state.infos[name] for name in plain}, dtype.name if dtype else None) | {
            name: TensorInfo(dequantised_info(state, name, layout), dtype or default)
            for name, layout in codes.weights.items()
        }

    def into_file(self, target: Path) -> str:
        with StreamWriter(target, self.infos, self._metadata(self.infos)) as writer:
            self._write(writer, self.infos)
            return writer.commit()

    def into_folder(self, target: Path, shard_size: int | None) -> str:
        """Write a folder beside its final name and rename it when it is whole."""
        names = shard_names(self.infos, shard_size)
        stem = weights_stem(Path(self.state.path))
        shards = {shard_file(index, len(names), stem): list(held) for index, held in enumerate(names)}
        plan = {file: {name: self.infos[name] for name in held} for file, held in shards.items()}
        digests: dict[str, str] = {}
        with OutputFolder(target) as folder, removed_on_failure(folder.partial):
            folder.begin({"convert": identity_of({"source": self.state.path})}, plan, resume=False)
            for file, infos in plan.items():
                with StreamWriter(folder.partial / file, infos, self._metadata(infos)) as writer:
                    self._write(writer, infos)
                    writer.commit()
                    digests |= writer.digests()
            write_index(folder.partial, shards, sum(info.nbytes for info in self.infos.values()))
            copy_companions(Path(self.state.path), folder.partial, self.config_dtype)
            _forget_quantisation(folder.partial / "config.json")
            result = fingerprint_of(self.infos, digests)
            folder.write_record({"converted": public_name(self.state.path), "fingerprint": result})
            folder.publish()
        return result

    def _metadata(self, names: Iterable[str]) -> dict[str, str]:
        return {"format": "pt", CONVERTED: str(len(self.codes.weights))} | tie_notes(self.state.tied, names)

    def _write(self, writer: StreamWriter, infos: Mapping[str, TensorInfo]) -> None:
        for name, info in infos.items():
            if name in self.codes.weights:
                whole = dequantise(self.state, name, self.codes.weights[name], self.codes.declared).reshape(-1)
                pieces = ((at, whole[at : at + BLOCK]) for at in range(0, info.numel, BLOCK))
            else:
                pieces = (
                    (at, self.state.read(name, at, min(at + BLOCK, info.numel))) for at in range(0, info.numel, BLOCK)
                )
            for at, piece in pieces:
                writer.write(name, at, self._fitting(name, piece, info.dtype))

    def _fitting(self, name: str, piece: Tensor, dtype: DType) -> Tensor:
        """Return a piece in its type, checked where the type changes."""
        if piece.dtype == dtype.torch:
            return piece
        converted = piece.to(dtype.torch)
        if bool(piece.isnan().any()):
            raise not_finite(self.state.path, name)
        if bool((converted.isinf() & piece.isfinite()).any()):  # infinities of the source belong there, as bounds do
            raise MergeflowError(f"tensor '{name}' overflows {dtype}: choose a wider --dtype, such as bfloat16.")
        return converted


def _forget_quantisation(config: Path) -> None:
    if config.is_file():
        values = json.loads(config.read_bytes())
        if values.pop("quantization_config", None) is not None:
            write_json(config, values)
