"""The task runner by configuration: one line of params.yaml decides where the stages run."""

import importlib
import logging
import os
from typing import Any

from prefect.task_runners import ProcessPoolTaskRunner, TaskRunner, ThreadPoolTaskRunner

from mergeflow.application import HOME
from mergeflow.errors import MergeflowError
from mergeflow.processes import end_with_parent

# Ray's default is 30 % of the memory; what crosses a task border here is a path.
OBJECT_STORE = 100 * 2**20


def task_runner(name: str, workers: int) -> TaskRunner[Any]:
    """Return the Prefect task runner called `name`.

    Args:
        name: `threads`, `processes`, `dask` or `ray`. The last two start a cluster on this machine, or use the running
            one that the environment names in DASK_SCHEDULER_ADDRESS or RAY_ADDRESS; its workers must see the project
            folder under the same path.
        workers: stages that run at once, at least 1; a running cluster has its own number.

    Raises:
        MergeflowError: the runner's package is not installed.
    """
    if name == "threads":
        return ThreadPoolTaskRunner(max_workers=workers)
    if name == "processes":
        return ProcessPoolTaskRunner(max_workers=workers, initializer=end_with_parent)
    module, attribute, options = {"dask": _dask, "ray": _ray}[name](workers)
    try:
        runner: TaskRunner[Any] = getattr(importlib.import_module(module), attribute)(**options)
    except ModuleNotFoundError:
        raise MergeflowError(
            f"run.runner is '{name}', which needs the package {module.replace('_', '-')}: run "
            f"`pip install '/path/to/mergeflow[{name}]'`, or use 'threads' or 'processes'."
        ) from None
    return runner


def _dask(workers: int) -> tuple[str, str, dict[str, Any]]:
    address = os.environ.get("DASK_SCHEDULER_ADDRESS")
    local = {"n_workers": workers, "threads_per_worker": 1, "dashboard_address": None, "silence_logs": logging.ERROR}
    return "prefect_dask", "DaskTaskRunner", {"address": address} if address else {"cluster_kwargs": local}


def _ray(workers: int) -> tuple[str, str, dict[str, Any]]:
    # Ray's workers are fresh processes that know neither the driver's folder nor its import path.
    path = os.pathsep.join(filter(None, [str(HOME), os.environ.get("PYTHONPATH")]))
    options: dict[str, Any] = {"runtime_env": {"env_vars": {"PYTHONPATH": path}}, "log_to_driver": False}
    address = os.environ.get("RAY_ADDRESS")
    if address:
        return "prefect_ray", "RayTaskRunner", {"address": address, "init_kwargs": options}
    local: dict[str, Any] = {"num_cpus": workers, "include_dashboard": False, "object_store_memory": OBJECT_STORE}
    # On a busy machine Ray's workers, at the lowest priority by default, get nothing, and one that has not come up
    # within a minute is killed and started again, for ever.
    local["_system_config"] = {"worker_niceness": 0, "worker_register_timeout_seconds": 600}
    return "prefect_ray", "RayTaskRunner", {"init_kwargs": options | local}
