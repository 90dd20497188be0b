"""A fleet: stages on workers of Dask that share with the driver a bucket and no folder, and what is killed there.

The night's part repeats the kills: `MERGEFLOW_KILLS=60 pytest -s -n 0 tests/flows/test_fleet.py -m nightly`.
"""

import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from mergeflow.errors import MergeflowError
from tasks.project.recorded import locked_stages
from tasks.travel.store import Store
from tests.flows.forked import Forked
from tests.flows.hosts import Hosts, Machines, machines
from tests.flows.kill_driver import make_toy_repository, wait_for
from tests.flows.runbook import read_blocks
from tests.flows.small_project import ROOT, environment, run_in
from tests.loopback import free_port
from tests.once import once
from tests.project_folder import change_params

if TYPE_CHECKING:
    from moto.server import ThreadedMotoServer

pytestmark = [pytest.mark.slow, pytest.mark.nightly]
MACHINES = ROOT / "docs/machines.md"
BUCKET = "s3://bucket/fleet"
WORKERS = ("one", "two")
LONG: dict[str, Any] = {"steps": 3000, "save_every": 50}  # of a fine-tune that is killed: some five seconds
SHORT = {"MERGEFLOW_LEASE_SECONDS": "4"}  # until a dead host's stage is another's
SPAN, OUTAGE = 15.0, 30.0  # seconds of which the lot chooses: until a kill, and until a killed store is there again


def with_store(folder: Path, store: str = BUCKET, *, runner: str = "dask", **finetune: Any) -> Path:
    make_toy_repository(folder, runner, **finetune)
    change_params(folder, {"run.store": store})
    return folder


def recorded(folder: Path) -> dict[str, Any]:
    """What dvc.lock says of all stages but the registration, which names the run's version and time."""
    return {name: entry for name, entry in locked_stages(folder).items() if name != "register"}


def reference(factory: pytest.TempPathFactory, name: str, **finetune: int) -> dict[str, Any]:
    def make(folder: Path) -> None:
        make_toy_repository(folder, "threads", **finetune)
        started = time.monotonic()
        done = run_in(folder, "mergeflow", "run", timeout=900)
        assert done.returncode == 0, done.stderr
        print(f"threads: {time.monotonic() - started:.1f} s")

    return recorded(once(factory, name, make))


@pytest.fixture(scope="module")
def threads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return reference(tmp_path_factory, "threads")


@pytest.fixture(scope="module")
def threads_long(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return reference(tmp_path_factory, "threads_long", **LONG)


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def cluster(s3: str, tmp_path: Path, port: int) -> Iterator[Machines]:
    with machines("dask", hosts_below(tmp_path), port, WORKERS) as cluster:
        yield cluster


def hosts_below(folder: Path, **options: Any) -> Hosts:
    return Hosts(folder / "hosts", folder / "driver", **options)


def run(folder: Path, cluster: Machines) -> "subprocess.CompletedProcess[str]":
    started = time.monotonic()
    done = run_in(folder, "mergeflow", "run", timeout=900, **cluster.address)
    print(f"{time.monotonic() - started:.1f} s\n{done.stdout}{done.stderr}")
    return done


def test_stages_travel_through_a_bucket_to_the_bits_of_threads(
    cluster: Machines, threads: dict[str, Any], tmp_path: Path, s3: str
) -> None:
    folder = with_store(tmp_path / "driver/project")
    done = run(folder, cluster)
    assert done.returncode == 0, done.stderr + "".join(map(cluster.hosts.log, WORKERS))
    assert recorded(folder) == threads
    assert (folder / "outputs/experts/left").exists()  # the registration has read it, and nothing these
    assert not any((folder / "outputs" / name).exists() for name in ("vectors", "data/train", "data/test"))
    assert re.search(r"Store s3://bucket/fleet: [\d.]+ kB sent from here and [\d.]+ kB by workers", done.stdout)
    assert "Nothing changed" in run_in(folder, "mergeflow", "run").stdout
    record = json.loads((folder / ".mergeflow/records/finetune@left.json").read_text())
    assert record["host"]
    for host in WORKERS:  # no path of the driver has arrived anywhere
        for path in cluster.hosts.home(host).rglob("*"):
            assert not path.is_file() or str(folder).encode() not in path.read_bytes(), path
    pull(folder, s3)


def pull(folder: Path, s3: str) -> None:
    """The bucket is a remote of DVC's that has the outputs."""
    for option, value in (("url", BUCKET), ("endpointurl", s3)):
        done = run_in(folder, "dvc", "remote", "modify", "--local", "storage", option, value)
        assert done.returncode == 0, done.stderr
    shutil.rmtree(folder / ".dvc/cache")
    shutil.rmtree(folder / "outputs/experts")
    done = run_in(folder, "dvc", "pull", "finetune@left", "finetune@right", "prepare@left", "vectors")
    assert done.returncode == 0, done.stderr
    assert (folder / "outputs/experts/left/model.safetensors").exists()
    assert (folder / "outputs/vectors/left.safetensors").exists()


def test_the_page_leads_to_a_run_on_three_hosts(
    s3: str, threads: dict[str, Any], tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_toy_repository(tmp_path / "driver/project")
    names = {"HEAD": "127.0.0.1", "8786": str(port), "BUCKET": "bucket", "workers 4": "workers 2"}
    scheduler, worker = (block.commands[0] for block in read_blocks(names, MACHINES) if block.how == "background")
    (choice,) = re.findall(r"```yaml\n(.*?)```", MACHINES.read_text(), re.DOTALL)
    change_params(folder, yaml.safe_load(choice.replace("BUCKET", "bucket")))
    experts = [f"outputs/experts/{task}" for task in ("left", "right")]
    recipe = {"method": "ties", "base": "outputs/base", "experts": experts, "out": "merged", "shard_size": 100}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    hosts = hosts_below(tmp_path)
    try:
        hosts.start("head", scheduler)
        for name in ("box-1", "box-2", "box-3"):
            hosts.start(name, worker)
        for words in (
            words for block in read_blocks(names, MACHINES) if block.how == "run" for words in block.commands
        ):
            if words[0] == "export":
                monkeypatch.setenv(*words[1].split("="))
                continue
            done = run_in(folder, *words, timeout=600)
            assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
    finally:
        hosts.end()
    assert recorded(folder) == threads
    there = {path.name: path.read_bytes() for path in (folder / "merged").iterdir()}
    assert len(there) > 3
    assert run_in(folder, "mergeflow", "merge", "recipe.yaml").returncode == 0
    assert {path.name: path.read_bytes() for path in (folder / "merged").iterdir()} == there


def test_stages_travel_with_ray(s3: str, threads: dict[str, Any], tmp_path: Path, port: int) -> None:
    folder = with_store(tmp_path / "driver/project", runner="ray")
    with machines("ray", hosts_below(tmp_path), port, ["box"]) as cluster:
        done = run(folder, cluster)
        assert done.returncode == 0, done.stdout + done.stderr
    assert recorded(folder) == threads


@pytest.mark.parametrize(("runner", "sentence"), [("dask", "lost the Dask scheduler"), ("ray", "lost Ray's head")])
def test_a_lost_head_is_told_in_a_sentence_and_the_next_run_ends_right(
    runner: str, sentence: str, s3: str, threads_long: dict[str, Any], tmp_path: Path, port: int
) -> None:
    folder = with_store(tmp_path / "driver/project", runner=runner, **LONG)
    with machines(runner, hosts_below(tmp_path), port, ["box"]) as cluster:
        driver = started(folder, cluster)
        assert wait_for(saved("finetune@left"), 240)
        cluster.hosts.kill("head")
        out, err = driver.communicate(timeout=120)
        assert driver.returncode == 2, out + err
        assert sentence in err
        assert "Traceback" not in err
        cluster.hosts.end()
        cluster.start()
        assert run(folder, cluster).returncode == 0
    assert recorded(folder) == threads_long


def started(folder: Path, cluster: Machines) -> "subprocess.Popen[str]":
    variables = environment() | cluster.address
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(["mergeflow", "run"], cwd=folder, env=variables, **pipes)  # type: ignore[call-overload]


def saved(stage: str) -> Callable[[], bool]:
    store = Store(BUCKET)

    def ask() -> bool:
        with suppress(MergeflowError):
            return any(name.startswith(stage) for name in store.names("states"))
        return False

    return ask


def test_a_killed_workers_training_goes_on_elsewhere_to_the_same_bits(
    cluster: Machines, threads_long: dict[str, Any], tmp_path: Path
) -> None:
    folder = with_store(tmp_path / "driver/project", **LONG)
    driver = started(folder, cluster)
    assert wait_for(saved("finetune@left"), 240)
    (victim,) = cluster.hosts.at_work("finetune@left")
    cluster.kill(victim)
    out, err = driver.communicate(timeout=400)
    assert driver.returncode == 0, out + err
    assert recorded(folder) == threads_long


@pytest.fixture
def forked(s3: str, tmp_path: Path, port: int) -> Iterator[Machines]:
    """A cluster whose hosts are there again at once after a kill, with leases that run out soon."""
    with machines("dask", hosts_below(tmp_path, forked=True, **SHORT), port, WORKERS) as cluster:
        yield cluster


@pytest.mark.parametrize("runner", ["dask", "ray"])
def test_killed_at_random_moments(
    runner: str, s3_server: "ThreadedMotoServer", threads_long: dict[str, Any], tmp_path: Path, port: int
) -> None:
    """Worker, head, store or driver, whatever the lot says; in the end the bits are those of an undisturbed run.

    The first project and every other has two drivers, which share their stages.
    """
    lot, begun = random.Random(int(os.environ.get("MERGEFLOW_SEED", 0))), time.monotonic()
    kills, struck, projects = int(os.environ.get("MERGEFLOW_KILLS", 6)), Counter[str](), 0
    hosts, trouble = hosts_below(tmp_path, forked=runner == "dask", **SHORT), Trouble(s3_server)
    with machines(runner, hosts, port, WORKERS[: 2 if runner == "dask" else 1]) as cluster:
        while struck.total() < kills:
            folders = [tmp_path / f"driver/{projects}-{number}" for number in range(2 - projects % 2)]
            for folder in folders:
                with_store(folder, f"{BUCKET}-{projects}", runner=runner, **LONG)
            killed_until_they_end(folders, cluster, trouble, lot, kills, struck)
            assert all(recorded(folder) == threads_long for folder in folders)
            projects += 1
    print(f"{dict(struck)} killed in {projects} projects, {time.monotonic() - begun:.0f} s", flush=True)


def killed_until_they_end(
    folders: list[Path], cluster: Machines, trouble: "Trouble", lot: random.Random, kills: int, struck: Counter[str]
) -> None:
    """Run all projects to their ends, while hosts, store and drivers are killed and started again."""

    def start(folder: Path) -> Forked:
        return Forked(folder, ("mergeflow", "run"), environment() | cluster.address)

    drivers = {folder: start(folder) for folder in folders}
    while drivers:
        wait_for(lambda: any(map(ended, drivers.values())), lot.uniform(1, SPAN) if struck.total() < kills else 600)
        finished = {folder: done for folder, driver in drivers.items() if (done := ended(driver))}
        for folder, done in finished.items():
            assert done.returncode in (0, 2, -9), done.stdout + done.stderr
            assert "Traceback" not in done.stderr, done.stderr
            del drivers[folder]
            if done.returncode:
                drivers[folder] = start(folder)
        if not finished:
            assert struck.total() < kills, "it does not end"
            victim = lot.choice([*cluster.workers, "head", "store", "driver"])
            struck[victim] += 1
            print(f"kill {struck.total()}: {victim} of {len(drivers)} drivers'", flush=True)
            if victim == "driver":
                lot.choice(list(drivers.values())).kill()
            elif victim == "store":
                trouble.stop(lot.uniform(0, OUTAGE))
            else:
                cluster.start(*cluster.kill(victim))


def ended(driver: Forked) -> "subprocess.CompletedProcess[str] | None":
    with suppress(subprocess.TimeoutExpired):
        return driver.wait(0)
    return None


class Trouble:
    """What lies between a server of S3 and its clients: it is slow, takes nothing more, or is killed."""

    def __init__(self, server: Any) -> None:
        self.kind, self._server = "", server
        _, server._port = server.get_host_and_port()
        self._hold()

    def _hold(self) -> None:
        self._served = self._server._server
        self._app, self._served.app = self._served.app, self

    def stop(self, seconds: float) -> None:
        """Let it not answer even what it is at work on, and refuse connections for a while. What it has stays."""
        self.kind = "killed"
        self._server.stop()
        self._served.server_close()
        time.sleep(seconds)
        self._server.start()
        self._hold()
        self.kind = ""

    def __call__(self, request: dict[str, Any], answer: Any) -> Any:
        if self.kind == "full" and request["REQUEST_METHOD"] == "PUT":
            answer("507 Insufficient Storage", [])
            return []
        if self.kind == "slow":
            time.sleep(0.2)
        answered = self._app(request, answer)
        if self.kind == "killed":
            raise ConnectionError
        return answered


@pytest.mark.parametrize("kind", ["slow", "full"])
def test_a_store_in_trouble_is_waited_for_or_named(
    kind: str,
    s3_server: "ThreadedMotoServer",
    forked: Machines,
    threads_long: dict[str, Any],
    tmp_path: Path,
) -> None:
    folder, trouble = with_store(tmp_path / "driver/project", **LONG), Trouble(s3_server)
    driver = Forked(folder, ("mergeflow", "run"), environment() | forked.address)
    assert wait_for(saved("finetune@left"), 240)
    trouble.kind = kind
    begun = time.monotonic()
    done = driver.wait(400)
    print(f"{kind}: {time.monotonic() - begun:.0f} s\n{done.stdout}{done.stderr}")
    trouble.kind = ""
    if kind != "slow":
        assert done.returncode == 2, done.stdout + done.stderr
        assert f"the store {BUCKET}" in done.stderr
        assert "Traceback" not in done.stderr
        store = Store(BUCKET)
        for path in store._fs.find(f"{store._root}/files/md5"):  # nothing half-written
            assert hashlib.md5(store._fs.cat_file(path)).hexdigest() == "".join(
                path.removesuffix(".dir").split("/")[-2:]
            )
        done = run(folder, forked)
    assert done.returncode == 0, done.stdout + done.stderr
    assert recorded(folder) == threads_long


def test_two_drivers_at_once_do_no_stage_twice(forked: Machines, threads: dict[str, Any], tmp_path: Path) -> None:
    folders = [with_store(tmp_path / "driver" / name) for name in ("here", "there")]
    variables = environment() | forked.address
    for driver in [Forked(folder, ("mergeflow", "run"), variables) for folder in folders]:
        done = driver.wait(400)
        assert done.returncode == 0, done.stdout + done.stderr
    assert [recorded(folder) for folder in folders] == [threads, threads]
    for stage in ("base", "finetune@left", "finetune@right", "sweep@ties"):
        records = [json.loads((folder / f".mergeflow/records/{stage}.json").read_text()) for folder in folders]
        assert records[0]["seconds"] == records[1]["seconds"], stage
