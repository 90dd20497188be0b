"""MLflow with its model half, imported without the warning that its own type hints raise on the way."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)
    import mlflow
    import mlflow.pyfunc

__all__ = ["mlflow"]
