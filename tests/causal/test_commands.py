"""Commands that judge causal models as they are: perplexity, and tasks of lm-evaluation-harness."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from click.testing import Result
from peft import LoraConfig, get_peft_model
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

from mergeflow.commands import language
from mergeflow.errors import MergeflowError
from mergeflow.evaluation import accuracies
from mergeflow.memory import Forecast
from mergeflow.modalities.causal.modality import MODALITY
from mergeflow.modalities.causal.model import open_language
from mergeflow.modalities.causal.tokenizer import ASSETS
from mergeflow.search.scorer import find_tasks
from mergeflow.search.sweep import run_sweep
from mergeflow.search.sweep_file import LmEvalScore, make_sweep
from tests.card import driver
from tests.causal.small_project import make_base, save_tokenizer, tale
from tests.command import invoke

Run = Callable[..., Any]
BLOCKS = ("--data", "folder:texts", "--block", "45")
BASE = "outputs/base/model.safetensors"
EXPERT = "outputs/experts/ships/model.safetensors"
CLOZE = """
task: colours_cloze
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {rows}, test: {rows}}}}}
output_type: multiple_choice
validation_split: validation
test_split: test
doc_to_text: text
doc_to_choice: choices
doc_to_target: answer
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


def command(*words: str | Path, catch: bool = False) -> Result:
    """Run a command in the current folder."""
    return invoke(language.add_commands, *words, catch_exceptions=catch)


@pytest.fixture
def run(project: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command in the project; return its output, or what it printed as JSON."""
    monkeypatch.chdir(project)

    def in_project(*words: str | Path) -> Any:
        result = command(*words)
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout) if "--json" in words else result.stdout

    return in_project


def test_a_block_longer_than_the_positions_is_refused() -> None:
    with pytest.raises(MergeflowError, match=r"--block is 100000, .*/books cannot take \(its max_position_embeddings"):
        command("perplexity", ASSETS / "books", "--data", "suite:books/harbour", "--block", "100000")


def test_every_model_is_foretold_with_its_longest_blocks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of prepared texts the blocks are as long as they were prepared; only the first model was looked at."""
    books, other = ASSETS / "books", tmp_path / "other"
    shutil.copytree(books, other)
    config = json.loads((books / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 64}))
    asked: list[tuple[int, int]] = []

    def foretold(config: str, rows: int, block: int, device: str) -> Forecast:
        asked.append((json.loads(config)["max_position_embeddings"], block))
        return Forecast(device, 10**9, ())

    monkeypatch.setattr("mergeflow.evaluation.memory.estimate_perplexity_memory", foretold)
    monkeypatch.setattr("mergeflow.commands.texts.prepared_block", lambda source, block: 48)
    monkeypatch.setattr("mergeflow.commands.texts.read_texts", lambda *_: None)
    monkeypatch.setattr("mergeflow.modalities.causal.modality.total_loss", lambda *_: (10.0, 10))
    monkeypatch.setattr(torch.nn.Module, "to", lambda module, *_: module)
    with driver():
        command("perplexity", books, books, other, "--data", "held", "--device", "cuda")
    assert asked == [(config["max_position_embeddings"], 48), (64, 48)]
    (other / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 32}))
    with pytest.raises(MergeflowError, match=r"the blocks of held have 48 tokens, which .* 32\): give its source"):
        command("perplexity", other, "--data", "held")


@pytest.mark.slow
def test_in_a_project_base_experts_and_merges_are_judged_on_validation(run: Run) -> None:
    report = run("perplexity", "--json")
    assert len(report) == 1 + 3 + 4
    assert all(set(texts) == {"ships", "trees"} for texts in report.values())  # the colours are questions
    of_ships = {model: texts["ships"]["perplexity"] for model, texts in report.items()}
    assert of_ships[EXPERT] < of_ships["outputs/merged/average.safetensors"] < of_ships[BASE]
    table = run("perplexity")
    assert f"{report[BASE]['trees']['perplexity']:.3f}" in table
    assert f"trees {report[BASE]['trees']['tokens']}" in table


def test_it_is_the_perplexity_of_transformers_own_loss(run: Run, project: Path, base: Path, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text(tale("ship", 40, 1))
    (tmp_path / "two.md").write_text(tale("tree", 25, 2))
    report = run("perplexity", base, "--base", base, "--data", f"folder:{tmp_path}", "--block", "45", "--json")
    model, words = AutoModelForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(base)
    ids = [id for name in ("one.txt", "two.md") for id in (*words((tmp_path / name).read_text())["input_ids"], 256)]
    loss, count = loss_of(model, ids)
    (numbers,) = report[str(base)].values()
    assert numbers["tokens"] == count
    assert numbers["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    asked = ("--data", f"folder:{tmp_path}", "--block", "45", "--stride", "44", "--json")
    (numbers,) = run("perplexity", base, "--base", base, *asked)[str(base)].values()
    assert numbers["tokens"] == len(ids) - 1
    assert "; windows begin 44 tokens apart" in run("perplexity", base, "--base", base, *asked[:-1])


def test_a_folder_says_itself_what_it_is_and_an_expert_saved_as_one_is_the_same(run: Run, tmp_path: Path) -> None:
    opened = open_language(BASE, Path())
    opened.load(EXPERT)
    opened.save(tmp_path / "saved")
    report = run("perplexity", tmp_path / "saved", EXPERT, "--data", "outputs/data/validation/ships", "--json")
    assert report[str(tmp_path / "saved")] == report[EXPERT]
    words = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert words.eos_token == "<end>"
    assert words("a ship")["input_ids"] == opened.tokenizer.encode("a ship")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--data", "outputs/data/validation/colours"), "has questions with choices; a perplexity is one of texts"),
        (("--data", "jsonl:inputs/colours.jsonl"), "has questions with choices"),
        (("--data", "jsonl:inputs/trees.jsonl", "--split", "tset"), "unknown split of jsonl:inputs/trees.jsonl 'tset'"),
        (("--data", "fodler:inputs"), "did you mean 'folder'"),
        (("outputs/vectors/ships.safetensors",), "is a task vector, which is not a model"),
        (("--data", "outputs/data/validation/ships", "--stride", "64"), "the stride is 64; expected 1 to 63"),
        (("--base", "inputs"), "cannot be read"),
        (("--base", "outputs/vectors/ships.safetensors"), "does not say that it is a causal model"),
    ],
)
def test_what_has_no_perplexity_is_refused(run: Run, words: tuple[str, ...], message: str) -> None:
    with pytest.raises(MergeflowError, match=message):
        run("perplexity", *words)


def test_outside_of_a_project_the_base_and_the_texts_have_to_be_named(
    run: Run, project: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(MergeflowError, match="--base is missing"):
        run("perplexity", project / EXPERT, "--data", "folder:.")
    with pytest.raises(MergeflowError, match="there is no model at 'nowhere'"):
        run("perplexity", "nowhere", "--data", "folder:.")
    with pytest.raises(MergeflowError, match="--data is missing"):
        run("perplexity", base)
    with pytest.raises(MergeflowError, match="no model is named"):
        run("perplexity", "--data", "folder:.")
    opened = open_language(str(base), Path())
    opened.save(tmp_path / "other")
    turn_vocabulary(tmp_path / "other")
    with pytest.raises(MergeflowError, match="prepared with another tokenizer"):
        run("perplexity", tmp_path / "other", "--data", project / "outputs/data/test/ships")


def judged(monkeypatch: pytest.MonkeyPatch, folder: Path, *words: str | Path) -> dict[str, Any]:
    """Run `mergeflow perplexity --json` outside of a project, on blocks of 45 tokens of one text."""
    monkeypatch.chdir(folder)
    (folder / "texts").mkdir(exist_ok=True)
    (folder / "texts/one.txt").write_text(tale("ship", 40, 1))
    report: dict[str, Any] = json.loads(command("perplexity", *words, *BLOCKS, "--json").stdout)
    return {model: texts["folder:texts"] for model, texts in report.items()}


def own_loss(folder: Path, model: torch.nn.Module) -> float:
    """Compute the loss of the same text by transformers and PEFT."""
    words = AutoTokenizer.from_pretrained(folder)
    return loss_of(model, [*words(tale("ship", 40, 1))["input_ids"], words.eos_token_id])[0]


def loss_of(model: torch.nn.Module, ids: list[int], *first: int) -> tuple[float, int]:
    """Compute a model's own loss of tokens in blocks of 45, each with `first` before it; and how many it predicts."""
    total, count = 0.0, 0
    for start in range(0, len(ids), 45):
        block = torch.tensor([[*first, *ids[start : start + 45]]])
        with torch.no_grad():
            total += float(model(input_ids=block, labels=block).loss) * (block.shape[1] - 1)
        count += block.shape[1] - 1
    return total / count, count


def test_a_folder_is_judged_by_its_own_tokens_and_ties(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    untied = AutoModelForCausalLM.from_pretrained(base)
    untied.lm_head.weight = torch.nn.Parameter(untied.lm_head.weight.detach().flip(0).clone())
    untied.config.tie_word_embeddings = False
    untied.save_pretrained(tmp_path / "untied")
    untied.save_pretrained(tmp_path / "wordless")
    save_tokenizer(tmp_path / "untied")
    make_base(tmp_path / "turned")
    turn_vocabulary(tmp_path / "turned")
    judgement = judged(monkeypatch, tmp_path, base, "untied", "wordless", "turned", "--base", base)
    assert judgement["untied"]["loss"] == pytest.approx(own_loss(tmp_path / "untied", untied), rel=1e-5)
    assert judgement["wordless"] == judgement["untied"]
    turned = AutoModelForCausalLM.from_pretrained(tmp_path / "turned")
    assert judgement["turned"]["loss"] == pytest.approx(own_loss(tmp_path / "turned", turned), rel=1e-5)
    assert judgement["turned"]["loss"] != pytest.approx(judgement[str(base)]["loss"], rel=1e-5)
    with pytest.raises(MergeflowError, match=r"'lm_head.weight' is another weight than 'model.embed_tokens.weight'"):
        judged(monkeypatch, tmp_path, "untied/model.safetensors", "--base", base)


def turn_vocabulary(folder: Path) -> None:
    """Give the letters of a saved tokenizer other rows."""
    content = json.loads((folder / "tokenizer.json").read_text())
    words = content["model"]["vocab"]
    content["model"]["vocab"] = {word: 255 - number for word, number in words.items()}
    (folder / "tokenizer.json").write_text(json.dumps(content))


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers and PEFT
def test_an_adapter_is_judged_on_the_base_it_names(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.normal_(std=0.5, generator=torch.Generator().manual_seed(1))
    model.save_pretrained(tmp_path / "adapter")
    wanted = own_loss(base, model.eval())
    judgement = judged(monkeypatch, tmp_path, base, "adapter")
    assert judgement["adapter"]["loss"] == pytest.approx(wanted, rel=1e-5)
    assert judgement[str(base)]["loss"] != pytest.approx(wanted, rel=1e-3)
    assert judged(monkeypatch, tmp_path, "adapter", "--base", base)["adapter"] == judgement["adapter"]
    path = tmp_path / "adapter/adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": "elsewhere/base"}))
    with pytest.raises(MergeflowError, match=r"adapter was made for 'elsewhere/base', which is not on this machine"):
        judged(monkeypatch, tmp_path, "adapter")
    assert judged(monkeypatch, tmp_path, "adapter", "--base", base)["adapter"] == judgement["adapter"]


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers and PEFT
def test_an_adapter_is_judged_on_the_base_of_a_project(run: Run, project: Path, base: Path, tmp_path: Path) -> None:
    config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    model = get_peft_model(open_language(str(base), Path()).model.module.whole, config)
    model.save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter/adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": None}))
    report = run("perplexity", tmp_path / "adapter", BASE, "--json")
    assert report[str(tmp_path / "adapter")]["ships"]["loss"] != report[BASE]["ships"]["loss"]
    path.write_text(json.dumps({**json.loads(path.read_text()), "target_modules": None}))
    result = command("perplexity", tmp_path / "adapter", "--json")
    assert json.loads(result.stdout)[str(tmp_path / "adapter")] == report[str(tmp_path / "adapter")]
    assert "lists no modules" in result.stderr


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path: Path) -> None:
    save_tokenizer(make_base(tmp_path), "runs", "rests")
    with pytest.raises(MergeflowError, match=r"has 259 tokens and its model 257"):
        open_language(str(tmp_path), Path())


def test_a_loss_that_is_none_is_named_and_a_huge_one_is_infinite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = AutoModelForCausalLM.from_pretrained(make_base(tmp_path / "huge", "phi"))
    save_tokenizer(tmp_path / "broken")
    with torch.no_grad():
        model.lm_head.weight *= 1e6
    model.save_pretrained(tmp_path / "huge")
    judgement = judged(monkeypatch, tmp_path, "huge")["huge"]
    assert judgement["perplexity"] is None
    assert judgement["loss"] > 800
    with torch.no_grad():
        model.lm_head.weight *= float("nan")
    model.save_pretrained(tmp_path / "broken")
    result = command("perplexity", "broken", "huge", *BLOCKS, "--json", catch=True)
    assert isinstance(result.exception, MergeflowError)
    assert "the loss under broken is not a number" in str(result.exception)
    losses = [texts["folder:texts"]["loss"] for texts in json.loads(result.stdout).values()]
    assert losses == [None, judgement["loss"]]


def test_tokens_are_counted_by_model_if_they_differ(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_base(tmp_path / "wide", "phi")
    save_tokenizer(tmp_path / "wide")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "wide")
    model.resize_token_embeddings(258)
    model.save_pretrained(tmp_path / "wide")
    save_tokenizer(tmp_path / "wide", "ship")
    judgement = judged(monkeypatch, tmp_path, base, "wide")
    printed = command("perplexity", base, "wide", *BLOCKS).stdout
    assert "do not compare" in printed
    assert f"wide: folder:texts {judgement['wide']['tokens']}" in printed


def test_a_prepared_text_keeps_its_blocks(run: Run) -> None:
    with pytest.raises(MergeflowError, match=r"ships was prepared in blocks of 64 tokens, --block is 32"):
        run("perplexity", BASE, "--data", "outputs/data/validation/ships", "--block", "32")


def test_a_saved_model_has_the_token_that_its_tokenizer_begins_with(tmp_path: Path) -> None:
    folder = make_base(tmp_path / "base")
    words = AutoTokenizer.from_pretrained(folder)
    words.bos_token = "!"
    words.save_pretrained(folder)
    open_language(str(folder), Path()).save(tmp_path / "saved")
    saved = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert (saved.bos_token, saved.eos_token) == ("!", "<end>")


def test_of_thousands_of_tasks_the_nearest_are_told() -> None:
    pytest.importorskip("lm_eval", reason="needs mergeflow[lm-eval]")
    with pytest.raises(MergeflowError, match="did you mean 'hellaswag'") as raised:
        find_tasks(LmEvalScore(lm_eval=["helaswag"]))
    assert len(str(raised.value)) < 600
    with pytest.raises(MergeflowError, match=r"nosuch.*Known: .*, "):
        find_tasks(LmEvalScore(lm_eval=["zzz_nosuch"]))


@pytest.fixture
def cloze(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The project's questions as a task of the harness, in files."""
    pytest.importorskip("lm_eval", reason="needs mergeflow[lm-eval]")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    table = pq.read_table(project / "outputs/data/validation/colours/validation.parquet").to_pylist()
    (tmp_path / "tasks").mkdir()
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))
    (tmp_path / "tasks/colours.yaml").write_text(CLOZE.format(rows=tmp_path / "rows.jsonl"))
    return tmp_path / "tasks"


@pytest.mark.nightly
def test_the_harness_finds_of_files_of_a_project_what_the_project_finds(run: Run, project: Path, cloze: Path) -> None:
    expert = "outputs/experts/colours/model.safetensors"
    report = run("lm-eval", BASE, expert, "--task", "colours_cloze", "--include-path", cloze, "--json")
    questions = MODALITY.open("colours", project / "outputs/data/validation/colours", "validation", None, "cpu")
    opened = open_language(BASE, Path())
    for model in (BASE, expert):
        opened.load(model)
        wanted = accuracies(opened.model, {"colours": questions})["colours"]
        assert report[model] == {"colours_cloze acc": pytest.approx(wanted)}
    with pytest.raises(MergeflowError, match="did you mean 'colours_cloze'"):
        run("lm-eval", BASE, "--task", "colours_close", "--include-path", cloze)


@pytest.mark.nightly
def test_a_sweep_over_files_of_a_project_is_scored_by_the_harness(run: Run, tmp_path: Path, cloze: Path) -> None:
    experts = {task: f"outputs/experts/{task}/model.safetensors" for task in ("ships", "trees", "colours")}
    score = {"lm_eval": ["colours_cloze"], "include": str(cloze)}
    sweep = {"base": BASE, "experts": experts, "score": score, "methods": {"average": {}}}
    result = run_sweep(make_sweep(sweep), tmp_path / "sweep")
    merged = "outputs/merged/average.safetensors"
    same = run("lm-eval", merged, "--task", "colours_cloze", "--include-path", cloze, "--json")
    assert result.winner.score.mean == same[merged]["colours_cloze acc"]


def test_blocks_begin_as_a_tokenizer_begins_texts(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As lm-evaluation-harness does before a text; where a tokenizer only has such a token, none is put in."""
    shutil.copytree(base, tmp_path / "plain")
    shutil.copytree(base, tmp_path / "begins")
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.bos_token = "!"
    tokenizer.save_pretrained(tmp_path / "plain")
    start, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="! $A", special_tokens=[("!", start)])
    tokenizer.save_pretrained(tmp_path / "begins")
    judgement = judged(monkeypatch, tmp_path, "plain", "begins")
    ids = [*tokenizer(tale("ship", 40, 1), add_special_tokens=False)["input_ids"], end]
    loss, count = loss_of(AutoModelForCausalLM.from_pretrained(base), ids, start)
    assert judgement["begins"]["tokens"] == count == len(ids)
    assert judgement["begins"]["loss"] == pytest.approx(loss, rel=1e-5)
    assert judgement["plain"]["tokens"] < count
