"""The task runner by configuration: one line of params.yaml decides where the stages run."""

import importlib
from typing import Any

from prefect.task_runners import ProcessPoolTaskRunner, TaskRunner, ThreadPoolTaskRunner

from mergeflow.errors import MergeflowError


def task_runner(name: str, workers: int) -> TaskRunner[Any]:
    """Return the Prefect task runner called `name`.

    Args:
        name: `threads`, `processes`, `dask` (a local cluster of processes) or `ray` (a local cluster).
        workers: stages that run at once, at least 1.

    Raises:
        MergeflowError: the runner's package is not installed.
    """
    if name == "threads":
        return ThreadPoolTaskRunner(max_workers=workers)
    if name == "processes":
        return ProcessPoolTaskRunner(max_workers=workers)
    module, attribute, options = {
        "dask": ("prefect_dask", "DaskTaskRunner", {"cluster_kwargs": {"n_workers": workers, "threads_per_worker": 1}}),
        "ray": ("prefect_ray", "RayTaskRunner", {"init_kwargs": {"num_cpus": workers}}),
    }[name]
    try:
        runner: TaskRunner[Any] = getattr(importlib.import_module(module), attribute)(**options)
    except ModuleNotFoundError:
        package = module.replace("_", "-")
        raise MergeflowError(
            f"run.runner is '{name}', which needs the package {package}: install it, or use 'threads' or 'processes'."
        ) from None
    return runner
