"""A merge whose files are written by workers that share a store and no folder: the bits of one machine.

The night's part kills workers of Dask and drivers, and merges with Ray too.
"""

import json
import pickle
import shutil
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from flows import fleet
from flows.fleet import merge_on_fleet
from mergeflow.application import call
from mergeflow.errors import MergeflowError
from mergeflow.merging import Recipe, make_recipe, merge
from mergeflow.merging.catalog import METHODS
from tasks.running import merge_parcel, parcel
from tasks.running.runner import running_code
from tasks.travel import lease as leases
from tasks.travel.store import Store, StoreError
from tests.flows.hosts import Hosts, machines
from tests.flows.kill_driver import wait_for
from tests.flows.small_project import environment, run_in, write_method
from tests.loopback import free_port
from tests.merging.model_folders import llama, save, tokenizer

LAYERS, BUCKET = 6, "s3://bucket/fleet"


def write_models(folder: Path, width: int = 32, layers: int = LAYERS) -> None:
    """Write a base and two experts, each as files of one layer with their index."""
    torch.manual_seed(0)
    matrices = [f"layers.{layer}.{name}.weight" for layer in range(layers) for name in ("self_attn.q_proj", "mlp.fc1")]
    base = {name: torch.randn(width, width) for name in matrices}
    for model in ("base", "left", "right"):
        noise = 0.0 if model == "base" else 0.1
        place, places = folder / "models" / model, {}
        place.mkdir(parents=True)
        for layer in range(layers):
            names = [name for name in base if name.startswith(f"layers.{layer}.")]
            file = f"model-{layer + 1:05d}-of-{layers:05d}.safetensors"
            save_file({name: base[name] + noise * torch.randn(width, width) for name in names}, place / file)
            places |= dict.fromkeys(names, file)
        (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def recipe(**changes: Any) -> Recipe:
    experts = {name: f"models/{name}" for name in ("left", "right")}
    return make_recipe(
        {"method": "task_arithmetic", "base": "models/base", "experts": experts, "out": "merged"} | changes
    )


class Box:
    """A cluster of one worker after the other in this process, each with a home of its own.

    Attributes:
        sent: all that it was given.
        before: called with the number of each, before it begins.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self._monkeypatch = folder, monkeypatch
        self.sent: list[dict[str, Any]] = []
        self.before: Callable[[int], None] = lambda _number: None
        self.devices: list[bool] = []

    def has_devices(self) -> bool:
        return False

    def run(self, function: tuple[str, str], argument: dict[str, Any], device: bool, meanwhile: Any) -> Any:
        meanwhile()
        self.sent.append(argument)
        self.devices.append(device)
        home = self.folder / str(len(self.sent))
        self._monkeypatch.setenv(parcel.WORKER_FOLDER, str(home))
        self.before(len(self.sent))
        return call(*function, pickle.loads(pickle.dumps(argument)))

    def parts(self) -> list[str]:
        return [argument["address"] for argument in self.sent]


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Box:
    made = Box(tmp_path / "boxes", monkeypatch)
    monkeypatch.setattr(fleet, "cluster", lambda *_: nullcontext(made))
    # One thread: the workers of this process change its folder and environment.
    monkeypatch.setattr(fleet, "ThreadPoolExecutor", lambda _workers: InTurn())
    (tmp_path / "driver").mkdir()
    monkeypatch.chdir(tmp_path / "driver")
    write_models(tmp_path / "driver")
    return made


class InTurn:
    """A pool that does everything at once when it is submitted."""

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Any:
        from concurrent.futures import Future

        future = Future[Any]()
        try:
            future.set_result(work(*arguments))
        except BaseException as error:
            future.set_exception(error)
        return future

    def shutdown(self, **_: bool) -> None: ...


def on_fleet(values: Recipe, workers: int = 2, **options: Any) -> Any:
    settings = {"store": f"file://{Path.cwd().parent}/store", "workers": workers, "runner": None}
    return merge_on_fleet(settings, values, None, lambda *_: None, **{"resolve": None, "force": False} | options)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def alone(values: Recipe) -> dict[str, bytes]:
    """What one machine writes; it goes again."""
    made = contents(merge(values).path)
    shutil.rmtree("merged")
    return made


@pytest.mark.parametrize(
    ("method", "workers"), [("ties", 1), ("ties", 3), ("task_arithmetic", 2), ("dare", 2), ("cart", 2)]
)
def test_the_folder_is_that_of_one_machine_to_the_byte(box: Box, method: str, workers: int) -> None:
    values = recipe(method=method)
    expected = alone(values)
    made = on_fleet(values, workers)
    assert contents(made.path) == expected
    assert len(box.sent) == (workers if method == "ties" else LAYERS)
    assert not list(Path().glob(".merged*"))


def test_a_box_gets_the_files_that_its_part_reads(box: Box, capsys: pytest.CaptureFixture[str]) -> None:
    on_fleet(recipe(), 3)
    for number in range(1, LAYERS + 1):
        sizes = [path.stat().st_size for path in (box.folder / str(number) / "objects").glob("*/*")]
        assert sum(size > 8000 for size in sizes) == 3
        assert not list((box.folder / str(number) / "stages").glob("*/"))
    assert "sent from here and" in capsys.readouterr().out
    box.sent.clear()
    on_fleet(recipe(method="ties"), 3)  # a threshold of the whole model needs all of them
    assert sum(path.stat().st_size > 8000 for path in (box.folder / "1/objects").glob("*/*")) >= 3 * LAYERS


def test_a_second_merge_of_the_same_inputs_sends_none_of_them(box: Box) -> None:
    on_fleet(recipe())
    on_fleet(recipe(args={"scale": 0.1}))
    inputs = sum(path.stat().st_size for path in Path("models").rglob("*.*"))
    stored = sum(path.stat().st_size for path in Path("../store/files").rglob("*") if path.is_file())
    assert stored < 2 * inputs  # and two results, each a third of them


@pytest.mark.parametrize("where", ["worker", "driver"])
def test_what_a_killed_one_has_finished_is_not_written_again(
    box: Box, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        """Stands for SIGKILL."""

    values, finish, written = recipe(method="ties"), merge_parcel._Sending.finish, list[str]()
    expected = alone(values)

    def note(folder: Any, file: str, *rest: Any) -> None:
        written.append(file)
        finish(folder, file, *rest)
        if where == "worker" and len(written) == 2:
            raise Killed

    def die(*arguments: Any) -> None:
        take(*arguments)
        raise Killed

    take = merge_parcel.take_files
    monkeypatch.setattr(merge_parcel._Sending, "finish", note)
    monkeypatch.setattr(leases, "EXPIRY", 0.2)
    with monkeypatch.context() as patch:
        if where == "driver":
            patch.setattr(fleet, "take_files", lambda *args: die(*args) if args[0] else take(*args))
        with pytest.raises(Killed):
            on_fleet(values)
    assert not Path("merged").exists()
    assert contents(on_fleet(values).path) == expected
    assert len(written) == len(set(written)) == LAYERS


def test_lost_and_damaged_results_are_written_again_or_named(box: Box) -> None:
    values = recipe()
    expected = contents(on_fleet(values).path)
    shutil.rmtree("merged")
    store = Store(f"file://{Path.cwd().parent}/store")
    names = [f"results/{path.parent.name}/{path.name}" for path in Path("../store/mergeflow/results").glob("*/*")]
    noted = store.read(names[0])
    assert noted is not None
    lost = Path("../store/files/md5", noted["md5"][:2], noted["md5"][2:])
    lost.unlink()
    assert contents(on_fleet(values).path) == expected
    shutil.rmtree("merged")
    other = store.read(names[1])
    assert other is not None
    store.write(names[0], noted | {"md5": other["md5"]})
    with pytest.raises(StoreError, match="is not what its worker wrote"):
        on_fleet(values)


def test_a_worker_with_other_code_is_refused_by_both_names(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    other = running_code() | {"torch": "1.0", "host": "away"}
    monkeypatch.setattr(merge_parcel, "running_code", lambda: other)
    with pytest.raises(MergeflowError, match=r"merged, part . of 6 was sent to .* torch .* here and 1.0 there"):
        on_fleet(recipe())
    assert not Path("merged").exists()


@pytest.mark.parametrize(
    ("changes", "workers", "message"),
    [
        ({}, LAYERS + 1, f"the result has {LAYERS} files, .* Give a smaller `shard_size`, or .* fewer .*workers"),
        ({"out": "one.safetensors"}, 2, "is one file: parts need a folder"),
        ({"out": None}, 2, "no output"),
        ({"adapter": 4}, 2, "an adapter is one file"),
        ({"device": "cuda"}, 2, "no worker offers a GPU"),
        ({"experts": ["models/left", "models/lost"]}, 2, "there is no checkpoint at 'models/lost'"),
    ],
)
def test_what_no_fleet_can_merge_is_refused_before_anything_is_sent(
    box: Box, changes: dict[str, Any], workers: int, message: str
) -> None:
    with pytest.raises(MergeflowError, match=message):
        on_fleet(recipe(**changes), workers)
    assert not box.sent
    assert not Path("../store/files").exists()


def test_nothing_of_the_driver_is_on_any_wire(box: Box) -> None:
    here = str(Path.cwd())
    values = recipe(base=f"{here}/models/base", out=f"{here}/merged")
    expected = alone(values)
    made = on_fleet(values)
    assert contents(made.path) == expected
    assert here.encode() not in pickle.dumps(box.sent)
    for path in [*Path("../store").rglob("*"), *box.folder.rglob("*")]:
        assert path.is_dir() or here.encode() not in path.read_bytes(), path


@pytest.mark.slow
def test_every_form_of_an_input_travels(box: Box) -> None:
    words = tokenizer()
    for seed, name in enumerate(("base", "chat", "code")):
        model = llama(words.get_vocab_size(), seed)
        save(Path(name), model, words, chat_template="{{ messages }}" if name == "chat" else None)
    torch.save(load_file("code/model.safetensors"), "code.pt")
    (Path("lora")).mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    Path("lora/adapter_config.json").write_text(json.dumps(config))
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    save_file(
        {f"{layer}.lora_A.weight": torch.randn(2, 16), f"{layer}.lora_B.weight": torch.randn(16, 2)},
        "lora/adapter_model.safetensors",
    )
    experts = {"chat": "chat/model.safetensors", "code": "code.pt", "lora": "lora"}
    values = recipe(base="base", experts=experts, chat_template="chat", shard_size=4000)
    expected = alone(values)
    assert contents(on_fleet(values, 3).path) == expected


def test_a_method_of_the_users_own_travels(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(METHODS, "_files", ())
    Path("code").mkdir()
    write_method(Path("code/mine.py"), helpers="helpers")
    METHODS.add_file("code/mine.py")
    values = recipe(method="mine")
    expected = alone(values)
    assert contents(on_fleet(values).path) == expected


@pytest.mark.parametrize(
    ("method", "device", "there", "taken"),
    [
        ("cart", "auto", True, "cuda"),
        ("cart", "auto", False, "cpu"),
        ("ties", "auto", True, "cpu"),
        ("ties", "cuda:1", True, "cuda"),
    ],
)
def test_a_merge_takes_devices_that_workers_offer(
    box: Box, monkeypatch: pytest.MonkeyPatch, method: str, device: str, there: bool, taken: str
) -> None:
    def stop(_number: int) -> None:
        raise MergeflowError("it was sent")

    monkeypatch.setattr(Box, "has_devices", lambda _self: there)
    box.before = stop
    with pytest.raises(MergeflowError, match="it was sent"):
        on_fleet(recipe(method=method, device=device))
    assert {argument["device"] for argument in box.sent} == {taken}
    assert {*box.devices} == {taken == "cuda"}


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("runner", "victim"), [("dask", "worker"), ("dask", "driver"), ("dask", "head"), ("ray", "nobody")]
)
def test_workers_behind_a_bucket_write_the_bits_of_one_machine(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runner: str, victim: str
) -> None:
    """Whoever is killed after the first file: the same command ends with what one machine writes."""
    driver, workers = tmp_path / "driver", ["one", "two"] if runner == "dask" else ["one"]
    hosts = Hosts(tmp_path / "hosts", driver, MERGEFLOW_LEASE_SECONDS="4")
    write_models(driver, 256, 24)
    monkeypatch.chdir(driver)
    values = recipe(method="ties")
    Path("recipe.json").write_text(values.record())
    expected = alone(values)
    command = ["mergeflow", "merge", "recipe.json", "--store", BUCKET, "--runner", runner]
    with machines(runner, hosts, free_port(), workers) as cluster:
        variables = environment() | cluster.address
        if victim != "nobody":
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            started = subprocess.Popen(command, env=variables, **pipes)  # type: ignore[call-overload]
            assert wait_for(lambda: written(Store(BUCKET)), 120), started.communicate(timeout=60)
            if victim == "driver":
                started.kill()
            else:
                name = hosts.at_work("merge")[0] if victim == "worker" else "head"
                cluster.kill(name)
            out, err = started.communicate(timeout=300)
            assert started.returncode == {"worker": 0, "driver": -9, "head": 2}[victim], out + err
            assert "Traceback" not in err
            assert ("lost the Dask scheduler" in err) == (victim == "head")
            if victim == "head":
                cluster.start()
        done = run_in(driver, *command, timeout=300, **cluster.address)
        assert done.returncode == 0, done.stdout + done.stderr
    assert contents(Path("merged")) == expected
    assert Store(BUCKET).names("leases") == []


def written(store: Store) -> list[str]:
    return store.names("results")
