"""Stages that travel: a run's store and cluster, and the work of a stage on another machine."""

import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from threading import Lock

from rich.filesize import decimal

from flows.dvc_commands import remote_address
from flows.runners import Cluster, cluster
from mergeflow.errors import MergeflowError
from tasks.project.sections import ADDRESS, RunSection
from tasks.project.stage import MAIN, Stage, StageIO
from tasks.running.parcel import Parcel, Result, carry_out, pack, read_log, read_progress, unpack
from tasks.running.stage_log import add_to_log
from tasks.travel.store import Store, StoreError

PATIENCE = 60.0  # seconds until who waits for a worker is told; one that is new imports torch first
LOOK = 4.0  # seconds between two looks at what a worker says of its progress
DRIVERS_OWN = ("register",)  # needs the registry, and git


class Fleet:
    """The machines on which a run's stages are at work."""

    def __init__(self, machines: Cluster, run: RunSection) -> None:
        """Take a cluster and what params.yaml says of its use.

        Raises:
            MergeflowError: a CUDA device is asked for and no worker offers one, or the store cannot be opened.
        """
        self._machines, self._uri = machines, Store(str(run.store)).uri
        self._traffic, self._lock = Counter[str](), Lock()
        self._brought_before = Store.brought
        self._uses_devices = run.device != "cpu" and machines.has_devices()
        if run.device.startswith("cuda") and not self._uses_devices:
            raise MergeflowError(
                f"run.device is '{run.device}', but no worker offers a GPU: start Dask's with `--resources GPU=1`, "
                "Ray's nodes with `--num-gpus 1`."
            )

    def takes(self, stage: Stage) -> bool:
        """Check whether a stage travels; studies and stages that need the registry stay on the machine of the run."""
        return stage.file == MAIN and stage.name not in DRIVERS_OWN

    def work(self, io: StageIO) -> None:
        """Build the outputs of a stage on some machine, and take what it says of them.

        Raises:
            Exception: what the stage raised there.
            MergeflowError: store or cluster was lost.
        """
        store = Store(self._uri)
        try:
            parcel = pack(io, store)
            try:
                result = self._carried_out(parcel, "model" in io.stage.params, Watch(io, store, parcel).look)
            finally:
                with suppress(StoreError):
                    add_to_log(read_log(store, parcel))
            unpack(io, store, result)
        finally:
            self._count(here_sent=store.sent, here_fetched=store.fetched)

    def _carried_out(self, parcel: Parcel, computes: bool, look: Callable[[], None]) -> Result:
        function, device = (carry_out.__module__, carry_out.__name__), computes and self._uses_devices
        answer = self._machines.run(function, asdict(parcel), device, look)
        if isinstance(answer, Exception):
            raise answer
        result = Result(**answer)
        self._count(there_sent=result.sent, there_fetched=result.fetched)
        return result

    def _count(self, **traffic: int) -> None:
        with self._lock:
            self._traffic.update(traffic)

    def traffic(self) -> str:
        """Say in a sentence how many bytes went through the store."""
        moved = self._traffic
        fetched = moved["here_fetched"] + Store.brought - self._brought_before
        return (
            f"Store {self._uri}: {decimal(moved['here_sent'])} sent from here and {decimal(moved['there_sent'])} by "
            f"workers, {decimal(fetched)} fetched here and {decimal(moved['there_fetched'])} by workers."
        )


class Watch:
    """Shows the progress of a stage on its machine, and reports a long wait once."""

    def __init__(self, io: StageIO, store: Store, parcel: Parcel) -> None:
        self._io, self._store, self._parcel = io, store, parcel
        self._started, self._looked, self._is_quiet = time.monotonic(), 0.0, True

    def look(self) -> None:
        """Report the stage's progress from the store, every few seconds."""
        now = time.monotonic()
        if now - self._looked < LOOK:
            return
        self._looked = now
        with suppress(StoreError):  # of a moment; else the machine says it
            progress = read_progress(self._store, self._parcel)
            self._io.report(*(progress or ("waiting for a worker", 0, 1)))
            if progress is None and self._is_quiet and now - self._started > PATIENCE:
                self._is_quiet = False
                waited = f"{self._parcel.address} has waited {PATIENCE:.0f} s for a worker of the cluster to begin it."
                print(waited, file=sys.stderr, flush=True)


@contextmanager
def fleet(root: Path, run: RunSection) -> Iterator[Fleet | None]:
    """Connect to store and cluster while the block runs; None where params.yaml names no store.

    Raises:
        MergeflowError: the store is DVC's remote, which is a folder.
    """
    if run.store is None:
        yield None
        return
    if run.store == "remote":
        run = run.model_copy(update={"store": remote_address(root)})
        if not re.fullmatch(ADDRESS, str(run.store)):
            raise MergeflowError(
                f"run.store is 'remote', but DVC's remote is '{run.store}', which workers do not reach: give it an "
                "address, `dvc remote modify --local storage url s3://BUCKET/fleet`."
            )
    with cluster(run.runner, run.workers) as machines:
        ours = Fleet(machines, run)
        try:
            yield ours
        finally:
            print(ours.traffic(), flush=True)
