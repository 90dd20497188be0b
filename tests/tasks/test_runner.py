"""One stage: skipped when nothing changed, whole or absent when killed, resumed from its scratch folder."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from mergeflow.errors import MergeflowError
from mergeflow.layout import CODE
from tasks.project.graph import load_graph
from tasks.project.recorded import digest
from tasks.project.stage import StageIO
from tasks.running import runner
from tasks.running.digests import code_of
from tasks.running.runner import DiskFull, run_stage

ROOT = Path(__file__).parents[2]

# Adds one line at a time to a file in scratch, as training adds steps; then writes two outputs.
WORK = """
import time
def run(io):
    saved = io.scratch / "saved.txt"
    lines = saved.read_text().splitlines() if saved.exists() else []
    with (io.root / "starts.txt").open("a") as file:
        file.write(f"{len(lines)}\\n")
    for number in range(len(lines), 30):
        time.sleep(io.section("tasks")["pause"] == "long" and 0.02 or 0)
        with saved.open("a") as file:
            file.write(f"{number} {io.dep('input.txt').read_text()}\\n")
        io.report("lines", number + 1, 30)
    io.out("made/one.txt").write_text(saved.read_text())
    folder = io.out("made/two")
    folder.mkdir()
    for index in range(20):
        (folder / f"{index}.txt").write_text(saved.read_text())
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    values = yaml.safe_load((ROOT / "params.yaml").read_text())
    values["tasks"] = {"pause": "none"}
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(values))
    (tmp_path / "input.txt").write_text("hello")
    (tmp_path / "stage_work.py").write_text(WORK)
    graph = {
        "stages": {
            "work": {
                "cmd": "work",
                "meta": {"run": "stage_work"},
                "params": ["tasks", {CODE: ["work"]}],
                "deps": ["input.txt"],
                "outs": ["made/one.txt", "made/two"],
            }
        }
    }
    (tmp_path / "dvc.yaml").write_text(yaml.safe_dump(graph))
    return tmp_path


@pytest.fixture
def run(project: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.syspath_prepend(str(project))

    def run(force: bool = False) -> bool:
        sys.modules.pop("stage_work", None)  # each run as a process of its own, which reads the code anew
        code_of.cache_clear()
        return run_stage(project, load_graph(project)["work"], force)

    return run


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_runs_once_then_skips(project: Path, run) -> None:  # type: ignore[no-untyped-def]
    assert run() is True
    assert run() is False
    assert run(force=True) is True
    assert len(tree(project / "made")) == 21
    assert not (project / ".mergeflow/scratch/work").exists()
    record = json.loads((project / ".mergeflow/records/work.json").read_text())
    assert record["seconds"] >= 0


@pytest.mark.parametrize("change", ["input", "params", "lost output", "altered output", "code"])
def test_any_change_runs_it_again(project: Path, run, change: str) -> None:  # type: ignore[no-untyped-def]
    run()
    before = tree(project / "made")
    if change == "input":
        (project / "input.txt").write_text("other")
    elif change == "params":
        text = (project / "params.yaml").read_text().replace("pause: none", "pause: still none")
        (project / "params.yaml").write_text(text)
    elif change == "lost output":
        shutil.rmtree(project / "made/two")
    elif change == "altered output":
        (project / "made/two/3.txt").write_text("scribble")
    else:
        (project / "stage_work.py").write_text(WORK + "CHANGED = True\n")
    assert run() is True
    assert (tree(project / "made") == before) == (change != "input")


def test_a_comment_changes_nothing(project: Path, run) -> None:  # type: ignore[no-untyped-def]
    run()
    (project / "stage_work.py").write_text(
        '"""What it does."""\n' + WORK.replace("import time", "import time  # waits")
    )
    assert run() is False


def test_an_unrelated_parameter_changes_nothing(project: Path, run) -> None:  # type: ignore[no-untyped-def]
    run()
    text = (project / "params.yaml").read_text().replace("steps: 300", "steps: 301")
    (project / "params.yaml").write_text(text)
    assert run() is False


def test_of_the_inputs_only_what_parameters_name_counts(project: Path, run) -> None:  # type: ignore[no-untyped-def]
    graph, values = (yaml.safe_load((project / name).read_text()) for name in ("dvc.yaml", "params.yaml"))
    graph["stages"]["work"]["deps"].append("inputs")
    values["tasks"] = {"pause": "none", "cats": "folder:inputs/cats", "dogs": "parquet:inputs/dogs/*.parquet"}
    (project / "dvc.yaml").write_text(yaml.safe_dump(graph))
    (project / "params.yaml").write_text(yaml.safe_dump(values))
    for name in ("cats", "dogs", "others"):
        (project / "inputs" / name).mkdir(parents=True)
    assert run()
    (project / "inputs/others/new.png").write_text("another task's")
    assert not run()
    for name in ("cats", "dogs"):
        (project / "inputs" / name / "new.png").write_text("an image")
        assert run()
        assert not run()


def test_a_linked_folder_counts_by_what_lies_in_it(tmp_path: Path) -> None:
    real, pets, copy = tmp_path / "real", tmp_path / "inputs/pets", tmp_path / "copy"
    for folder in (real, pets, copy / "dog"):
        folder.mkdir(parents=True)
    (pets / "dog").symlink_to(real, target_is_directory=True)
    for content in ("one", "another"):
        for folder in (real, copy / "dog"):
            (folder / "0.png").write_text(content)
        assert digest(pets) == digest(copy)
    (real / "again").symlink_to(tmp_path / "inputs", target_is_directory=True)
    (real / "itself").symlink_to(real, target_is_directory=True)
    assert len(digest(pets)) == 64  # no endless walk


def test_a_missing_input_is_named(project: Path, run) -> None:  # type: ignore[no-untyped-def]
    (project / "input.txt").unlink()
    with pytest.raises(MergeflowError, match=r"stage work needs input.txt, which is missing"):
        run()


def test_a_failed_run_leaves_old_outputs_alone(project: Path, run, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    run()
    before = tree(project / "made")
    (project / "input.txt").write_text("other")
    original = Path.write_text

    def full_disk(self: Path, *args, **kwargs):  # type: ignore[no-untyped-def]
        if self.name == "7.txt":
            raise OSError(28, "No space left on device", str(self))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Path, "write_text", full_disk)
    with pytest.raises(DiskFull, match="the disk is full"):
        run()
    assert tree(project / "made") == before
    monkeypatch.undo()
    sys.path.insert(0, str(project))
    assert run() is True
    sys.path.remove(str(project))
    assert tree(project / "made") != before


@pytest.mark.parametrize("way_out", ["from error", "from None"])  # as writers of data and of checkpoints tell it
def test_a_full_disk_that_a_stage_tells_in_words_is_one_too(project: Path, run, way_out: str) -> None:  # type: ignore[no-untyped-def]
    (project / "stage_work.py").write_text(
        "from mergeflow.errors import MergeflowError\n"
        "def run(io):\n"
        "    try:\n"
        "        raise OSError(28, 'No space left on device')\n"
        "    except OSError as error:\n"
        f"        raise MergeflowError('cannot write model: it needs 5 MB.') {way_out}\n"
    )
    with pytest.raises(DiskFull, match=r"stage work: cannot write model: it needs 5 MB\. Finished work is kept"):
        run()


def test_what_a_stage_may_not_write_is_one_message(project: Path) -> None:
    def work(io: StageIO) -> None:
        raise PermissionError(13, "Permission denied", "outputs/x")

    with pytest.raises(MergeflowError, match="outputs/x: permission denied"):
        run_stage(project, load_graph(project)["work"], work=work)


def test_undeclared_paths_are_an_error_of_the_project(project: Path, run) -> None:  # type: ignore[no-untyped-def]
    (project / "stage_work.py").write_text("def run(io):\n    io.dep('secret.txt')\n")
    with pytest.raises(MergeflowError, match=r"does not declare secret.txt"):
        run()


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.15, 0.45, 0.75, 0.9, 1.0])
def test_killed_at_any_moment_it_resumes(project: Path, run, delay: float) -> None:  # type: ignore[no-untyped-def]
    text = (project / "params.yaml").read_text().replace("pause: none", "pause: long")
    (project / "params.yaml").write_text(text)
    code = (
        "import sys; from pathlib import Path; sys.path[:0] = ['.', sys.argv[1]]\n"
        "from tasks.project.graph import load_graph; from tasks.running.runner import run_stage\n"
        "import mergeflow.merging; print('ready', flush=True)\n"
        "run_stage(Path('.'), load_graph(Path('.'))['work'])"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(ROOT)], cwd=project, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(delay)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    made = tree(project / "made") if (project / "made").exists() else {}
    assert set(made) <= {"one.txt", *(f"two/{index}.txt" for index in range(20))}
    whole = "".join(f"{number} hello\n" for number in range(30)).encode()
    assert all(content == whole for content in made.values())
    run()
    assert tree(project / "made") == dict.fromkeys(["one.txt", *(f"two/{i}.txt" for i in range(20))], whole)
    starts = [int(line) for line in (project / "starts.txt").read_text().split()]
    assert starts == sorted(starts)
    assert run() is False


CUT_SHORT = """
import os, time
def run(io):
    part = io.scratch / "part.txt"
    if not part.exists():
        part.write_text("half of the work")
        os.utime(part, (time.time() + 100,) * 2)  # as if it had taken so long
        raise KeyboardInterrupt
    io.out("made/one.txt").write_text("whole")
    io.out("made/two").mkdir()
"""


def test_what_a_stage_took_counts_the_runs_that_were_cut_short(project: Path, run) -> None:  # type: ignore[no-untyped-def]
    (project / "stage_work.py").write_text(CUT_SHORT)
    with pytest.raises(KeyboardInterrupt):
        run()
    assert not (project / ".mergeflow/records/work.json").exists()
    assert run() is True
    assert 100 <= json.loads((project / ".mergeflow/records/work.json").read_text())["seconds"] < 200


THREADS = """
import torch
def run(io):
    io.out("made/one.txt").write_text(str(torch.get_num_threads()))
    io.out("made/two").mkdir()
"""


@pytest.mark.slow
@pytest.mark.parametrize("before", ["", "import torch\n"], ids=["torch comes with the stage", "torch is there before"])
def test_a_stage_computes_on_one_thread_wherever_a_runner_places_it(project: Path, before: str) -> None:
    (project / "stage_work.py").write_text(THREADS)
    code = (
        "import sys; from pathlib import Path; sys.path[:0] = ['.', sys.argv[1]]\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from tasks.project.graph import load_graph; from tasks.running.runner import run_stage\n"
        "with ThreadPoolExecutor() as pool:\n"
        "    pool.submit(run_stage, Path('.'), load_graph(Path('.'))['work']).result()"
    )
    many = {**os.environ, "OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}
    subprocess.run([sys.executable, "-c", before + code, str(ROOT)], cwd=project, env=many, check=True)
    assert (project / "made/one.txt").read_text() == "1"


def test_stopped_between_two_outputs_the_next_run_puts_the_others_in_place(
    project: Path, run: Callable[..., bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(runner, "sync_folder", stop)
        with pytest.raises(KeyboardInterrupt):
            run()
    assert len(list((project / "made").iterdir())) == 1
    starts = (project / "starts.txt").read_text()
    assert run() is True
    assert len(tree(project / "made")) == 21
    assert (project / "starts.txt").read_text() == starts


def test_a_build_that_was_stopped_is_not_taken_for_the_finished_one_before_it(  # type: ignore[no-untyped-def]
    project: Path, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "code_digest", lambda *_: "the same")

    def stop(_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(runner, "_publish", stop)
        with pytest.raises(KeyboardInterrupt):
            run()
    stopped = WORK.replace("    folder = io", "    raise KeyboardInterrupt\n    folder = io")
    (project / "stage_work.py").write_text(stopped)
    with pytest.raises(KeyboardInterrupt):
        run(force=True)
    (project / "stage_work.py").write_text(WORK)
    assert run() is True
    assert len(tree(project / "made")) == 21


def test_a_file_name_that_is_not_utf_8_has_a_digest(tmp_path: Path) -> None:
    for name in (b"caf\xe9.png", b"caf\xe8.png"):
        folder = tmp_path / name.hex()
        folder.mkdir()
        (folder / os.fsdecode(name)).write_text("a picture")
    first, other = map(digest, tmp_path.iterdir())
    assert first != other
