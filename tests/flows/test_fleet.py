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
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from mergeflow.errors import MergeflowError
from tasks.project.recorded import locked_stages
from tasks.travel.store import Store
from tests.flows.forked import Forked
from tests.flows.hosts import Hosts, dask_hosts, dask_scheduler, dask_worker
from tests.flows.kill_driver import make_toy_repository, wait_for
from tests.flows.runbook import read_blocks
from tests.flows.small_project import ROOT, environment, run_in
from tests.loopback import free_port
from tests.once import once

if TYPE_CHECKING:
    from moto.server import ThreadedMotoServer

pytestmark = [pytest.mark.slow, pytest.mark.nightly]
MACHINES = ROOT / "docs/machines.md"
BUCKET = "s3://bucket/fleet"
WORKERS = ("one", "two")
LONG: dict[str, Any] = {"steps": 3000, "save_every": 50}  # of a fine-tune that is killed: some five seconds
SPAN = 15.0  # seconds of a run, among which a kill's moment is drawn


def with_store(folder: Path, store: str = BUCKET, *, runner: str = "dask", **finetune: Any) -> Path:
    """Make a toy project whose stages travel."""
    make_toy_repository(folder, runner, **finetune)
    values = yaml.safe_load((folder / "params.yaml").read_text())
    values["run"]["store"] = store
    (folder / "params.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
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
    """What dvc.lock says after a run with threads."""
    return reference(tmp_path_factory, "threads")


@pytest.fixture(scope="module")
def threads_long(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return reference(tmp_path_factory, "threads_long", **LONG)


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def hosts(s3: str, tmp_path: Path, port: int) -> Iterator[Hosts]:
    with dask_hosts(Hosts(tmp_path / "hosts", tmp_path / "driver"), port, WORKERS) as hosts:
        yield hosts


def at(port: int) -> str:
    return f"127.0.0.1:{port}"


def tcp(port: int) -> str:
    return f"tcp://{at(port)}"


def run(folder: Path, port: int) -> "subprocess.CompletedProcess[str]":
    started = time.monotonic()
    done = run_in(folder, "mergeflow", "run", timeout=600, DASK_SCHEDULER_ADDRESS=tcp(port))
    print(f"dask: {time.monotonic() - started:.1f} s\n{done.stdout}{done.stderr}")
    return done


def test_stages_travel_through_a_bucket_to_the_bits_of_threads(
    hosts: Hosts, threads: dict[str, Any], tmp_path: Path, port: int, s3: str
) -> None:
    folder = with_store(tmp_path / "driver/project")
    done = run(folder, port)
    assert done.returncode == 0, done.stderr + "".join(map(hosts.log, WORKERS))
    assert recorded(folder) == threads
    assert (folder / "outputs/experts/left").exists()  # the registration has read it, and nothing these
    assert not any((folder / "outputs" / name).exists() for name in ("vectors", "data/train", "data/test"))
    assert re.search(r"Store s3://bucket/fleet: [\d.]+ kB sent from here and [\d.]+ kB by workers", done.stdout)
    assert "Nothing changed" in run_in(folder, "mergeflow", "run").stdout
    record = json.loads((folder / ".mergeflow/records/finetune@left.json").read_text())
    assert record["host"]
    for host in WORKERS:  # no path of the driver has arrived anywhere
        for path in hosts.home(host).rglob("*"):
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
    names = {"HEAD": "127.0.0.1", "8786": str(port), "BUCKET": "bucket"}
    scheduler, worker = (block.commands[0] for block in read_blocks(names, MACHINES) if block.how == "background")
    values = yaml.safe_load((folder / "params.yaml").read_text())
    (choice,) = re.findall(r"```yaml\n(.*?)```", MACHINES.read_text(), re.DOTALL)
    values |= yaml.safe_load(choice.replace("BUCKET", "bucket"))
    (folder / "params.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    hosts = Hosts(tmp_path / "hosts", tmp_path / "driver")
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


@contextmanager
def ray_hosts(tmp_path: Path, port: int) -> Iterator[Hosts]:
    """Give hosts with a head of Ray's, `head`, and another node."""
    hosts = Hosts(tmp_path / "hosts", tmp_path / "driver")
    common = ["--block", "--num-cpus", "1", "--object-store-memory", "100000000"]
    places = {"head": ["--head", "--port", str(port), "--include-dashboard", "false"], "box": ["--address", at(port)]}

    def is_ready(name: str) -> bool:
        return "Ray runtime started" in hosts.log(name)

    try:
        for name, place in places.items():
            hosts.start(name, ["ray", "start", *place, *common])
            assert wait_for(partial(is_ready, name), 120)
        yield hosts
    finally:
        hosts.end()


def test_stages_travel_with_ray(s3: str, threads: dict[str, Any], tmp_path: Path, port: int) -> None:
    folder = with_store(tmp_path / "driver/project", runner="ray")
    with ray_hosts(tmp_path, port):
        done = run_in(folder, "mergeflow", "run", timeout=900, RAY_ADDRESS=at(port))
        assert done.returncode == 0, done.stdout + done.stderr
    assert recorded(folder) == threads


def test_a_lost_head_of_ray_is_told_in_a_sentence_and_the_next_run_ends_right(
    s3: str, threads_long: dict[str, Any], tmp_path: Path, port: int
) -> None:
    folder = with_store(tmp_path / "driver/project", runner="ray", **LONG)
    with ray_hosts(tmp_path, port) as hosts:
        driver = started(folder, RAY_ADDRESS=at(port))
        assert wait_for(saved("finetune@left"), 240)
        hosts.kill("head")
        check_lost(driver, "lost Ray's head")
    with ray_hosts(tmp_path, port):
        assert run_in(folder, "mergeflow", "run", timeout=900, RAY_ADDRESS=at(port)).returncode == 0
    assert recorded(folder) == threads_long


def started(folder: Path, **address: str) -> "subprocess.Popen[str]":
    variables = environment() | address
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(["mergeflow", "run"], cwd=folder, env=variables, **pipes)  # type: ignore[call-overload]


def check_lost(driver: "subprocess.Popen[str]", sentence: str) -> None:
    out, err = driver.communicate(timeout=120)
    assert driver.returncode == 2, out + err
    assert sentence in err
    assert "Traceback" not in err


def saved(stage: str) -> Callable[[], bool]:
    """Ask whether the bucket has a saved state of a stage."""
    store = Store(BUCKET)

    def ask() -> bool:
        with suppress(MergeflowError):
            return any(name.startswith(stage) for name in store.names("states"))
        return False

    return ask


def test_a_killed_workers_training_goes_on_elsewhere_to_the_same_bits(
    hosts: Hosts, threads_long: dict[str, Any], tmp_path: Path, port: int
) -> None:
    folder = with_store(tmp_path / "driver/project", **LONG)
    driver = started(folder, DASK_SCHEDULER_ADDRESS=tcp(port))
    assert wait_for(saved("finetune@left"), 240)
    (victim,) = hosts.at_work("finetune@left")
    hosts.kill(victim)
    out, err = driver.communicate(timeout=400)
    assert driver.returncode == 0, out + err
    assert recorded(folder) == threads_long


def test_a_lost_scheduler_is_told_in_a_sentence_and_the_next_run_ends_right(
    hosts: Hosts, threads_long: dict[str, Any], tmp_path: Path, port: int
) -> None:
    folder = with_store(tmp_path / "driver/project", **LONG)
    driver = started(folder, DASK_SCHEDULER_ADDRESS=tcp(port))
    assert wait_for(saved("finetune@left"), 240)
    hosts.kill("head")
    check_lost(driver, "lost the Dask scheduler")
    hosts.end()
    hosts.start("head", dask_scheduler(port))
    hosts.start("three", dask_worker(port))
    assert run(folder, port).returncode == 0
    assert recorded(folder) == threads_long


@pytest.fixture
def forked_hosts(s3: str, tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    """Hosts that are there again at once after a kill, with leases that run out soon."""
    hosts = Hosts(tmp_path / "hosts", tmp_path / "driver", forked=True, MERGEFLOW_LEASE_SECONDS="4")
    with dask_hosts(hosts, port, WORKERS):
        yield hosts


def test_killed_at_random_moments(forked_hosts: Hosts, threads_long: dict[str, Any], tmp_path: Path, port: int) -> None:
    """Worker, scheduler or driver, whatever the lot says; in the end the bits are those of an undisturbed run."""
    lot, folder = random.Random(int(os.environ.get("MERGEFLOW_SEED", 0))), tmp_path / "driver/project"
    kills, struck, projects = int(os.environ.get("MERGEFLOW_KILLS", 6)), Counter[str](), 0
    begun = time.monotonic()
    while struck.total() < kills or folder.exists():
        if not folder.exists():
            with_store(folder, f"{BUCKET}-{projects}", **LONG)
            projects += 1
        driver = Forked(folder, ("mergeflow", "run"), environment() | {"DASK_SCHEDULER_ADDRESS": tcp(port)})
        done = killed_until_it_ends(driver, forked_hosts, port, lot, kills, struck)
        assert done.returncode in (0, 2, -9), done.stdout + done.stderr
        assert "Traceback" not in done.stderr, done.stderr
        if done.returncode == 0:
            assert recorded(folder) == threads_long
            shutil.rmtree(folder)
    print(f"{dict(struck)} killed in {projects} projects, {time.monotonic() - begun:.0f} s", flush=True)


def killed_until_it_ends(
    driver: Forked, hosts: Hosts, port: int, lot: random.Random, kills: int, struck: Counter[str]
) -> "subprocess.CompletedProcess[str]":
    """Kill hosts while a driver runs, and start them again, or the driver; return how it has ended."""
    while struck.total() < kills:
        with suppress(subprocess.TimeoutExpired):
            return driver.wait(lot.uniform(1, SPAN))
        victim = lot.choice([*WORKERS, "head", "driver"])
        struck[victim] += 1
        print(f"kill {struck.total()}: {victim}", flush=True)
        if victim == "driver":
            return driver.kill()
        hosts.kill(victim)
        if victim == "head":  # its workers end too
            hosts.end()
            hosts.start("head", dask_scheduler(port))
        for name in WORKERS if victim == "head" else [victim]:
            hosts.start(name, dask_worker(port))
    return driver.wait(400)


class Trouble:
    """What lies between a server of S3 and its clients: it is slow, or takes nothing more."""

    def __init__(self, server: Any) -> None:
        self.kind, self._app = "", server._server.app
        server._server.app = self

    def __call__(self, request: dict[str, Any], answer: Any) -> Any:
        if self.kind == "full" and request["REQUEST_METHOD"] == "PUT":
            answer("507 Insufficient Storage", [])
            return []
        if self.kind == "slow":
            time.sleep(0.2)
        return self._app(request, answer)


@pytest.mark.parametrize("kind", ["slow", "full"])
def test_a_store_in_trouble_is_waited_for_or_named(
    kind: str,
    s3_server: "ThreadedMotoServer",
    forked_hosts: Hosts,
    threads_long: dict[str, Any],
    tmp_path: Path,
    port: int,
) -> None:
    folder, trouble = with_store(tmp_path / "driver/project", **LONG), Trouble(s3_server)
    driver = Forked(folder, ("mergeflow", "run"), environment() | {"DASK_SCHEDULER_ADDRESS": tcp(port)})
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
        done = run(folder, port)
    assert done.returncode == 0, done.stdout + done.stderr
    assert recorded(folder) == threads_long


def test_two_drivers_at_once_do_no_stage_twice(
    forked_hosts: Hosts, threads: dict[str, Any], tmp_path: Path, port: int
) -> None:
    folders = [with_store(tmp_path / "driver" / name) for name in ("here", "there")]
    variables = environment() | {"DASK_SCHEDULER_ADDRESS": tcp(port)}
    for driver in [Forked(folder, ("mergeflow", "run"), variables) for folder in folders]:
        done = driver.wait(400)
        assert done.returncode == 0, done.stdout + done.stderr
    assert [recorded(folder) for folder in folders] == [threads, threads]
    for stage in ("base", "finetune@left", "finetune@right", "sweep@ties"):
        records = [json.loads((folder / f".mergeflow/records/{stage}.json").read_text()) for folder in folders]
        assert records[0]["seconds"] == records[1]["seconds"], stage
