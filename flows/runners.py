"""Choose where stages run: Prefect's task runner, and the cluster for travelling stages.

A travelling stage is a task of Prefect's on this machine, which waits for a worker of Dask or Ray. So a worker needs
neither Prefect nor its address, and `run.workers` limits the stages in flight on any cluster.
"""

import importlib
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from operator import itemgetter
from typing import Any, Protocol

from prefect.task_runners import ProcessPoolTaskRunner, TaskRunner, ThreadPoolTaskRunner

from mergeflow.application import HOME, call
from mergeflow.errors import MergeflowError, first_line
from mergeflow.processes import end_with_parent

HERE = "local"  # Ray's address of a new cluster; without one it joins what somebody else has started on this machine
# Ray's default is 30 % of the memory; what crosses a task border here is a path.
OBJECT_STORE = 100 * 2**20


def task_runner(name: str, workers: int) -> TaskRunner[Any]:
    """Return the Prefect task runner called `name`.

    Args:
        name: `threads`, `processes`, `dask` or `ray`. The last two start a cluster on this machine, or use the running
            one that the environment names in DASK_SCHEDULER_ADDRESS or RAY_ADDRESS; its workers must see the project
            folder under the same path.
        workers: stages that run at once, at least 1; a running cluster has as many as it has, and is sent no more.
    """
    if name == "threads":
        return ThreadPoolTaskRunner(max_workers=workers)
    if name == "processes":
        return ProcessPoolTaskRunner(max_workers=workers, initializer=end_with_parent)
    module, attribute, options = {"dask": _dask, "ray": _ray}[name](workers)
    try:
        runner: TaskRunner[Any] = getattr(importlib.import_module(module), attribute)(**options)
    except ModuleNotFoundError:
        raise _not_installed(name, module) from None
    return runner


def _not_installed(name: str, module: str) -> MergeflowError:
    return MergeflowError(
        f"run.runner is '{name}', which needs the package {module.replace('_', '-')}: run "
        f"`pip install '/path/to/mergeflow[{name}]'`, or use 'threads' or 'processes'."
    )


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
    return "prefect_ray", "RayTaskRunner", {"address": HERE, "init_kwargs": options | local}


QUESTION = 1.0  # seconds between two questions whether a stage has ended
SILENCE = 20.0  # seconds after which a scheduler that does not answer is lost
_AGAIN = "Finished work counts, and what a worker has finished since is taken from the store: run again."


class Cluster(Protocol):
    """Machines that call functions of the application."""

    def has_devices(self) -> bool:
        """Whether some worker offers a GPU."""
        ...

    def run(self, function: tuple[str, str], argument: Any, device: bool, meanwhile: Callable[[], None]) -> Any:
        """Call a function on some worker, and return its result.

        Args:
            device: take a GPU of the worker's for it.
        """
        ...


def cluster(name: str, workers: int) -> AbstractContextManager[Cluster]:
    """Connect to the cluster that the environment names, or start one on this machine, while the block runs."""
    module, connect = {"dask": ("distributed", _dask_cluster), "ray": ("ray", _ray_cluster)}[name]
    try:
        importlib.import_module(module)
    except ModuleNotFoundError:
        raise _not_installed(name, module) from None
    return connect(workers)


@contextmanager
def _dask_cluster(workers: int) -> Iterator[Cluster]:
    from distributed import Client, LocalCluster

    logging.getLogger("distributed.client").setLevel(logging.CRITICAL)  # a lost scheduler is told in a sentence of ours
    address = os.environ.get("DASK_SCHEDULER_ADDRESS")
    with ExitStack() as stack:
        place = address or stack.enter_context(LocalCluster(**_dask(workers)[2]["cluster_kwargs"]))
        try:
            client = stack.enter_context(Client(place, timeout=SILENCE))
        except OSError as error:
            fault = f"the Dask scheduler at {address} does not answer ({first_line(error)})"
            raise MergeflowError(f"{fault}. {_AGAIN}") from error
        yield _Dask(client)


def _await(
    has_ended: Callable[[], bool], meanwhile: Callable[[], None], answers: Callable[[], bool], lost: str
) -> None:
    """Return when a stage has ended, which each question waits `QUESTION` seconds for."""
    answered = time.monotonic()
    while not has_ended():
        meanwhile()
        if answers():
            answered = time.monotonic()
        elif time.monotonic() - answered > SILENCE:
            raise MergeflowError(lost)


class _Dask:
    def __init__(self, client: Any) -> None:
        self._client, self._address = client, client.scheduler.address

    def has_devices(self) -> bool:
        workers = self._client.scheduler_info(n_workers=-1)["workers"].values()
        return any("GPU" in worker["resources"] for worker in workers)

    def run(self, function: tuple[str, str], argument: Any, device: bool, meanwhile: Callable[[], None]) -> Any:
        from distributed import CancelledError, KilledWorker, wait

        def has_ended() -> bool:
            with suppress(TimeoutError):
                wait(future, timeout=QUESTION)
            return bool(future.done())

        lost = f"lost the Dask scheduler at {self._address}. {_AGAIN}"
        if self._client.status != "running":
            raise MergeflowError(lost)
        resources = {"GPU": 1} if device else None
        future = self._client.submit(call, *function, argument, pure=False, resources=resources)
        try:
            _await(has_ended, meanwhile, lambda: self._client.status == "running", lost)
            return future.result()
        except MergeflowError:
            raise
        except CancelledError as error:
            raise MergeflowError(lost) from error
        except KilledWorker as error:
            deaths = error.allowed_failures + 1
            raise MergeflowError(f"{deaths} workers of Dask died with this stage. {_AGAIN}") from error
        except Exception as error:  # not the stage's, which is returned
            raise _refused("Dask", error) from error


@contextmanager
def _ray_cluster(workers: int) -> Iterator[Cluster]:
    import ray

    address, settings = itemgetter("address", "init_kwargs")(_ray(workers)[2])
    if address != HERE:
        settings.pop("runtime_env")  # its path is of this machine
    try:
        ray.init(address, **settings)
    except (OSError, RuntimeError) as error:
        raise MergeflowError(f"Ray at {address} does not answer ({first_line(error)}). {_AGAIN}") from error
    try:
        yield _Ray()
    finally:
        ray.shutdown()


class _Ray:
    def has_devices(self) -> bool:
        import ray

        return bool(ray.cluster_resources().get("GPU"))

    def run(self, function: tuple[str, str], argument: Any, device: bool, meanwhile: Callable[[], None]) -> Any:
        import ray

        head = ray.get_runtime_context().gcs_address
        remote = ray.remote(call).options(num_cpus=1, num_gpus=int(device), scheduling_strategy="SPREAD")
        waiting = [remote.remote(*function, argument)]
        try:
            # Before Ray itself, which ends this process a minute after it has lost its head.
            lost = f"lost Ray's head at {head}. {_AGAIN}"
            _await(lambda: bool(ray.wait(waiting, timeout=QUESTION)[0]), meanwhile, lambda: _listens(head), lost)
            return ray.get(waiting[0])
        except ray.exceptions.RayTaskError as error:
            raise _refused("Ray", error) from error
        except ray.exceptions.RayError as error:
            raise MergeflowError(f"Ray lost the stage ({first_line(error)}). {_AGAIN}") from error


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with suppress(OSError), socket.create_connection((host, int(port)), timeout=QUESTION):
        return True
    return False


def _refused(engine: str, error: Exception) -> MergeflowError:
    return MergeflowError(
        f"a worker of {engine} could not begin the stage ({type(error).__name__}: {first_line(error)}). Install the "
        "same mergeflow there as here."
    )
