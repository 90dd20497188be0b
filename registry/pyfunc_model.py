"""A merged model as an MLflow pyfunc folder: weights and heads as safetensors, the code beside them, no pickle."""

import json
import os
import platform
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd

from mergeflow.errors import MergeflowError
from mergeflow.modalities.served import SERVED, WEIGHTS_FILES, Kind, Served
from registry.store import mlflow

CODE = Path(__file__).with_name("served_model.py")
_REQUIRED = ("mergeflow", "mlflow", "torch", "safetensors", "numpy", "pandas")


@dataclass(frozen=True)
class ModelFiles:
    """The files of one merged model.

    Args:
        weights: safetensors of the merged weights.
        heads: task name to the file that `save_head` wrote of its head, or of its having none; at least one.
        model: the section `model` of params.yaml, which names the modality and decides the module.
        decoding: how examples are stored, as the tasks' manifests record it.
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
        """What the model takes and answers."""
        return SERVED.get(self.model["modality"])


def signature(served: Served, decoding: Mapping[str, Any]) -> Any:
    """Return MLflow's signature: the modality's columns and `task` in, the modality's answer out."""
    inputs: dict[str, Kind] = {**served.inputs(decoding), "task": "text"}
    return mlflow.models.ModelSignature(inputs=_schema(inputs), outputs=_schema(served.outputs))


def as_pyfunc(folder: Path) -> Any:
    """Return a version's model as MLflow loads it, made by this library's code from weights, heads and model.json.

    Args:
        folder: holds the version's `artifacts/model`; of the rest of a version nothing is read.
    """
    import torch  # here and below: whoever lists or promotes versions does without

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
    """Write the MLflow model folder.

    Args:
        folder: made by this call; must not exist.
    """
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
    """Load the folder as its users will and let it answer its own example.

    Raises:
        MergeflowError: it does not load, or does not answer in the form of the signature.
    """
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
    _place(files.weights, inside / WEIGHTS_FILES[0])
    heads = {}
    for number, (task, path) in enumerate(sorted(files.heads.items())):
        heads[task] = f"heads/{number:03d}.safetensors"  # a task's name need not be a file name
        _place(path, inside / heads[task])
    config: dict[str, Any] = {"model": dict(files.model), "decoding": dict(files.decoding), "heads": heads}
    config["class_names"] = {task: list(names) for task, names in files.class_names.items()}
    transforms = {"transforms": json.dumps({task: list(names) for task, names in sorted(files.transforms.items())})}
    config["record"] = {**files.record, **(transforms if files.transforms else {})}
    (inside / "model.json").write_text(json.dumps(config, indent=2, sort_keys=True))
    for stem, document in files.documents.items():
        # As given: the order of a recipe's experts is part of it.
        (inside / f"{stem}.json").write_text(json.dumps(document, indent=2))


def _place(source: Path, target: Path) -> None:
    """Put the file there without writing it again where the disk allows: MLflow copies it from there."""
    try:
        os.link(Path(source).resolve(), target)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(source, target)


def _environment(packages: Sequence[str]) -> dict[str, Any]:
    """Return the model's requirements at this machine's versions; in full, or MLflow looks for pip and warns.

    Raises:
        MergeflowError: a package that every model needs runs here without being installed.
    """
    pinned = []
    for name in (*_REQUIRED, *packages):
        try:
            pinned.append(f"{name}=={version(name)}")
        except PackageNotFoundError as error:
            if name in _REQUIRED:
                raise MergeflowError(
                    f"the package '{name}' is not installed, so the requirements of a registered model would lack it. "
                    "Install it; of mergeflow itself: pip install --no-deps --editable REPOSITORY"
                ) from error
    return {"name": "mergeflow", "dependencies": [f"python={platform.python_version()}", "pip", {"pip": pinned}]}
