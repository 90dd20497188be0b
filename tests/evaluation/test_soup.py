"""Soups of one run: the weights of each kind, the barrier's warning, and a run of transformers' own Trainer."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mergeflow.checkpoints import open_checkpoint, write_checkpoint
from mergeflow.commands.derived import add_commands
from mergeflow.errors import MergeflowError
from mergeflow.search.soup import checkpoints_of, soup
from tests.command import invoke

ROOT = Path(__file__).parents[2]
SCORERS = """
from pathlib import Path


def closeness(state, candidate):
    assert candidate.split == "validation"
    assert not (Path("stop").exists() and state["w"][0] == 0.5), "stopped at the last one"
    return {"ones": -float(abs(state["w"] - 1).mean())}


def unscored(state, candidate):
    raise AssertionError


def ends(state, candidate):
    return {"far": float(abs(state["w"]).mean())}
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Weights 3, 0, 1.5, 0.5 at steps 9, 10, 20, 100: in order of their numbers, not of their names."""
    monkeypatch.chdir(tmp_path)
    Path("scorers.py").write_text(SCORERS)
    for step, value in ((9, 3.0), (10, 0.0), (20, 1.5), (100, 0.5)):
        write_checkpoint(f"run/checkpoint-{step}/model.safetensors", {"w": torch.full((4,), value)})
    Path("run/runs").mkdir()
    return "run"


def weight(path="soup"):
    with open_checkpoint(path) as state:
        return float(state["w"][0])


def test_checkpoints_are_in_the_order_of_the_run(run):
    assert list(checkpoints_of(Path(run))) == [f"checkpoint-{step}" for step in (9, 10, 20, 100)]
    assert list(checkpoints_of(Path(run), 2)) == ["checkpoint-20", "checkpoint-100"]


def test_names_that_training_programs_give_are_in_order_of_steps(tmp_path):
    names = ["model_3.pth", "epoch=0-step=90.ckpt", "epoch=1-step=180.ckpt", "checkpoint_0200.pth.tar", "iter_300.pth"]
    for name in (*names, "last.ckpt", "epoch=1-step=180-v1.ckpt", "model-00001-of-00002.safetensors"):
        (tmp_path / name).touch()
    assert list(checkpoints_of(tmp_path)) == names


@pytest.mark.parametrize("end", ["safetensors", "pt", "pth", "bin", "ckpt"])
def test_files_of_every_kind_that_can_be_read_are_checkpoints(tmp_path, end):
    for epoch in (1, 2):
        torch.save({"w": torch.zeros(2)}, tmp_path / f"epoch_{epoch}.{end}")
    assert list(checkpoints_of(tmp_path)) == [f"epoch_1.{end}", f"epoch_2.{end}"]


def write_adapter(folder, value, base="base"):
    """Write an adapter that changes each element of a matrix `a.weight` by `value`."""
    prefix = "base_model.model.a.lora_"
    factors = {f"{prefix}A.weight": torch.ones(1, 4), f"{prefix}B.weight": torch.full((4, 1), value)}
    write_checkpoint(f"{folder}/adapter_model.safetensors", factors)
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "base_model_name_or_path": base}
    Path(folder, "adapter_config.json").write_text(json.dumps(config))


@pytest.fixture
def adapters(tmp_path, monkeypatch):
    """A base of fives, and adapters that add 1 and 3 to it."""
    monkeypatch.chdir(tmp_path)
    write_checkpoint("base/model.safetensors", {"a.weight": torch.full((4, 4), 5.0), "b": torch.ones(2)})
    Path("base/config.json").write_text("{}")
    write_adapter("run/checkpoint-1", 1.0)
    write_adapter("run/checkpoint-2", 3.0)
    Path("scorers.py").write_text(
        "from mergeflow.checkpoints import read_state\n\n\n"
        "def mean(state, candidate):\n"
        "    assert state.keys() == {'a.weight', 'b'}\n"
        "    return {'mean': float(state['a.weight'].mean())}\n\n\n"
        "def of_folder(folder, candidate):\n"
        "    assert (folder / 'config.json').exists() and not (folder / 'adapter_config.json').exists()\n"
        "    return mean(read_state(folder), candidate)\n"
    )
    return "run"


@pytest.mark.parametrize(
    "scorer", [{"function": "scorers.py:mean"}, {"function": "scorers.py:of_folder", "model": "folder"}]
)
def test_adapters_are_scored_as_the_models_they_make_of_their_base(adapters, scorer):
    made = soup(adapters, "soup", score=scorer)
    assert made.scores == {"checkpoint-1": 6.0, "checkpoint-2": 8.0, "soup": 7.0}
    with open_checkpoint("soup") as state:
        assert float(state["a.weight"].mean()) == 7.0


@pytest.mark.parametrize("score", [None, "scorers.py:mean"])
def test_adapters_that_name_no_base_are_refused(adapters, score):
    for step in (1, 2):
        write_adapter(f"run/checkpoint-{step}", 1.0, base=None)
    with pytest.raises(
        MergeflowError, match=r"checkpoint-\d' is an adapter that names no base.*base_model_name_or_path"
    ):
        soup(adapters, "soup", score=score)
    assert not Path("soup").exists()
    assert not list(Path().glob(".*.scores"))


def test_what_cannot_be_averaged_or_written_is_said_before_anything_is_scored(run):
    Path("mine.safetensors").write_bytes(b"precious")
    with pytest.raises(MergeflowError, match="was not made by a merge"):
        soup(run, "mine.safetensors", weights="greedy", score="scorers.py:unscored")
    write_checkpoint("run/checkpoint-100/model.safetensors", {"w": torch.zeros(5)})
    with pytest.raises(MergeflowError, match=r"'w' of shape \[4\], base has \[5\]"):
        soup(run, "soup", weights="greedy", score="scorers.py:unscored")
    assert not list(Path().glob(".*.scores"))


def test_uniform_and_linear_weights(run):
    assert soup(run, "soup", window=2).weights == {"checkpoint-20": 0.5, "checkpoint-100": 0.5}
    assert weight() == 1.0
    linear = soup(run, "linear", weights="linear")
    assert list(linear.weights.values()) == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert weight("linear") == pytest.approx(0.1 * 3 + 0.3 * 1.5 + 0.4 * 0.5)
    assert linear.scores == {}


def test_greedy_takes_what_helps(run):
    made = soup(run, "soup", weights="greedy", score="scorers.py:closeness")
    # 1.5 and 0.5 are best, their mean is exact; neither 0 nor 3 keeps it so.
    assert made.weights == {"checkpoint-20": 0.5, "checkpoint-100": 0.5}
    assert made.scores["soup"] == 0
    assert weight() == 1.0


def test_a_barrier_and_a_better_single_checkpoint_are_told(run):
    write_checkpoint("run/checkpoint-100/model.safetensors", {"w": torch.full((4,), -3.0)})
    made = soup(run, "soup", score="scorers.py:ends")
    assert "a barrier of 3 lies between 'checkpoint-9' (3) and 'checkpoint-100' (3)" in made.warnings[0]
    assert "'checkpoint-9' alone 3" in made.warnings[1]
    assert soup(run, "other", score="scorers.py:closeness", window=2).warnings[0].startswith("the average scores")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"run": "nowhere"}, "is not a folder"),
        ({"run": "run/runs"}, "holds 0 checkpoints named like `checkpoint-100`.*found nothing"),
        ({"window": 5}, "a window is 2 to 4"),
        ({"window": 1}, "a window is 2 to 4"),
        ({"weights": "greedy"}, "give a scorer"),
        ({"weights": "cubic"}, "expected uniform, linear or greedy"),
        ({"score": "scorers.py:nothing"}, "nothing"),
    ],
)
def test_faults_are_one_message_and_nothing_is_written(run, given, message):
    with pytest.raises(MergeflowError, match=message):
        soup(**{"run": run, "out": "soup", **given})
    assert not Path("soup").exists()


KILLED = """
import os
from pathlib import Path
from tests.command import invoke


def closeness(state, candidate):
    with open("calls", "a") as calls:
        calls.write(candidate.name + "\\n")
    if len(Path("calls").read_text().splitlines()) in (3, 7):
        os.kill(os.getpid(), 9)
    return {"ones": -float(abs(state["w"] - 1).mean())}
"""


@pytest.mark.nightly
def test_a_killed_soup_goes_on_with_the_scores_it_has(run):
    Path("scorers.py").write_text(KILLED)
    code = (
        "from mergeflow.search.soup import soup; soup('run', 'killed', weights='greedy', score='scorers.py:closeness')"
    )
    ends = [subprocess.run([sys.executable, "-c", code], timeout=300).returncode for _ in range(3)]
    assert ends == [-9, -9, 0]
    calls = Path("calls").read_text().splitlines()
    Path("calls").write_text("\n" * 9)  # kills no more
    made = soup(run, "whole", weights="greedy", score="scorers.py:closeness")
    assert weight("killed") == weight("whole") == 1.0
    again = Path("calls").read_text().split()
    assert sorted(calls) == sorted([*again, calls[2], calls[6]])  # the two that kills cut short, and no others
    assert made.scores["soup"] == 0
    assert not list(Path().glob(".*.scores"))


def test_scores_of_other_checkpoints_do_not_count(run):
    Path("stop").touch()
    with pytest.raises(MergeflowError, match="stopped at the last one"):
        soup(run, "run.safetensors", score="scorers.py:closeness")
    assert Path(".run.safetensors.scores").exists()
    write_checkpoint("run/checkpoint-9/model.safetensors", {"w": torch.full((4,), 1.0)})
    Path("stop").unlink()
    made = soup(run, "run.safetensors", score="scorers.py:closeness")
    assert made.scores["checkpoint-9"] == 0


def test_the_pages_python_runs(run):
    (text,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/recipes.md").read_text(), flags=re.S)
    names: dict[str, object] = {}
    exec(text, names)
    assert weight() == 1.0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_run_of_the_trainer(tmp_path, monkeypatch):
    """Trained, averaged and scored by perplexity as the page says; transformers loads the result."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    tokens = torch.arange(16).roll(3)[None].repeat(8, 1)
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    settings = transformers.TrainingArguments(
        "outputs/run", max_steps=8, save_steps=2, learning_rate=1e-2, report_to=[], use_cpu=True, disable_tqdm=True
    )
    transformers.Trainer(model, settings, train_dataset=rows).train()
    Path("scorers.py").write_text(
        "import torch\nfrom transformers import AutoModelForCausalLM\n\n\n"
        "def perplexity(state, candidate):\n"
        "    model = AutoModelForCausalLM.from_pretrained('outputs/run/checkpoint-8').eval()\n"
        "    model.load_state_dict(state, strict=False)\n"
        f"    rows = torch.tensor([{tokens[0].tolist()}])\n"
        "    return {'text': -float(model(rows, labels=rows).loss)}\n"
    )
    line = re.search(r"mergeflow (soup .* --weights greedy .*) +#", (ROOT / "docs/recipes.md").read_text())
    assert line is not None
    done = invoke(add_commands, *line.group(1).split())
    assert done.exit_code == 0, done.output
    assert "checkpoint-8   score" in done.output
    loaded = transformers.LlamaForCausalLM.from_pretrained("outputs/soup")
    assert loaded.config.num_hidden_layers == 1
    assert not Path("outputs/soup/trainer_state.json").exists()
