"""A merged model as an MLflow pyfunc folder: weights and heads as safetensors, the code beside them, no pickle."""

import io
import json
import os
import platform
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
from PIL import Image

from mergeflow.errors import MergeflowError
from registry.quiet import mlflow

_CODE = Path(__file__).with_name("served_model.py")
_REQUIRED = (
    "mergeflow",
    "mlflow",
    "torch",
    "torchvision",
    "open_clip_torch",
    "safetensors",
    "pillow",
    "numpy",
    "pandas",
)


@dataclass(frozen=True)
class ModelFiles:
    """The files of one merged model.

    Args:
        encoder: safetensors of the merged image encoder.
        heads: task name to the safetensors of its head; at least one.
        architecture: name that `load_clip` knows; it alone decides activation and pixel statistics, because `load_clip`
            refuses tags that need others.
        image_size: S, pixels of the square input.
        documents: further JSON documents kept with the weights by file stem, such as {"recipe": {...}}.
        examples: rows for the input example, as (image file's bytes, task); None: a drawn grey image of one task.
    """

    encoder: Path
    heads: Mapping[str, Path]
    architecture: str
    image_size: int
    documents: Mapping[str, object] = field(default_factory=dict)
    examples: tuple[tuple[bytes, str], ...] = ()

    def __post_init__(self) -> None:
        if not self.heads:
            raise MergeflowError("a model without a head classifies nothing: give the head of at least one task.")
        for path in (self.encoder, *self.heads.values()):
            if not Path(path).is_file():
                raise MergeflowError(f"the model's file {path} is missing: run the stage that makes it again.")


def signature() -> Any:
    """Return MLflow's signature of every merged model: image bytes and task in, label and probabilities out."""
    schema = mlflow.types.schema
    kind, column = schema.DataType, schema.ColSpec
    inputs = schema.Schema([column(kind.binary, "image"), column(kind.string, "task")])
    outputs = schema.Schema([column(kind.string, "label"), column(schema.Map(kind.double), "probabilities")])
    return mlflow.models.ModelSignature(inputs=inputs, outputs=outputs)


def save_pyfunc(folder: Path, files: ModelFiles, metadata: Mapping[str, str] | None = None) -> None:
    """Write the MLflow model folder.

    Args:
        folder: made by this call; must not exist.
        files: weights, heads and documents; they are copied.
        metadata: text kept in the model's MLmodel file.
    """
    with TemporaryDirectory(dir=folder.parent, prefix=".model-") as scratch:
        inside = Path(scratch) / "model"
        _copy_weights(inside, files)
        mlflow.pyfunc.save_model(
            path=str(folder),
            python_model=str(_CODE),
            artifacts={"model": str(inside)},
            signature=signature(),
            input_example=input_example(files),
            conda_env=_environment(),
            metadata=dict(metadata or {}),
        )


def check_pyfunc(folder: Path) -> None:
    """Load the folder as its users will and classify its own example.

    Raises:
        MergeflowError: it does not load, or does not answer in the form of the signature.
    """
    try:
        model = mlflow.pyfunc.load_model(str(folder))
        example = model.input_example
        answer = model.predict(example)
    except Exception as error:
        raise MergeflowError(
            f"the model does not classify its own example, so it is not registered: {error} "
            "Its encoder, heads and architecture must belong together."
        ) from error
    sums = [sum(row.values()) for row in answer["probabilities"]]
    if len(answer) != len(example) or not np.allclose(sums, 1.0, atol=1e-6):
        raise MergeflowError(
            f"the model's probabilities sum to {sums}, expected 1 in each of {len(example)} rows, so it is not "
            "registered: look for NaN or Inf in the merged weights."
        )


def input_example(files: ModelFiles) -> pd.DataFrame:
    """Return the rows that MLflow keeps as the model's example."""
    rows = files.examples or ((_grey_png(files.image_size), sorted(files.heads)[0]),)
    return pd.DataFrame({"image": [image for image, _ in rows], "task": [task for _, task in rows]})


def _copy_weights(inside: Path, files: ModelFiles) -> None:
    (inside / "heads").mkdir(parents=True)
    _place(files.encoder, inside / "encoder.safetensors")
    heads = {}
    for number, (task, path) in enumerate(sorted(files.heads.items())):
        heads[task] = f"heads/{number:03d}.safetensors"  # a task's name need not be a file name
        _place(path, inside / heads[task])
    config = {"architecture": files.architecture, "image_size": files.image_size, "heads": heads}
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


def _grey_png(size: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (size, size), (127, 127, 127)).save(buffer, "PNG")
    return buffer.getvalue()


def _environment() -> dict[str, Any]:
    """Return what the model needs, at this machine's versions; given whole, or MLflow looks for pip and complains."""
    found = []
    for name in _REQUIRED:
        try:
            found.append(f"{name}=={version(name)}")
        except PackageNotFoundError:
            continue
    return {"name": "mergeflow", "dependencies": [f"python={platform.python_version()}", "pip", {"pip": found}]}
