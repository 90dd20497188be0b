"""Stages and merges that travel: the store, the cluster, and the work on other machines."""

import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

from rich.filesize import decimal

from flows.dvc_commands import remote_address
from flows.runners import Cluster, cluster
from mergeflow.errors import MergeflowError
from mergeflow.merging.files.output import OutputFolder
from mergeflow.merging.files.parts import Part, check_parts
from mergeflow.merging.files.plan import check_target, make_plan, open_inputs
from mergeflow.merging.files.recipe import Recipe, Resolve
from mergeflow.merging.streaming import Job, Merged, merge
from mergeflow.plugins import project_folder
from mergeflow.schema import validated
from tasks.project.sections import ADDRESS, RunSection
from tasks.project.stage import MAIN, Progress, Stage, StageIO
from tasks.running.merge_parcel import MergeParcel, merge_part, pack_merge, take_files
from tasks.running.parcel import Result, Sent, carry_out, pack, read_log, read_progress, unpack
from tasks.running.stage_log import add_to_log
from tasks.travel.store import Store, StoreError

PATIENCE = 60.0  # seconds until who waits for a worker is told; one that is new imports torch first
LOOK = 4.0  # seconds between two looks at what a worker says of its progress
PARTS = 4  # of a merge for each worker, so that those with less to do take more; if each needs its share of inputs only
DRIVERS_OWN = ("register",)  # needs the registry, and git


class Fleet:
    """The machines on which a run's stages are at work."""

    def __init__(self, machines: Cluster, run: RunSection) -> None:
        self._machines, self._uri, self._workers = machines, Store(str(run.store)).uri, run.workers
        self._traffic, self._lock = Counter[str](), Lock()
        self._brought_before = Store.brought
        self._uses_devices = run.device != "cpu" and machines.has_devices()
        if run.device.startswith("cuda") and not self._uses_devices:
            raise MergeflowError(
                f"the device is '{run.device}', but no worker offers a GPU: start Dask's with `--resources GPU=1`, "
                "Ray's nodes with `--num-gpus 1`."
            )

    def takes(self, stage: Stage) -> bool:
        """Check whether a stage travels; studies and stages that need the registry stay on the machine of the run."""
        return stage.file == MAIN and stage.name not in DRIVERS_OWN

    def work(self, io: StageIO) -> None:
        """Build the outputs of a stage on some machine, and take what it says of them."""
        with self._store() as store:
            parcel = pack(io, store)
            try:
                result = self._carried_out(carry_out, parcel, "model" in io.stage.params, store, io.report)
            finally:
                with suppress(StoreError):
                    add_to_log(read_log(store, parcel))
            unpack(io, store, result)

    def device(self, whole: bool) -> str:
        """Choose a device for a merge whose recipe leaves the choice: a card where tensors are treated `whole`."""
        return "cuda" if whole and self._uses_devices else "cpu"

    def fill(self, resolve: Resolve | None, report: Callable[[int, int], None], job: Job, folder: OutputFolder) -> None:
        """Merge the files of a result on some machines, and put them into its folder."""
        count = self._workers if job.inputs.looks_at_all_first else min(PARTS * self._workers, len(job.shards))
        parts = [Part(number, count).of(job.shards) for number in range(1, count + 1)]
        missing = [file for file in job.shards if file not in folder.shards]
        pool, bytes_read = ThreadPoolExecutor(self._workers), Counter[str]()

        def merge_files(parcel: MergeParcel) -> Sequence[str]:
            def look(_what: str, done: int, _total: int) -> None:
                bytes_read[parcel.address] = done
                report(bytes_read.total(), max(bytes_read.total(), job.plan.bytes_read))

            self._carried_out(merge_part, parcel, job.recipe.device != "cpu", store, look)
            return parcel.files

        try:
            with self._store() as store:
                whole = pack_merge(job, missing, resolve, store)
                take_files([file for file in missing if file not in whole.files], whole, job, folder, store)
                sent = [pool.submit(merge_files, parcel) for parcel in whole.parts(parts)]
                for part in as_completed(sent):
                    take_files(part.result(), whole, job, folder, store)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # who waits for a worker ends with the cluster

    @contextmanager
    def _store(self) -> Iterator[Store]:
        store = Store(self._uri)
        try:
            yield store
        finally:
            self._count(here_sent=store.sent, here_fetched=store.fetched)

    def _carried_out(
        self, work: Callable[[dict[str, Any]], Any], parcel: Sent, computes: bool, store: Store, report: Progress
    ) -> Result:
        function, device = (work.__module__, work.__name__), computes and self._uses_devices
        answer = self._machines.run(function, asdict(parcel), device, Watch(report, store, parcel).look)
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
    """Shows the progress of work on its machine, and reports a long wait once."""

    def __init__(self, report: Progress, store: Store, parcel: Sent) -> None:
        self._report, self._store, self._parcel = report, store, parcel
        self._started, self._looked, self._is_quiet = time.monotonic(), 0.0, True

    def look(self) -> None:
        """Report the progress from the store, every few seconds."""
        now = time.monotonic()
        if now - self._looked < LOOK:
            return
        self._looked = now
        with suppress(StoreError):  # of a moment; else the machine says it
            progress = read_progress(self._store, self._parcel)
            self._report(*(progress or ("waiting for a worker", 0, 1)))
            if progress is None and self._is_quiet and now - self._started > PATIENCE:
                self._is_quiet = False
                waited = f"{self._parcel.address} has waited {PATIENCE:.0f} s for a worker of the cluster to begin it."
                print(waited, file=sys.stderr, flush=True)


@contextmanager
def fleet(root: Path, run: RunSection) -> Iterator[Fleet | None]:
    """Connect to store and cluster while the block runs; None where params.yaml names no store."""
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
        fleet = Fleet(machines, run)
        try:
            yield fleet
        finally:
            print(fleet.traffic(), flush=True)


def merge_on_fleet(
    settings: dict[str, Any],
    recipe: Recipe,
    out: Path | None,
    progress: Callable[[int, int], None],
    *,
    resolve: Resolve | None,
    force: bool,
) -> Merged:
    """Merge a recipe on several machines, each of which writes some files of the result.

    Args:
        settings: `store`, `runner` and `workers`, as params.yaml has them; None where they are not given.
        recipe, out, progress, resolve, force: as `merge` takes them. What was finished before is always used.
    """
    given = {key: value for key, value in settings.items() if value is not None} | {"device": recipe.device}
    run = validated(RunSection, {"runner": "dask", **given}, "--store, --runner, --workers")
    recipe = recipe if out is None else recipe.model_copy(update={"out": str(out)})
    check_parts(recipe, None, ())
    with open_inputs(recipe, resolve) as inputs:  # what is wrong with them is said before anything is started or sent
        check_target(recipe, inputs, force)
        Part(1, run.workers).of({str(number): {} for number, _ in enumerate(make_plan(recipe, inputs).shards)})
        whole = inputs.treats_whole
    with fleet(project_folder() or Path.cwd(), run) as machines:
        assert machines is not None
        device = machines.device(whole) if recipe.device == "auto" else recipe.device
        recipe = recipe.model_copy(update={"device": device})
        fill = partial(machines.fill, resolve, progress)
        return merge(recipe, resume=True, resolve=resolve, force=force, fill=fill)
