"""GPU slots: on a Prefect server the limit `gpu` says how many stages may use a CUDA device at once, on all machines.

On one machine a file lock per device keeps stages apart, with or without a server (tasks/project/devices.py).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError
from prefect.concurrency.sync import concurrency

from flows.embedded import is_server_chosen
from mergeflow.errors import MergeflowError
from tasks.project.parameters import load_params
from tasks.project.stage import Stage

LIMIT = "gpu"
LEASE_SECONDS = 60  # the slot of a holder that was killed is free again after this long


@contextmanager
def gpu_slot(root: Path, stage: Stage) -> Iterator[None]:
    """Hold a slot while the block runs, if the stage uses a CUDA device and a person chose the Prefect server.

    Raises:
        MergeflowError: the server has no such limit; without it any number of stages would share the device.
    """
    if not is_server_chosen() or not _uses_cuda(root, stage):
        yield
        return
    try:
        # A renewal that fails must not end hours of training: the device's file lock still keeps others off.
        with concurrency(LIMIT, strict=True, lease_duration=LEASE_SECONDS, raise_on_lease_renewal_failure=False):
            yield
    except ConcurrencySlotAcquisitionError as error:
        raise MergeflowError(
            f"stage {stage.address} uses a GPU and the Prefect server refuses a slot of the limit '{LIMIT}' ({error}): "
            f"create it once with `prefect global-concurrency-limit create {LIMIT} --limit 1`."
        ) from error


def _uses_cuda(root: Path, stage: Stage) -> bool:
    if "model" not in stage.params:  # it computes no features
        return False
    from tasks.project.devices import device_names  # torch comes with it

    return device_names(load_params(root / "params.yaml").run.device) != ["cpu"]
