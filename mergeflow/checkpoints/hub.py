"""Models by their Hugging Face id: from the local cache, or downloaded where the network is there."""

import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from mergeflow.errors import MergeflowError

_ID = re.compile(r"(?P<repo>[\w][\w.-]*/[\w][\w.-]*)(?:@(?P<revision>[\w][\w./-]*))?")
_CACHED = re.compile(r"(?:^|/)models--([\w][\w.-]*?)--([\w][\w.-]*)/snapshots/")
_FILES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".json", ".yaml", ".yml", ".gguf")
_WEIGHTS = ("*.safetensors", "*.bin")
_COMPANIONS = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.bpe", "*.py", "LICENSE*", "README.md")


def from_hub(name: str) -> Path:
    """Return the local folder of a model that is named by its Hugging Face id.

    Args:
        name: `owner/name`, or `owner/name@revision` (a branch, tag or commit). A model in the local cache is taken from
            there without asking the network, so `owner/name` is then the commit that was downloaded last.

    Raises:
        MergeflowError: It is not an id, or the model is neither in the cache nor can it be downloaded.
    """
    found = _ID.fullmatch(name)
    if not found or not is_id(name):
        raise MergeflowError(f"there is no checkpoint at '{name}'. Check the path.")
    try:
        import huggingface_hub as hub
    except ImportError:
        raise MergeflowError(
            f"there is no checkpoint at '{name}'; to read it as a Hugging Face id, install huggingface_hub."
        ) from None
    repo, revision = found.group("repo"), found.group("revision")
    return _cached(hub, repo, revision) or _downloaded(hub, repo, revision)


def fixed_id(name: str) -> str:
    """Return `owner/name@commit` for a model of the cache, so that a recorded recipe reads the same files for ever.

    Anything else, a path of this machine above all, comes back as it is.
    """
    found = _ID.fullmatch(name)
    if not found or Path(name).expanduser().exists():
        return name
    try:
        folder = from_hub(name)
    except MergeflowError:
        return name
    return f"{found.group('repo')}@{folder.name}"


def is_id(name: str) -> bool:
    """Whether a name has the form of a Hugging Face id and is not a path of this machine.

    Example:
        >>> is_id("acme/tiny"), is_id("/models/tiny")
        (True, False)
    """
    # `models/base` with a folder `models` here is a mistyped path: nobody wants it asked of a server.
    return bool(_ID.fullmatch(name)) and not name.endswith(_FILES) and not Path(name).parent.is_dir()


def local_folder(name: str) -> Path | None:
    """Return the folder of a model by its path, or by its id where the local cache has it; the network is not asked.

    Args:
        name: A path, `owner/name` or `owner/name@revision`.
    """
    place = Path(name).expanduser()
    if place.is_dir():
        return place
    if not is_id(name):
        return None
    try:
        import huggingface_hub as hub
    except ImportError:
        return None
    found = _ID.fullmatch(name)
    assert found is not None
    return _cached(hub, found.group("repo"), found.group("revision"))


def cached_id(path: str) -> str | None:
    """Return the id of a model that lies in the local cache, by its path; None for one that lies elsewhere.

    Example:
        >>> cached_id("/home/me/.cache/huggingface/hub/models--acme--tiny/snapshots/c0ffee")
        'acme/tiny'
    """
    found = _CACHED.search(path)
    return "/".join(found.groups()) if found else None


def _cached(hub: Any, repo: str, revision: str | None) -> Path | None:
    try:
        folder = Path(hub.snapshot_download(repo, revision=revision, local_files_only=True))
    except Exception:  # every version of the client has another class for "not in the cache"
        return None
    # A tokenizer alone may have been downloaded, by whatever needed no more.
    return folder if any(path for pattern in _WEIGHTS for path in folder.glob(pattern)) else None


def _downloaded(hub: Any, repo: str, revision: str | None) -> Path:
    try:
        found = hub.model_info(repo, revision=revision, timeout=10)
        files = [file.rfilename for file in found.siblings if "/" not in file.rfilename]
        weights = _WEIGHTS[0] if any(file.endswith(".safetensors") for file in files) else _WEIGHTS[1]
        wanted = [file for file in files if any(fnmatchcase(file, one) for one in (weights, *_COMPANIONS))]
        return Path(hub.snapshot_download(repo, revision=found.sha, allow_patterns=wanted))
    except Exception as error:  # no network, no such model, no licence accepted: the client's own words say which
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].removesuffix(".")[:160]
        raise MergeflowError(
            f"there is no checkpoint at '{repo}': the path does not exist, and as a Hugging Face id it is neither in "
            f"the local cache nor can it be downloaded ({reason}). Check the path, or run `hf download {repo}` with a "
            "network."
        ) from None
