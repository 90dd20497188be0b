"""Find and read the base and the tokenizer of a transformers model."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from threading import RLock
from typing import Any, TypeVar

from mergeflow.errors import MergeflowError, unknown_name

# Transformers fills itself in while it is imported: a second thread that imports it meanwhile finds it half done.
_IMPORTING = RLock()
# Entries of config.json that differ by machine or release and have no effect on the model.
_NOT_ARCHITECTURE = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype")
_OF_TEXTS = "config.json, model.safetensors and tokenizer.json"
T = TypeVar("T")


def transformers(name: str) -> Any:
    """Return a class of transformers, imported when it is first asked for: that takes seconds."""
    with _IMPORTING:
        return getattr(import_module("transformers"), name)


def find_place(place: str, root: Path, assets: Path, files: str = _OF_TEXTS) -> str:
    """Return the address that transformers loads: the path of a folder, or an id of the hub.

    Args:
        place: a folder relative to `root` or absolute, the name of an embedded base, or an id `owner/name`.
        files: those that an error message expects in a folder.
    """
    if (root / place).is_dir():
        return str(root / place)
    embedded = {folder.name: folder for folder in assets.iterdir() if folder.is_dir()} if assets.is_dir() else {}
    if place in embedded:
        return str(embedded[place])
    if place.startswith((".", "/", "inputs/")) or place.count("/") > 1 or not ("/" in place or embedded):
        raise MergeflowError(f"there is no folder '{place}'; expected one with {files}, or the hub's OWNER/NAME.")
    if "/" not in place:
        raise unknown_name("base", place, embedded)
    return place


def check_folder(place: str, root: Path, assets: Path, files: str = _OF_TEXTS) -> None:
    """Refuse a base that is no place, or a folder in which transformers has saved no model; nothing is loaded."""
    folder = Path(find_place(place, root, assets, files))
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise MergeflowError(
            f"model.pretrained '{place}' has no config.json; expected a folder that `save_pretrained` wrote, with "
            f"{files}."
        )


def from_place(what: str, place: str, load: Callable[[], T], files: str = _OF_TEXTS) -> T:
    """Read something of transformers', quietly; an error message calls it `what`, such as "the tokenizer"."""
    try:
        with quiet():
            return load()
    except MergeflowError:
        raise
    # Files, the hub's client and the parsers raise errors of many types; all mean that nothing can be read there.
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        raise MergeflowError(
            f"{what} of '{place}' cannot be read ({type(error).__name__}: {first}). Name a folder with {files}; "
            "without a network only folders and the local cache can be read."
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Hide transformers' remarks and progress bars; the caller checks for missing weights."""
    with _IMPORTING:
        from transformers.utils import logging
    before: Any = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before[0])
        if before[1]:
            logging.enable_progress_bar()


def load_pretrained(
    auto: str, what: str, place: str, root: Path, assets: Path, files: str = _OF_TEXTS, **settings: Any
) -> tuple[Any, list[str]]:
    """Return a pre-trained model of transformers in float32, and the names of the weights that its file lacks.

    Weights of other shapes, which transformers draws anew where `settings` allow it, count as lacking.

    Args:
        auto: the class that loads it, such as AutoModel.
        settings: further ones for `from_pretrained`, or for the configuration.
    """
    import torch

    from mergeflow.modalities.modules import own_generator

    source = find_place(place, root, assets, files)
    options = {"dtype": torch.float32, "use_safetensors": True, "output_loading_info": True, **settings}
    with own_generator(0):  # for weights that the file lacks
        model, info = from_place(what, place, lambda: transformers(auto).from_pretrained(source, **options), files)
    drawn = {*info["missing_keys"], *(entry[0] for entry in info["mismatched_keys"])}
    return model, sorted(drawn)


def check_whole(place: str, lacking: list[str]) -> None:
    """Refuse a model whose file lacks weights."""
    if lacking:
        more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
        raise MergeflowError(f"the model of '{place}' lacks the weights {', '.join(lacking[:3])}{more}: save it whole.")


def fast_tokenizer(place: str, root: Path, assets: Path, token: str, lacks: str, hint: str) -> tuple[Any, str]:
    """Return a tokenizer, and its tokenizer.json without padding and truncation.

    Args:
        token: its token that must not be missing, such as `pad_token`.
        hint: the message's end.
    """
    source = find_place(place, root, assets)
    tokenizer: Any = from_place("the tokenizer", place, lambda: transformers("AutoTokenizer").from_pretrained(source))
    fast = getattr(tokenizer, "is_fast", False)
    if not fast or getattr(tokenizer, f"{token}_id") is None:
        raise MergeflowError(f"the tokenizer of '{place}' has {lacks if fast else 'no tokenizer.json'}{hint}")
    backend = tokenizer.backend_tokenizer
    backend.no_padding()
    backend.no_truncation()
    return tokenizer, json.dumps(json.loads(backend.to_str()), ensure_ascii=False, separators=(",", ":"))


def architecture_text(config: Mapping[str, Any]) -> str:
    """Return a configuration as text, without entries that do not affect the architecture."""
    return json.dumps({name: value for name, value in sorted(config.items()) if name not in _NOT_ARCHITECTURE})


def check_prepared(manifests: Mapping[str, Any], digest: str, named: str, pretrained: str) -> None:
    """Refuse splits that were prepared with another tokenizer than the base's; `data.tokenizer` has `named` theirs."""
    other = [task for task, manifest in manifests.items() if manifest["decoding"].get("tokenizer") != digest]
    if other:
        raise MergeflowError(
            f"the texts of {', '.join(other)} were prepared with the tokenizer of '{named}' (data.tokenizer), "
            f"which is not that of '{pretrained}' (model.pretrained): give both the same name."
        )
