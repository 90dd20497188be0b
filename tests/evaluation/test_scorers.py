"""Sweeps with a scorer of the user's: any architecture, by a function, a command or the harness; and its faults."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from mergeflow.checkpoints import open_checkpoint, read_state, write_checkpoint
from mergeflow.errors import MergeflowError
from mergeflow.merging import catalog, configure, merge, prepare
from mergeflow.search.scorer import CandidateModel, _metric_score, find_tasks, lm_eval_scorer, metrics_of
from mergeflow.search.sweep import SweepResult, run_sweep
from mergeflow.search.sweep_file import LmEvalScore, load_sweep, make_sweep
from tests.merging.model_folders import TEXT, llama, save, tokenizer

ROOT = Path(__file__).parents[2]
SCORER = """
import json, os, sys
from pathlib import Path


def closeness(state, candidate):
    assert candidate.split in ("validation", "test")
    sign = {"validation": 1, "test": 2}[candidate.split]
    return {"ones": -sign * float(abs(state["w"] - 1).mean()), "twos": -sign * abs(state["w"] - 2).mean()}

def of_folder(folder, candidate):
    from safetensors.numpy import load_file
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["config.json", "model.safetensors"], names
    return closeness(load_file(folder / "model.safetensors"), candidate)

def raises(state, candidate):
    if candidate.name == "ties":
        raise ZeroDivisionError("no data")
    return {"ones": 0.5}

def not_a_number(state, candidate):
    return {"ones": float("nan") if candidate.name == "ties" else 0.5}

def no_mapping(state, candidate):
    return [0.5]

def text(state, candidate):
    return {"ones": "0.5"}

def exits(state, candidate):
    sys.exit(0)

def wanders(state, candidate):
    os.chdir("/")
    return closeness(state, candidate)

def nothing(state, candidate):
    return {}

def changing(state, candidate):
    return {"ones": 0.5} if candidate.name == "base" else {"twos": 0.5}

if __name__ == "__main__":
    folder, split = sys.argv[1:3]
    told = json.loads(os.environ["MERGEFLOW_CANDIDATE"])
    assert told["split"] == split
    class Candidate:
        pass
    candidate = Candidate()
    candidate.split = split
    print("loading", folder)
    print(json.dumps({task: float(value) for task, value in of_folder(Path(folder), candidate).items()}))
"""
METHODS = {"average": {}, "ties": {"keep": [0.5, 1.0], "scale": [0.5, 1.0]}}


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A base of zeros and two experts as model folders of no architecture that anybody knows."""
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("base", "ones", "twos")):
        state = {"w": torch.full((4, 4), float(number)), "steps": torch.tensor(3)}
        write_checkpoint(tmp_path / name / "model.safetensors", state, {"format": "pt"})
        (tmp_path / name / "config.json").write_text(json.dumps({"architectures": ["Nobody"]}))
    (tmp_path / "scorer.py").write_text(SCORER)
    return tmp_path


def values(score: Any, **changes: Any) -> dict[str, Any]:
    experts = {"ones": "ones", "twos": "twos"}
    return {"base": "base", "experts": experts, "score": score, "methods": METHODS, **changes}


def sweep(score: Any, folder: str = "out", **changes: Any) -> SweepResult:
    return run_sweep(make_sweep(values(score, **changes)), folder)


COMMAND = f"{sys.executable} scorer.py {{model}} {{split}}"
SCORERS = {
    "state": "scorer.py:closeness",
    "folder": {"function": "scorer.py:of_folder", "model": "folder"},
    "command": {"command": COMMAND},
}


def expected(method: str, args: dict[str, Any]) -> dict[str, float]:
    states = {name: dict(open_checkpoint(name)) for name in ("base", "ones", "twos")}
    call = configure(method, args)
    merged = prepare(call, states["base"], {name: states[name] for name in ("ones", "twos")}).at(call.scale)
    return {"ones": -float((merged["w"] - 1).abs().mean()), "twos": -float((merged["w"] - 2).abs().mean())}


@pytest.mark.parametrize("kind", SCORERS)
def test_every_kind_of_scorer_sees_the_plain_merges(models: Path, kind: str):
    result = sweep(SCORERS[kind], test=True)
    assert [trial.method for trial in result.trials] == ["average"] + 4 * ["ties"]
    for trial in result.trials:
        assert trial.score.accuracy == expected(trial.method, trial.args)
        assert trial.objective == trial.score.mean
    assert result.base.accuracy == {"ones": -1.0, "twos": -2.0}
    assert result.test is not None
    assert result.test.accuracy == {task: 2 * value for task, value in result.winner.score.accuracy.items()}
    assert sorted(path.name for path in Path("out").iterdir()) == ["trials.jsonl", "trials.parquet", "winner.yaml"]
    table = pq.read_table("out/trials.parquet")
    assert table.column("score.ones").to_pylist() == [trial.score.accuracy["ones"] for trial in result.trials]
    made = merge("out/winner.yaml")
    merged = dict(open_checkpoint(made.path))
    assert -float((merged["w"] - 1).abs().mean()) == result.winner.score.accuracy["ones"]


def test_a_second_run_scores_nothing_and_test_is_looked_at_once(models: Path):
    Path("out/.candidate-x").mkdir(parents=True)  # as a kill leaves it
    first = sweep(SCORERS["state"], test=True)
    assert not list(Path("out").glob(".candidate-*"))
    before = Path("out/trials.jsonl").read_bytes()
    assert before.count(b'["test\\"'.replace(b"[", b"[\\")) == before.count(b'\\"test\\"') == 1
    again = sweep(SCORERS["state"], test=True)
    assert (again.scored, again.test, again.rows()) == (0, first.test, first.rows())
    assert Path("out/trials.jsonl").read_bytes() == before


def test_choosing_again_after_a_look_at_test_is_refused_and_the_choice_is_kept(models: Path):
    sweep(SCORERS["state"], test=True, methods={"task_arithmetic": {"scale": [0.1]}})
    wider = {"task_arithmetic": {"scale": [0.1, 0.5]}}
    before = {name: Path("out", name).read_bytes() for name in ("winner.yaml", "trials.parquet")}
    with pytest.raises(MergeflowError, match="test was looked at already, for another winner"):
        sweep(SCORERS["state"], test=True, methods=wider)
    assert {name: Path("out", name).read_bytes() for name in before} == before
    result = sweep(SCORERS["state"], methods=wider)
    assert (result.scored, result.winner.args["scale"]) == (0, 0.5)


OWN_METHOD = '''
from mergeflow.merging.method import Args, Parts, Stack, method


class DrawnArgs(Args):
    """No arguments of its own."""


@method("drawn", DrawnArgs)
def drawn(stack: Stack, args: DrawnArgs) -> Parts:
    """A part of the way.

    θ = θ0 + scale · PART · Σ τ_t / T

    Source:
        A test.
    """
    return stack.base, PART * stack.taus.mean(0)
'''


@pytest.fixture
def own_method(models: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A function that writes the project's own method with another formula, as a new process would find it."""
    monkeypatch.setattr(catalog.METHODS, "_files", ())
    monkeypatch.setattr(catalog.METHODS, "_outside_things", {})
    for name in ("params.yaml", "dvc.yaml"):
        (models / name).touch()
    (models / "methods").mkdir()

    def write(part: str) -> None:
        (models / "methods/drawn.py").write_text(OWN_METHOD.replace("PART", part))
        for name in [name for name in sys.modules if name.startswith("_mergeflow_") and name.endswith(".drawn")]:
            del sys.modules[name]
        catalog.METHODS._outside_things.clear()

    return write


def test_scores_of_a_method_s_old_code_are_not_taken_for_those_of_the_new(own_method: Callable[[str], None]):
    methods = {"drawn": {}, "average": {}}
    own_method("0.5")
    first = sweep(SCORERS["state"], test=True, methods=methods)
    assert (first.winner.method, first.scored) == ("average", 4)
    own_method("1.125")
    again = sweep(SCORERS["state"], methods=methods)
    assert (again.winner.method, again.scored) == ("drawn", 1)
    assert again.trials[0].score.accuracy != first.trials[0].score.accuracy
    own_method("0.5")
    assert sweep(SCORERS["state"], test=True, methods=methods).scored == 0


def test_after_a_look_at_test_the_winner_s_other_code_is_another_winner(own_method: Callable[[str], None]):
    own_method("0.5")
    sweep(SCORERS["state"], test=True, methods={"drawn": {}})
    own_method("1.125")
    with pytest.raises(MergeflowError, match=r"test was looked at already, for another winner than drawn .* of this"):
        sweep(SCORERS["state"], test=True, methods={"drawn": {}})


def test_normalised_scores_ask_for_the_experts_own(models: Path):
    (models / "counts.py").write_text(
        "def share(state, candidate):\n    mean = float(state['w'].mean())\n"
        "    return {'ones': min(mean, 1.0), 'twos': min(mean / 2, 1.0)}\n"
    )
    result = sweep("counts:share", objective="normalised")
    assert result.individual == {"ones": 1.0, "twos": 1.0}
    assert all(trial.objective == trial.score.normalised == trial.score.mean for trial in result.trials)
    (models / "counts2.py").write_text("def share(state, candidate):\n    return {'threes': 1.0}\n")
    with pytest.raises(MergeflowError, match="threes have no expert of their name"):
        sweep("counts2:share", folder="other", objective="normalised")


def test_an_expert_that_is_a_task_vector_is_scored_as_a_model(models: Path):
    from mergeflow.merging.files.vectors import extract

    extract("base", "ones", "vector.safetensors")
    result = sweep(SCORERS["state"], objective="mean", experts={"ones": "vector.safetensors", "twos": "twos"})
    assert result.trials[0].score.accuracy == expected("average", {})


FAULTS = {
    "scorer.py:raises": r"candidate ties \(scale 0\.5, keep .*\): score function 'scorer.py:raises': it raised "
    r"ZeroDivisionError: no data \(line 19 of scorer.py\)\.",
    "scorer.py:not_a_number": "returned nan for task 'ones', expected a finite number",
    "scorer.py:no_mapping": r"base: .*no_mapping': it returned \[0.5\], expected a mapping of tasks to numbers",
    "scorer.py:text": "returned '0.5' for task 'ones'",
    "scorer.py:nothing": "returned {}",
    "scorer.py:exits": r"it raised SystemExit: 0 \(line \d+ of scorer\.py\)",
    "scorer.py:changing": "it returned the tasks twos, and before ones: every model is scored on the same tasks",
    "scorer.py:closenes": "unknown function of scorer.py 'closenes': did you mean 'closeness'",
    "missing.py:score": "there is no file 'missing.py'",
    "no_such_module:score": "cannot import 'no_such_module': ModuleNotFoundError",
    "scorer.py": "function: must match pattern|String should match",
}


@pytest.mark.parametrize("score", FAULTS)
def test_a_fault_of_a_function_is_one_message_and_nothing_is_lost(models: Path, score: str):
    with pytest.raises(MergeflowError, match=FAULTS[score]):
        sweep(score)
    journal = Path("out/trials.jsonl")
    lines = journal.read_text().splitlines() if journal.exists() else []
    if score in ("scorer.py:raises", "scorer.py:not_a_number"):
        assert len(lines) == 3  # the inputs, the base and the average
    assert not Path("out/winner.yaml").exists()
    assert not list(Path(".").glob("out/.candidate-*"))


def test_a_scorer_that_leaves_the_folder_does_not_take_the_sweep_along(models: Path):
    assert sweep("scorer.py:wanders").winner == sweep("scorer.py:closeness", "there").winner
    assert sorted(path.name for path in models.glob("out/*")) == sorted(path.name for path in models.glob("there/*"))
    assert Path.cwd() == models


COMMANDS = {
    "false {model}": "it ended with status 1: it printed nothing",
    "echo hello {model}": "its output is not JSON: 'hello",
    "echo '{{\"a\": NaN}}' {model}": "its output is not JSON",
    'sh -c \'echo "{{\\"a\\": NaN}}" # {model}\'': "returned nan for task 'a'",
    "sh -c 'echo boom >&2; exit 3 # {model}'": "it ended with status 3: 'boom'",
    "no-such-command {model}": "it cannot be started: No such file",
    "sh -c 'sleep 5; # {model}'": "took longer than 0.2 s and was stopped",
    "echo 1": r"the command needs \{model\}",
    "echo 'a {model}": "No closing quotation",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_fault_of_a_command_is_one_message(models: Path, command: str):
    timeout = 0.2 if "sleep" in command else None
    began = time.monotonic()
    with pytest.raises(MergeflowError, match=COMMANDS[command]):
        sweep({"command": command.replace("{{", "{").replace("}}", "}"), "timeout": timeout})
    assert time.monotonic() - began < 4
    assert not Path("out/winner.yaml").exists()
    assert not list(Path(".").glob("out/.candidate-*"))


def test_what_is_wrong_in_the_file_is_told_before_anything_is_read():
    def refused(match: str, score: Any, **changes: Any) -> None:
        with pytest.raises(MergeflowError, match=match):
            make_sweep(values(score, **changes))

    refused("score: unknown key 'modle': did you mean 'model'", {"function": "a:b", "modle": "folder"})
    refused("score: model: must be 'state' or 'folder', found 'file'", {"function": "a:b", "model": "file"})
    refused("must name one of function, command, lm_eval, found function, command", {"function": "a:b", "command": "c"})
    refused("score: must name one of function, command, lm_eval, found nothing", {})
    refused("score: must be `module:function`", 3)
    refused("`score` replaces `model` and `tasks`", "a:b", tasks={"ones": {"data": "d", "head": "h"}})
    refused(r"needs \{split\} in score.command", {"command": "run {model}"}, test=True)
    refused("model and tasks missing: name the images to score on, or a scorer", None)
    refused("score: lm_eval: ", {"lm_eval": []})


def test_candidates_that_cannot_be_merged_are_told_before_anything_is_scored(models: Path):
    spectral = {"cart": {"rank_ratio": [0.1, 0.5], "scale": [1.0, 2.0]}, "tsv": {"scale": [0.5]}}
    with pytest.raises(MergeflowError, match=r"(?s)candidate cart .*no rule says.*\n.*candidate tsv") as caught:
        sweep("scorer.py:closeness", methods={"average": {}, **spectral})
    assert str(caught.value).count("candidate") == 2
    assert '"base"' not in (models / "out/trials.jsonl").read_text().partition("\n")[2]
    whole = {name: {**space, "matrices": [["w"]]} for name, space in spectral.items()}
    assert len(sweep("scorer.py:closeness", methods={"average": {}, **whole}).trials) == 6


def test_a_changed_scorer_is_not_taken_for_the_same(models: Path):
    sweep(SCORERS["state"])
    (models / "scorer.py").write_text(SCORER.replace("sign = {", "sign = -3 * {"))
    with pytest.raises(MergeflowError, match=r"other inputs \(files of the scorer changed\)"):
        sweep(SCORERS["state"])
    (models / "scorer.py").write_text(SCORER)
    with pytest.raises(MergeflowError, match=r"other inputs \(score changed\)"):
        sweep({"function": "scorer.py:closeness", "model": "folder"})


WITH_HELPERS = """
from __future__ import annotations

from dataclasses import dataclass

from distance import between


@dataclass
class Aim:
    value: float


def closeness(state, candidate):
    return {"ones": -between(state, Aim(1.0).value)}
"""


def test_the_file_of_a_function_may_hold_dataclasses_and_import_its_neighbours(models: Path):
    folder = models / "scorers"
    folder.mkdir()
    (folder / "own.py").write_text(WITH_HELPERS)
    (folder / "distance.py").write_text("def between(state, aim):\n    return float(abs(state['w'] - aim).mean())\n")
    paths = list(sys.path)
    result = sweep("scorers/own.py:closeness")
    assert result.base.accuracy == {"ones": -1.0}
    assert sys.path == paths
    sys.modules.pop("distance")


def test_two_files_of_one_name_are_two_modules_and_one_that_fails_is_forgotten(models: Path):
    from mergeflow.search.scorer import _from_file

    for name in ("one", "two"):
        (models / name / "own.py").parent.mkdir()
        (models / name / "own.py").write_text(f"PLACE = '{name}'\n")
    loaded = [_from_file(Path(name, "own.py")) for name in ("one", "two", "one")]
    assert [module.PLACE for module in loaded] == ["one", "two", "one"]
    assert len({module.__name__ for module in loaded}) == 2
    (models / "scorer.py").write_text("import sys\nsys.path.insert(0, 'elsewhere')\nraise SystemExit('no data')\n")
    modules, paths = set(sys.modules), list(sys.path)
    with pytest.raises(MergeflowError, match=r"cannot import 'scorer\.py': SystemExit: no data"):
        sweep(SCORERS["state"])
    assert set(sys.modules) == modules
    assert sys.path == ["elsewhere", *paths]
    sys.path.remove("elsewhere")


def test_the_harness_is_asked_for_where_it_is_missing(models: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mergeflow.search.scorer.find_spec", lambda name: None)
    with pytest.raises(MergeflowError, match=r"install it with `pip install 'mergeflow\[lm-eval\]'`, or score"):
        sweep({"lm_eval": ["arc_easy"]})


def test_a_metric_behind_several_filters_keeps_theirs():
    """gsm8k's exact_match is measured twice; the last one was taken for both."""
    result = {"alias": "gsm8k", "exact_match,strict-match": 0.1, "exact_match_stderr,strict-match": "N/A",
              "exact_match,flexible-extract": 0.4, "bleu,none": 2}  # fmt: skip
    better = {"exact_match": True, "bleu": False}
    metrics = {"exact_match,strict-match": 0.1, "exact_match,flexible-extract": 0.4, "bleu": 2}
    assert metrics_of(result, better) == metrics
    assert _metric_score("gsm8k", result, better, "exact_match,flexible-extract") == 0.4
    assert _metric_score("gsm8k", result, better, None) == 0.1, "the first"
    assert _metric_score("gsm8k", result, better, "bleu") == -2
    with pytest.raises(MergeflowError, match=r"several filters: .* exact_match,strict-match or exact_match,flexible"):
        _metric_score("gsm8k", result, better, "exact_match")
    with pytest.raises(MergeflowError, match="does not say whether a larger 'bleu' is better"):
        _metric_score("gsm8k", result, better | {"bleu": None}, "bleu")  # a sweep sought the largest loss
    with pytest.raises(MergeflowError, match="unknown metric of gsm8k 'bleau'"):
        _metric_score("gsm8k", result, better, "bleau")


def test_a_group_of_the_harness_is_refused_before_anything_is_judged(monkeypatch: pytest.MonkeyPatch):
    """The harness tells results of its tasks alone: after all of them had run, its name was a KeyError."""
    harness_of(monkeypatch, glue=(), mmlu=(), cola=())
    manager = sys.modules["lm_eval.tasks"].TaskManager(None)
    manager.all_groups, manager.all_tags = ["mmlu"], ["glue"]
    assert find_tasks(LmEvalScore(lm_eval=["cola"])).all_tags == ["glue"]
    for name in ("glue", "mmlu"):
        with pytest.raises(MergeflowError, match=f"'{name}' is a group or tag of lm-evaluation-harness"):
            find_tasks(LmEvalScore(lm_eval=["cola", name]))


def harness_of(monkeypatch: pytest.MonkeyPatch, **splits: tuple[str, ...]) -> None:
    """Install a harness of tasks that have some splits."""
    harness = ModuleType("lm_eval.tasks")
    manager = SimpleNamespace(all_tasks=list(splits), all_groups=[], all_tags=[])
    made = {
        name: SimpleNamespace(
            config=SimpleNamespace(test_split="test"),
            **{f"has_{split}_docs": lambda split=split, of=of: split in of for split in ("validation", "test")},
        )
        for name, of in splits.items()
    }
    harness.TaskManager = lambda include_path: manager  # type: ignore[attr-defined]
    harness.get_task_dict = lambda names, _: {name: made[name] for name in names}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lm_eval", ModuleType("lm_eval"))
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", harness)
    monkeypatch.setattr("mergeflow.search.scorer.find_spec", lambda name: True)
    monkeypatch.setattr("mergeflow.search.scorer.version", lambda name: "")


def test_documents_of_the_other_split_are_not_taken_for_those_of_a_task(monkeypatch: pytest.MonkeyPatch):
    """Validation of a task such as hellaswag, which has no test split, was printed as test, and looked at as test."""
    harness_of(monkeypatch, both=("validation", "test"), hellaswag=("validation",), exam=("test",))
    lm_eval_scorer(LmEvalScore(lm_eval=["both", "hellaswag"]), "cpu")
    lm_eval_scorer(LmEvalScore(lm_eval=["both"]), "cpu", test=True)
    with pytest.raises(MergeflowError, match=r"'hellaswag' has no test split, and the harness would take its valid"):
        lm_eval_scorer(LmEvalScore(lm_eval=["both", "hellaswag"]), "cpu", test=True)
    with pytest.raises(MergeflowError, match=r"'exam' has no validation split, and the harness would take its test"):
        lm_eval_scorer(LmEvalScore(lm_eval=["exam"]), "cpu")


@pytest.mark.slow
def test_the_example_of_a_causal_model_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    from mergeflow.search.scorer import _from_file

    threads = torch.get_num_threads()
    _from_file(Path("examples/sweeps/tiny_causal.py")).build(Path("outputs/causal"))
    torch.set_num_threads(threads)
    result = run_sweep(load_sweep("examples/sweeps/causal.yaml"), "sweeps/causal")
    assert result.test is not None
    assert set(result.base.accuracy) == {"sums", "weather"}
    assert result.base.mean < result.winner.score.mean < 0
    assert result.base.mean < result.test.mean < 0
    assert "On test, looked at once: mean score -" in Path("sweeps/causal/winner.yaml").read_text()
    merge("sweeps/causal/winner.yaml", out="merged")
    assert Path("merged/config.json").exists()


@pytest.mark.parametrize("stem", ["model", "diffusion_pytorch_model"])
def test_a_candidate_s_folder_has_the_base_s_name_of_weights(tmp_path: Path, stem: str) -> None:
    write_checkpoint(tmp_path / f"{stem}.safetensors", {"w": torch.zeros(2)})
    with CandidateModel({"w": torch.ones(2)}, tmp_path, tmp_path).folder() as folder, open_checkpoint(folder) as state:
        assert [path.name for path in folder.iterdir()] == [f"{stem}.safetensors"]
        assert state["w"].tolist() == [1.0, 1.0]


TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
OF_CHATS = """
import json
from pathlib import Path
from safetensors.torch import load_file
from transformers import AutoTokenizer

def loss(folder, candidate):
    words = AutoTokenizer.from_pretrained(folder)
    if candidate.name == "task_arithmetic":
        told = json.loads((folder / "config.json").read_text())
        rows = len(load_file(folder / "model.safetensors")["model.embed_tokens.weight"])
        assert told["vocab_size"] == len(words) == rows
        assert words.chat_template.startswith("{% for m")
    return {"text": -abs(candidate.args.get("scale", 0.0) - 0.6)}
"""


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    plain, more = tokenizer("BPE"), tokenizer("BPE", TEXT, "<|im_start|>", "<|im_end|>")
    save(tmp_path / "base", llama(plain.get_vocab_size(), 0), plain)
    save(tmp_path / "chat", llama(more.get_vocab_size(), 1), more)
    config = json.loads((tmp_path / "chat/config.json").read_text())
    (tmp_path / "chat/config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3, "hidden_act": "gelu"}))
    (tmp_path / "scorer.py").write_text(OF_CHATS)
    return tmp_path


def of_chats(chats: Path, **changes: object) -> dict[str, object]:
    settings = {
        "base": str(chats / "base"),
        "experts": {"chat": str(chats / "chat")},
        "score": {"function": f"{chats}/scorer.py:loss", "model": "folder"},
    }
    methods = {"task_arithmetic": {"scale": [0.3, 0.6]}}
    return {**settings, "methods": methods, "tokenizer_source": "union", "allow": ["hidden_act"], **changes}


def test_candidates_have_the_vocabulary_and_the_template_of_the_winner(chats: Path) -> None:
    sweep = make_sweep(of_chats(chats, chat_template=TEMPLATE))
    result = run_sweep(sweep, chats / "sweep")
    assert result.winner.args["scale"] == 0.6
    made = merge(yaml.safe_load((chats / "sweep/winner.yaml").read_text()))
    assert made.path == chats / "sweep/merged"
    loaded, words = AutoModelForCausalLM.from_pretrained(made.path), AutoTokenizer.from_pretrained(made.path)
    assert len(words) == len(loaded.model.embed_tokens.weight)
    assert words.chat_template == TEMPLATE
    base, chat, merged = (read_state(path)["model.norm.weight"] for path in (chats / "base", chats / "chat", made.path))
    torch.testing.assert_close(merged, base + 0.6 * (chat - base))
    with pytest.raises(MergeflowError, match=r"holds results of other inputs \(.*chat_template"):
        run_sweep(make_sweep(of_chats(chats, chat_template="{{ messages }}")), chats / "sweep")


def test_the_winner_of_model_folders_is_a_model_folder(tmp_path: Path) -> None:
    words = tokenizer("BPE")
    for seed, name in enumerate(("base", "chat")):
        save(tmp_path / name, llama(words.get_vocab_size(), seed), words)
    (tmp_path / "scorer.py").write_text("def loss(folder, candidate):\n    return {'text': 1.0}\n")
    chosen = {name: value for name, value in of_chats(tmp_path).items() if name not in ("tokenizer_source", "allow")}
    run_sweep(make_sweep(chosen), tmp_path / "sweep")
    made = merge(yaml.safe_load((tmp_path / "sweep/winner.yaml").read_text()))
    assert made.path == tmp_path / "sweep/merged"
    AutoModelForCausalLM.from_pretrained(made.path)
    assert len(AutoTokenizer.from_pretrained(made.path)) == words.get_vocab_size()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"allow": None}, "hidden_act: base 'silu'"),
        ({"tokenizer_source": None}, "tokenizer_source"),
        ({"tokenizer": "union"}, "are both in the sweep"),
        (
            {"score": None, "model": {"architecture": "ViT-B-32"}, "tasks": {"t": "data"}, "objective": "mean"},
            "are of language models",
        ),
    ],
)
def test_what_does_not_fit_is_one_message(chats: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(MergeflowError, match=message):
        run_sweep(make_sweep(of_chats(chats, **changes)), chats / "sweep")
    assert not (chats / "sweep").exists() or not list((chats / "sweep").glob("winner*"))
