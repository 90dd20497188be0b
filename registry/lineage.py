"""Where a version comes from: described when it is registered, read back from MLflow as plain values.

The description is a JSON document kept beside the recipe, so that nothing in it depends on runs that may be deleted.
"""

import hashlib
import json
import platform
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import yaml
from mlflow.entities import Run
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

import mergeflow
from mergeflow import layout
from mergeflow.checkpoints.fingerprint import short
from mergeflow.data import digest_of_split, load_manifest
from mergeflow.errors import MergeflowError
from mergeflow.yaml_text import in_words
from registry.artifacts import fetched
from registry.logging import ChildRecord, DatasetRecord, PipelineRecord
from registry.store import Store
from registry.versions import CHAMPION, chosen_version, describe, read_documents
from tasks.project.recorded import digest_as_dvc, locked_stages
from tasks.project.stage import StageIO

# Whatever touches a number on its way from pixels or text to merged weights.
_PACKAGES = (
    *("mergeflow", "torch", "torchvision", "open_clip_torch", "timm", "transformers", "tokenizers"),
    *("safetensors", "numpy", "scipy", "pillow"),
)


def environment() -> dict[str, Any]:
    """Describe the library's code, interpreter, operating system, processor, accelerator and packages, as JSON values.

    Example:
        >>> sorted(environment())
        ['accelerator', 'code', 'instructions', 'packages', 'processor', 'python', 'system']
    """
    return {
        "code": _code(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "packages": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
    }


def environment_changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Describe the differences between two environments.

    Example:
        >>> environment_changes({"python": "3.11", "packages": {"torch": "2.9"}}, {"python": "3.11", "packages": {}})
        ['torch: 2.9 then, missing now']
    """
    old, new = _flat(then), _flat(now)
    return [
        f"{key}: {old.get(key) or 'missing'} then, {new.get(key) or 'missing'} now"
        for key in sorted({*old, *new})
        if old.get(key) != new.get(key)
    ]


def _flat(environment: Mapping[str, Any]) -> dict[str, Any]:
    return {**{key: value for key, value in environment.items() if key != "packages"}, **environment["packages"]}


def _code() -> str:
    """Return a digest of the library's source: its version number does not change with every change of a formula."""
    folder, whole = Path(mergeflow.__file__).parent, hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        whole.update(f"{path.relative_to(folder).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return whole.hexdigest()[:12]


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    """Return the processor's model, which decides the kernels that are chosen; platform.processor() is often empty."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


_CODE = ("mergeflow", "tasks", "registry", "flows", "suites", "params.yaml", "dvc.yaml")


def pipeline_record(io: StageIO, selection: dict[str, Any], origin: Mapping[str, Any]) -> PipelineRecord:
    """Return the pipeline's run: parameters, test figures, data sets, DVC's hashes, figures and results."""
    test = read_json(io, layout.TEST)
    metrics = {f"test/{row['name']}/{key}": row[key] for row in test["rows"] for key in ("mean", "normalised")}
    fine_tuning = io.section("finetune").model_dump()
    params = {f"finetune.{key}": value for key, value in fine_tuning.items()}
    params |= {f"model.{key}": value for key, value in io.section("model").model_dump().items()}
    files = sorted(io.dep(layout.FIGURES).glob("*.svg"))
    return PipelineRecord(
        name="pipeline",
        fingerprint=hashlib.sha256(json.dumps([selection, test], sort_keys=True).encode()).hexdigest(),
        params={**params, "seed": io.section("seed"), "tasks": ",".join(selection["tasks"])},
        metrics=metrics,
        tags={"git_commit": origin["git_commit"], "winner": selection["winner"]},
        dvc=dvc_hashes(io.root),
        datasets=dataset_records(origin),
        artifacts={
            "figures": tuple(map(str, files)),
            "series": tuple(str(path) for path in sorted(io.dep(layout.SERIES).glob("*.json"))),
            "results": tuple(str(io.dep(path)) for path in (layout.SELECTION, layout.TEST, layout.GEOMETRY)),
        },
    )


def dataset_records(origin: Mapping[str, Any]) -> tuple[DatasetRecord, ...]:
    """Return the splits that a provenance document names."""
    splits = [(task, *split) for task, expert in origin["experts"].items() for split in expert["splits"].items()]
    return tuple(
        DatasetRecord(
            task=task,
            split=split,
            digest=facts["sha256"],
            path=facts["path"],
            counts={"examples": facts["examples"]},
        )
        for task, split, facts in splits
    )


def child_records(io: StageIO, selection: dict[str, Any]) -> Iterator[ChildRecord]:
    """Yield the run of each expert and of each method."""
    test = {row["name"]: row for row in read_json(io, layout.TEST)["rows"]}
    for task in selection["tasks"]:
        yield expert_record(io, task, {"test/accuracy": test["individual"]["accuracy"][task]})
    for method, chosen in selection["methods"].items():
        figures = {f"test/{key}": test[method][key] for key in ("mean", "normalised")}
        figures |= {f"test/accuracy/{task}": value for task, value in test[method]["accuracy"].items()}
        yield method_record(io, method, chosen, figures)


def expert_record(io: StageIO, task: str, metrics: Mapping[str, float]) -> ChildRecord:
    """Return the run of one expert: its settings, its curves and the metrics given."""
    summary = read_json(io, layout.expert_training(task))
    curves = ("loss", "gradient_norm", "distance", "validation_accuracy")
    return ChildRecord(
        kind="expert",
        name=task,
        params={"task": task, "fingerprint": summary["fingerprint"], **summary["settings"]},
        metrics={**metrics, **_seconds(io, f"finetune@{task}")},
        steps=tuple((key, row["steps"], row[key]) for row in summary["epochs"] for key in curves if key in row),
    )


def method_record(io: StageIO, method: str, chosen: Mapping[str, Any], metrics: Mapping[str, float]) -> ChildRecord:
    """Return the run of one method's sweep: the choice, every candidate's score and the metrics given."""
    sweep = read_json(io, layout.sweep(method))
    validation = {f"validation/{key}": chosen["validation"][key] for key in ("mean", "normalised")}
    return ChildRecord(
        kind="method",
        name=method,
        params={"fingerprint": chosen["fingerprint"], "candidates": chosen["candidates"], **chosen["args"]},
        metrics={**validation, **metrics, **_seconds(io, f"sweep@{method}")},
        steps=tuple(
            ("validation/candidate/normalised", number, row["normalised"])
            for number, row in enumerate(sweep["candidates"])
        ),
        artifacts={"sweep": (str(io.dep(layout.sweep(method))),)},
    )


def _seconds(io: StageIO, address: str) -> dict[str, float]:
    cost = io.cost(address)
    return {"seconds": cost["seconds"]} if cost else {}


def read_json(io: StageIO, path: str) -> dict[str, Any]:
    """Return the content of a declared JSON file."""
    value: dict[str, Any] = json.loads(io.dep(path).read_text())
    return value


def dvc_hashes(root: Path) -> dict[str, str]:
    """Read DVC's hash of every output from dvc.lock; the flow records them before this stage runs."""
    outs = (out for stage in locked_stages(root).values() for out in stage.get("outs", []))
    return {out["path"]: out["md5"] for out in outs if "md5" in out}


def git_commit(root: Path) -> str:
    """Read the commit that is checked out, marked where the project's code or parameters differ from it.

    Where there is none: why.
    """
    commit = _git(root, "rev-parse", "--verify", "--quiet", "HEAD").strip()
    if not commit:
        repository = _git(root, "rev-parse", "--git-dir").strip()
        return f"none ({'made before the first commit' if repository else 'in no git repository'})"
    changes = _git(root, "status", "--porcelain", "--untracked-files=no", "--", *_CODE)
    return f"{commit} with local changes" if changes.strip() else commit


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False).stdout


PROVENANCE = "provenance"
SECTIONS = ("model", "finetune", "seed")


def describe_origin(io: StageIO, selection: Mapping[str, Any]) -> dict[str, Any]:
    """Write the document of a merge that the stage `select` made.

    Returns:
        `base`, `experts` by task, `params`, `git_commit`, `environment`. A path comes with DVC's hash where dvc.lock
        has one, and with a digest of mergeflow's own that proves the content wherever it is found.
    """
    hashes = dvc_hashes(io.root)
    commit = git_commit(io.root)
    recipe = selection["methods"][selection["winner"]]["recipe"]
    return {
        "kind": "pipeline",
        "base": {
            "path": layout.BASE,
            "dvc": _proven(io, layout.BASE, hashes),
            "fingerprint": recipe["base_fingerprint"],
        },
        "experts": {task: describe_expert(io, task, hashes, commit) for task in selection["tasks"]},
        "params": {key: _plain(io.section(key)) for key in SECTIONS},
        "git_commit": commit,
        "accepted": accepted(io.root),
        "environment": environment(),
    }


def accepted(root: Path) -> list[dict[str, str]]:
    """List the stages whose outputs of older code a project accepts now, with who decided so and why."""
    path, codes = root / layout.ACCEPTED, root / layout.CODE
    entries = yaml.safe_load(path.read_text("utf-8")) if path.exists() else None
    digests = yaml.safe_load(codes.read_text("utf-8")) if codes.exists() else {}
    return [entry for entry in entries or [] if _lookup(digests, entry["stage"]) == entry["outputs_of"]]


def _lookup(digests: Any, key: str) -> Any:
    name, _, item = key.partition(".")
    return digests.get(name, {}).get(item) if item else digests.get(name)


def describe_expert(io: StageIO, task: str, hashes: Mapping[str, str], commit: str) -> dict[str, Any]:
    """Return one expert's part of the document: weights, settings, seed, run, machine, and data."""
    summary = read_json(io, layout.expert_training(task))
    manifest_path = layout.manifest_folder(task)
    manifest = load_manifest(io.dep(manifest_path))
    splits = {
        split: {
            "path": layout.split(split, task),
            "sha256": digest_of_split(facts),
            "examples": facts["count"],
            "dvc": _proven(io, layout.split(split, task), hashes),
        }
        for split, facts in manifest["splits"].items()
    }
    return {
        "path": layout.expert(task),
        "dvc": _proven(io, layout.expert(task), hashes),
        "fingerprint": summary["fingerprint"],
        "validation_accuracy": summary["validation_accuracy"],
        "settings": summary["settings"],
        "seed": io.section("seed"),
        "run": None,
        "host": io.cost(f"finetune@{task}").get("host"),
        "git_commit": commit,
        "source": manifest.get("source"),
        "manifest": {
            "path": manifest_path,
            "sha256": hashlib.sha256(io.dep(f"{manifest_path}/manifest.json").read_bytes()).hexdigest(),
            "dvc": _proven(io, manifest_path, hashes),
        },
        "splits": splits,
    }


def _proven(io: StageIO, path: str, hashes: Mapping[str, str]) -> str | None:
    """Return DVC's hash of an ancestor, which its bytes have, where they are here."""
    recorded = hashes.get(path)
    if recorded is not None and (io.root / path).exists():
        md5 = digest_as_dvc(io.root / path)
        if md5 != recorded:
            raise MergeflowError(
                f"{path} is not what dvc.lock has recorded: MD5 {md5}, recorded {recorded}. A version merged from it "
                "could not be made again. Remove it, and `mergeflow run` makes it again; or bring it back with "
                "`dvc checkout`."
            )
    return recorded


def _plain(value: Any) -> Any:
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else value


@dataclass(frozen=True)
class Node:
    """One ancestor, with its own ancestors."""

    text: str
    children: list["Node"] = field(default_factory=list)


def lineage(store: Store, name: str, which: str | int = CHAMPION) -> dict[str, Any]:
    """Read a version's ancestors as a tree of JSON values.

    Returns:
        `model`, `version`, `aliases`, `fingerprint`, `created`; `kind` (pipeline, unmerge, unlearn or add-task) and
        `parent`; `recipe`; `base`; `experts`, each with task, run, regime, seed, settings, fingerprint, DVC hash,
        manifest and data splits with their digests; `run` (id, parameters); `git_commit`; `accepted`: stages whose
        outputs are of older code, with who accepted them and why; `environment`; `requirements`;
        `missing`: what could not be found, in words.
    """
    version, aliases = chosen_version(store, name, which)
    described = describe(version, aliases)
    missing: list[str] = []
    recipe, origin = _documents(store, version, missing)
    ancestors = {**origin.get("experts", {}), **origin.get("unlearned", {})}
    experts = [_expert(store, task, facts, missing) for task, facts in sorted(ancestors.items())]
    run = None if described.run_id is None else _find_run(store, described.run_id)
    if run is None:
        unknown = "the run that made it: the version was registered without one"
        missing.append(unknown if described.run_id is None else f"the run {described.run_id} that made it")
    return {
        "model": name,
        "version": described.version,
        "aliases": list(described.aliases),
        "fingerprint": described.fingerprint,
        "created": described.created,
        "kind": origin.get("kind"),
        "parent": origin.get("parent"),
        "recipe": recipe or None,
        "base": origin.get("base"),
        "experts": experts,
        "run": run
        and {
            "id": run.info.run_id,
            "params": {key: value for key, value in run.data.params.items() if not key.startswith("dvc/")},
        },
        "git_commit": origin.get("git_commit"),
        "accepted": origin.get("accepted", []),
        "environment": origin.get("environment"),
        "requirements": _requirements(store, str(version.source), missing),
        "missing": missing,
    }


def lineage_nodes(tree: dict[str, Any]) -> Node:
    """Turn what `lineage` returns into nested texts, for a terminal and for a picture."""
    aliases = "".join(f" @{alias}" for alias in tree["aliases"])
    top = Node(f"{tree['model']} version {tree['version']}{aliases}, weights {_short(tree['fingerprint'])}")
    parent = tree["parent"]
    if parent:
        top.children.append(Node(f"{tree['kind']} of {parent['task']}, from version {parent['version']}"))
    if tree["recipe"]:
        weights = {f"weight of {task}": weight for task, weight in tree["recipe"].get("weights", {}).items()}
        given = {**tree["recipe"].get("args", {}), **weights}
        recipe = Node(f"recipe {tree['recipe'].get('method', '')}: {in_words(given)}".rstrip(": "))
        if tree["base"]:
            recipe.children.append(Node(_tracked(f"base, weights {_short(tree['base']['fingerprint'])}", tree["base"])))
        recipe.children.extend(_expert_node(expert) for expert in tree["experts"])
        top.children.append(recipe)
    if tree["run"]:
        top.children.append(Node(f"run {_short(tree['run']['id'])}"))
    if tree["git_commit"]:
        commit, _, changes = tree["git_commit"].partition(" ")
        top.children.append(Node(f"git commit {_short(commit)} {changes}".rstrip()))
    for entry in tree.get("accepted", []):
        top.children.append(Node(f"{entry['stage']} is of older code, accepted by {entry['who']}: {entry['because']}"))
    if tree["environment"]:
        top.children.append(Node(f"environment {_environment_text(tree['environment'])}"))
    top.children.extend(Node(f"missing: {text}") for text in tree["missing"])
    return top


def tree_lines(tree: dict[str, Any]) -> Iterator[str]:
    """Yield what `lineage` returns as indented lines for a terminal.

    Example:
        >>> empty = {"model": "m", "version": "1", "aliases": ["champion"], "fingerprint": "ab12", "recipe": None,
        ...          "parent": None, "base": None, "run": None, "experts": [], "git_commit": None,
        ...          "environment": None, "missing": ["no run"]}
        >>> print("\\n".join(tree_lines(empty)))
        m version 1 @champion, weights ab12
        └─ missing: no run
    """
    top = lineage_nodes(tree)
    yield top.text
    yield from _lines(top.children, "")


def _lines(nodes: list[Node], indent: str) -> Iterator[str]:
    for node in nodes:
        last = node is nodes[-1]
        yield f"{indent}{'└─' if last else '├─'} {node.text}"
        yield from _lines(node.children, indent + ("   " if last else "│  "))


def _expert_node(expert: dict[str, Any]) -> Node:
    words = [f"expert {expert['task']}, {expert['regime']}, seed {expert['seed']}"]
    words += [f"weights {_short(expert['fingerprint'])}", f"run {_short(expert['run'])}"]
    manifest = expert["manifest"]
    source = Node(_tracked(f"data {expert['source']}, manifest {_short(manifest['sha256'])}", manifest))
    for split in expert["data"]:
        text = f"{split['split']}, {split['examples']} examples, sha256 {_short(split['sha256'])}"
        source.children.append(Node(_tracked(text, split)))
    return Node(_tracked(", ".join(words), expert), [source])


def _expert(store: Store, task: str, expert: dict[str, Any], missing: list[str]) -> dict[str, Any]:
    if expert["run"] is not None and _find_run(store, expert["run"]) is None:
        missing.append(f"the run {expert['run']} of the expert '{task}'")
    data = [{"split": split, **facts} for split, facts in expert["splits"].items()]
    rest = {key: value for key, value in expert.items() if key != "splits"}
    return {"task": task, "regime": expert["settings"]["regime"], **rest, "data": data}


def _documents(store: Store, version: ModelVersion, missing: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        return read_documents(store, version)
    except MergeflowError as error:
        missing.append(str(error))
        return {}, {}


def _requirements(store: Store, source: str, missing: list[str]) -> list[str]:
    try:
        with fetched(store, source, "requirements.txt") as path:
            lines = path.read_text().splitlines()
    except (MlflowException, OSError):
        missing.append(f"the version's file {source}/requirements.txt")
        return []
    return [line for line in lines if line and not line.startswith("#")]


def _find_run(store: Store, run_id: str) -> Run | None:
    try:
        run = store.client.get_run(run_id)
    except MlflowException:
        return None
    return run if run.info.lifecycle_stage == "active" else None


def _environment_text(environment: dict[str, Any]) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in environment["packages"].items())
    machine = environment["accelerator"] or environment["processor"]
    return f"code {environment['code']}, Python {environment['python']}, {environment['system']}, {machine}, {packages}"


def _tracked(text: str, record: dict[str, Any]) -> str:
    return f"{text}, DVC {_short(record['dvc'])}" if record.get("dvc") else text


def _short(text: str | None) -> str:
    return short(text or "unknown")
