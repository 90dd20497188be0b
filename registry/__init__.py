"""The registry, which is MLflow's: log, register, ask the gates, promote, roll back, look up.

Importing this package imports no MLflow (that costs seconds); its modules do. The environment is set here, before
any of them can: MLflow reads these names once, when it is imported.
"""

import os

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("DO_NOT_TRACK", "true")
# "Creating initial MLflow database tables..." and its like are not for our readers; warnings still are.
os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
