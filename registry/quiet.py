"""Imports MLflow with its models, without the warning that its own type hints raise."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)
    import mlflow
    import mlflow.pyfunc

__all__ = ["mlflow"]
