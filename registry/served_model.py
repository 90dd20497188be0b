"""The code inside a registered model: rows in, answers out, by the model's modality.

MLflow copies this one file into the model and runs it wherever the model is loaded. So it imports `mergeflow` and
never `registry`, which is not installed there. Nothing but safetensors and JSON is read, and no network is needed.
"""

from pathlib import Path
from typing import Any

import mlflow
import pandas as pd
import torch
from mlflow.exceptions import MlflowException
from mlflow.pyfunc import PythonModel

from mergeflow.errors import MergeflowError
from mergeflow.memory import placed
from mergeflow.modalities.served import SERVED, Loaded
from mergeflow.modalities.serving import read_model
from mergeflow.training.arithmetic import arithmetic


class MergedModel(PythonModel):
    """One merged model with the head of every task."""

    loaded: Loaded

    def load_context(self, context: Any) -> None:
        """Read the weights; on a machine with a GPU that has room they go there."""
        self.loaded = placed(read_model(Path(context.artifacts["model"]), torch.device("cpu")))

    def predict(self, context: Any, model_input: pd.DataFrame, params: Any = None) -> pd.DataFrame:
        """Answer each row as the modality does.

        Raises:
            MlflowException: columns are missing, or rows cannot be answered; all are named.
        """
        try:
            return pd.DataFrame(self.answer(model_input), index=model_input.index)
        except MergeflowError as error:
            raise MlflowException.invalid_parameter_value(str(error)) from None

    @arithmetic()
    def answer(self, rows: pd.DataFrame) -> dict[str, list[Any]]:
        columns = {str(name): rows[name].tolist() for name in rows}
        return SERVED.get(self.loaded.modality.name).answer(self.loaded, columns)


mlflow.models.set_model(MergedModel())
