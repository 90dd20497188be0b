"""The code inside a registered model: an image and a task's name in, a label and probabilities out.

MLflow copies this one file into the model and runs it wherever the model is loaded. So it imports `mergeflow` and
never `registry`, which is not installed there. Nothing but safetensors and JSON is read, and no network is needed.
"""

import base64
import binascii
import json
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import torch
from mlflow.exceptions import MlflowException
from mlflow.pyfunc import PythonModel
from safetensors.torch import load_file

from mergeflow.errors import MergeflowError, unknown_name
from mergeflow.modalities.heads import Head, load_head
from mergeflow.modalities.vision.images import resize, to_rgb
from mergeflow.modalities.vision.models import image_model, load_clip
from mergeflow.modality import Network

_BATCH = 256
_ROWS_NAMED = 10
_EXPECTED = "Expected are the bytes of a PNG or JPEG file; over HTTP, their base64."


def read_model(folder: Path, device: torch.device) -> tuple[Network, dict[str, Head], int]:
    """Return model, head of each task (on the CPU) and image size from a model's folder."""
    config = json.loads((folder / "model.json").read_text())
    model = image_model(load_clip(config["architecture"]))
    model.load(load_file(folder / "encoder.safetensors"))
    model.module.eval().to(device)
    heads = {task: load_head(folder / file) for task, file in config["heads"].items()}
    return model, heads, config["image_size"]


class MergedModel(PythonModel):
    """One merged image encoder with the frozen head of every task."""

    model: Network
    heads: dict[str, Head]
    image_size: int
    device: torch.device

    def load_context(self, context: Any) -> None:
        """Read the weights; on a machine with a GPU they go there."""
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model, self.heads, self.image_size = read_model(Path(context.artifacts["model"]), self.device)

    def predict(self, context: Any, model_input: pd.DataFrame, params: Any = None) -> pd.DataFrame:
        """Classify each row among its task's classes.

        Args:
            context: MLflow's, unused.
            model_input: DataFrame with `image` (bytes of an encoded image, or their base64 text) and `task` (name).
            params: MLflow's, unused.

        Returns:
            DataFrame with `label` (class name) and `probabilities` (class name to probability), in the rows' order.

        Raises:
            MlflowException: some rows have an unknown task or an image that cannot be decoded; all are named.
        """
        missing = [name for name in ("image", "task") if name not in model_input]
        if missing:
            raise _bad(f"the input lacks the column(s) {', '.join(missing)}; expected image and task.")
        pixels, tasks = self._check_rows(list(model_input["image"]), list(model_input["task"]))
        labels: list[str] = [""] * len(tasks)
        probabilities: list[dict[str, float]] = [{}] * len(tasks)
        for start in range(0, len(tasks), _BATCH):
            features = self._features(pixels[start : start + _BATCH])
            for row, task in enumerate(tasks[start : start + _BATCH]):
                head = self.heads[task]
                chances = torch.softmax(head(features[row : row + 1])[0].double(), dim=0).tolist()
                labels[start + row] = head.class_names[int(np.argmax(chances))]
                probabilities[start + row] = dict(zip(head.class_names, chances, strict=True))
        return pd.DataFrame({"label": labels, "probabilities": probabilities}, index=model_input.index)

    def _check_rows(self, images: list[Any], tasks: list[Any]) -> tuple[list[np.ndarray], list[str]]:
        pixels, wrong = [], []
        for row, (image, task) in enumerate(zip(images, tasks, strict=True)):
            try:
                if not isinstance(task, str) or task not in self.heads:
                    raise unknown_name("task", str(task), self.heads)
                pixels.append(resize(to_rgb(_to_bytes(image), "the image", _EXPECTED), self.image_size))
            except MergeflowError as error:
                wrong.append(f"row {row}: {error}")
        if wrong:
            more = f" And {len(wrong) - _ROWS_NAMED} more." if len(wrong) > _ROWS_NAMED else ""
            named = " ".join(wrong[:_ROWS_NAMED])
            raise _bad(f"{len(wrong)} of {len(tasks)} rows cannot be classified. {named}{more}")
        return pixels, tasks

    def _features(self, pixels: list[np.ndarray]) -> torch.Tensor:
        batch = torch.from_numpy(np.stack(pixels)).to(self.device)
        with torch.inference_mode():
            features: torch.Tensor = self.model.module(batch)
            return features.float().cpu()


def _to_bytes(image: Any) -> bytes:
    if not isinstance(image, (bytes, bytearray, str)):
        raise MergeflowError(f"the image is a {type(image).__name__}. {_EXPECTED}")
    try:
        found = base64.b64decode(image, validate=True) if isinstance(image, str) else bytes(image)
    except (binascii.Error, ValueError):
        raise MergeflowError(f"the image is text but not base64. {_EXPECTED}") from None
    if not found:  # MLflow's server skips what is not base64, up to all of a text
        raise MergeflowError(f"the image is empty, or text that is not base64. {_EXPECTED}")
    return found


def _bad(message: str) -> MlflowException:
    return MlflowException.invalid_parameter_value(message)


mlflow.models.set_model(MergedModel())
