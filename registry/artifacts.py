"""A version's artifacts: the pyfunc folder with safetensors and no pickle, its evidence, and their digests."""

import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from mergeflow.analysis.provable.criteria import Criterion
from mergeflow.checkpoints import matches, open_checkpoint
from mergeflow.checkpoints.fingerprint import short
from mergeflow.checkpoints.writer import link_or_copy
from mergeflow.errors import MergeflowError
from mergeflow.modalities.served import SERVED, WEIGHTS, Kind, Served
from registry.gates import Evidence
from registry.logging import FINGERPRINT
from registry.store import Store, mlflow
from tasks.project.recorded import digest

DIGESTS = "mergeflow.files"
MODEL, EVIDENCE = "artifacts/model", "evidence"
UNREADABLE = (MlflowException, OSError, ValueError, SafetensorError)


def digests_of(folder: Path) -> str:
    return json.dumps({part: digest(folder / part) for part in (MODEL, EVIDENCE)})


@contextmanager
def fetched(store: Store, source: str, part: str, folder: Path | None = None) -> Iterator[Path]:
    """Fetch one part of a version's files; files on this machine are copied only into a `folder` that is named.

    Args:
        folder: where to put it; None: it is gone after the block.
    """
    with TemporaryDirectory(prefix="mergeflow-version-") as scratch, store.active():
        local = folder is None and source.startswith("file:")
        place = None if local else str(folder or scratch)
        yield Path(mlflow.artifacts.download_artifacts(f"{source}/{part}", dst_path=place))


def check_model(store: Store, version: ModelVersion) -> None:
    """Compare a version's weights, heads and documents with what was registered; evidence checks itself when read."""
    with reading(version), fetched(store, str(version.source), MODEL) as folder:
        check_part(version, MODEL, folder)


def check_part(version: ModelVersion, part: str, folder: Path) -> None:
    """Compare one part of a version's files with what was registered: by its digest, or by the weights' fingerprint."""
    recorded = json.loads(version.tags.get(DIGESTS, "{}")).get(part)
    weights = version.tags.get(FINGERPRINT)
    if recorded is not None:
        now = digest(folder)
        same = now == recorded
    elif part == MODEL and weights is not None:  # of the days when the weights alone were recorded
        with open_checkpoint(folder / WEIGHTS) as state:
            same = matches(state, weights)
        now, recorded = "another one", short(weights)
    else:
        return
    if not same:
        raise MergeflowError(
            f"version {version.version} of '{version.name}' is damaged: its {part} at {version.source} has the digest "
            f"{now[:12]}, registered was {recorded[:12]}. Restore these files from a backup; or register the model "
            "again with `mergeflow stage run register --force`, which makes a version of its own."
        )


@contextmanager
def reading(version: ModelVersion) -> Iterator[None]:
    try:
        yield
    except MergeflowError:
        raise
    except UNREADABLE as error:
        raise MergeflowError(
            f"the files of version {version.version} of '{version.name}' cannot be read at {version.source}: {error}. "
            "Restore them; or register the model again with `mergeflow run`, which makes a version of its own."
        ) from error


_SCORES = "scores.safetensors"


def write_evidence(folder: Path, evidence: Evidence) -> None:
    """Write a model's validation figures into the folder that becomes a version's `evidence/`."""
    folder.mkdir()
    document = {
        "accuracy": dict(evidence.accuracy),
        "expert_accuracy": dict(evidence.expert_accuracy),
        "digests": dict(evidence.digests),
        "reproducible": evidence.reproducible,
    }
    if evidence.criteria:
        document["criteria"] = [vars(criterion) for criterion in evidence.criteria]
    (folder / "evidence.json").write_text(json.dumps(document, indent=2, sort_keys=True))
    save_file(
        {task: np.asarray(scores, dtype=np.float32) for task, scores in evidence.scores.items()}, folder / _SCORES
    )


def read_evidence(store: Store, version: ModelVersion) -> Evidence:
    """Read the evidence of a version; reading it also proves that the version's files are there."""
    try:
        with fetched(store, str(version.source), EVIDENCE) as folder:
            check_part(version, EVIDENCE, folder)
            return load_evidence(folder)
    except MergeflowError:
        raise
    except UNREADABLE as error:
        raise MergeflowError(
            f"version {version.version} of '{version.name}' has no readable evidence at {version.source}: only "
            "versions that mergeflow registered, with their files in place, can be champion. Restore the files; or "
            "register the model again with `mergeflow run`, which makes a version of its own."
        ) from error


def load_evidence(folder: Path) -> Evidence:
    """Load the evidence in a folder; a failure raises one of `UNREADABLE`."""
    document = json.loads((folder / "evidence.json").read_text())
    scores = load_file(folder / _SCORES)
    criteria = [Criterion(**criterion) for criterion in document.pop("criteria", ())]
    return Evidence(scores=scores, criteria=criteria, **document)


CODE = Path(__file__).with_name("served_model.py")
_REQUIRED = ("mergeflow", "mlflow", "torch", "safetensors", "numpy", "pandas")


@dataclass(frozen=True)
class ModelFiles:
    """The files of one merged model.

    Args:
        heads: task name to the file that `save_head` wrote of its head, or of its having none; at least one.
        class_names: task name to its classes in label order, for tasks without a head.
        record: the metadata of the base's weights, which together with `model` decides the module.
        transforms: task name to the transforms that its manifest names.
        documents: further JSON documents kept with the weights by file stem, such as {"recipe": {...}}.
    """

    weights: Path
    heads: Mapping[str, Path]
    model: Mapping[str, Any]
    decoding: Mapping[str, Any]
    class_names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    record: Mapping[str, str] = field(default_factory=dict)
    transforms: Mapping[str, Sequence[str]] = field(default_factory=dict)
    documents: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.heads:
            raise MergeflowError("a model without a task answers nothing: give the head of at least one task.")
        for path in (self.weights, *self.heads.values()):
            if not Path(path).is_file():
                raise MergeflowError(f"the model's file {path} is missing: run the stage that makes it again.")

    @property
    def served(self) -> Served:
        return SERVED.get(self.model["modality"])


def signature(served: Served, decoding: Mapping[str, Any]) -> Any:
    """Return MLflow's signature: the modality's columns and `task` in, the modality's answer out."""
    inputs: dict[str, Kind] = {**served.inputs(decoding), "task": "text"}
    return mlflow.models.ModelSignature(inputs=_schema(inputs), outputs=_schema(served.outputs))


def as_pyfunc(folder: Path) -> Any:
    """Build a version's model as MLflow loads it, by this library's code from weights, heads and model.json."""
    import torch  # here: whoever lists or promotes versions does without

    from mergeflow.memory import placed
    from mergeflow.modalities.serving import read_model
    from registry.served_model import MergedModel

    model = MergedModel()
    loaded = model.loaded = placed(read_model(folder, torch.device("cpu")))
    served = SERVED.get(loaded.modality.name)
    meta = mlflow.models.Model(
        signature=signature(served, loaded.decoding), flavors={"python_function": {"loader_module": __name__}}
    )
    return mlflow.pyfunc.PyFuncModel(meta, _Answering(model))


class _Answering:
    """What MLflow's wrapper asks; it enforces the signature first."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def predict(self, rows: pd.DataFrame) -> pd.DataFrame:
        return pd.DataFrame(self._model.answer(rows), index=rows.index)


def _schema(columns: Mapping[str, Kind]) -> Any:
    schema = mlflow.types.schema
    kind = schema.DataType
    types: dict[Kind, Any] = {
        "bytes": kind.binary,
        "text": kind.string,
        "optional text": kind.string,
        "number": kind.double,
        "shares": schema.Map(kind.double),
    }
    optional: Kind = "optional text"
    return schema.Schema(
        [schema.ColSpec(types[kind], name, required=kind != optional) for name, kind in columns.items()]
    )


def save_pyfunc(folder: Path, files: ModelFiles, metadata: Mapping[str, str] | None = None) -> None:
    with TemporaryDirectory(dir=folder.parent, prefix=".model-") as scratch:
        inside = Path(scratch) / "model"
        _copy_weights(inside, files)
        mlflow.pyfunc.save_model(
            path=str(folder),
            python_model=str(CODE),
            artifacts={"model": str(inside)},
            signature=signature(files.served, files.decoding),
            input_example=input_example(files),
            conda_env=_environment(files.served.packages),
            metadata=dict(metadata or {}),
        )
    _forget_this_machine(folder)


def _forget_this_machine(folder: Path) -> None:
    """Take the paths that the files had on this machine out of MLmodel; nobody needs them."""
    described = mlflow.models.Model.load(str(folder / "MLmodel"))
    flavor = described.flavors["python_function"]
    flavor["model_code_path"] = CODE.name
    for artifact in flavor["artifacts"].values():
        artifact["uri"] = artifact["path"]
    described.save(str(folder / "MLmodel"))


def check_pyfunc(folder: Path, served: Served) -> None:
    """Load the folder as its users will and answer its own example."""
    try:
        model = mlflow.pyfunc.load_model(str(folder))
        example = model.input_example
        answer = model.predict(example)
    except Exception as error:
        raise MergeflowError(
            f"the model does not answer its own example, so it is not registered: {error} "
            "Its weights, heads and `model` section must belong together."
        ) from error
    for name, kind in served.outputs.items():
        answers = [(sum(value.values()) if value else 1.0) if kind == "shares" else value for value in answer[name]]
        wrong = kind == "shares" and not np.allclose(answers, 1.0, atol=1e-6)
        if wrong or (kind == "number" and not np.all(np.isfinite(answers))) or len(answers) != len(example):
            raise MergeflowError(
                f"the model's answer for {len(example)} rows of its own example has in `{name}` {answers}"
                f"{' as sums, expected 1' if kind == 'shares' else ''}, so it is not registered: look for NaN or "
                "Inf in the merged weights."
            )


def input_example(files: ModelFiles) -> pd.DataFrame:
    """Return the row that MLflow keeps as the model's example."""
    task = sorted(files.heads)[0]
    facts = {**files.decoding, "transforms": files.transforms.get(task, ())}
    row = {**files.served.example(facts), "task": task}
    return pd.DataFrame({name: [value] for name, value in row.items()})


def _copy_weights(inside: Path, files: ModelFiles) -> None:
    (inside / "heads").mkdir(parents=True)
    link_or_copy(files.weights, inside / WEIGHTS)
    heads = {}
    for number, (task, path) in enumerate(sorted(files.heads.items())):
        heads[task] = f"heads/{number:03d}.safetensors"  # a task's name need not be a file name
        link_or_copy(path, inside / heads[task])
    config: dict[str, Any] = {"model": dict(files.model), "decoding": dict(files.decoding), "heads": heads}
    config["class_names"] = {task: list(names) for task, names in files.class_names.items()}
    transforms = {"transforms": json.dumps({task: list(names) for task, names in sorted(files.transforms.items())})}
    config["record"] = {**files.record, **(transforms if files.transforms else {})}
    (inside / "model.json").write_text(json.dumps(config, indent=2, sort_keys=True))
    for stem, document in files.documents.items():
        # As given: the order of a recipe's experts is part of it.
        (inside / f"{stem}.json").write_text(json.dumps(document, indent=2))


def _environment(packages: Sequence[str]) -> dict[str, Any]:
    """Return the model's requirements at this machine's versions; in full, or MLflow looks for pip and warns."""
    pinned = []
    for name in (*_REQUIRED, *packages):
        try:
            pinned.append(f"{name}=={installed_version(name)}")
        except PackageNotFoundError as error:
            if name in _REQUIRED:
                raise MergeflowError(
                    f"the package '{name}' is not installed, so the requirements of a registered model would lack it. "
                    "Install it; of mergeflow itself: pip install --no-deps --editable REPOSITORY"
                ) from error
    return {"name": "mergeflow", "dependencies": [f"python={platform.python_version()}", "pip", {"pip": pinned}]}
