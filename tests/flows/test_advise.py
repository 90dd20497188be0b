"""`mergeflow advise` on checkpoints of real classes: what it says, its JSON, and what it says it could not compute."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from torchvision import models

from mergeflow.analysis.provable.advice import advise
from mergeflow.errors import MergeflowError
from mergeflow.linearity.networks import open_network
from mergeflow.modalities.nets import recompute_statistics
from tasks.commands import advise as advise_commands
from tests.command import invoke
from tests.linearity.checkpoints import WORDS, noisy, texts, word_tokenizer


def run(*arguments: str, root: Path | None = None, columns: int = 100) -> Any:
    add = partial(advise_commands.add_commands, root=root or Path("/"))
    return invoke(add, "advise", *arguments, env={"COLUMNS": f"{columns}"})


def save(path: Path, state: dict[str, Tensor]) -> str:
    save_file({name: value.contiguous().clone() for name, value in state.items()}, path)
    return str(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recipes over a base and experts whose task vectors are known: b is a's negative, c is another, d is a twice."""
    folder = tmp_path_factory.mktemp("advise")
    base = open_network("pocket-clip", {}).model.state()
    first, other = ({n: v - base[n] for n, v in noisy(base, seed).items()} for seed in (1, 2))
    moved = {"a": (1, 0), "b": (-1, 0), "c": (0, 1), "d": (2, 0), "e": (-0.99, 0)}
    paths = {
        name: save(folder / f"{name}.safetensors", {n: v + p * first[n] + q * other[n] for n, v in base.items()})
        for name, (p, q) in moved.items()
    }
    save(folder / "base.safetensors", base)
    save(folder / "narrow.safetensors", {"x": torch.zeros(2)})
    for names in ("ac", "ad", "ab", "ae", "acd"):
        recipe = {"method": "task_arithmetic", "base": str(folder / "base.safetensors"), "out": "merged.safetensors"}
        recipe["experts"] = {name: paths[name] for name in names}  # type: ignore[assignment]
        (folder / f"{names}.yaml").write_text(yaml.safe_dump(recipe))
    return folder


ASKED = ["--architecture", "pocket-clip", "--data", "suite:pocket8/signs", "--samples", "24"]


def test_the_suggestion_keeps_the_experts_length_and_can_be_pasted(folder: Path) -> None:
    done = run(str(folder / "ad.yaml"), *ASKED, columns=80)
    assert done.exit_code == 0, done.exception
    block = done.output.split("task vectors:\n")[1]
    scales = yaml.safe_load(block)["methods"]["task_arithmetic"]["scale"]
    # ‖τ‖, 2‖τ‖ along one line: λ° = 1.5 / 3
    assert (scales[0], scales[-1]) == (pytest.approx(0.4, rel=0.01), pytest.approx(0.8, rel=0.01))
    assert "aligned" in done.output


def test_smaller_scales_are_suggested_where_many_tasks_share_the_model() -> None:
    """The best λ of eight real tasks on texts lay below the range by lengths."""
    vectors = {f"t{i}": {"w": row} for i, row in enumerate(torch.eye(8))}
    assert advise({"w": torch.zeros(8)}, vectors).scales == [0.0707, 0.141, 0.283, 0.356, 0.449, 0.566]


def test_json_has_every_part_and_one_source_for_each_expert(folder: Path) -> None:
    data = ["--data", "suite:pocket8/signs", "--data", "suite:pocket8/land", "--data", "suite:pocket8/street"]
    done = run(str(folder / "acd.yaml"), "--architecture", "pocket-clip", *data, "--samples", "16", "--json")
    assert done.exit_code == 0, done.exception
    advice = json.loads(done.output)
    assert advice["remarks"] == []
    assert [(pair["first"], pair["second"]) for pair in advice["pairs"]] == [("a", "c"), ("a", "d"), ("c", "d")]
    assert advice["cosines"][0][2] == pytest.approx(1, abs=1e-4)
    for matrix in ("alphas", "changes"):
        assert all(advice[matrix][i][i] == 1 for i in range(3))
        assert advice[matrix][0][1] == advice[matrix][1][0]


def test_without_an_architecture_the_weights_alone_are_judged(folder: Path) -> None:
    done = run(str(folder / "ac.yaml"), "--json")
    advice = json.loads(done.output)
    assert advice["pairs"] is None
    assert "--architecture is missing" in advice["remarks"][0]
    assert len(advice["scales"]) == 4
    said = " ".join(run(str(folder / "ac.yaml")).output.split())
    assert "! α̂, and with it the verdicts: not computed. --architecture is missing" in said


def test_what_a_merge_says_of_its_inputs_goes_to_standard_error(folder: Path, tmp_path: Path) -> None:
    state = load_file(folder / "c.safetensors")
    torch.save({"state_dict": {f"model.{name}": v for name, v in state.items()}, "ema": state}, tmp_path / "c.pt")
    recipe = yaml.safe_load((folder / "ac.yaml").read_text())
    recipe["experts"]["c"] = str(tmp_path / "c.pt")
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe))
    done = run(str(tmp_path / "r.yaml"), "--json")
    assert json.loads(done.stdout)["scales"]
    assert "'ema', not read" in done.stderr
    assert "'c' are taken without their prefix" in done.stderr


@pytest.mark.parametrize("names", ["ab", "ae"])  # the second but for a hundredth: its λ would be 80 to 160
def test_task_vectors_that_cancel_have_no_suggestion(folder: Path, names: str) -> None:
    advice = json.loads(run(str(folder / f"{names}.yaml"), "--json").output)
    assert advice["scales"] is None
    assert "cancel each other" in advice["remarks"][-1]


def test_every_expert_without_a_task_vector_is_named(folder: Path, tmp_path: Path) -> None:
    recipe = yaml.safe_load((folder / "acd.yaml").read_text())
    broken = {name: value * torch.nan for name, value in load_file(folder / "c.safetensors").items()}
    recipe["experts"] |= {"c": str(folder / "narrow.safetensors"), "d": save(tmp_path / "nan.safetensors", broken)}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe))
    refused = run(str(tmp_path / "r.yaml"), *ASKED, "--json").exception
    assert isinstance(refused, MergeflowError)
    first, second = str(refused).splitlines()
    assert first.startswith("the task vector of 'c': ")
    assert "`ignore: [patterns]`" in first
    assert second.startswith("the task vector of 'd': it has a NaN or an infinity in ")


def test_a_source_too_few_is_refused(folder: Path) -> None:
    done = run(str(folder / "acd.yaml"), *ASKED, "--data", "suite:pocket8/land", "--json")
    assert "--data is given 2 times for 3 experts" in str(done.exception)


def test_bad_input_is_one_message(folder: Path, tmp_path: Path) -> None:
    assert "name a recipe" in str(run().exception)
    recipe = yaml.safe_load((folder / "ac.yaml").read_text())
    del recipe["experts"]["c"]
    (tmp_path / "one.yaml").write_text(yaml.safe_dump(recipe))
    assert "1 expert is named" in str(run(str(tmp_path / "one.yaml")).exception)
    recipe["experts"]["c"] = str(tmp_path / "missing.safetensors")
    (tmp_path / "one.yaml").write_text(yaml.safe_dump(recipe))
    error = run(str(tmp_path / "one.yaml")).exception
    assert isinstance(error, MergeflowError)
    assert "missing.safetensors" in str(error)


def test_an_expert_that_answers_as_the_base_has_no_verdict(folder: Path, tmp_path: Path) -> None:
    recipe = yaml.safe_load((folder / "acd.yaml").read_text())
    recipe["experts"]["d"] = str(folder / "base.safetensors")
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe))
    advice = json.loads(run(str(tmp_path / "r.yaml"), *ASKED, "--json").output)
    assert advice["pairs"] is None
    assert advice["remarks"][0] == "'d' has the base's weights: its task vector is zero."
    assert "experts 'd' and 'a' on the samples of 'd': a model answers all samples alike" in advice["remarks"][1]
    assert len(advice["scales"]) == 4


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("suite:pocket9", "unknown suite 'pocket9': did you mean 'pocket8'"),
        ("suite:pocket8", "suite pocket8 has 8 tasks: name one, suite:pocket8/"),
        ("suite:pocket8/digits?colour=1.5", "expected P(red | odd), a number from 0 to 1"),
        ("folder:empty", "'empty' has no images; expected a folder with images below it"),
        ("folder:one?classes=0-1", "the task has no classes; this transform is for tasks that have"),
    ],
)
def test_samples_that_are_named_and_cannot_be_read_are_an_error(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("one/x", "empty"):
        (tmp_path / name).mkdir(parents=True)
    Image.new("RGB", (32, 32)).save(tmp_path / "one/x/1.png")
    done = run(str(folder / "ac.yaml"), "--architecture", "pocket-clip", "--data", source, "--json")
    assert isinstance(done.exception, MergeflowError)
    assert message in str(done.exception)


@pytest.mark.parametrize("place", ["loose", "one", "loose?rotate=90"])
def test_a_folder_of_pictures_needs_no_classes(folder: Path, tmp_path: Path, place: str) -> None:
    draw = torch.Generator().manual_seed(0)
    for number in range(6):
        pixels = torch.randint(0, 256, (40, 32, 3), generator=draw, dtype=torch.uint8).numpy()
        for path in (tmp_path / f"loose/{number}.png", tmp_path / f"one/x/{number}.png"):
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path)
    (tmp_path / "loose/licence.txt").write_text("free")
    done = run(
        str(folder / "ac.yaml"), "--architecture", "pocket-clip", "--data", f"folder:{tmp_path}/{place}", "--json"
    )
    assert done.exit_code == 0, done.exception
    advice = json.loads(done.output)
    assert advice["remarks"] == []
    assert [(pair["first"], pair["second"]) for pair in advice["pairs"]] == [("a", "c")]


def torchvision_recipe(folder: Path, **change: Any) -> tuple[Path, list[str]]:
    """Write a recipe over a torchvision classifier with BatchNorm and dropout, and eight pictures to ask it about."""
    torch.manual_seed(0)
    net = models.get_model("mobilenet_v3_small", weights=None, num_classes=5)
    recompute_statistics(net, [torch.randn(8, 3, 64, 64)])  # else it answers all pictures alike
    base = net.state_dict()
    paths = {name: save(folder / f"{name}.safetensors", noisy(base, seed)) for name, seed in (("a", 1), ("b", 2))}
    recipe = {"method": "task_arithmetic", "base": save(folder / "base.safetensors", base), "experts": paths | change}
    (folder / "r.yaml").write_text(yaml.safe_dump(recipe | {"out": "merged.safetensors"}))
    (folder / "pictures").mkdir()
    for number in range(8):
        pixels = torch.randint(0, 256, (32, 32, 3), generator=torch.Generator().manual_seed(number), dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(folder / f"pictures/{number}.png")
    data = ["--architecture", "torchvision:mobilenet_v3_small", "--data", f"folder:{folder}/pictures"]
    return folder / "r.yaml", data


def test_models_are_asked_as_they_answer_in_use(tmp_path: Path) -> None:
    """Without dropout, and with BatchNorm's own statistics."""
    recipe, data = torchvision_recipe(tmp_path)
    advice = json.loads(run(str(recipe), *data, "--json").output)
    states = {name: load_file(tmp_path / f"{name}.safetensors") for name in "ab"}
    opened = open_network("torchvision:mobilenet_v3_small", states["a"])
    source = opened.read(data[-1], 8)
    answers = []
    opened.model.module.eval()
    for state in states.values():
        opened.model.load(state)
        with torch.inference_mode():
            logits = source.features(opened.model, torch.arange(8), [""])[""].double()
        centred = logits - logits.mean(1, keepdim=True)
        answers.append(centred - centred.mean(0))
    assert advice["alphas"][0][1] == pytest.approx(float(torch.cosine_similarity(*answers).mean()), abs=1e-4)


def language_recipe(folder: Path, **more: Any) -> list[str]:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: Any = {"vocab_size": 24, "hidden_size": 16, "intermediate_size": 16}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2))
    model.save_pretrained(folder / "base")
    word_tokenizer().save_pretrained(folder / "base")
    state = noisy(model.state_dict(), 1) | {"lm_head.weight": model.lm_head.weight.detach() + 1}
    model.save_pretrained(folder / "tuned", state_dict=state)
    tuned: Any = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "lm_head"]))
    for name, value in tuned.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(value)
    tuned.save_pretrained(folder / "lora")
    tuned.merge_and_unload().save_pretrained(folder / "merged")
    for second in ("lora", "merged"):
        paths = {"a": str(folder / "tuned"), "b": str(folder / second)}
        recipe = {"method": "task_arithmetic", "base": str(folder / "base"), "experts": paths, "out": "merged"}
        (folder / f"{second}.yaml").write_text(yaml.safe_dump(recipe | more))
    return ["--data", f"text:{texts(folder)}", "--json"]


@pytest.mark.filterwarnings("ignore")  # of transformers and PEFT
def test_an_adapter_is_the_model_that_it_makes_of_the_base(tmp_path: Path) -> None:
    data = language_recipe(tmp_path)
    lora, merged = (json.loads(run(str(tmp_path / f"{name}.yaml"), *data).output) for name in ("lora", "merged"))
    assert lora["remarks"] == []
    for key in ("alphas", "changes", "cosines"):
        assert lora[key][0] == pytest.approx(merged[key][0], abs=1e-4)
    assert lora["scales"] == pytest.approx(merged["scales"], rel=1e-2)


@pytest.mark.filterwarnings("ignore")  # of transformers and PEFT
def test_task_vectors_are_whole_ones_whatever_part_of_a_model_is_asked(tmp_path: Path) -> None:
    """Texts are given to the model below its head; a merge sums the heads too."""
    data = language_recipe(tmp_path)
    asked, weighed = (json.loads(run(str(tmp_path / "merged.yaml"), *options).output) for options in (data, ["--json"]))
    assert len(asked["pairs"]) == 1
    assert asked["cosines"] == weighed["cosines"]
    assert asked["scales"] == weighed["scales"]


def test_tensors_that_the_recipe_leaves_out_are_the_bases(folder: Path, tmp_path: Path) -> None:
    recipe = yaml.safe_load((folder / "ac.yaml").read_text())
    state = load_file(folder / "c.safetensors")
    name = next(tensor for tensor, value in state.items() if value.ndim == 2)
    recipe["experts"]["c"] = save(tmp_path / "c.safetensors", state | {name: torch.zeros(3, 3)})
    for left_out in ({}, {"ignore": [name]}):
        (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe | left_out))
        done = run(str(tmp_path / "r.yaml"), *ASKED, "--json")
        if not left_out:
            assert "`ignore: [patterns]`" in str(done.exception)
    advice = json.loads(done.output)
    assert advice["remarks"] == []
    assert len(advice["scales"]) == 4
    assert len(advice["pairs"]) == 1


def test_the_recipes_weights_are_said_to_be_left_aside(folder: Path, tmp_path: Path) -> None:
    recipe = yaml.safe_load((folder / "ac.yaml").read_text()) | {"weights": {"a": 2.0, "c": 0.5}}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe))
    plain, weighted = (
        json.loads(run(str(path), "--json").output) for path in (folder / "ac.yaml", tmp_path / "r.yaml")
    )
    assert weighted["scales"] == plain["scales"]
    assert weighted["remarks"][-1].startswith("`weights` of the recipe are left aside")


def test_one_source_may_be_named_for_several_experts(folder: Path) -> None:
    data = [f"--data=suite:pocket8/{task}" for task in ("signs", "land", "signs")]
    done = run(str(folder / "acd.yaml"), "--architecture", "pocket-clip", *data, "--samples", "8", "--json")
    assert json.loads(done.output)["remarks"] == []


def test_an_expert_with_another_head_is_named(tmp_path: Path) -> None:
    recipe, data = torchvision_recipe(tmp_path, c=str(tmp_path / "c.safetensors"))
    state = load_file(tmp_path / "a.safetensors")
    save(tmp_path / "c.safetensors", state | {"classifier.3.bias": torch.zeros(9)})
    refused = run(str(recipe), *data, *data[-2:], *data[-2:], "--json").exception
    assert str(refused).startswith("the task vector of 'c': 1 of the base's tensors")


def test_texts_are_cut_to_the_positions_that_a_model_has(tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel

    sizes: Any = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = BertModel(
        BertConfig(vocab_size=len(WORDS) + 2, max_position_embeddings=4, **sizes), add_pooling_layer=False
    )
    model.save_pretrained(tmp_path / "base")
    word_tokenizer().save_pretrained(tmp_path / "base")
    base = {name: value.clone() for name, value in model.state_dict().items()}
    paths = {name: save(tmp_path / f"{name}.safetensors", noisy(base, seed)) for name, seed in (("a", 1), ("b", 2))}
    recipe = {"method": "task_arithmetic", "base": str(tmp_path / "base"), "experts": paths, "out": "merged"}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe))
    done = run(str(tmp_path / "r.yaml"), "--data", f"text:{texts(tmp_path)}", "--json")
    assert done.exit_code == 0, done.exception
    assert json.loads(done.output)["remarks"] == []


@pytest.mark.filterwarnings("ignore")  # of transformers
def test_weights_of_sixteen_bits_are_computed_with_in_thirty_two(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: Any = {"vocab_size": 24, "hidden_size": 16, "intermediate_size": 16}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)).bfloat16()
    start, changes = model.state_dict(), {}
    states = {"base": start, **{name: noisy(start, seed, 0.01) for name, seed in (("a", 1), ("b", 2))}}
    for kind in (torch.bfloat16, torch.float32):
        folder = tmp_path / f"{kind}"
        for name, state in states.items():
            model.to(kind).save_pretrained(
                folder / name, state_dict={n: v.bfloat16().to(kind) for n, v in state.items()}
            )
        word_tokenizer().save_pretrained(folder / "base")
        paths = {name: str(folder / name) for name in "ab"}
        recipe = {"method": "task_arithmetic", "base": str(folder / "base"), "experts": paths, "out": "merged"}
        (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe))
        done = run(str(tmp_path / "r.yaml"), "--data", f"text:{texts(tmp_path)}", "--json")
        changes[kind] = json.loads(done.output)["changes"][0][1]
    assert changes[torch.bfloat16] == pytest.approx(changes[torch.float32], abs=1e-4)
