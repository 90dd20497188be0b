"""Classification: loss, scores and log-probabilities against torch; parts and layers of examples; heads; weights."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mergeflow.errors import MergeflowError
from mergeflow.evaluation import accuracies, example_scores, losses
from mergeflow.modalities.classification import Classification, Subset
from mergeflow.modalities.heads import Head, load_head, save_head
from mergeflow.modalities.metrics import METRICS
from mergeflow.modalities.nets import SmallResNet
from mergeflow.modality import Metric, Network


def model(seed: int = 0) -> Network:
    torch.manual_seed(seed)
    return Network(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)))


def examples(count: int = 9) -> Classification:
    generator = torch.Generator().manual_seed(1)
    inputs, labels = torch.randn(count, 6, generator=generator), torch.arange(count) % 3
    head = Head(torch.nn.functional.normalize(torch.randn(3, 5, generator=generator), dim=1), 80.0, ["a", "b", "c"])
    return Classification("letters", inputs, labels, head)


def logits(network: Network, data: Classification, rows: Tensor) -> Tensor:
    assert isinstance(data.head, Head)
    return 80.0 * network.module(data.inputs[rows]) @ data.head.weight.T


def test_loss_scores_and_log_p_are_torchs() -> None:
    network, data, rows = model(), examples(), torch.tensor([4, 0, 7])
    expected = logits(network, data, rows)
    assert torch.equal(data.loss(network, rows), nn.functional.cross_entropy(expected, data.labels[rows]))
    assert data.scores(network, rows).tolist() == (expected.argmax(1) == data.labels[rows]).float().tolist()
    assert torch.equal(data.log_p(network, rows), expected.log_softmax(1))


@pytest.mark.parametrize("metric", [None, *(METRICS[name] for name in ("matthews", "f1", "macro_f1"))])
def test_a_model_whose_answers_are_nan_is_never_right(metric: Metric | None) -> None:
    """NaN counts as the largest logit: where one class has most examples, such a merge won a sweep."""
    network, data = model(), replace(examples(), metric=metric)
    next(network.module.parameters()).data.fill_(torch.nan)
    assert accuracies(network, {"letters": data}, 4) == {"letters": 0.0}


def test_logits_are_float32_under_autocast() -> None:
    network, data, rows = model(), examples(), torch.arange(9)
    with torch.autocast("cpu", torch.bfloat16):
        loss, features = data.loss(network, rows), network.module(data.inputs[rows])
    assert features.dtype == torch.bfloat16
    assert torch.equal(loss, nn.functional.cross_entropy(data.head(features.float()), data.labels))  # type: ignore[misc]


@pytest.mark.parametrize("batch_size", [1, 4, 9, 100])
def test_evaluation_goes_through_every_example_once_in_order(batch_size: int) -> None:
    network, data = model(), examples()
    scores = example_scores(network, data, batch_size)
    assert scores.dtype == np.float32
    assert scores.tolist() == data.scores(network, torch.arange(9)).tolist()
    assert accuracies(network, {"letters": data}, batch_size) == {"letters": scores.mean(dtype=np.float64)}
    expected = float(data.loss(network, torch.arange(9)).detach())
    assert losses(network, {"letters": data}, batch_size)["letters"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("count", "sizes"), [(9, [4, 4, 4]), (8, [4, 4]), (2, [4]), (0, [0])])
def test_padded_batches_have_one_size_and_change_no_score(count: int, sizes: list[int]) -> None:
    network, data, seen = model(), examples(count), list[int]()
    expected = example_scores(network, data, 4).tolist()
    network.module.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    assert example_scores(network, data, 4, pad=True).tolist() == expected
    assert seen == sizes


def test_a_subset_is_judged_like_its_rows() -> None:
    network, data, rows = model(), examples(), torch.tensor([1, 0])
    part = Subset(data, torch.tensor([6, 2, 5]))
    there = torch.tensor([2, 6])
    assert (len(part), part.task, part.head) == (3, "letters", data.head)
    assert torch.equal(part.loss(network, rows), data.loss(network, there))
    assert torch.equal(part.scores(network, rows), data.scores(network, there))
    assert torch.equal(part.log_p(network, rows), data.log_p(network, there))
    assert torch.equal(part.features(network, rows, ["1"])["1"], data.features(network, there, ["1"])["1"])
    assert [len(Subset.first(data, count)) for count in (0, 4, 99)] == [0, 4, 9]


def test_features_are_the_layers_outputs_and_no_hook_stays() -> None:
    network, data, rows = model(), examples(), torch.arange(4)
    features = data.features(network, rows, ["0", "1", ""])
    hidden = network.module.get_submodule("0")(data.inputs[rows])
    assert torch.equal(features["0"], hidden)
    assert torch.equal(features["1"], hidden.tanh())
    assert torch.equal(features[""], network.module(data.inputs[rows]))
    assert not any(part._forward_hooks for part in network.module.modules())
    with pytest.raises(MergeflowError, match="unknown layer '3'"):
        data.features(network, rows, ["3"])


def test_a_trained_head_comes_back_trained(tmp_path: Path) -> None:
    head = Head(torch.randn(3, 5), 1.0, ["a", "b", "c"], bias=torch.randn(3), trained=True)
    save_head(head, tmp_path / "head.safetensors")
    loaded = load_head(tmp_path / "head.safetensors")
    assert loaded.trained
    assert loaded.class_names == head.class_names
    features = torch.randn(2, 5)
    assert torch.equal(loaded(features), head(features))
    assert [p.requires_grad for p in loaded.parameters()] == [True, True]


def test_weights_that_do_not_fit_are_all_named() -> None:
    state = model().state()
    state["0.weight"] = state["0.weight"][:3]
    del state["2.bias"]
    state["extra"] = torch.zeros(1)
    network = model()
    before = {name: value.clone() for name, value in network.state().items()}
    with pytest.raises(MergeflowError, match="3 differences") as caught:
        network.load(state)
    assert all(word in str(caught.value) for word in ("2.bias: missing", "extra: not expected", "shape (3, 6)"))
    assert all(torch.equal(value, before[name]) for name, value in network.state().items())


def test_a_residual_net_needs_eight_channels() -> None:
    with pytest.raises(ValueError, match="7 channels wide; give at least 8"):
        SmallResNet(5, width=7)
