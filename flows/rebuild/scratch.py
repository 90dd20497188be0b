"""A scratch project in which a version's experts are merged again, from files proven by their digests."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mergeflow import layout
from mergeflow.checkpoints import matches, open_checkpoint
from mergeflow.data import digest_of_split, load_manifest, load_split
from mergeflow.errors import MergeflowError
from registry.lineage import environment, git_commit
from registry.store import Store
from registry.versions import ModelVersion, download_model, head_files
from tasks.project.files import read_yaml
from tasks.project.graph import find_stage, load_graph
from tasks.project.parameters import load_params
from tasks.project.stage import STATE, Stage, StageIO, covers
from tasks.running.runner import open_stage, run_stage
from tasks.running.scratch_project import link, write_params
from tasks.sweep import sweep_near
from tasks.travel.store import bring


@dataclass(frozen=True)
class Ancestor:
    """A tracked folder, or some files of it, and how to know it when it is found.

    Attributes:
        files: names of the files needed, as far as they are there; none means all.
        is_it: whether a folder holds the very content.
    """

    what: str
    path: str
    dvc: str | None
    files: tuple[str, ...]
    is_it: Callable[[Path], bool]


def base_of(origin: dict[str, Any]) -> Ancestor:
    """Return the base of a version's origin, with the heads of its tasks."""
    base, heads = origin["base"], [layout.head(task).removeprefix(f"{layout.BASE}/") for task in origin["experts"]]
    return Ancestor("the base", base["path"], base["dvc"], (layout.MODEL_FILE, *heads), _weights(base["fingerprint"]))


def expert_of(origin: dict[str, Any], task: str) -> Ancestor:
    facts = origin["experts"][task]
    is_it = _weights(facts["fingerprint"])
    return Ancestor(f"the expert '{task}'", facts["path"], facts["dvc"], (layout.MODEL_FILE,), is_it)


def split_of(origin: dict[str, Any], task: str, split: str) -> Ancestor:
    """Return one split of one task's data of a version's origin."""
    facts = origin["experts"][task]["splits"][split]

    def is_it(folder: Path) -> bool:
        load_split(folder, split, verify=True)
        return digest_of_split(load_manifest(folder)["splits"][split]) == facts["sha256"]

    return Ancestor(f"the {split} split of '{task}'", facts["path"], facts["dvc"], (), is_it)


def gather(root: Path, wanted: Iterable[Ancestor], target: Path) -> dict[str, str]:
    """Link the ancestors below `target` at their paths, each proven by its digest.

    Returns:
        Path to where it was found: "the project", "DVC's cache" or "DVC's remote".
    """
    places: dict[str, str] = {}
    absent: list[Ancestor] = []
    for ancestor in wanted:
        bring(root, [ancestor.path])
        if _proven(ancestor, root / ancestor.path):
            folder = root / ancestor.path
            files = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
            names = [name for name in ancestor.files if name in files] or files
            for name in names:
                link(folder / name, target / ancestor.path / name)
            places[ancestor.path] = "the project"
        else:
            absent.append(ancestor)
    tracked = [ancestor for ancestor in absent if ancestor.dvc is not None]
    if tracked:
        places |= _from_dvc(root, tracked, target)
    lost = [ancestor for ancestor in absent if ancestor.path not in places]
    if lost:
        lines = [f"  {ancestor.what} ({ancestor.path}, DVC {ancestor.dvc or 'unknown'})" for ancestor in lost]
        raise MergeflowError(
            "\n".join(
                [
                    "these ancestors are neither in the project nor in DVC's cache or remote, or their content is not "
                    "what was recorded:",
                    *lines,
                    "Bring them back (`dvc remote add -d`, `dvc pull`), or make them again from data.",
                ]
            )
        )
    return places


def _weights(expected: str) -> Callable[[Path], bool]:
    def is_it(folder: Path) -> bool:
        with open_checkpoint(folder / layout.MODEL_FILE) as state:
            return matches(state, expected)

    return is_it


def _proven(ancestor: Ancestor, folder: Path) -> bool:
    try:
        return ancestor.is_it(folder)
    except (MergeflowError, OSError):  # missing or damaged is as good as another content
        return False


def _from_dvc(root: Path, wanted: list[Ancestor], target: Path) -> dict[str, str]:
    """Link what DVC's cache holds, after fetching what only its remote holds; older versions' files included.

    DVC's commands fetch what dvc.lock or a commit names. A version's own hashes may stand in neither, so this asks
    DVC's cache and remote for objects by hash.
    """
    from dvc.repo import Repo

    places: dict[str, str] = {}
    with Repo(str(root)) as repo:
        cache = repo.cache.local
        for ancestor in wanted:
            assert ancestor.dvc is not None
            fetched = _fetch(repo, [ancestor.dvc])
            folder = Path(cache.oid_to_path(ancestor.dvc))
            entries = json.loads(folder.read_text()) if folder.exists() else []
            chosen = {
                row["relpath"]: row["md5"] for row in entries if not ancestor.files or row["relpath"] in ancestor.files
            }
            fetched |= _fetch(repo, list(chosen.values()))
            for name, md5 in chosen.items():
                if (path := Path(cache.oid_to_path(md5))).exists():
                    link(path, target / ancestor.path / name)
            if _proven(ancestor, target / ancestor.path):
                places[ancestor.path] = "DVC's remote" if fetched else "DVC's cache"
    return places


def _fetch(repo: Any, hashes: list[str]) -> bool:
    """Fetch objects that the cache lacks from the default remote; return whether there was anything to fetch."""
    from dvc.exceptions import DvcException
    from dvc_data.hashfile.hash_info import HashInfo

    lacking = [digest for digest in hashes if not Path(repo.cache.local.oid_to_path(digest)).exists()]
    if not lacking:
        return False
    try:
        repo.cloud.pull([HashInfo("md5", digest) for digest in lacking])
    except DvcException:  # no remote, or none that answers: the caller names what is missing
        return False
    return True


Grids = Mapping[str, Mapping[str, list[Any]]]


def lay_out(root: Path, store: Store, version: ModelVersion, origin: dict[str, Any], scratch: Path) -> None:
    """Put a version's base, heads, experts and validation splits into the scratch project, proven by their digests."""
    tasks = origin["experts"]
    wanted = [base_of(origin)]
    wanted += [
        ancestor for task in tasks for ancestor in (expert_of(origin, task), split_of(origin, task, "validation"))
    ]
    gather(root, wanted, scratch)
    heads = head_files(download_model(store, version, scratch / "registered"))
    for task, expert in tasks.items():
        link(heads[task], scratch / expert["path"] / layout.HEAD_FILE)
        link(scratch / layout.split("validation", task) / layout.MANIFEST_FILE, scratch / layout.manifest(task))
        summary = {key: expert[key] for key in ("fingerprint", "settings", "validation_accuracy")}
        (scratch / expert["path"] / "training.json").write_text(json.dumps({"task": task, **summary}))


def note_rebuild(
    root: Path,
    origin: dict[str, Any],
    kind: str,
    version: ModelVersion,
    task: str,
    report: Callable[[str], None] = lambda text: None,
) -> None:
    """Record in a provenance document which version, command and task the new model comes from.

    Args:
        report: told of each task that the version has unlearned: the new merge does not subtract it.
    """
    if kind != "unlearn":
        for other, facts in origin.pop("unlearned", {}).items():
            report(
                f"version {version.version} has unlearned '{other}' (λ = {facts['weight']:g}); the new one leaves it "
                "out alone. To subtract it again, unlearn it from a version that has it"
            )
    origin |= {"kind": kind, "parent": {"model": str(version.name), "version": str(version.version), "task": task}}
    origin |= {"git_commit": git_commit(root), "environment": environment()}


def choose(
    root: Path,
    scratch: Path,
    origin: Mapping[str, Any],
    sweep: Grids,
    report: Callable[[str], None],
    near: Mapping[str, Any] | None = None,
) -> None:
    """Score candidates on validation and write the chosen merges, by the pipeline's own stages.

    Args:
        root: the project folder, whose params.yaml holds all but the tasks, the model and the sweep.
        near: a recipe; then only its method is tried, by a climb from its arguments.
    """
    values = read_yaml(root / "params.yaml")
    sources = {task: expert["source"] for task, expert in origin["experts"].items()}
    grids = {name: dict(grid) for name, grid in sweep.items() if near is None or name == near["method"]}
    write_params(scratch, {**values, "tasks": sources, "model": origin["params"]["model"], "sweep": grids})
    stages = load_graph(scratch)
    for method in grids:
        report(f"scoring candidates of {method}")
        stage = find_stage(stages, "sweep", method)
        if near is None:
            run_stage(scratch, stage)
        else:
            sweep_near(open_stage(scratch, stage)[0], near["args"])
    report("choosing")
    run_stage(scratch, find_stage(stages, "select", None))


def register_view(scratch: Path) -> StageIO:
    """Return the inputs of the stage `register` in the scratch project."""
    params = load_params(scratch / "params.yaml")
    stage = find_stage(load_graph(scratch), "register", None)
    return StageIO(stage, scratch, scratch / STATE / "scratch" / "register", params)


def stage_making(path: str, stages: Mapping[str, Stage]) -> Stage:
    return next(stage for stage in stages.values() if any(covers(out, path) for out in stage.outs))
