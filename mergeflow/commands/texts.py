"""Models and texts that a command is about: those it names, or those of the project."""

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
import typer

from mergeflow import layout
from mergeflow.checkpoints import open_checkpoint
from mergeflow.checkpoints.folders import named_base
from mergeflow.checkpoints.formats import local_folder
from mergeflow.checkpoints.lora import ADAPTER_CONFIG
from mergeflow.commands.options import local
from mergeflow.data import load_manifest
from mergeflow.data.address import open_source
from mergeflow.data.arrays import MANIFEST, array_file
from mergeflow.data.task import Place, RawTask, transformed
from mergeflow.errors import MergeflowError, unknown_name
from mergeflow.merging import merge
from mergeflow.modalities.catalog import is_recorded
from mergeflow.modalities.causal.modality import PackedText, cut, open_examples, stream
from mergeflow.modalities.causal.model import Opened, is_causal, open_language
from mergeflow.modalities.causal.preparation import TRANSFORMS, causal_decoding
from mergeflow.modalities.causal.tokenizer import CausalTokenizer
from mergeflow.modalities.preparing import find_preparation
from mergeflow.plugins import project_folder

_UNSEEN_FIRST = ("test", "validation", "train")


def project_base() -> str | None:
    """Return the base of the project that the current folder lies in, if it is a causal model; None elsewhere."""
    project = project_folder()
    if project is None or not (project / layout.BASE_MODEL).is_file():
        return None
    with open_checkpoint(project / layout.BASE_MODEL) as state:
        return str(project / layout.BASE_MODEL) if is_causal(state.metadata) else None


def project_models() -> list[str]:
    """Return the files of the project's base, its experts and its merges."""
    project, base = project_folder(), project_base()
    if project is None or base is None:
        raise MergeflowError("no model is named, and this is not a project of causal models that has run: name some.")
    files = [Path(base), *sorted(project.glob(layout.expert_model("*"))), *sorted(project.glob(layout.merge("*")))]
    folder = Path.cwd()
    return [str(file.relative_to(folder) if file.is_relative_to(folder) else file) for file in files]


def project_texts(split: str) -> list[str]:
    """Return the prepared folders of the project's tasks that are texts."""
    project = project_folder()
    folders = [] if project is None else sorted(project.glob(layout.split(split, "*")))
    if not (paths := [str(folder) for folder in folders if array_file(folder, split, "documents").exists()]):
        raise MergeflowError("--data is missing: name texts, such as folder:texts/, or run the command in a project.")
    return paths


def read_texts(
    source: str, split: str | None, tokenizer: CausalTokenizer, block: int, device: torch.device, root: Path
) -> PackedText:
    """Return the texts of a split.

    Args:
        source: `KIND:ADDRESS`, as a task of params.yaml has it; or the folder of a prepared task, whose blocks are as
            long as they were prepared.
    """
    folder = root / source
    if (folder / MANIFEST).is_file():
        unseen = next((name for name in _UNSEEN_FIRST if array_file(folder, name, "ids").exists()), "test")
        return _prepared(folder, split or unseen, tokenizer, device)
    raw = open_source(source, source, find_preparation("causal").sources, TRANSFORMS, root=root)
    blocks = cut(_tokens(raw, split, tokenizer, block), block, tokenizer.end)
    return PackedText(source, blocks, device, tokenizer.prefix)


def prepared_block(source: str, block: int | None) -> int | None:
    """Return how long the blocks of a prepared task are; None for a source, which is cut as one likes."""
    if not (Path(source) / MANIFEST).is_file():
        return None
    held = load_manifest(Path(source))["decoding"].get("block")
    if block is not None and held is not None and block != held:
        raise MergeflowError(
            f"{source} was prepared in blocks of {held} tokens, --block is {block}: leave it out, or give the source, "
            "such as folder:texts/."
        )
    return held


def _prepared(folder: Path, split: str, tokenizer: CausalTokenizer, device: torch.device) -> PackedText:
    decoding = load_manifest(folder)["decoding"]
    if decoding.get("tokenizer") != tokenizer.digest:
        raise MergeflowError(
            f"{folder} was prepared with another tokenizer than the models': give its source, or their own base."
        )
    examples = open_examples(folder.name, folder, split, None, device)
    if not isinstance(examples, PackedText):
        raise _questions(str(folder))
    return examples


def _tokens(raw: RawTask, split: str | None, tokenizer: CausalTokenizer, block: int) -> np.ndarray:
    if split is not None and split not in raw.splits:
        raise unknown_name(f"split of {raw.source}", split, raw.splits)
    chosen = split or next(name for name in _UNSEEN_FIRST if name in raw.splits)
    decode, rows = causal_decoding(tokenizer, block).decode, []
    for index, example in enumerate(raw.splits[chosen]()):
        seen = transformed(raw, example, Place(chosen, index, raw.seed))
        if seen is None:
            continue
        arrays = decode(seen, f"{raw.source}, split {chosen}").arrays
        if "documents" not in arrays:
            raise _questions(raw.source)
        rows.append(arrays)
    names = ("ids", "lengths", "documents", "places")
    tokens = stream(*(np.stack([row[name] for row in rows]) for name in names)) if rows else np.zeros(0, np.int32)
    if len(tokens) < 2:
        raise MergeflowError(f"{raw.source} has {len(tokens)} tokens in its split {chosen}; expected at least 2.")
    return tokens


def _questions(source: str) -> MergeflowError:
    return MergeflowError(f"{source} has questions with choices; a perplexity is one of texts. Name a source of texts.")


_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")


def opened_models(context: typer.Context, models: Sequence[str], base: str | None) -> Iterator[tuple[str, Opened]]:
    """Yield each model by its name, with its weights loaded.

    A folder with config.json is a model by itself, with the base's tokenizer where it has none. A file of weights is
    one of its base, and so is an adapter, whose base is the one named here, else the one that it names, else the
    project's.

    Args:
        base: what files and adapters were tuned from; None: the project's base, where there is one.
    """
    chosen = base or project_base()
    shared = cache(open_language)
    for model in models:
        path = local(context, model)
        folder = local_folder(path)
        if folder is not None and (folder / ADAPTER_CONFIG).is_file():
            opened = _adapted(folder, base or _own_base(folder) or chosen)
        elif folder is not None and (folder / "config.json").is_file():
            has_own = chosen is None or any((folder / name).is_file() for name in _TOKENIZERS)
            opened = open_language(str(folder), Path(), None if has_own else shared(str(chosen), Path()).tokenizer)
        elif folder is None and not Path(path).exists():
            raise MergeflowError(f"there is no model at '{model}'. Check the path, or fetch the model by its id first.")
        elif chosen is None:
            raise MergeflowError(
                f"--base is missing: {model} is not a folder with config.json, and a file of weights does not say what "
                "its texts are tokens by. Name the base that it was tuned from."
            )
        else:
            opened = shared(chosen, Path())
            opened.load(path)
        opened.model.module.eval()
        yield model, opened


def _own_base(adapter: Path) -> str | None:
    """Return the base that an adapter names, if it is on this machine."""
    named = named_base(adapter)
    folder = None if named is None else named.folder()
    return None if folder is None else str(folder)


def _adapted(adapter: Path, base: str | None) -> Opened:
    """Return a base with an adapter in it: the two are merged in a folder that is removed again."""
    if base is None:
        named = named_base(adapter)
        reason = "names no base" if named is None else f"was made for '{named.path}', which is not on this machine"
        raise MergeflowError(
            f"--base is missing: the adapter {adapter} {reason}. Name the base that it was tuned from."
        )
    with TemporaryDirectory(prefix="mergeflow-adapter-") as made:
        out = str(Path(made) / ("model.safetensors" if is_recorded(base) else "model"))
        added = {"method": "task_arithmetic", "args": {"scale": 1.0}, "experts": {"adapter": str(adapter)}}
        merged = merge({**added, "base": base, "out": out})
        for line in (*merged.notes, *merged.warnings):
            typer.echo(line, err=True)
        if not is_recorded(base):
            return open_language(out, Path())
        opened = open_language(base, Path())
        opened.load(out)
    return opened
