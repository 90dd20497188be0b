"""A merged folder, sent to the Hugging Face Hub: the files that the merge made, unchanged, and no others."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mergeflow.checkpoints.fingerprint import matches
from mergeflow.checkpoints.formats import open_checkpoint, read_json
from mergeflow.checkpoints.lora import ADAPTER_WEIGHTS
from mergeflow.checkpoints.reader import open_safetensors
from mergeflow.errors import MergeflowError
from mergeflow.merging.files.place import RECORD
from mergeflow.merging.preflight import front_matter

_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")


@dataclass(frozen=True)
class Push:
    """What is sent.

    Attributes:
        repo: The model's id.
        files: Names of the files, with their sizes in bytes.
        url: Of the commit; None for a dry run.
        warnings: What to know of before the model is given away.
    """

    repo: str
    files: tuple[tuple[str, int], ...]
    url: str | None
    warnings: tuple[str, ...] = ()


def push(
    folder: str | Path, repo: str, *, private: bool = False, dry_run: bool = False, say: Callable[[str], None] = print
) -> Push:
    """Send a folder that a merge made to the Hub, as one commit.

    Args:
        folder: The folder; the files that its record lists are sent, after their weights were compared with it.
        repo: `owner/name`; the repository is made where it is not there.
        private: Whether it is made private.
        dry_run: Check all and send nothing; needs neither a network nor an account.
        say: Takes a line about what is done.

    Raises:
        MergeflowError: No folder of a merge, weights that are not the record's, no `huggingface_hub`, nobody logged in,
            or the Hub's refusal.
    """
    place = Path(folder).expanduser()
    if not _ID.fullmatch(repo):
        raise MergeflowError(f"'{repo}' is not the id of a model on the Hub: expected owner/name.")
    files = _files(place)
    _check_card(place)
    say(f"comparing the weights of '{place}' with its record")
    _check_weights(place)
    licence = front_matter(place).get("license")
    warnings = () if licence else ("the card names no licence: others may not use the model; write one into README.md",)
    if dry_run:
        return Push(repo, files, None, warnings)
    hub = _hub()
    try:
        hub.whoami()
    except Exception as error:  # every version of the client has another class for "nobody is logged in"
        raise MergeflowError(f"nobody is logged in to the Hub ({_told(error)}): run `hf auth login`.") from None
    say(f"sending {len(files)} files, {sum(size for _, size in files) / 1e9:.2f} GB, to {repo}")
    try:
        hub.create_repo(repo, private=private, exist_ok=True)
        made = hub.upload_folder(
            repo_id=repo,
            folder_path=place,
            allow_patterns=[name for name, _ in files],
            commit_message="A merge made by mergeflow",
        )
    except Exception as error:  # no right to write, no network, a full quota: the client's own words say which
        raise MergeflowError(f"the Hub did not take '{place}' as {repo}: {_told(error)}.") from None
    return Push(repo, files, str(getattr(made, "commit_url", made)), warnings)


def _files(place: Path) -> tuple[tuple[str, int], ...]:
    """Return the files of a merge's folder; what somebody put beside them stays here."""
    if not (place / RECORD).is_file():
        raise MergeflowError(f"'{place}' is not a folder that a merge made: it has no {RECORD}. Merge into a folder.")
    listed = [place / name for name in read_json(place / RECORD).get("files", [])]
    missing = [path.name for path in listed if not path.exists()]
    if missing:
        raise MergeflowError(f"'{place}' lacks {missing}, which its {RECORD} lists: merge again.")
    found = [file for path in listed for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    return tuple((str(file.relative_to(place)), file.stat().st_size) for file in sorted(found) if file.is_file())


def _check_card(place: Path) -> None:
    if not front_matter(place):
        raise MergeflowError(f"'{place / 'README.md'}' has no front matter, which the Hub reads: merge again.")


def _check_weights(place: Path) -> None:
    recorded = str(read_json(place / RECORD).get("fingerprint", ""))
    factors = place / ADAPTER_WEIGHTS  # an adapter opens as the task vector that it makes: its record is of the file
    with open_safetensors(factors) if factors.exists() else open_checkpoint(place) as state:
        if not matches(state, recorded):
            raise MergeflowError(f"the weights of '{place}' are not those that its {RECORD} records: merge again.")


def _hub() -> Any:
    try:
        from huggingface_hub import HfApi
    except ImportError:
        raise MergeflowError("to push, install huggingface_hub (the extra `hub`).") from None
    return HfApi()


def _told(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__).removesuffix(".")[:200]
