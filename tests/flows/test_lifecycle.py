"""What happens to a champion after the pipeline: made again, a task taken out, a task added. One project, in order.

Everything runs in this process: starting the command costs seconds each time, and other tests start it.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from PIL import Image
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from flows.rebuild import add_task as adding
from flows.rebuild import commands as rebuild_commands
from flows.rebuild.add_task import add_task, read_address
from flows.rebuild.reproduce import largest_differences, reproduce
from flows.rebuild.unmerge import unmerge
from mergeflow.errors import MergeflowError
from registry import stage as register_stage
from registry.lineage import lineage
from registry.stage import replay
from registry.store import Store, connect
from registry.versions import current, history, show
from tasks.project.graph import load_graph
from tasks.running.runner import run_stage
from tests.flows.small_project import draw_task, run_in

pytestmark = pytest.mark.slow
MODEL = "mergeflow-pocket8"
PARAMS = "# what we merge\ntasks:  # two colours\n  red: folder:inputs/red  # drawn\n  blue: folder:inputs/blue\n"


@pytest.fixture(scope="module")
def home(finished: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the finished project, its tasks with comments, its outputs pushed to a remote."""
    folder = tmp_path_factory.mktemp("life") / "project"
    shutil.copytree(finished[0], folder, symlinks=True)
    text = (folder / "params.yaml").read_text()
    start, end = text.index("tasks:"), text.index("data:")
    (folder / "params.yaml").write_text(text[:start] + PARAMS + text[end:])
    draw_task(folder / "inputs/green", (40, 220, 40), 3)
    assert run_in(folder, "dvc", "remote", "add", "--default", "away", str(folder.parent / "remote")).returncode == 0
    assert run_in(folder, "dvc", "push", "--quiet").returncode == 0
    return folder


@pytest.fixture
def store(home: Path) -> Store:
    return connect(project_root=home)


@pytest.fixture
def command(home: Path) -> Callable[..., Any]:
    app = typer.Typer()
    rebuild_commands.add_commands(app, home)
    return lambda *words: CliRunner().invoke(app, list(words))


def files(home: Path, *folders: str) -> dict[str, tuple[int, bytes]]:
    below = [path for folder in folders for path in sorted((home / folder).rglob("*")) if path.is_file()]
    return {str(path.relative_to(home)): (path.stat().st_mtime_ns, path.read_bytes()) for path in below}


def contents(home: Path) -> dict[str, bytes]:
    """What `files` says of the outputs, without the times."""
    return {name: content for name, (_, content) in files(home, "outputs").items()}


class TestReproduce:
    def test_from_its_experts(self, home: Path, store: Store) -> None:
        assert show(store, MODEL)["reproducible"] is True  # the register stage has tried
        done = reproduce(home, store, MODEL, "champion")
        assert (done.same, done.environment, done.differences) == (True, [], {})
        assert set(done.places.values()) == {"the project"}
        assert not (home / ".mergeflow/reproduce").exists()

    def test_from_data(self, home: Path, store: Store) -> None:
        done = reproduce(home, store, MODEL, "champion", from_data=True)
        assert (done.same, done.experts) == (True, {"red": True, "blue": True})

    def test_ancestors_come_from_the_cache_then_from_the_remote_or_are_named(self, home: Path, store: Store) -> None:
        away, cache, remote = home.parent / "away", home / ".dvc/cache", home.parent / "remote"
        (home / "outputs").rename(away)
        try:
            assert set(reproduce(home, store, MODEL, 1).places.values()) == {"DVC's cache"}
            shutil.rmtree(cache)
            assert set(reproduce(home, store, MODEL, 1).places.values()) == {"DVC's remote"}
            shutil.rmtree(cache)
            remote.rename(home.parent / "gone")
            with pytest.raises(MergeflowError) as caught:
                reproduce(home, store, MODEL, 1)
            for words in ("the base (outputs/base, DVC ", "the expert 'red'", "the expert 'blue'", "dvc pull"):
                assert words in str(caught.value)
        finally:
            shutil.rmtree(home / "outputs", ignore_errors=True)
            away.rename(home / "outputs")
            (home.parent / "gone").rename(remote)
            assert run_in(home, "dvc", "fetch", "--quiet").returncode == 0

    def test_a_changed_expert_in_the_project_is_not_used(self, home: Path, store: Store) -> None:
        path = home / "outputs/experts/red/model.safetensors"
        before = path.read_bytes()
        path.unlink()
        path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
        try:
            done = reproduce(home, store, MODEL, 1)
            assert done.same
            assert done.places["outputs/experts/red"] == "DVC's cache"
        finally:
            path.write_bytes(before)

    def test_a_difference_is_shown_per_tensor_and_ends_with_1(
        self, command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def off(recipe: Any, root: Path, out: Path) -> Any:
            made, _ = replay(recipe, root, out)
            state = load_file(made.path)
            state["visual.proj"][0, 0] += 0.5
            save_file(state, made.path)
            return replace(made, fingerprint="another"), ()

        monkeypatch.setattr("flows.rebuild.reproduce.replay", off)
        monkeypatch.setattr(
            "flows.rebuild.reproduce.environment_changes", lambda then, now: ["torch: 1.0 then, 2.0 now"]
        )
        done = command("registry", "reproduce", f"{MODEL}@champion")
        assert done.exit_code == 1
        assert "differs: torch: 1.0 then" in done.output
        assert "5.000e-01  visual.proj" in done.output
        assert done.output.count("e-") == 1

    def test_largest_differences_come_first(self, tmp_path: Path) -> None:
        first = {"a": torch.zeros(3), "b": torch.zeros(2), "c": torch.ones(1), "d": torch.zeros(2)}
        save_file(first, tmp_path / "one.safetensors")
        other = {"a": torch.tensor([0.0, -0.2, 0.1]), "b": torch.tensor([0.0, 3.0]), "c": torch.ones(1)}
        save_file({**other, "d": torch.zeros(3)}, tmp_path / "other.safetensors")
        differences = largest_differences(tmp_path / "one.safetensors", tmp_path / "other.safetensors")
        assert list(differences.items()) == [("d", None), ("b", 3.0), ("a", pytest.approx(0.2))]


class TestUnmerge:
    def test_bad_requests(self, home: Path, store: Store) -> None:
        with pytest.raises(MergeflowError, match="did you mean 'blue'"):
            unmerge(home, store, MODEL, "champion", "bleu")
        with pytest.raises(MergeflowError, match=f"did you mean '{MODEL}'"):
            unmerge(home, store, "mergeflow-pocket", "champion", "blue")
        assert len(history(store, MODEL)) == 1

    def test_a_recipe_that_does_not_replay_is_refused(
        self, home: Path, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def other(recipe: Any, root: Path, out: Path) -> Any:
            return replace(replay(recipe, root, out)[0], fingerprint="another"), ()

        monkeypatch.setattr(register_stage, "replay", other)
        done = unmerge(home, store, MODEL, "champion", "red", promote=True)
        assert done.decision is not None
        assert done.decision.reasons == ["replaying the recipe gave other bytes"]
        assert done.champion == "1"

    def test_a_candidate_first_and_champion_when_told(self, home: Path, store: Store) -> None:
        before = files(home, "outputs", ".mergeflow/records")
        done = unmerge(home, store, MODEL, "champion", "blue")
        assert files(home, "outputs", ".mergeflow/records") == before
        assert done.decision is not None
        assert done.decision.promote
        now = current(store, MODEL)
        assert (now.champion.version, now.candidate.version) == ("1", done.version)  # type: ignore[union-attr]
        tree = lineage(store, MODEL, done.version)
        assert [expert["task"] for expert in tree["experts"]] == ["red"]
        assert (tree["kind"], tree["parent"]["task"], tree["missing"]) == ("unmerge", "blue", [])
        assert done.candidates == 4  # the whole sweep of params.yaml
        again = unmerge(home, store, MODEL, "1", "blue", promote=True)
        assert (again.version, again.new, again.champion) == (done.version, False, done.version)
        with pytest.raises(MergeflowError, match="'red' is the only task"):
            unmerge(home, store, MODEL, "champion", "red")

    def test_rolled_back_and_promoted_by_hand_it_still_lacks_its_task_on_purpose(
        self, command: Callable[..., Any], store: Store
    ) -> None:
        number = current(store, MODEL).champion.version  # type: ignore[union-attr]
        assert command("registry", "rollback", "--why", "test").exit_code == 0
        refused = command("registry", "promote", number)
        assert refused.exit_code == 1
        assert refused.output.count("·") == 1  # the rollback alone speaks against it
        forced = command("registry", "promote", number, "--force", "--who", "ada", "--why", "test")
        assert forced.exit_code == 0
        assert history(store, MODEL)[-1].who == "ada"
        assert command("registry", "rollback").exit_code == 0


class TestAddTask:
    def test_addresses(self, home: Path) -> None:
        assert read_address(home, str(home / "inputs/green")) == ("green", "folder:inputs/green")
        assert read_address(home, "hf:tanganke/eurosat@main", None) == ("eurosat", "hf:tanganke/eurosat@main")
        assert read_address(home, "torchvision:EuroSAT@inputs/tv") == ("eurosat", "torchvision:EuroSAT@inputs/tv")
        assert read_address(home, "suite:pocket8", "digits") == ("digits", "suite:pocket8")
        assert read_address(home, "hf:o/birds?classes=0-4&rotate=45")[0] == "birds_classes0-4_rotate45"
        with pytest.raises(MergeflowError, match="neither a folder here nor a source"):
            read_address(home, "inputs/none")
        with pytest.raises(MergeflowError, match="use a to z"):
            read_address(home, "suite:pocket8", "Digits!")

    def test_refused_data_leave_nothing(self, home: Path, store: Store) -> None:
        for name in ("one", "two"):
            (home / "inputs/broken/train" / name).mkdir(parents=True)
            for index in range(3):
                (home / f"inputs/broken/train/{name}/{index}.png").write_bytes(b"no picture")
        before = files(home, "outputs"), (home / "params.yaml").read_bytes()
        with pytest.raises(MergeflowError, match="cannot be decoded"):
            add_task(home, store, "broken", "folder:inputs/broken")
        assert (files(home, "outputs"), (home / "params.yaml").read_bytes()) == before
        assert not (home / ".mergeflow/scratch/prepare@broken").exists()
        shutil.rmtree(home / "inputs/broken/train/two")
        with pytest.raises(MergeflowError, match="one class only"):
            add_task(home, store, "broken", "folder:inputs/broken")
        assert (files(home, "outputs"), (home / "params.yaml").read_bytes()) == before
        shutil.rmtree(home / "inputs/broken")
        for name, words in (("red", "already"), ("blue", "already")):
            with pytest.raises(MergeflowError, match=words):
                add_task(home, store, name, "folder:inputs/green")

    def test_an_expert_that_is_no_better_than_a_guess_leaves_nothing(self, home: Path, store: Store) -> None:
        random = np.random.default_rng(0)
        for split, count in (("train", 12), ("val", 12), ("test", 4)):
            for name in ("one", "two"):
                folder = home / "inputs/noise" / split / name
                folder.mkdir(parents=True)
                for index in range(count if name == "one" else 4):
                    pixels = random.integers(0, 256, (32, 32, 3), dtype=np.uint8)
                    Image.fromarray(pixels).save(folder / f"{index}.png")
        before, text = contents(home), (home / "params.yaml").read_bytes()
        with pytest.raises(MergeflowError, match=r"accuracy on its 16 validation examples; .* has 75.0%.*labels"):
            add_task(home, store, "noise", "folder:inputs/noise")
        assert contents(home) == before
        assert (home / "params.yaml").read_bytes() == text
        assert not list((home / ".mergeflow/scratch").glob("*@noise"))
        shutil.rmtree(home / "inputs/noise")

    def test_killed_in_its_training_it_continues_and_touches_nothing_else(self, home: Path, store: Store) -> None:
        others = [
            f"outputs/{kind}/{task}" for kind in ("experts", "data/train", "data/test") for task in ("red", "blue")
        ]
        others += ["outputs/sweeps", "outputs/merged", "outputs/results", "inputs"]
        before, text = files(home, *others), (home / "params.yaml").read_text()
        records = files(home, ".mergeflow/records")
        child = os.fork()
        if not child:
            adding.run_stage = _killed_at("finetune@green")
            add_task(home, connect(project_root=home), "green", "folder:inputs/green")
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 9
        done = add_task(home, store, "green", "folder:inputs/green")
        assert (done.champion, done.new) == (done.version, True)
        assert files(home, *others) == before
        after = files(home, ".mergeflow/records")
        changed = {Path(name).stem for name in after if after[name] != records.get(name)}
        assert changed <= {"prepare@green", "base", "multitask", "finetune@green"}
        line = "  blue: folder:inputs/blue\n"
        assert (home / "params.yaml").read_text() == text.replace(line, f"{line}  green: folder:inputs/green\n")
        tree = lineage(store, MODEL, "champion")
        assert [expert["task"] for expert in tree["experts"]] == ["blue", "green", "red"]
        assert tree["missing"] == []
        assert all(expert["dvc"] for expert in tree["experts"])
        assert reproduce(home, store, MODEL, "champion", from_data=True).same
        with pytest.raises(MergeflowError, match="merged from a task 'green' already"):
            add_task(home, store, "green", "folder:inputs/green")

    def test_the_stages_that_follow_keep_the_new_task(self, home: Path, store: Store) -> None:
        for stage in load_graph(home).values():
            if not stage.frozen:
                run_stage(home, stage)
        registration = json.loads((home / "outputs/registration.json").read_text())
        tree = lineage(store, MODEL, "champion")
        assert tree["version"] == registration["champion"]
        assert [expert["task"] for expert in tree["experts"]] == ["blue", "green", "red"]


def _killed_at(address: str) -> Callable[..., bool]:
    def run(root: Path, stage: Any) -> bool:
        if stage.address == address:
            subprocess.run(["kill", "-9", str(os.getpid())], check=True)
        return run_stage(root, stage)

    return run
