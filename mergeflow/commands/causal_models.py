"""Causal models as a command names them, opened one after the other."""

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import typer

from mergeflow.checkpoints.folders import named_base
from mergeflow.checkpoints.formats import local_folder
from mergeflow.checkpoints.lora import ADAPTER_CONFIG
from mergeflow.commands.options import local
from mergeflow.commands.texts import project_base
from mergeflow.errors import MergeflowError
from mergeflow.merging import merge
from mergeflow.modalities.catalog import is_recorded
from mergeflow.modalities.causal.model import Opened, open_language

_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")


def opened_models(context: typer.Context, models: Sequence[str], base: str | None) -> Iterator[tuple[str, Opened]]:
    """Yield each model by its name, with its weights loaded.

    A folder with config.json is a model by itself, with the base's tokenizer where it has none. A file of weights is
    one of its base, and so is an adapter, whose base is the one named here, else the one that it names, else the
    project's.

    Args:
        models: checkpoints, folders, adapters, ids in the local cache, or references.
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
        merge({**added, "base": base, "out": out})
        if not is_recorded(base):
            return open_language(out, Path())
        opened = open_language(base, Path())
        opened.load(out)
    return opened
