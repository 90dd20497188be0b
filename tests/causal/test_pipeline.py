"""Causal models go through the same stages as images, and the whole way of a registered model."""

import html
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from flows.rebuild.add_task import add_task
from flows.rebuild.reproduce import reproduce
from flows.rebuild.unlearn import Bounds, unlearn
from flows.rebuild.unmerge import unmerge
from mergeflow.checkpoints import open_checkpoint
from mergeflow.data import load_manifest, load_split
from mergeflow.errors import MergeflowError
from mergeflow.evaluation import example_scores
from mergeflow.evaluation.adamerging import entropies
from mergeflow.evaluation.statistics import diagonal_fisher, input_grams
from mergeflow.modalities.catalog import open_recorded
from mergeflow.modalities.causal.modality import MODALITY, Questions
from mergeflow.modalities.classification import Subset
from mergeflow.modalities.served import SERVED, Loaded
from mergeflow.modality import Examples, Model
from registry.versions import load, show
from tasks.commands.advise import make_advice
from tasks.commands.expert_inputs import ExpertInputs
from tasks.project.graph import load_graph
from tasks.report import write_report
from tasks.running.runner import run_stage
from tests.causal.small_project import TASKS, make_causal_project, save_tokenizer, tale
from tests.project_folder import SWEPT, change_params, register

CPU = torch.device("cpu")
LINES = "".join(json.dumps({"question": f"{n}", "choices": ["b", "c"], "answer": 0}) + "\n" for n in range(20))


def opened(project: Path, task: str, split: str = "validation") -> Any:
    return MODALITY.open(task, project / f"outputs/data/{split}/{task}", split, None, CPU)


@pytest.fixture(scope="module")
def model(project: Path) -> Model:
    _, model = open_recorded(project / "outputs/base/model.safetensors", CPU)
    return model


def run_only(folder: Path, *names: str) -> None:
    for stage in load_graph(folder).values():
        if stage.name in names:
            run_stage(folder, stage)


def test_the_whole_pipeline_runs_and_experts_learn(project: Path) -> None:
    rows = {row["name"]: row for row in json.loads((project / "outputs/results/test.json").read_text())["rows"]}
    assert set(rows) == {"zero_shot", "individual", *SWEPT}
    for task in ("ships", "trees"):
        assert rows["individual"]["accuracy"][task] > rows["zero_shot"]["accuracy"][task] + 0.2
        assert rows["cart"]["accuracy"][task] > rows["zero_shot"]["accuracy"][task] + 0.1


def test_texts_are_stored_whole_and_held_out_in_sections(project: Path) -> None:
    splits = ("train", "validation", "test")
    stored = {split: load_split(project / f"outputs/data/{split}/ships", split) for split in splits}
    places = {split: list(zip(*map(list, (x.documents, x.places)), strict=True)) for split, x in stored.items()}
    together = [place for split in splits for place in places[split]]
    assert len(set(together)) == len(together)
    assert {document for document, _ in together} == {0, 1, 2}
    assert len({(document, place // 16) for document, place in places["test"]}) <= 2 < len(stored["test"])
    whole = "".join((project / f"inputs/ships/{n}.txt").read_text() for n in range(3))
    total = sum(int(blocks.lengths.sum()) for blocks in stored.values())
    assert total == len(whole.encode())  # a token a byte
    train = opened(project, "ships", "train")
    assert int(train.blocks.lengths.sum()) > int(stored["train"].lengths.sum())  # end tokens


def test_experts_and_merges_are_models_of_transformers(project: Path, tmp_path: Path) -> None:
    shutil.copy(project / "inputs/base/config.json", tmp_path)
    for path in ("experts/ships/model.safetensors", "merged/cart.safetensors"):
        shutil.copyfile(project / "outputs" / path, tmp_path / "model.safetensors")
        plain, loading = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
        assert not loading["missing_keys"] | loading["unexpected_keys"]
        for name, tensor in load_file(tmp_path / "model.safetensors").items():
            assert torch.equal(plain.state_dict()[name], tensor)


def test_the_likeliest_choice_answers_a_question(project: Path, model: Model) -> None:
    questions = opened(project, "colours")
    assert isinstance(questions, Questions)
    plain = AutoModelForCausalLM.from_pretrained(project / "inputs/base").eval()
    rows = torch.tensor([4, 0, 7])
    likelihoods = questions.likelihoods(model, rows)
    for line, row in enumerate(rows.tolist()):
        ends, ids = questions.ends[row], torch.from_numpy(np.asarray(questions.ids[row])).long()
        for k in range(3):
            tokens = torch.cat([ids[: ends[0]], ids[ends[k] : ends[k + 1]]])
            log_p = plain(input_ids=tokens[None]).logits[0].log_softmax(dim=1)
            expected = sum(log_p[at - 1, tokens[at]] for at in range(int(ends[0]), len(tokens)))
            torch.testing.assert_close(likelihoods[line, k], expected)
    assert likelihoods.shape == (3, 16)
    assert questions.log_p(model, rows).exp().sum(dim=1).tolist() == pytest.approx([1, 1, 1])
    right = questions.likelihoods(model, rows).argmax(dim=1) == questions.answers[rows]
    assert questions.scores(model, rows).tolist() == right.float().tolist()


def test_merge_statistics_take_blocks_and_questions(project: Path, model: Model) -> None:
    for task in ("trees", "colours"):
        few: Examples = Subset.first(opened(project, task), 3)
        fisher = diagonal_fisher(model, few, labels="sampled", seed=0)
        assert all(value.isfinite().all() and (value >= 0).all() for value in fisher.values())
        assert max(float(value.max()) for value in fisher.values()) > 0
        assert "model.layers.0.mlp.down_proj.weight" in input_grams(model, few)
        assert np.isfinite(np.asarray(list(entropies(model, {task: few}, model.state()).values()))).all()


@pytest.mark.slow
def test_training_by_adapters_and_drawn_weights(project: Path, tmp_path: Path) -> None:
    config = {"model_type": "qwen2", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    model = {"pretrained": "none", "config": config, "seed": 3}
    lora = {"rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj"]}
    folder = make_causal_project(tmp_path / "drawn", model, regime="lora", lora=lora, steps=3)
    run_only(folder, "prepare", "base", "multitask", "finetune")
    base, expert = (load_file(folder / f"outputs/{part}/model.safetensors") for part in ("base", "experts/trees"))
    changed = {name for name in base if not torch.equal(base[name], expert[name])}
    assert changed == {f"model.layers.0.self_attn.{part}_proj.weight" for part in "qv"}
    assert base["model.embed_tokens.weight"].shape == (257, 32)
    adapter = json.loads((folder / "outputs/experts/trees/adapter/adapter_config.json").read_text())
    assert adapter["target_modules"] == ["q_proj", "v_proj"]


@pytest.mark.parametrize(
    ("source", "text", "message"),
    [
        ("folder:inputs/one.txt", "  \n ", "one.txt is empty"),
        ("folder:inputs/none", None, "no such file or folder"),
        ("jsonl:inputs/one.jsonl", '{"text": ""}\n', r"one.jsonl: each row's text is empty"),
        ("jsonl:inputs/one.jsonl", '{"text": 7}\n', r"row 0: text is 7; expected a text"),
        ("jsonl:inputs/one.jsonl", '{"body": "a"}\n', r"found the columns 'body'; expected one of texts"),
        ("jsonl:inputs/one.jsonl", '{"question": "a", "choices": ["b"], "answer": 0}\n' * 20, "1 choices found"),
        ("jsonl:inputs/one.jsonl", '{"question": "a", "choices": ["b", "c"], "answer": 2}\n' * 20, "its answer is 2"),
        ("jsonl:inputs/one.jsonl", '{"question": "a", "choices": ["b", " "], "answer": 0}\n' * 20, "choices is empty"),
        (
            "jsonl:inputs/one.jsonl",
            json.dumps({"question": "a " * 40, "choices": ["b", "c"], "answer": 0}) + "\n" + LINES,
            r"81 tokens with its longest choice .* Nothing of a question is cut: raise data.block",
        ),
    ],
)
def test_useless_texts_are_refused(project: Path, tmp_path: Path, source: str, text: str | None, message: str) -> None:
    folder = make_causal_project(tmp_path / "project")
    change_params(folder, {"tasks": {"one": source}})
    if text is not None:
        (folder / source.partition(":")[2]).write_text(text)
    with pytest.raises(MergeflowError, match=message):
        run_only(folder, "prepare")


def test_a_book_shorter_than_a_block_is_refused(tmp_path: Path) -> None:
    folder = make_causal_project(tmp_path / "project")
    (folder / "inputs/trees.jsonl").write_text("".join(json.dumps({"text": f"a {n}"}) + "\n" for n in range(12)))
    run_only(folder, "prepare")
    assert len(opened(folder, "trees", "validation")) == 1
    with pytest.raises(MergeflowError, match=r"task 'trees': \d+ tokens in its split train, .*expected at least 64"):
        opened(folder, "trees", "train")


@pytest.mark.slow
def test_texts_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    folder = make_causal_project(tmp_path / "project")
    save_tokenizer(folder / "inputs/other", "ship", "tree")
    change_params(folder, {"data.tokenizer": "inputs/other"})
    with pytest.raises(MergeflowError, match=r"prepared with the tokenizer of 'inputs/other' .* the same name"):
        run_only(folder, "prepare", "base")


def test_a_registered_model_goes_on_from_a_text(project: Path, model: Model) -> None:
    modality, expert = open_recorded(project / "outputs/base/model.safetensors", CPU)
    expert.load(load_file(project / "outputs/experts/ships/model.safetensors"))
    with open_checkpoint(project / "outputs/base/model.safetensors") as state:
        record = state.metadata
    decoding = load_manifest(project / "outputs/data/manifests/ships")["decoding"]
    tasks = dict.fromkeys(TASKS)
    loaded = Loaded(modality, expert, tasks, {task: [] for task in tasks}, decoding, record, CPU)
    answer = SERVED.get("causal").answer
    continuations = answer(loaded, {"task": ["ships", "trees"], "text": ["the ship ", "the ship "]})["continuation"]
    tokenizer = AutoTokenizer.from_pretrained(project / "inputs/base")
    ids = tokenizer("the ship ", return_tensors="pt")["input_ids"]
    plain = AutoModelForCausalLM.from_pretrained(project / "inputs/base").eval()
    plain.load_state_dict(expert.state(), strict=False)
    new = plain.generate(ids, max_new_tokens=32, do_sample=False, pad_token_id=256)[0, ids.shape[1] :]
    assert continuations == [tokenizer.decode(new, skip_special_tokens=True)] * 2
    with pytest.raises(MergeflowError, match=r"2 of 2 rows cannot be answered. row 0: .*empty.* row 1: unknown task"):
        answer(loaded, {"task": ["ships", "shps"], "text": [" ", "a"]})
    assert len(example_scores(expert, opened(project, "ships"), 2)) == len(opened(project, "ships"))


def test_advice_takes_one_prediction_of_each_example(project: Path) -> None:
    advice = make_advice(ExpertInputs(project, [], None, [], None, None), 12)
    assert not advice.remarks
    assert advice.alphas is not None
    assert all(-1 <= value <= 1 for row in advice.alphas.values for value in row)
    assert len(advice.scales or []) == 4


MODEL = "writers"


@pytest.mark.nightly
def test_a_project_of_causal_models_lives_as_one_of_images_does(project: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(project, tmp_path / "project", symlinks=True)
    store = register(folder, MODEL)

    model = load(store, MODEL)
    asked = pd.DataFrame({"text": ["the ship ", "the tree", "the ship "], "task": ["ships", "trees", "trees"]})
    answer = model.predict(asked)["continuation"]
    assert answer[0] == answer[2]
    assert all(isinstance(text, str) for text in answer)
    assert 0 < show(store, MODEL)["accuracy"]["ships"] < 1

    assert reproduce(folder, store, MODEL, "champion", from_data=False).same
    done = unlearn(
        folder, store, MODEL, "champion", "trees", bounds=Bounds(lose=0.9, rise=9, fall=0.9), scales=[-0.5, -1.0]
    )
    assert set(done.before.loss) == {"ships", "trees"}  # the colours are questions
    assert {criterion.form for criterion in done.chosen.criteria if criterion.task == "trees"} == {
        "accuracy",
        "loss",
        "recall",
    }
    assert set(done.before.recall) == {"ships", "trees"}
    assert done.chosen.figures.recall.keys() == done.before.recall.keys()
    assert done.chosen.figures.loss["trees"] > done.before.loss["trees"]
    assert done.rebuilt.decision is not None
    shown = {text["task"]: (text["before"], text["after"]) for text in done.texts}
    assert set(shown) == {"ships", "trees"}
    page = write_report(folder, tmp_path / "report.html").read_text()
    assert f"How version {done.rebuilt.version}, which has unlearned trees" in page
    assert all(html.escape(text, quote=False) in page for pair in shown.values() for text in pair)
    reasons = {gate.reason: gate.passed for gate in done.rebuilt.decision.gates if gate.name == "forgotten"}
    assert reasons == {criterion.reason: criterion.holds for criterion in done.chosen.criteria if not criterion.kept}
    assert reproduce(folder, store, MODEL, done.rebuilt.version, from_data=False).same
    assert isinstance(load(store, MODEL, done.rebuilt.version).predict(asked[:1])["continuation"][0], str)

    without = unmerge(folder, store, MODEL, "champion", "trees")
    assert show(store, MODEL, without.version)["tasks"] == ["colours", "ships"]

    lines = (json.dumps({"text": tale("cart", 12, n)}) + "\n" for n in range(200))
    (folder / "inputs/carts.jsonl").write_text("".join(lines))
    added = add_task(folder, store, "carts", "jsonl:inputs/carts.jsonl")
    assert show(store, MODEL, added.version)["tasks"] == ["carts", "colours", "ships", "trees"]
