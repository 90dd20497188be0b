"""`mergeflow linearity` on checkpoints of real classes: tables, files, and one message for each kind of bad input."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, BertForSequenceClassification, GPT2Config

from mergeflow.errors import MergeflowError
from mergeflow.linearity.layers import find_layers
from mergeflow.linearity.networks import Sequences, count_classes, open_network, read_texts
from mergeflow.linearity.pairs import measure_pairs
from mergeflow.modality import Network
from tasks.commands import linearity as linearity_commands
from tasks.commands.linearity import ANSWER, predicted
from tests.command import invoke
from tests.linearity.checkpoints import WORDS, noisy, texts, word_tokenizer
from tests.merging.tiny_models import tiny

ROWS = len(WORDS) + 2


def run(*arguments: str, root: Path | None = None, columns: int = 160) -> Any:
    add = partial(linearity_commands.add_commands, root=root or Path("/"))
    return invoke(add, "linearity", *arguments, env={"COLUMNS": f"{columns}"})


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Files of a base, two experts of it, a foreign model, one of another class and one of another width."""
    folder = tmp_path_factory.mktemp("clip")
    base = open_network("pocket-clip", {}).model.state()
    files = {
        "base": base,
        "cats": noisy(base, 1),
        "dogs": noisy(base, 2),
        "foreign": {n: torch.randn(v.shape, generator=torch.Generator().manual_seed(5)) for n, v in base.items()},
        "other": {f"layer.{n}.weight": torch.zeros(2, 2) for n in range(50)},
        "narrow": {n: v[..., : max(v.shape[-1] // 2, 1)] if v.ndim else v for n, v in base.items()},
    }
    for name, state in files.items():
        save_file({n: v.contiguous().clone() for n, v in state.items()}, folder / f"{name}.safetensors")
    return {name: str(folder / f"{name}.safetensors") for name in files}


@pytest.fixture
def common(clip: dict[str, str]) -> list[str]:
    return ["--base", clip["base"], "--architecture", "pocket-clip", "--data", "suite:pocket8/signs"]


def test_tables_files_and_verdicts(clip: dict[str, str], common: list[str], tmp_path: Path) -> None:
    done = run(clip["cats"], clip["dogs"], *common, "--samples", "40", "--out", str(tmp_path / "out"), columns=72)
    assert done.exit_code == 0, done.exception
    named = [line.split()[0] for line in done.output.splitlines()[1:8] if line.split()]
    assert [named[0], *named[2:]] == ["layer", *"0123"]  # in a narrow terminal, too
    assert "cats – dogs" in done.output
    assert re.search("combine as weights do (holds|does not hold|is undecided) for this pair", done.output)
    content = json.loads((tmp_path / "out/result.json").read_text())
    assert content["margins"] == {"direction": 0.3, "trivial": 0.02, "length": 0.1}
    (pair,) = content["pairs"]
    states = [load_file(clip[name]) for name in ("cats", "dogs")]
    assert pair[ANSWER.prediction] == pytest.approx(predicted(*states), rel=1e-6)
    assert f"{pair[ANSWER.prediction]:.4g}" in done.output
    assert "rank correlation" in done.output
    assert pair["pair"] == ["cats", "dogs"]
    assert [layer["layer"] for layer in pair["layers"]] == [f"visual.transformer.resblocks.{n}" for n in range(4)]
    rows = pq.read_table(tmp_path / "out/samples.parquet").to_pylist()
    assert len(rows) == 3 * 4 * 40
    last = [row for row in rows if row["layer"].endswith("3")]
    worst = max((0.25, 0.5, 0.75), key=lambda a: sum(row["error"] for row in last if row["alpha"] == a))
    mean = sum(row["distance"] for row in last if row["alpha"] == worst) / 40
    assert mean == pytest.approx(pair["layers"][3]["distance"][1])
    assert (tmp_path / "out/linearity.svg").read_text().count("coef") >= 1


@pytest.mark.parametrize(
    ("experts", "changes", "message"),
    [
        (["cats"], [], "1 expert is named; features of at least two"),
        (["cats", "cats"], [], "is named twice"),
        (["cats", "foreign"], [], r"expert 'foreign' has a cosine of -?0\.0\d with the base"),
        (["cats", "narrow"], [], "does not fit the model"),
        (["cats", "dogs"], ["--samples", "31"], "31 samples found"),
        (["cats", "other"], [], r"\A.*other\.safetensors' has 0 of the \d+ tensors .* and lacks 'visual.*\Z"),
        (["cats", "dogs"], ["--layer", "visual.transformer.resblock.3"], r"did you mean 'visual\.transformer\.resbl"),
        (["cats", "dogs"], ["--data", "suite:pocket8/signs?classes=900-905"], "900"),
        (["cats", "dogs"], ["--alpha", "1"], "--alpha 1 is not between 0 and 1"),
        (["cats", "dogs"], ["--data", "suite:pocket9/signs"], "unknown suite 'pocket9'"),
        (["cats", "dogs"], ["--data", "text:lines.txt"], "unknown kind of data source 'text'"),
        (["cats", "dogs"], ["--architecture", "pocket-clap"], "did you mean 'pocket-clip'"),
        (["cats", "dogs"], ["--architecture", "torchvision:resnet19"], "unknown architecture of torchvision"),
    ],
)
def test_bad_input_is_one_message(
    clip: dict[str, str], common: list[str], experts: list[str], changes: list[str], message: str
) -> None:
    done = run(*(clip[name] for name in experts), *common, *changes)
    assert isinstance(done.exception, MergeflowError)
    assert re.search(message, str(done.exception)), done.exception


def test_a_broken_expert_and_a_folder_that_cannot_be_are_told_before_anything_is_measured(
    clip: dict[str, str], common: list[str], tmp_path: Path
) -> None:
    broken = load_file(clip["dogs"])
    name = next(tensor for tensor, value in broken.items() if value.ndim > 1)
    save_file(broken | {name: broken[name] * torch.nan}, tmp_path / "broken.safetensors")
    done = run(clip["cats"], str(tmp_path / "broken.safetensors"), *common, "--samples", "32")
    assert f"'broken' holds NaN or infinity in tensor '{name}'" in str(done.exception)
    (tmp_path / "file").touch()
    done = run(clip["cats"], clip["dogs"], *common, "--samples", "32", "--out", str(tmp_path / "file"))
    assert isinstance(done.exception, MergeflowError)
    assert f"--out {tmp_path / 'file'} is no folder" in str(done.exception)


def test_what_is_missing_is_named(clip: dict[str, str]) -> None:
    pair = [clip["cats"], clip["dogs"]]
    assert "--base is missing" in str(run(*pair).exception)
    assert "--architecture is missing" in str(run(*pair, "--base", clip["base"]).exception)
    error = run(*pair, "--base", clip["base"], "--architecture", "pocket-clip").exception
    assert "--data is missing" in str(error)


def test_a_residual_net_of_torchvision() -> None:
    from torchvision.models import resnet18

    torch.manual_seed(0)
    opened = open_network("torchvision:resnet18", dict(resnet18(num_classes=7).state_dict()))
    assert opened.model.module.fc.out_features == 7  # type: ignore[union-attr]
    assert len(find_layers(opened.model.module)) == 8
    samples = opened.read("suite:pocket8/signs", 3)
    features = samples.features(opened.model, torch.arange(3), ["layer4.1"])["layer4.1"]
    assert features.shape == (3, 512, 7, 7)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return word_tokenizer()


def test_encoders_of_texts_with_heads_of_their_own(tmp_path: Path, tokenizer: Any) -> None:
    whole: Any = BertForSequenceClassification(tiny("bert", vocab_size=ROWS).config)
    whole.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    for number, name in enumerate(("reviews", "questions"), start=1):
        save_file(noisy(whole.state_dict(), number), tmp_path / f"{name}.safetensors")
    experts = [str(tmp_path / f"{name}.safetensors") for name in ("reviews", "questions")]
    done = run(*experts, "--base", str(tmp_path / "base"), "--data", f"text:{texts(tmp_path)}")
    assert done.exit_code == 0, done.exception
    assert "reviews – questions" in done.output
    error = run(*experts, "--base", str(tmp_path / "base"), "--data", "suite:pocket8/signs").exception
    assert "expected text:FILE" in str(error)
    (tmp_path / "wide.txt").write_text("good film", encoding="utf-16")
    error = run(*experts, "--base", str(tmp_path / "base"), "--data", f"text:{tmp_path / 'wide.txt'}").exception
    assert "wide.txt is not a text in UTF-8: it begins as UTF-16 does" in str(error)


@pytest.mark.parametrize("kind", ["t5", "gpt2", "roberta"])
def test_models_as_transformers_saves_them(kind: str, tmp_path: Path, tokenizer: Any) -> None:
    """Tied weights have one name in the file, bodies a prefix, and heads are there; all columns fit 80 characters."""
    net: Any = tiny(kind, vocab_size=ROWS, decoder_start_token_id=0)
    for number, name in enumerate(("base", "left", "right")):  # each a step from the one before
        with torch.no_grad():
            for weight in (parameter for parameter in net.parameters() if parameter.ndim > 1):
                weight.add_(0.1 * number * weight.std() * torch.randn(weight.shape))
        net.save_pretrained(tmp_path / name)
    tokenizer.save_pretrained(tmp_path / "base")
    experts = [str(tmp_path / name) for name in ("left", "right")]
    done = run(*experts, "--base", str(tmp_path / "base"), "--data", f"text:{texts(tmp_path)}", columns=80)
    assert done.exit_code == 0, done.exception
    assert "left – right" in done.output
    assert "…" not in done.output


def test_the_padding_of_a_batch_changes_no_feature(tmp_path: Path, tokenizer: Any) -> None:
    net = Network(tiny("t5", vocab_size=ROWS, decoder_start_token_id=0))
    batch = tokenizer(texts(tmp_path).read_text().splitlines(), padding=True, return_tensors="pt")
    data = Sequences(batch["input_ids"], batch["attention_mask"])
    layers = find_layers(net.module)
    assert layers == ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"]
    with torch.no_grad():
        whole = data.features(net, torch.arange(len(data)), layers)
        for row in (0, 7):
            alone = data.features(net, torch.tensor([row]), layers)
            for layer in layers:
                assert whole[layer].shape == (40, 32)
                torch.testing.assert_close(whole[layer][row], alone[layer][0], atol=1e-5, rtol=1e-5)
    experts = {name: noisy(net.state(), seed) for seed, name in enumerate("ab", start=1)}
    (pair,) = measure_pairs(net, {"lines": data}, experts, layers, [0.5])
    assert [layer.layer for layer in pair.layers] == layers


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small"])
def test_the_classes_of_torchvisions_nets_are_read_in_any_order_of_names(name: str) -> None:
    from torchvision import models

    with torch.device("meta"):
        state = models.get_model(name, num_classes=7).state_dict()
    for ordered in (state, dict(sorted(state.items())), dict(reversed(state.items()))):
        assert count_classes(name, ordered) == 7


def test_a_base_that_is_no_net_of_this_name_is_said_to_be_none() -> None:
    with pytest.raises(MergeflowError, match=r"the base has no 'fc\.bias', .* of torchvision:resnet18"):
        count_classes("resnet18", {"a": torch.zeros(2)})


def test_models_that_read_no_texts_are_refused_by_their_kind(tmp_path: Path) -> None:
    for kind in ("vit", "clip"):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        with pytest.raises(MergeflowError, match=f"is of the kind '{kind}', which does not read texts alone"):
            open_network(str(tmp_path), {})


def test_a_folder_without_a_tokenizer_is_said_to_have_none(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path / "llama")  # type: ignore[operator]
    with pytest.raises(MergeflowError, match=r"the tokenizer .*llama"):
        open_network(str(tmp_path / "llama"), {}).read(f"text:{texts(tmp_path)}", 8)


def test_counters_have_no_part_in_how_far_experts_are_apart() -> None:
    zeros, other = {"w": torch.zeros(4), "n": torch.tensor(1)}, {"w": torch.ones(4), "n": torch.tensor(2)}
    assert predicted(zeros, zeros) == 0.0
    assert predicted(zeros, other) == pytest.approx(2.0)


def test_a_folder_without_its_tokenizer_is_named(tmp_path: Path) -> None:
    """transformers makes an empty tokenizer of a model folder that has none of its files."""
    GPT2Config().save_pretrained(tmp_path)
    (tmp_path / "texts.txt").write_text("a line\n")
    with pytest.raises(MergeflowError, match="the model's tokenizer makes no tokens of it"):
        read_texts(tmp_path / "texts.txt", AutoTokenizer.from_pretrained(tmp_path), 4, 8)
