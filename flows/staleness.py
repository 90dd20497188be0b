"""DVC's answers, asked as a command: what is stale, and recording what a run made."""

import json
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from flows.dvc_process import ask_dvc, dvc, writers
from mergeflow.errors import MergeflowError, unknown_name
from mergeflow.layout import CODE
from tasks.project.accepted import accept
from tasks.project.digests import CODE_STAGE, digest_key, strict_digest, write_digests
from tasks.project.dvc_lock import locked_stages, md5_of
from tasks.project.graph import load_graph
from tasks.project.stage import MAIN, Stage, covers


def stale_stages(root: Path, stages: dict[str, Stage]) -> set[str]:
    """Return the addresses that DVC finds changed, missing or never run, for the code as it is now."""
    return set(changes(root, stages))


def changes(root: Path, stages: dict[str, Stage]) -> dict[str, list[Any]]:
    """Return what DVC's status says of each stale stage by address, for the code as it is now.

    `dvc status` alone compares with the digests of code that were written last. While another DVC is at work these
    stay as they are: it would take new ones for a change.
    """
    if not writers(root):
        write_digests(root)
    files = {stage.file for stage in stages.values()}
    status = json.loads(ask_dvc(root, "status", "--json", *sorted(files)) or "{}")
    return {address: said for address, said in status.items() if address in stages and not stages[address].frozen}


def accept_outputs(root: Path, names: Sequence[str], because: str, who: str = "") -> dict[str, str]:
    """Let the outputs of stages count, although their code has changed since they were made.

    Args:
        root: the project folder.
        names: stages, or items of stages such as `sweep@ties`.
        because: why, for the lineage.
        who: who decided; by default the user of this machine.

    Returns:
        The digest of the older code, by what the digest stands under; nothing for a stage whose code did not change.

    Raises:
        MergeflowError: there is no such stage, it never ran, or its items were made by different code.
    """
    stages = load_graph(root, studies=True)
    codes: dict[str, tuple[str, str]] = {}
    for name in names:
        chosen = [stage for stage in stages.values() if name in (stage.name, stage.address)]
        if not chosen:
            raise unknown_name("stage", name, {stage.name for stage in stages.values()})
        for stage in chosen:
            key, older = digest_key(stage), _recorded_code(root, stage)
            if codes.setdefault(key, (strict_digest(root, stage), older))[1] != older:
                raise MergeflowError(f"the items of '{key}' were made by different code: run them again.")
    changed = {key: code for key, code in codes.items() if code[0] != code[1]}
    if changed:
        accept(root, changed, because, who)
    return {key: older for key, (_, older) in changed.items()}


def _recorded_code(root: Path, stage: Stage) -> str:
    address = stage.address.rpartition(":")[2]
    recorded = locked_stages(root, stage.file).get(address, {}).get("params", {})
    for file, digests in recorded.items():
        if file.endswith(CODE):
            return str(digests[digest_key(stage)])
    raise MergeflowError(f"{stage.address} has no recorded outputs, so there is nothing to accept: run it.")


def record_outputs(root: Path, addresses: list[str]) -> None:
    """Put the outputs of finished stages into DVC's cache and dvc.lock, and the digests of code with them."""
    write_digests(root)
    if addresses or not _code_is_recorded(root):
        dvc(root, "commit", "--force", CODE_STAGE, *addresses)


def _code_is_recorded(root: Path) -> bool:
    known = locked_stages(root).get(CODE_STAGE, {})
    return md5_of(root / CODE) in [out["md5"] for out in known.get("outs", [])]


def push_outputs(root: Path) -> None:
    """Send the pipeline's outputs to DVC's remote; the studies' stay with who ran them."""
    dvc(root, "commit", "--force", CODE_STAGE)  # dvc.lock of a clone names it, the cache may lack it
    dvc(root, "push", MAIN)


def fetch_output(root: Path, path: Path) -> None:
    """Bring a missing file or folder back from DVC's cache or remote, if DVC tracks it; else do nothing."""
    whole = path.resolve()
    if not whole.is_relative_to(root) or not _is_tracked(root, whole.relative_to(root).as_posix()):
        return
    wanted = whole.relative_to(root).as_posix()
    try:
        dvc(root, "checkout", wanted)
    except MergeflowError:  # not in the cache
        dvc(root, "pull", wanted)


def _is_tracked(root: Path, path: str) -> bool:
    outs = [out["path"] for stage in locked_stages(root).values() for out in stage.get("outs", [])]
    folders = [path, *map(str, PurePosixPath(path).parents)]
    return any((root / f"{place}.dvc").exists() for place in folders) or any(covers(out, path) for out in outs)
