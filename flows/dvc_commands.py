"""Run DVC's commands: list stale stages, record outputs, wait for another DVC, and mend lock files after a kill."""

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import psutil  # type: ignore[import-untyped]  # DVC needs it too

from mergeflow import layout
from mergeflow.errors import MergeflowError, unknown_name
from mergeflow.layout import CODE
from tasks.project.graph import downstream_closure, load_graph, needed_for, removed_items
from tasks.project.recorded import (
    digest_as_dvc,
    is_made,
    listing_file,
    locked_stages,
    md5_of,
    stored_outputs,
    whole_stages,
)
from tasks.project.stage import MAIN, STATE, STUDIES, Stage, covers
from tasks.running.digests import CODE_STAGE, accept, digest_key, strict_digest, write_digests
from tasks.running.runner import has_run, remove_output
from tasks.travel.store import bring, forget_lost

if TYPE_CHECKING:
    from tasks.project.parameters import Params

RUNNING = ".dvc/tmp/rwlock"  # DVC's list of which process reads and writes which paths


def mend_locks(root: Path) -> bool:
    """Mend lock files that a killed DVC has cut off; return whether there were any.

    Each lock file becomes git's last version, or none. Nothing is lost: the stages' own manifests know what has run,
    and the next run records it again. The list of who reads and writes what is removed: it concerns running processes
    only. To be called after DVC has refused to read them: while it holds its lock, nobody else writes.
    """
    names = [file.replace(".yaml", ".lock") for file in (MAIN, STUDIES)]
    damaged = [name for name in names if (root / name).exists() and not is_whole((root / name).read_text("utf-8"))]
    for name in damaged:
        _restore(root, name)
    running = dvc_home(root) / RUNNING
    try:
        json.loads(running.read_text("utf-8") if running.exists() else "{}")
    except ValueError:
        running.unlink()
        return True
    return bool(damaged)


def dvc_home(root: Path) -> Path:
    """Return the folder that has DVC's settings: the project's, or one above it."""
    return next((folder for folder in (root, *root.parents) if (folder / ".dvc").is_dir()), root)


def _restore(root: Path, name: str) -> None:
    command = ["git", "show", f"HEAD:./{name}"]
    shown = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if shown.returncode == 0 and is_whole(shown.stdout):
        (root / name).write_text(shown.stdout, encoding="utf-8")
        outcome = "git's last version is there again"
    else:
        (root / name).unlink()
        outcome = "it is written anew"
    print(f"{name} was cut off when DVC was killed: {outcome}; no results are lost.", file=sys.stderr)


def is_whole(text: str) -> bool:
    """Check whether this is a whole lock file, which DVC can read."""
    return whole_stages(text) is not None


WAIT = 1.0  # seconds between questions
_DVC = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r}); from flows.dvc_process import run; run()"


def dvc(root: Path, *arguments: str) -> str:
    """Run a command of DVC's to its end and return its output."""
    return _run_dvc(root, ["--wait-for-lock", *arguments])


def _run_dvc(root: Path, arguments: list[str]) -> str:
    announced: set[str] = set()
    while True:
        command = [sys.executable, "-c", _DVC, *arguments]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return done.stdout
        text = done.stderr.strip() or done.stdout.strip()
        holders = [(int(pid), words) for pid, words in re.findall(r"\(PID (\d+)\): (.*)", text) if "is busy" in text]
        if any(_is_dvc(pid) for pid, _ in holders):
            _tell(holders, announced)
            time.sleep(WAIT)
        elif "not inside of a DVC repository" in text:
            raise MergeflowError(f"{root} lacks the folder .dvc, as a copy may: call `dvc init` there.")
        elif not mend_locks(root):
            words = " ".join(arguments[arguments.index("--wait-for-lock") + 1 :])
            text = text.partition("\n\nHaving any troubles?")[0]
            raise MergeflowError(f"`dvc {words}` failed: {text or f'it ended with status {done.returncode}'}")


def wait_for_dvc(root: Path, report: Callable[[str], None] = lambda text: print(text, file=sys.stderr)) -> None:
    """Wait until no other DVC makes outputs of the project."""
    announced: set[str] = set()
    while holders := writers(root):
        _tell(holders, announced, report)
        time.sleep(WAIT)


def writers(root: Path) -> list[tuple[int, str]]:
    """Return process and command of each DVC that makes outputs of the project now."""
    path = dvc_home(root) / RUNNING
    try:
        entries = json.loads(path.read_text("utf-8")).get("write", {})
        running = {(int(entry["pid"]), str(entry["cmd"])) for entry in entries.values()}
    except (OSError, ValueError, AttributeError, KeyError, TypeError):  # none has run, or it writes just now
        return []
    return sorted((pid, words) for pid, words in running if _is_dvc(pid))


def _is_dvc(pid: int) -> bool:
    """Whether a process lives and is DVC; the number of one that was killed may be another program's by now."""
    try:
        return any("dvc" in word for word in psutil.Process(pid).cmdline())
    except psutil.Error:
        return False


def _tell(
    holders: list[tuple[int, str]],
    waited_for: set[str],
    report: Callable[[str], None] = lambda text: print(text, file=sys.stderr),
) -> None:
    names = ", ".join(f"`dvc {words.partition(' ')[2]}` (process {pid})" for pid, words in holders)
    if names not in waited_for:
        waited_for.add(names)
        report(f"Waiting for {names}, which is at work in this project.")


def changes(root: Path, stages: dict[str, Stage]) -> dict[str, list[Any]]:
    """Return DVC's status of each stale stage by address, for the code as it is now.

    `dvc status` alone compares with the digests of code that were written last. While another DVC is at work these
    stay as they are: it would take new ones for a change.
    """
    if not writers(root):
        write_digests(root)
    files = {stage.file for stage in stages.values()}
    # It only reads, so it is answered at once, whatever stage another DVC runs.
    status = json.loads(_run_dvc(root, ["ask", "--wait-for-lock", "status", "--json", *sorted(files)]) or "{}")
    return {address: said for address, said in status.items() if address in stages and not stages[address].frozen}


def accept_outputs(root: Path, names: Sequence[str], because: str, who: str = "") -> dict[str, str]:
    """Accept the outputs of stages although their code has changed since they were made.

    Returns:
        The digest of the older code, by what the digest stands under; nothing for a stage whose code did not change.
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
    recorded = locked_stages(root).get(CODE_STAGE, {}).get("outs", [])
    if addresses or md5_of(root / CODE) not in [out["md5"] for out in recorded]:
        dvc(root, "commit", "--force", CODE_STAGE, *addresses)


def push_outputs(root: Path) -> None:
    """Send the pipeline's outputs to DVC's remote; outputs of studies stay on their machine.

    What another store has comes into DVC's cache on the way.
    """
    brought = bring(root, stored_outputs(root), unless_in=remote_address(root))
    for out in brought:
        listing_file(root, out).unlink(missing_ok=True)
    made = [address for address, stage in load_graph(root).items() if set(brought) & set(stage.outs)]
    dvc(root, "commit", "--force", CODE_STAGE, *made)  # dvc.lock of a clone names the code, the cache may lack it
    dvc(root, "push", MAIN)


def remote_address(root: Path) -> str:
    """Return the address of DVC's default remote; an empty one where there is none."""
    try:
        return dvc(root, "config", f"remote.{dvc(root, 'config', 'core.remote').strip()}.url").strip()
    except MergeflowError:
        return ""


def check_remote(root: Path) -> None:
    """Refuse to begin what ends in a push that has no remote to go to."""
    if not remote_address(root):
        raise MergeflowError("--push has nowhere to go: name a remote, `dvc remote add --default NAME ADDRESS`.")


def fetch_output(root: Path, path: Path) -> None:
    """Bring a missing file or folder back from DVC's cache or remote, if DVC tracks it; else do nothing."""
    whole = path.resolve()
    if not whole.is_relative_to(root) or not _is_tracked(root, whole.relative_to(root).as_posix()):
        return
    wanted = whole.relative_to(root).as_posix()
    if bring(root, [wanted]):
        return
    try:
        dvc(root, "checkout", wanted)
    except MergeflowError:  # not in the cache
        dvc(root, "pull", wanted)


def _is_tracked(root: Path, path: str) -> bool:
    outs = [out["path"] for stage in locked_stages(root).values() for out in stage.get("outs", [])]
    folders = [path, *map(str, PurePosixPath(path).parents)]
    return any((root / f"{place}.dvc").exists() for place in folders) or any(covers(out, path) for out in outs)


def remove_stale_outputs(root: Path, report: Callable[[str], object]) -> None:
    """Remove the outputs of stage items that params.yaml no longer has.

    Stages that read the folder above would hash them into dvc.lock, and a clone that pulls does not have them. Those
    that DVC has recorded as they are stay in its cache. It has no others, as after a killed run, and these are moved.
    """
    locked = locked_stages(root)
    # Read before params.yaml: of a task that is being added, the line comes first and the outputs later.
    addresses = has_run(root) | set(locked)
    gone = removed_items(root, addresses)
    left_over = [(out, stage.address) for stage in gone for out in stage.outs if is_made(root / out)]
    cached = [out for out, address in left_over if _is_recorded(root, out, locked.get(address, {}))]
    others = [out for out, _ in left_over if out not in cached]
    said = []
    if cached:
        for out in cached:
            remove_output(root, out)
        said.append(
            f"Removed outputs of what params.yaml no longer has: {', '.join(cached)}. DVC's cache keeps them: where a "
            "name was mistyped, correct it and call `dvc checkout`."
        )
    if others:
        aside = next(folder for number in count(1) if not (folder := root / STATE / "removed" / str(number)).exists())
        for out in others:
            (aside / out).parent.mkdir(parents=True, exist_ok=True)
            shutil.move(root / out, aside / out)
        said.append(
            f"Outputs of what params.yaml no longer has were moved to {aside.relative_to(root)}, because DVC has not "
            f"recorded them: {', '.join(others)}. Where a name was mistyped, correct it and move them back; else "
            "remove that folder."
        )
    if said:
        report("\n".join(said))


def _is_recorded(root: Path, out: str, entry: Mapping[str, Any]) -> bool:
    """Whether an output is, byte for byte, the one that DVC's lock has put into the cache, or in a store alone."""
    if not (root / out).exists():
        return True
    recorded = [out_entry.get("md5") for out_entry in entry.get("outs", []) if out_entry["path"] == out]
    return bool(recorded) and recorded == [digest_as_dvc(root / out)]


REGISTER = "register"


def stages_to_run(root: Path, stages: dict[str, Stage], targets: Iterable[str] | None = None) -> list[str]:
    """List the addresses to run, in running order: stale stages and those that depend on them.

    The stage `register` is among them, although its files are up to date, where the registry lacks their version.

    Args:
        targets: only these stages and what they need; `finetune` names all its items, `finetune@digits` one. None: all.
    """
    todo = downstream_closure(set(changes(root, stages)), stages)
    if targets is not None:
        wanted = needed_for(targets, stages)
        todo = [address for address in todo if address in wanted]
    lost = REGISTER not in todo and are_results_wanted(targets, stages) and registration_lost(root)
    return [*todo, REGISTER] if lost else todo


def plan_run(
    root: Path,
    push: bool,
    targets: list[str] | None,
    say: Callable[[str], object],
    warn: Callable[[str], None] = lambda text: print(text, file=sys.stderr),
) -> tuple["Params", dict[str, Stage], list[str]]:
    """Return the project's choices, its stages and the addresses to run, once no other DVC is at work."""
    from tasks.project.validate_params import BASE, check_base, validate_params  # here: `results` needs none of it

    params = validate_params(root)  # first: a task whose name is mistyped takes the outputs of the right one away
    if push:
        check_remote(root)
    wait_for_dvc(root, warn)
    remove_stale_outputs(root, say)
    if lost := forget_lost(root):
        warn(f"no longer in the store, so made again: {', '.join(lost)}")
    stages = load_graph(root, studies=targets is not None)
    todo = stages_to_run(root, stages, targets)
    if BASE in todo:
        check_base(root, params)
    return params, stages, todo


def are_results_wanted(targets: Iterable[str] | None, stages: dict[str, Stage]) -> bool:
    """Check whether a run of these targets registers its results; None means all of dvc.yaml."""
    return targets is None or REGISTER in needed_for(targets, stages)


def registration_lost(root: Path) -> bool:
    """Check whether the configured registry lacks the version that this project registered."""
    if not (root / layout.REGISTRATION).exists():
        return False
    from registry.versions import is_registered

    return not is_registered(root)
