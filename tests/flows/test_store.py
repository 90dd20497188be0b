"""The store of a fleet: objects as DVC's remotes have them, leases, saved states; on a folder and on a server of S3."""

import errno
import json
import pickle
import shutil
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import chdir, nullcontext, suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import yaml
from fsspec.implementations.local import LocalFileSystem
from s3fs import S3FileSystem

from flows import fleet
from flows.dvc_commands import changes, push_outputs, record_outputs, remove_stale_outputs
from flows.fleet import Fleet, Watch
from mergeflow.errors import MergeflowError
from mergeflow.merging.catalog import METHODS
from mergeflow.merging.compression.compressor import COMPRESSORS
from mergeflow.modalities.catalog import MODALITIES
from mergeflow.modalities.preparing import PREPARATIONS, SOURCES
from mergeflow.modalities.sections import SECTIONS
from mergeflow.modalities.served import SERVED
from registry.lineage import describe_expert
from tasks.project.graph import load_graph
from tasks.project.recorded import digest_as_dvc, locked_stages, md5_of, stored_outputs
from tasks.project.sections import RunSection
from tasks.project.stage import Stage, StageIO
from tasks.running import digests
from tasks.running import parcel as parcels
from tasks.running.parcel import Parcel, Result, carry_out, pack, unpack
from tasks.running.runner import PROGRESS_SECONDS, do_here, open_stage, progress_file, run_stage, running_code
from tasks.travel import lease as leases
from tasks.travel import store as stores
from tasks.travel.lease import forget_state, lease, lease_name, mirrored, restore_state
from tasks.travel.store import Store, StoreError, bring, forget_lost
from tests.flows.kill_driver import make_toy_repository
from tests.flows.small_project import run_in, write_method
from tests.project_folder import change_params, run_pipeline
from tests.toy_project import make_toy_project


@pytest.fixture(params=["file", "s3"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        request.getfixturevalue("s3")
        return "s3://bucket/fleet"
    return f"file://{tmp_path}/store"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("a.txt", "b/c.txt", "b.d/e.txt"):
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_text(name)
    return tmp_path / "tree"


def test_what_is_sent_has_dvcs_hash_comes_back_and_is_not_sent_again(uri: str, tree: Path, tmp_path: Path) -> None:
    store = Store(uri)
    hashes = {path: store.send(path) for path in (tree, tree / "a.txt")}
    assert hashes == {path: digest_as_dvc(path) for path in hashes}
    sent = store.sent
    assert sent > 0
    store.send(tree)
    assert store.sent == sent
    for path, md5 in hashes.items():
        store.fetch(md5, tmp_path / "back")
        assert digest_as_dvc(tmp_path / "back") == md5, path


def test_large_files_are_sent_one_after_the_other(
    s3: str, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "_LARGE", 6)
    together, put = list[str](), S3FileSystem.put
    monkeypatch.setattr(S3FileSystem, "put", lambda fs, sources, to: (together.extend(sources), put(fs, sources, to)))
    store = Store("s3://bucket/fleet")
    md5 = store.send(tree)
    assert [Path(path).name for path in together] == ["a.txt"]
    store.fetch(md5, tmp_path / "back")
    assert digest_as_dvc(tmp_path / "back") == md5


def test_what_a_machine_has_is_not_fetched_again(uri: str, tree: Path, tmp_path: Path) -> None:
    md5 = Store(uri).send(tree)
    store = Store(uri, tmp_path / "cache")
    store.fetch(md5, tmp_path / "first")
    listing = store.fetched - sum(path.stat().st_size for path in tree.rglob("*") if path.is_file())
    again = Store(uri, tmp_path / "cache")
    again.fetch(md5, tmp_path / "second")
    assert again.fetched == listing
    assert digest_as_dvc(tmp_path / "second") == md5


def test_damaged_bytes_are_refused_wherever_they_lie(uri: str, tree: Path, tmp_path: Path) -> None:
    store = Store(uri, tmp_path / "cache")
    file, folder = store.send(tree / "a.txt"), store.send(tree)
    place = f"{store._root}/files/md5/{file[:2]}/{file[2:]}"
    store.fetch(file, tmp_path / "out")
    cached = tmp_path / "cache" / file[:2] / file[2:]
    cached.chmod(0o644)
    cached.write_text("A.txt")
    store.fetch(file, tmp_path / "out")  # the machine's copy is fetched anew
    assert (tmp_path / "out").read_text() == "a.txt"
    store._fs.pipe_file(place, b"A.txt")
    shutil.rmtree(tmp_path / "cache")
    for md5 in (file, folder):
        with pytest.raises(StoreError, match=f"Remove {file}.*run again"):
            store.fetch(md5, tmp_path / "out")
    assert not list((tmp_path / "cache").rglob(f"{file[2:]}*"))
    store._fs.rm_file(place)
    with pytest.raises(StoreError, match="is missing"):
        store.fetch(file, tmp_path / "out")


def test_a_store_that_takes_nothing_is_told_in_a_sentence(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StoreError, match="nowhere://bucket cannot be opened"):
        Store("nowhere://bucket")
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="run again when that is mended"):
        Store(f"file://{tmp_path}/file/store").send(tree)

    def put_file(_fs: Any, _source: str, target: str) -> None:
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        Path(target).write_text("a")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(LocalFileSystem, "put_file", put_file)
    with pytest.raises(StoreError, match="No space left"):
        Store(f"file://{tmp_path}/full").send(tree)
    assert not [path for path in (tmp_path / "full").rglob("*") if path.is_file()]


def test_a_store_that_does_not_answer_is_told_in_a_sentence(s3: str, tree: Path) -> None:
    with pytest.raises(StoreError, match="the store s3://missing/x cannot be written to"):
        Store("s3://missing/x").send(tree)


def test_one_of_many_that_create_a_document_at_once_has_created_it(uri: str) -> None:
    many = 16
    start = threading.Barrier(many)

    def create(number: int) -> bool:
        store = Store(uri)
        start.wait()
        return store.create("leases/a.json", {"holder": number})

    with ThreadPoolExecutor(many) as threads:
        for _ in range(5):
            created = list(threads.map(create, range(many)))
            assert sum(created) == 1
            assert Store(uri).read("leases/a.json") == {"holder": created.index(True)}
            Store(uri).remove("leases/a.json")


def test_a_document_is_read_by_one_request(s3_server: Any) -> None:
    requests, app = list[str](), s3_server._server.app

    def counted(request: dict[str, Any], answer: Any) -> Any:
        requests.append(request["REQUEST_METHOD"])
        return app(request, answer)

    store = Store("s3://bucket/fleet")
    store.write("there.json", {"text": "x" * 10**6})
    s3_server._server.app = counted
    assert store.read("missing.json") is None
    assert store.read("there.json") == {"text": "x" * 10**6}
    assert requests == ["GET", "GET"]


@pytest.mark.slow
def test_a_store_that_drops_every_connection_is_given_up_after_few(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: list[object] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drop() -> None:
            with suppress(OSError):  # the server is closed
                while True:
                    connection, address = server.accept()
                    connection.close()
                    dropped.append(address)

        threading.Thread(target=drop, daemon=True).start()
        S3FileSystem.clear_instance_cache()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        with pytest.raises(StoreError, match="cannot be written to"):
            Store("s3://bucket/fleet").create("leases/a.json", {})
    S3FileSystem.clear_instance_cache()
    assert len(dropped) <= 25  # 50 by the clients' defaults, and 45 seconds


class TestLease:
    def test_two_hold_it_one_after_the_other(self, uri: str) -> None:
        held: list[str] = []

        def hold(name: str) -> None:
            with lease(Store(uri), "stage", dict):
                held.append(f"{name} has it")
                time.sleep(0.3)
                held.append(f"{name} had it")

        threads = [threading.Thread(target=hold, args=(name,)) for name in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [text[0] for text in held] in (list("aabb"), list("bbaa"))
        assert Store(uri).read(lease_name("stage")) is None

    def test_that_of_a_dead_holder_runs_out_and_that_of_a_living_one_does_not(
        self, uri: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name, seconds in (("EXPIRY", 0.6), ("RENEWAL", 0.1), ("POLL", 0.05)):
            monkeypatch.setattr(leases, name, seconds)
        store, waited = Store(uri), list[float]()
        store.create(lease_name("stage"), {"holder": "killed", "clock": time.time() + 3600})

        def hold(seconds: float) -> None:
            started = time.monotonic()
            with lease(Store(uri), "stage", dict):
                waited.append(time.monotonic() - started)
                time.sleep(seconds)

        hold(0)
        assert waited.pop() >= 0.6
        living = threading.Thread(target=hold, args=(1.5,))
        living.start()
        while not waited:
            time.sleep(0.01)
        hold(0)
        living.join()
        assert waited[-1] >= 1.3

    def test_of_many_that_see_a_dead_holder_one_alone_has_it_next(
        self, uri: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name, seconds in (("EXPIRY", 0.4), ("RENEWAL", 0.1), ("POLL", 0.1)):
            monkeypatch.setattr(leases, name, seconds)
        many, changes = 8, list[int]()
        Store(uri).create(lease_name("stage"), {"holder": "killed"})

        def hold(_number: int) -> None:
            with lease(Store(uri), "stage", dict):
                changes.append(1)
                time.sleep(0.15)
                changes.append(-1)

        with ThreadPoolExecutor(many) as threads:
            list(threads.map(hold, range(many)))
        assert max(accumulate(changes)) == 1


class TestSavedState:
    def test_it_goes_on_elsewhere_and_is_forgotten_in_the_end(
        self, uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(leases, "MIRROR", 0.05)
        store, here, there = Store(uri), tmp_path / "here", tmp_path / "there"
        (here / "building").mkdir(parents=True)
        (here / "building/half").write_text("of an output")
        (here / "training").mkdir()
        with mirrored(store, "stage", here):
            for step in ("1", "2"):
                (here / "training/saved.pt").write_text(step)
                while (store.read("states/stage.json") or {}).get("training/saved.pt") != digest_as_dvc(
                    here / "training/saved.pt"
                ):
                    time.sleep(0.02)
        assert len(store.names("states/stage")) == 1  # the last one alone
        assert restore_state(store, "stage", there)
        assert [path.relative_to(there).as_posix() for path in there.rglob("*.*")] == ["training/saved.pt"]
        assert (there / "training/saved.pt").read_text() == "2"
        forget_state(store, "stage")
        assert not restore_state(store, "stage", tmp_path / "third")

    def test_a_damaged_one_is_none(self, uri: str, tmp_path: Path) -> None:
        store, file = Store(uri), tmp_path / "saved"
        file.write_text("1")
        store.put_file(file, "states/stage/0123")
        store.write("states/stage.json", {"saved": "0123"})
        assert not restore_state(store, "stage", tmp_path / "scratch")
        assert not (tmp_path / "scratch").exists()


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_toy_project(tmp_path_factory.mktemp("driver") / "toy")
    (folder / "methods").mkdir()
    write_method(folder / "methods/mine.py", helpers="_help")
    change_params(folder, {"sweep": {"mine": {"scale": [1.0]}}})
    with chdir(folder):
        return run_pipeline(folder, ("prepare", "base", "multitask"))


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(parcels.WORKER_FOLDER, str(tmp_path / "worker"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "worker"


def test_all_folders_of_plugins_travel() -> None:
    shelves = (METHODS, SOURCES, COMPRESSORS, SECTIONS, MODALITIES, SERVED, PREPARATIONS)
    assert {shelf.folder for shelf in shelves} == set(parcels._PLUGINS)


def stage_of(project: Path, address: str = "finetune@left") -> Stage:
    return load_graph(project)[address]


def packed(project: Path, store: Store, address: str = "finetune@left") -> Parcel:
    with chdir(project):
        return pack(open_stage(project, stage_of(project, address))[0], store)


def travelled(project: Path, address: str, store: Store) -> Result:
    return carried_out(packed(project, store, address))


def carried_out(parcel: Parcel) -> Result:
    fields = carry_out(vars(parcel))
    if isinstance(fields, Exception):
        raise fields
    return Result(**fields)


@pytest.mark.slow
class TestParcel:
    def test_the_outputs_are_those_of_a_stage_that_stayed_whatever_the_clock(
        self, toy: Path, worker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store, clock = Store(f"file://{tmp_path}/store"), time.time
        parcel = packed(toy, store)
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda: clock() - 3600)  # an hour off on the worker
            result = carried_out(parcel)
        with chdir(toy):
            run_stage(toy, stage_of(toy))
        assert result.outs == {"outputs/experts/left": digest_as_dvc(toy / "outputs/experts/left")}
        assert not list((worker / "stages").glob("*/"))
        assert carried_out(parcel).sent == 0  # what was made is not made again

    @pytest.mark.parametrize("address", ["prepare@left", "base", "multitask"])
    def test_every_kind_of_stage_travels(self, toy: Path, worker: Path, tmp_path: Path, address: str) -> None:
        result = travelled(toy, address, Store(f"file://{tmp_path}/store"))
        assert result.outs == {out: digest_as_dvc(toy / out) for out in stage_of(toy, address).outs}

    def test_no_path_of_the_driver_is_in_what_travels(self, toy: Path, worker: Path, tmp_path: Path) -> None:
        store = Store(f"file://{tmp_path}/store")
        parcel = packed(toy, store)
        assert str(toy) not in pickle.dumps(vars(parcel)).decode("latin-1")
        fields = carry_out(vars(parcel))
        assert str(toy) not in json.dumps(fields)
        for path in [*(tmp_path / "store").rglob("*"), *worker.rglob("*")]:
            assert path.is_dir() or str(toy).encode() not in path.read_bytes(), path

    def test_plugins_of_the_project_travel_with_it(self, toy: Path, worker: Path, tmp_path: Path) -> None:
        with chdir(toy):
            run_pipeline(toy, ("finetune",))
        result = travelled(toy, "sweep@mine", Store(f"file://{tmp_path}/store"))
        assert set(result.outs) == {"outputs/sweeps/mine.json"}

    def test_a_worker_goes_on_from_what_another_has_saved(
        self, toy: Path, worker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store, arrived = Store(f"file://{tmp_path}/store"), list[str]()
        parcel = packed(toy, store)
        (tmp_path / "saved").write_text("by another")
        md5 = md5_of(tmp_path / "saved")
        store.put_file(tmp_path / "saved", f"states/{parcel.key}/{md5}")
        store.write(f"states/{parcel.key}.json", {"training/other.pt": md5})

        def run(project: Path, stage: Stage) -> bool:
            scratch = open_stage(project, stage)[0].scratch
            arrived.append((scratch / "training/other.pt").read_text())
            return run_stage(project, stage)

        monkeypatch.setattr(parcels, "run_stage", run)
        assert not isinstance(carry_out(vars(parcel)), Exception)
        assert arrived == ["by another"]
        assert store.read(f"states/{parcel.key}.json") is None

    def test_a_machine_parses_the_code_once(
        self, toy: Path, worker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = Store(f"file://{tmp_path}/store")
        travelled(toy, "prepare@left", store)
        parcel = packed(toy, store, "prepare@right")
        monkeypatch.setattr(digests, "read_source", lambda *_: pytest.fail("it is parsed again"))
        assert carried_out(parcel).outs

    def test_the_driver_sees_on_which_machine_it_is_and_how_far(
        self, toy: Path, worker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store, reported = Store(f"file://{tmp_path}/store"), list[tuple[str, int, int]]()
        parcel = packed(toy, store)
        watch = Watch(lambda *what: reported.append(what), store, parcel)
        watch.look()

        def run(project: Path, stage: Stage) -> bool:
            with progress_file(project / ".mergeflow", stage.folder_name) as report:
                time.sleep(PROGRESS_SECONDS)
                report("steps", 3, 9)
                while not reported[-1][0].startswith("steps"):
                    watch.look()
                    time.sleep(0.05)
            return run_stage(project, stage)

        for where, name, value in ((parcels, "run_stage", run), (leases, "RENEWAL", 0.05), (fleet, "LOOK", 0.0)):
            monkeypatch.setattr(where, name, value)
        carried_out(parcel)
        assert reported[0] == ("waiting for a worker", 0, 1)
        assert reported[-1] == (f"steps on {running_code()['host']}", 3, 9)

    def test_who_waits_long_for_a_worker_is_told(
        self, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        store = Store(f"file://{tmp_path}/store")
        for name in ("LOOK", "PATIENCE"):
            monkeypatch.setattr(fleet, name, 0.0)
        watch = Watch(lambda *_: None, store, packed(toy, store))
        for _ in range(3):
            watch.look()
        assert capsys.readouterr().err == "finetune@left has waited 0 s for a worker of the cluster to begin it.\n"

    def test_errors_come_back_as_they_were_raised(self, toy: Path, worker: Path, tmp_path: Path) -> None:
        parcel = vars(packed(toy, Store(f"file://{tmp_path}/store")))
        other = {**parcel["driver"], "torch": "1.0"}
        refused = carry_out({**parcel, "driver": other})
        assert isinstance(refused, MergeflowError)
        assert "1.0" in str(refused)
        broken = carry_out({**parcel, "texts": {}})
        assert isinstance(broken, MergeflowError)
        elsewhere = carry_out({**parcel, "fingerprint": "0" * 16})
        assert "is another stage on" in str(elsewhere)

    def test_the_driver_takes_hashes_and_record(self, toy: Path, worker: Path, tmp_path: Path) -> None:
        store, out = Store(f"file://{tmp_path}/store"), "outputs/experts/right"
        with chdir(toy):
            io, _ = open_stage(toy, stage_of(toy, "finetune@right"))
        result = travelled(toy, "finetune@right", store)
        unpack(io, store, result)
        assert not (io.building / out).exists()
        assert digest_as_dvc(io.building / out) == result.outs[out]
        assert {"host", "seconds", "training"} <= set(io.costs)

    @pytest.mark.parametrize("fails", [False, True])
    def test_what_a_stage_prints_there_is_in_its_log_here(
        self, toy: Path, worker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
    ) -> None:
        def work(io: StageIO) -> None:
            print("about to work")
            if fails:
                raise RuntimeError("out of tune")
            do_here(io)

        monkeypatch.setattr(parcels, "run_stage", lambda project, stage: run_stage(project, stage, work=work))
        machines = Fleet(Here(), RunSection(runner="dask", workers=1, device="cpu", store=f"file://{tmp_path}/store"))
        with chdir(toy), pytest.raises(RuntimeError, match="out of tune") if fails else nullcontext():
            run_stage(toy, stage_of(toy, "prepare@left"), force=True, work=machines.work)
        log = (toy / ".mergeflow/logs/prepare@left.log").read_text()
        assert f"on {running_code()['host']}:" in log
        assert "about to work" in log
        assert ("out of tune" in log) == fails


class WithDevices:
    """A cluster whose workers offer GPUs; it notes which stages take one."""

    def __init__(self) -> None:
        self.taken: dict[str, bool] = {}

    def has_devices(self) -> bool:
        return True

    def run(self, _function: object, argument: dict[str, Any], device: bool, _meanwhile: object) -> Any:
        self.taken[argument["address"]] = device
        return carry_out(argument)


@pytest.mark.slow
@pytest.mark.parametrize(("choice", "taken"), [("auto", True), ("cpu", False)])
def test_stages_with_a_model_take_a_device(toy: Path, worker: Path, tmp_path: Path, choice: str, taken: bool) -> None:
    machines = WithDevices()
    settings = RunSection(runner="dask", workers=1, device=choice, store=f"file://{tmp_path}/store")
    with chdir(toy):
        for address in ("prepare@left", "base"):
            run_stage(toy, stage_of(toy, address), force=True, work=Fleet(machines, settings).work)
    assert machines.taken == {"prepare@left": False, "base": taken}


def test_a_device_that_no_worker_offers_is_refused(tmp_path: Path) -> None:
    settings = RunSection(runner="dask", workers=1, device="cuda", store=f"file://{tmp_path}/store")
    with pytest.raises(MergeflowError, match="no worker offers a GPU: start Dask's with `--resources GPU=1`"):
        Fleet(Here(), settings)


def test_dvcs_remote_is_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_toy_repository(tmp_path / "toy")
    monkeypatch.setattr(fleet, "cluster", lambda *_: nullcontext(Here()))
    settings = RunSection(runner="dask", workers=1, device="cpu", store="remote")
    with pytest.raises(MergeflowError, match=r"which workers do not reach: .*`dvc remote modify --local storage url"):
        fleet.fleet(folder, settings).__enter__()
    point_remote(folder, "s3://bucket/fleet")
    with fleet.fleet(folder, settings) as machines:
        assert machines is not None
        assert "Store s3://bucket/fleet:" in machines.traffic()


def point_remote(folder: Path, url: str) -> None:
    done = run_in(folder, "dvc", "remote", "modify", "--local", "storage", "url", url)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def stayed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy repository that was run here, up to the registration, and recorded."""
    return recorded_by(tmp_path_factory.mktemp("stayed") / "toy", do_here)


def recorded_by(folder: Path, work: Callable[[StageIO], None]) -> Path:
    make_toy_repository(folder)
    stages = [stage for stage in load_graph(folder).values() if stage.name != "register"]
    with chdir(folder):
        for stage in stages:
            run_stage(folder, stage, work=work)
        record_outputs(folder, [stage.address for stage in stages])
    return folder


@pytest.mark.slow
class TestOutputsInTheStore:
    @pytest.fixture(scope="class")
    def made(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """A folder with the same repository, run by a worker, and its store."""
        folder = tmp_path_factory.mktemp("fleet")
        settings = RunSection(runner="dask", workers=1, device="cpu", store=f"file://{folder}/store")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(parcels.WORKER_FOLDER, str(folder / "worker"))
            patch.setattr(leases, "POLL", 0.05)
            recorded_by(folder / "toy", Fleet(Here(), settings).work)
        return folder

    @pytest.fixture
    def remote(self, made: Path, tmp_path: Path) -> Path:
        """A copy of that repository, with a copy of the store."""
        for name in ("toy", "store"):
            shutil.copytree(made / name, tmp_path / name, symlinks=True)
        for listing in (tmp_path / "toy/.mergeflow/stored").iterdir():
            listing.write_text(listing.read_text().replace(str(made), str(tmp_path)))
        return tmp_path / "toy"

    def test_folders_stay_there_and_nothing_runs_again_for_it(self, remote: Path, stayed: Path) -> None:
        assert locked_stages(remote) == locked_stages(stayed)
        for folder in ("data", "base", "experts", "vectors", "merged", "results/figures"):
            assert not (remote / "outputs" / folder).exists(), folder
        assert (remote / "outputs/results/test.json").exists()
        cached = [path.name for path in (remote / ".dvc/cache/files/md5").glob("*/*")]
        assert not any(stored.md5[2:] in cached for stored in stored_outputs(remote).values())
        with chdir(remote):
            stages = load_graph(remote)
            assert set(changes(remote, stages)) == {"register"}
            for address in ("prepare@left", "finetune@left", "vectors", "evaluate"):
                assert not run_stage(remote, stages[address], work=refuse), address

    def test_what_a_stage_reads_here_is_fetched(self, remote: Path, stayed: Path) -> None:
        with chdir(remote):
            assert run_stage(remote, stage_of(remote, "figures"), force=True)
            record_outputs(remote, ["figures"])
            assert not run_stage(remote, stage_of(remote, "finetune@left"))
            assert set(changes(remote, load_graph(remote))) == {"register"}
        for out in ("outputs/experts", "outputs/results"):
            assert digest_as_dvc(remote / out) == digest_as_dvc(stayed / out)
        assert (remote / "outputs/experts/left/model.safetensors").exists()
        assert not (remote / "outputs/vectors").exists()

    def test_dvc_repro_fetches_them_and_runs_nothing(self, remote: Path, stayed: Path) -> None:
        record = remote / ".mergeflow/records/vectors.json"
        before = record.read_text()
        done = run_in(remote, "dvc", "repro", "vectors")
        assert done.returncode == 0, done.stdout + done.stderr
        assert record.read_text() == before
        assert digest_as_dvc(remote / "outputs/vectors") == digest_as_dvc(stayed / "outputs/vectors")
        assert "vectors" not in run_in(remote, "dvc", "status").stdout

    def test_the_provenance_of_an_expert_names_the_machine_that_made_it(self, remote: Path) -> None:
        record = remote / ".mergeflow/records/finetune@left.json"
        record.write_text(json.dumps(json.loads(record.read_text()) | {"host": "box-2"}))
        with chdir(remote):
            io, _ = open_stage(remote, stage_of(remote, "register"))
            bring(remote, io.stage.deps)
            assert describe_expert(io, "left", {}, "")["host"] == "box-2"

    def test_changes_are_seen_beside_what_is_not_here(self, remote: Path) -> None:
        with chdir(remote):
            bring(remote, ["outputs/experts/left"])
            (remote / "outputs/experts/left/training.json").write_text("{}")
            (remote / "outputs/vectors").mkdir()
            (remote / "outputs/vectors/another.txt").write_text("")
            stale = changes(remote, load_graph(remote))
        assert stale["finetune@left"] == [{"changed outs": {"outputs/experts/left": "modified"}}]
        assert stale["vectors"][1] == {"changed outs": {"outputs/vectors": "modified"}}
        assert "prepare@left" not in stale

    def test_what_the_store_has_lost_is_made_again(self, remote: Path, tmp_path: Path) -> None:
        lost = stored_outputs(remote)["outputs/vectors"].md5
        (tmp_path / "store/files/md5" / lost[:2] / lost[2:]).unlink()
        with chdir(remote):
            with pytest.raises(StoreError, match="run again"):
                bring(remote, ["outputs/vectors"])
            assert forget_lost(remote) == ["outputs/vectors"]
            assert set(changes(remote, load_graph(remote))) == {"register", "vectors"}

    def test_a_push_to_another_remote_takes_all_with_it(self, remote: Path, stayed: Path, tmp_path: Path) -> None:
        with chdir(remote):
            point_remote(remote, str(tmp_path / "remote"))
            push_outputs(remote)
            shutil.rmtree(tmp_path / "store")
            shutil.rmtree(remote / "outputs/vectors")
            assert run_in(remote, "dvc", "pull", "vectors").returncode == 0
        assert digest_as_dvc(remote / "outputs/vectors") == digest_as_dvc(stayed / "outputs/vectors")

    def test_tasks_that_are_taken_out_leave_nothing(self, remote: Path) -> None:
        values = yaml.safe_load((remote / "params.yaml").read_text())
        del values["tasks"]["right"]
        (remote / "params.yaml").write_text(yaml.safe_dump(values))
        remove_stale_outputs(remote, print)
        assert not [out for out in stored_outputs(remote) if "right" in out]

    @pytest.mark.parametrize("place", ["here", "there"])
    def test_killed_while_an_output_takes_its_place(
        self, remote: Path, worker: Path, place: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        settings = RunSection(runner="dask", workers=1, device="cpu", store=f"file://{remote.parent}/store")
        work = {"here": do_here, "there": Fleet(Here(), settings).work}[place]
        stage, rename = stage_of(remote, "vectors"), Path.rename

        def stop(path: Path, target: Path) -> Path:
            if target.name in ("vectors", "outputs%2Fvectors.json"):
                raise KeyboardInterrupt
            return rename(path, target)

        with chdir(remote):
            md5 = digest_as_dvc(remote / "outputs/vectors")
            with monkeypatch.context() as patch:
                patch.setattr(Path, "rename", stop)
                with pytest.raises(KeyboardInterrupt):
                    run_stage(remote, stage, force=True, work=work)
            assert run_stage(remote, stage, work=refuse)  # it takes its place now
            assert not run_stage(remote, stage, work=refuse)
        assert digest_as_dvc(remote / "outputs/vectors") == md5
        assert (remote / "outputs/vectors").exists() == (place == "here")


def refuse(io: StageIO) -> None:
    raise AssertionError(f"{io.stage.address} ran again")


class Here:
    def has_devices(self) -> bool:
        return False

    def run(self, _function: object, argument: dict[str, Any], _device: bool, _meanwhile: object) -> Any:
        return carry_out(argument)
