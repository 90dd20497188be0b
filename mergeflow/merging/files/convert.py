"""Make plain weights of a checkpoint: quantised ones dequantised, any of them in another type. Streaming and atomic."""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor

from mergeflow.checkpoints.checks import all_finite, not_finite
from mergeflow.checkpoints.fingerprint import BLOCK, combine
from mergeflow.checkpoints.folders import config_of
from mergeflow.checkpoints.formats import open_checkpoint
from mergeflow.checkpoints.header import FLOAT32, FLOATS, DType, TensorInfo
from mergeflow.checkpoints.quantised import Quantised, dequantise, dequantised_info, quantised
from mergeflow.checkpoints.reader import TIED, LazyStateDict
from mergeflow.checkpoints.sniff_format import GGUF
from mergeflow.checkpoints.writer import StreamWriter, write_text
from mergeflow.errors import MergeflowError
from mergeflow.merging.files.card import public_name
from mergeflow.merging.files.output import (
    CONVERTED,
    RECORD,
    OutputFolder,
    check_out,
    copy_companions,
    identity_of,
    removed_on_failure,
    shard_file,
    shard_names,
    weights_stem,
    write_index,
)


@dataclass(frozen=True)
class Converted:
    """The result of a conversion.

    Attributes:
        dequantised: How many of them were codes.
    """

    path: Path
    fingerprint: str
    tensors: int
    dequantised: int


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
    and the package gguf, whole in memory, as float32.

    Args:
        source: A checkpoint, as `open_checkpoint` takes it, or a GGUF file.
        out: A `.safetensors` file, or a folder, which gets the model's other files too; its config.json says the new
            type and no `quantization_config`.
        dtype: float64, float32, float16 or bfloat16 for all weights; by default each keeps its own, and codes become
            the type that config.json names (float32 without one).
        shard_size: Largest file of a folder, in bytes.
        force: Replace an output file even if mergeflow did not make it.

    Raises:
        MergeflowError: Packed layouts that are not known, scales that do not fit, a task vector or an adapter, an
            overflow of the type, an output that is not ours. Nothing half-written is left.
    """
    if dtype is not None and dtype not in FLOATS:
        raise MergeflowError(f"dtype '{dtype}': expected one of {', '.join(FLOATS)}.")
    if is_gguf(Path(source)):
        target = check_out(str(out), shard_size, {"source": str(source)}, force)
        with gguf_unpacked(Path(source), target) as folder:
            return convert(folder, out, dtype, shard_size, force=force)
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
        return Converted(target, made, len(job.infos), len(codes.weights))


def is_gguf(path: Path) -> bool:
    """Whether a path is a GGUF file, whatever its name."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(GGUF)) == GGUF


@contextmanager
def gguf_unpacked(source: Path, target: Path) -> Iterator[Path]:
    """Give a folder near `target` with a GGUF file's weights, config and tokenizer as transformers saves them.

    The folder is removed at the end; one that a killed conversion left is replaced.

    Raises:
        MergeflowError: A package is missing, or transformers cannot read the file.
    """
    if missing := [name for name in ("transformers", "gguf", "accelerate") if find_spec(name) is None]:
        needs = " and ".join(missing)
        raise MergeflowError(f"'{source}' is a GGUF file, which needs {needs}: pip install 'mergeflow[gguf]'")
    scratch = target.parent / f".{target.name}.gguf"
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        _save_gguf(source, scratch / source.name)
        yield scratch / source.name
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _save_gguf(source: Path, folder: Path) -> None:
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


class _Job:
    """One conversion on its way from an opened checkpoint to files."""

    def __init__(self, state: LazyStateDict, codes: Quantised, dtype: DType | None, default: DType) -> None:
        self.state, self.codes = state, codes
        self.config_dtype = (dtype or default).name if dtype or codes.weights else None
        plain = [name for name in state if name not in codes.parts and name not in codes.weights]
        self.infos = {name: self._info(state.infos[name], dtype) for name in plain} | {
            name: TensorInfo(dequantised_info(state, name, layout), dtype or default)
            for name, layout in codes.weights.items()
        }

    def _info(self, info: TensorInfo, dtype: DType | None) -> TensorInfo:
        return TensorInfo(info.shape, dtype or info.dtype) if info.dtype.is_floating_point else info

    def into_file(self, target: Path) -> str:
        """Write one file."""
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
            result = combine((name, info.dtype, info.shape, digests[name]) for name, info in sorted(self.infos.items()))
            files = sorted({RECORD, *(path.name for path in folder.partial.iterdir())})
            record = {"converted": public_name(self.state.path), "fingerprint": result, "files": files}
            write_text(folder.partial / RECORD, json.dumps(record, indent=2, ensure_ascii=False))
            folder.publish()
        return result

    def _metadata(self, names: Iterable[str]) -> dict[str, str]:
        held = set(names)
        ties = {name: first for name, first in self.state.tied.items() if {name, first} <= held}
        notes = {"format": "pt", CONVERTED: str(len(self.codes.weights))}
        return {**notes, TIED: json.dumps(ties)} if ties else notes

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
        if not all_finite(piece):
            raise not_finite(self.state.path, name)
        converted = piece.to(dtype.torch)
        if not all_finite(converted):
            raise MergeflowError(f"tensor '{name}' overflows {dtype}: choose a wider --dtype, such as bfloat16.")
        return converted


def _forget_quantisation(config: Path) -> None:
    if config.is_file():
        values = json.loads(config.read_bytes())
        if values.pop("quantization_config", None) is not None:
            write_text(config, json.dumps(values, indent=2, ensure_ascii=False) + "\n")
