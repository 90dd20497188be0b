"""Merges of causal experts: estimates without heads, a chat vector, and three domains by every method."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import Result
from safetensors.torch import load_file
from torch import Tensor

from mergeflow.checkpoints import read_state
from mergeflow.commands.statistics import add_commands
from mergeflow.errors import MergeflowError
from mergeflow.evaluation.adamerging import entropies
from mergeflow.merging import configure, load_recipe, make_recipe, merge, prepare
from mergeflow.merging.catalog import methods
from mergeflow.modalities.causal.modality import MODALITY, perplexity
from mergeflow.modalities.causal.model import Opened, open_language
from mergeflow.modalities.heads import save_head
from mergeflow.search.sweep import run_sweep
from mergeflow.search.sweep_file import make_sweep
from tests.causal.small_project import TASKS, make_base, save_tokenizer
from tests.command import invoke
from tests.project_folder import ROOT

State = dict[str, Tensor]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def base(project: Path) -> State:
    return load_file(project / "outputs/base/model.safetensors")


@pytest.fixture(scope="module")
def experts(project: Path) -> dict[str, State]:
    return {task: load_file(project / f"outputs/experts/{task}/model.safetensors") for task in TASKS}


def examples_of(project: Path, task: str) -> Any:
    return MODALITY.open(task, project / f"outputs/data/validation/{task}", "validation", None, CPU)


def call(project: Path, *words: str) -> Result:
    whole = [*words, "--architecture", str(project / "outputs/base/model.safetensors")]
    done = invoke(add_commands, *whole, obj=lambda text: text)
    if isinstance(done.exception, MergeflowError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done


def recipe_of(project: Path, out: Path, method: str, **more: Any) -> Path:
    experts = {task: str(project / f"outputs/experts/{task}/model.safetensors") for task in TASKS}
    base = str(project / "outputs/base/model.safetensors")
    values = {"method": method, "base": base, "experts": experts, "out": str(out / "merged.safetensors"), **more}
    (out / "recipe.yaml").write_text(yaml.safe_dump(values))
    return out / "recipe.yaml"


def test_adamerging_learns_without_heads_and_lowers_the_entropy(
    project: Path, base: State, experts: dict[str, State], tmp_path: Path
) -> None:
    recipe = recipe_of(project, tmp_path, "adamerging", args={"granularity": "task", "steps": 8, "lr": 0.05})
    places = [f"--task={task}={project / f'outputs/data/validation/{task}'}" for task in TASKS]
    done = call(project, "adamerge", str(recipe), *places, "--out", str(tmp_path / "learned"))
    assert "entropy" in done.output
    learned = load_file(merge(load_recipe(tmp_path / "learned/recipe.yaml")).path)
    start = prepare(configure("task_arithmetic", {"scale": 0.3}), base, experts).at(0.3)
    model = open_language(str(project / "outputs/base/model.safetensors"), Path()).model
    data = {task: examples_of(project, task) for task in TASKS}
    before, after = (sum(entropies(model, data, state).values()) for state in (start, learned))
    assert after < before
    with pytest.raises(MergeflowError, match="unknown task of --head 'shps': did you mean 'ships'"):
        call(project, "adamerge", str(recipe), *places, "--head=shps=x", "--out", str(tmp_path / "other"))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "method"), [("fisher", "fisher"), ("gram", "regmean")])
def test_statistics_need_no_head_where_a_task_has_none(project: Path, tmp_path: Path, kind: str, method: str) -> None:
    files = {task: tmp_path / f"{task}.safetensors" for task in TASKS}
    save_head(None, tmp_path / "none.safetensors")
    for number, (task, out) in enumerate(files.items()):
        expert = str(project / f"outputs/experts/{task}/model.safetensors")
        head = ["--head", str(tmp_path / "none.safetensors")] if number == 0 else []  # a file that says so will do
        places = ["--task", str(project / f"outputs/data/train/{task}"), "--out", str(out), *head]
        assert "3 examples of train" in call(project, "statistics", kind, expert, *places, "--samples", "3").output
    data = {kind: {task: str(path) for task, path in files.items()}}
    made = load_file(merge(load_recipe(recipe_of(project, tmp_path, method, data=data))).path)
    assert made.keys() == load_file(project / "outputs/base/model.safetensors").keys()


BASE = "outputs/base/model.safetensors"
EXPERT = "outputs/experts/{}/model.safetensors"
# Not in domains.yaml: two experts at most; experts that are adapters; statistics or coefficients from files; one model.
OTHERS = {"slerp", "nuslerp", "nearswap", "arcee_fusion", "core_space", "knots", "fisher", "regmean", "adamerging"}
OTHERS |= {"passthrough"}


@pytest.fixture
def opened(project: Path) -> Opened:
    return open_language(BASE, project)


def surprise(opened: Opened, project: Path, task: str) -> float:
    texts = MODALITY.open(task, project / f"outputs/data/validation/{task}", "validation", None, torch.device("cpu"))
    return perplexity(opened.model, texts)  # type: ignore[arg-type]


def test_a_chat_vector_gives_a_domains_model_what_instruction_tuning_changed(
    project: Path, opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = {"base": BASE, "instruct": EXPERT.format("trees"), "domain": EXPERT.format("ships")}
    for name, file in files.items():
        opened.load(project / file)
        opened.save(tmp_path / "models" / name)
    tokenizer_config = json.loads((tmp_path / "models/instruct/tokenizer_config.json").read_text())
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (tmp_path / "models/instruct/tokenizer_config.json").write_text(
        json.dumps({**tokenizer_config, "chat_template": template})
    )
    values = yaml.safe_load((ROOT / "examples/recipes/chat_vector.yaml").read_text())
    merge(make_recipe({**values, "weights": {"instruct": 0.5}}))
    base, instruct, domain = (read_state(project / file) for file in files.values())
    merged = read_state(tmp_path / "merged/domain-chat")
    for name, value in merged.items():
        torch.testing.assert_close(value, domain[name] + 0.5 * (instruct[name] - base[name]), rtol=1e-5, atol=1e-6)
    assert any(template in path.read_text() for path in (tmp_path / "merged/domain-chat").glob("*.j*"))
    surprises: dict[str, dict[str, float]] = {}
    for name in (*(f"models/{name}" for name in files), "merged/domain-chat"):
        opened.load(tmp_path / name)
        surprises[Path(name).name] = {task: surprise(opened, project, task) for task in ("trees", "ships")}
    assert surprises["domain-chat"]["trees"] < surprises["domain"]["trees"]  # it took the style
    assert surprises["domain-chat"]["ships"] < surprises["base"]["ships"]  # and kept the domain


def test_a_chat_model_brings_the_tokens_of_its_format_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen2 as transformers saves it, tied; the chat model has two more tokens and is stored in bfloat16."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.chdir(tmp_path)
    make_base(tmp_path / "models/base", "qwen2")
    for seed, name in enumerate(("instruct", "domain")):
        model = AutoModelForCausalLM.from_pretrained("models/base")
        with torch.no_grad():
            for value in model.parameters():
                value.add_(0.01 * torch.randn(value.shape, generator=torch.Generator().manual_seed(seed)))
        if name == "instruct":
            model.resize_token_embeddings(259)
            model.to(torch.bfloat16)
        model.save_pretrained(f"models/{name}")
        save_tokenizer(tmp_path / "models" / name, *(["<|im_start|>", "<|im_end|>"] if name == "instruct" else []))
    config_file = tmp_path / "models/instruct/tokenizer_config.json"
    template = "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"
    config_file.write_text(json.dumps({**json.loads(config_file.read_text()), "chat_template": template}))
    values = yaml.safe_load((ROOT / "examples/recipes/chat_vector.yaml").read_text())
    with pytest.raises(MergeflowError, match="'instruct' has 259 rows for tokens, the base 257; `tokenizer_source"):
        merge(make_recipe(values))
    merge(make_recipe({**values, "tokenizer_source": "instruct", "weights": {"instruct": 0.5}}))

    reloaded, loaded = AutoModelForCausalLM.from_pretrained("merged/domain-chat", output_loading_info=True)
    assert not any(loaded.values())
    words, told_by_base = (AutoTokenizer.from_pretrained(name) for name in ("merged/domain-chat", "models/base"))
    asked = words.apply_chat_template([{"role": "user", "content": "hi"}])
    assert asked["input_ids"] == [257, *told_by_base("hi")["input_ids"], 258]
    base, instruct, domain = (read_state(tmp_path / "models" / name) for name in ("base", "instruct", "domain"))
    merged = reloaded.state_dict()
    rows, norm = "model.embed_tokens.weight", "model.norm.weight"
    expected = domain[rows] + 0.5 * (instruct[rows][:257].float() - base[rows])
    torch.testing.assert_close(merged[rows][:257], expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(merged[rows][257:], instruct[rows][257:].float())
    torch.testing.assert_close(merged[norm], domain[norm] + 0.5 * (instruct[norm].float() - base[norm]))


@pytest.mark.slow
def test_three_domains_are_merged_by_every_method(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    values: dict[str, Any] = yaml.safe_load((ROOT / "examples/sweeps/domains.yaml").read_text())
    assert set(values["methods"]) == set(methods()) - OTHERS
    shutil.copyfile(ROOT / "examples/sweeps/domains.py", tmp_path / "domains.py")
    first = {name: {key: listed[:1] for key, listed in args.items()} for name, args in values["methods"].items()}
    experts = {task: EXPERT.format(task) for task in ("ships", "trees", "colours")}
    values |= {"experts": experts, "score": f"{tmp_path / 'domains.py'}:score", "methods": first}
    result = run_sweep(make_sweep(values), tmp_path / "sweep")
    assert {trial.method for trial in result.trials} == set(values["methods"])
    assert set(result.base.accuracy) == {"ships", "trees"}  # the colours are questions
    assert all(result.winner.score.accuracy[task] > result.base.accuracy[task] for task in ("ships", "trees"))
    assert result.test is not None
