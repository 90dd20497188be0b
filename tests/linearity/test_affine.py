"""The kernel of linearity: exact cases, hand-written sums, nothing that depends on the batches."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mergeflow.errors import MergeflowError
from mergeflow.linearity.affine import Combination, Linearity, affine, combine, judge, overall
from mergeflow.linearity.layers import check_layers, find_layers
from mergeflow.modalities.classification import Classification
from mergeflow.modalities.heads import Head
from mergeflow.modalities.nets import SmallResNet, on_pixels
from mergeflow.modalities.toy.modality import FeedForward
from mergeflow.modalities.vision.models import image_model, load_clip
from mergeflow.modality import Model, Network, State
from studies.theory.linearity import front, stitch

HALF = Combination({"i": 0.5, "j": 0.5})


def moved(model: Model, seed: int, by: float = 0.3) -> State:
    """Return the model's weights with noise of `by` times each tensor's spread: an expert without training."""
    generator = torch.Generator().manual_seed(seed)

    def noise(value: Tensor) -> Tensor:
        drawn = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value.dtype)
        return value + by * drawn * (value.std() if value.numel() > 1 else 1)

    return {
        name: noise(value) if value.is_floating_point() and "running" not in name else value.clone()
        for name, value in model.state().items()
    }


def mlp() -> tuple[Model, Classification]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    return Network(net), Classification("rows", torch.randn(70, 6), torch.randint(0, 3, (70,)))


def resnet() -> tuple[Model, Classification]:
    torch.manual_seed(0)
    images = torch.randint(0, 256, (40, 16, 16, 3), dtype=torch.uint8)
    labels = torch.randint(0, 5, (40,))
    return Network(SmallResNet(5, width=8, blocks=1)), Classification("pictures", images, labels, encode=on_pixels)


def clip() -> tuple[Model, Classification]:
    torch.manual_seed(0)
    images = torch.randint(0, 256, (40, 32, 32, 3), dtype=torch.uint8)
    head = Head(torch.randn(4, 128), 10.0, list("abcd"))
    return image_model(load_clip("pocket-clip", "pocket8")), Classification(
        "images", images, torch.arange(40) % 4, head
    )


def in_double(model: Model, data: Classification) -> tuple[Model, Classification]:
    """Return the same in float64, where sums can be compared to the last digits."""
    model.module.double()
    return model, Classification("rows", data.inputs.double(), data.labels)  # type: ignore[attr-defined]


FAMILIES = {"mlp": mlp, "resnet": resnet, "clip": clip}
LAYERS = {
    "mlp": ["1", "3"],
    "resnet": [f"layer{number}.0" for number in (1, 2, 3)],
    "clip": [f"visual.transformer.resblocks.{number}" for number in range(4)],
}


Family = tuple[str, Model, Classification, dict[str, State]]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    model, data = FAMILIES[request.param]()
    return request.param, model, data, {"i": moved(model, 1), "j": moved(model, 2)}


def test_blocks_are_found_in_every_family(family: Family) -> None:
    name, model, _, _ = family
    assert find_layers(model.module) == LAYERS[name]


def test_the_ends_of_the_path_are_exact(family: Family) -> None:
    name, model, data, ends = family
    paths = {str(a): Combination({"i": a, "j": 1 - a}) for a in (0.0, 1.0)}
    same = {"i": ends["i"], "j": ends["i"]}
    for layers in (
        *affine(model, {"a": data}, ends, paths, LAYERS[name]).values(),
        affine(model, {"a": data}, same, {"quarter": Combination({"i": 0.25, "j": 0.75})}, LAYERS[name])["quarter"],
    ):
        for values in layers.values():
            np.testing.assert_array_equal(values.distance, 0)
            np.testing.assert_array_equal(values.error, 0)
            np.testing.assert_allclose(values.coef, 1, rtol=1e-15)


def test_the_size_of_batches_changes_nothing(family: Family) -> None:
    name, model, data, ends = family
    whole, parts = (
        affine(model, {"a": data}, ends, {"half": HALF}, LAYERS[name], batch_size=size)["half"] for size in (40, 7)
    )
    for layer in LAYERS[name]:
        for field in ("distance", "coef", "error", "base"):
            np.testing.assert_allclose(
                getattr(whole[layer], field), getattr(parts[layer], field), atol=2e-6, err_msg=f"{layer} {field}"
            )


def test_the_model_is_left_as_it_was(family: Family) -> None:
    name, model, data, ends = family
    before = {key: value.clone() for key, value in model.state().items()}
    model.module.train()
    affine(model, {"a": data}, ends, {"half": HALF}, LAYERS[name])
    assert model.module.training
    model.module.eval()
    assert all(torch.equal(before[key], value) for key, value in model.state().items())
    assert not any(module._forward_hooks for module in model.module.modules())


def test_the_values_are_those_of_the_formulas() -> None:
    model, data = in_double(*mlp())
    ends = {"i": moved(model, 1), "j": moved(model, 2)}
    measures = affine(model, {"a": data}, ends, {"path": Combination({"i": 0.25, "j": 0.75})}, ["3"])["path"]["3"]
    feature = {}
    for name, state in {**ends, "path": combine([ends["i"], ends["j"]], [0.25, 0.75])}.items():
        model.load(state)
        feature[name] = model.module[:4](data.inputs).detach().double().numpy()  # type: ignore[index]
    for row in range(len(data)):
        f, g = feature["path"][row], 0.25 * feature["i"][row] + 0.75 * feature["j"][row]
        cosine = f @ g / np.linalg.norm(f) / np.linalg.norm(g)
        coef = np.linalg.norm(f) * cosine / np.linalg.norm(g)
        base = feature["i"][row] @ feature["j"][row]
        base /= np.linalg.norm(feature["i"][row]) * np.linalg.norm(feature["j"][row])
        assert measures.distance[row] == pytest.approx(1 - cosine, abs=1e-12)
        assert measures.coef[row] == pytest.approx(coef, rel=1e-12)
        assert measures.base[row] == pytest.approx(1 - base, abs=1e-12)
        assert measures.error[row] == pytest.approx((1 - coef) ** 2 + coef**2 * (1 / cosine**2 - 1), abs=1e-12)
    assert measures.error.max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_first_linear_layer_before_its_activation_is_exactly_linear(dtype: torch.dtype) -> None:
    model = Network(FeedForward([6, 8, 8, 3], "relu", dtype))
    ends = {"i": moved(model, 1), "j": moved(model, 2), "k": moved(model, 3)}
    data = Classification("rows", torch.randn(50, 6, dtype=dtype), torch.zeros(50, dtype=torch.int64))
    three = Combination({"i": 0.2, "j": -0.5, "k": 1.3})
    measures = affine(model, {"a": data}, ends, {"three": three}, ["layers.0", "active.0"])["three"]
    # float32 rounds features to 6e-8 of their length; error is the square of that.
    assert measures["layers.0"].distance.max() < (1e-11 if dtype == torch.float32 else 1e-15)
    assert measures["layers.0"].error.max() < (1e-11 if dtype == torch.float32 else 1e-25)
    assert abs(measures["layers.0"].coef - 1).max() < (1e-6 if dtype == torch.float32 else 1e-13)
    assert measures["active.0"].error.max() > 1e-3


def test_the_other_baseline_compares_the_average_with_each() -> None:
    model, data = mlp()
    ends = {name: moved(model, seed) for seed, name in enumerate("ijk")}
    third = dict.fromkeys(ends, 1 / 3)
    measures = affine(model, {"a": data}, ends, {"mean": Combination(third, baseline="each")}, ["3"])["mean"]["3"]
    with_mean = {**ends, "mean": combine(list(ends.values()), [1 / 3] * 3)}
    pairs = {name: Combination({"mean": 0.5, name: 0.5}) for name in ends}
    bases = [each["3"].base for each in affine(model, {"a": data}, with_mean, pairs, ["3"]).values()]
    np.testing.assert_allclose(measures.base, np.mean(bases, axis=0), atol=1e-12)


def test_a_combination_counts_the_samples_it_asks_for() -> None:
    model, data = mlp()
    ends = {"i": moved(model, 1), "j": moved(model, 2)}
    both = {"a": data, "b": Classification("b", data.inputs[:9] + 1, data.labels[:9])}
    half = Combination({"i": 0.5, "j": 0.5}, on=frozenset({"b"}))
    measures = affine(model, both, ends, {"all": HALF, "b": half}, ["3"])
    assert list(measures["all"]["3"].origin) == ["a"] * 70 + ["b"] * 9
    np.testing.assert_array_equal(measures["b"]["3"].coef, measures["all"]["3"].coef[70:])


def test_features_that_are_zero_are_equal_or_not() -> None:
    net = Network(nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU()))
    data = Classification("a", torch.ones(1, 2), torch.zeros(1))
    up, down = ({"0.weight": sign * torch.ones(2, 2)} for sign in (1, -1))
    asked = {"dead": Combination({"up": -1.0, "down": 2.0}), "half": Combination({"up": 0.5, "down": 0.5})}
    measures = affine(net, {"a": data}, {"up": up, "down": down}, asked, ["1"])
    # 2 f(down) − f(up) is −f(up), not zero, and the combined model is dead.
    assert (measures["dead"]["1"].distance, measures["dead"]["1"].coef) == (1, 0)
    assert (measures["half"]["1"].distance, measures["half"]["1"].coef) == (1, 0)


def test_bad_combinations_and_layers_are_refused() -> None:
    model, data = mlp()
    ends = {"digits": model.state()}
    with pytest.raises(MergeflowError, match=r"sum to 0\.9"):
        Combination({"digits": 0.9})
    with pytest.raises(MergeflowError, match="did you mean 'digits'"):
        affine(model, {"a": data}, ends, {"x": Combination({"digit": 1.0})}, ["1"])
    with pytest.raises(MergeflowError, match=r"unknown layer 'visual\.block'"):
        check_layers(model.module, ["visual.block"])
    with pytest.raises(MergeflowError, match="no samples"):
        affine(model, {}, ends, {"x": Combination({"digits": 1.0})}, ["1"])
    with pytest.raises(MergeflowError, match="no blocks and no activations"):
        find_layers(nn.Linear(2, 2))


def linearity(distance: float, base: float, coef: float, count: int = 200) -> Linearity:
    jitter = np.random.default_rng(0).normal(size=count)
    return Linearity(
        distance * (1 + 0.2 * jitter), coef + 0.02 * jitter, 0 * jitter, np.full(count, base), np.full(count, "a")
    )


@pytest.mark.parametrize(
    ("distance", "base", "coef", "llfc", "ctl"),
    [
        (0.01, 0.2, 1.0, True, True),
        (0.01, 0.2, 0.85, True, False),
        (0.01, 0.2, 0.9, True, None),
        (0.08, 0.2, 1.0, False, False),
        (0.06, 0.2, 1.0, None, None),
        (0.001, 0.01, 1.0, None, None),
    ],
)
def test_the_three_verdicts(distance: float, base: float, coef: float, llfc: bool | None, ctl: bool | None) -> None:
    verdict = overall(judge({"block": linearity(distance, base, coef)}))
    assert (verdict["LLFC"], verdict["CTL"]) == (llfc, ctl)


def test_a_stitch_of_a_model_on_itself_is_the_model(
    family: Family,
) -> None:
    name, model, data, ends = family
    model.module.eval()
    for layer in (LAYERS[name][0], LAYERS[name][-1]):
        terms = [(1.0, front(model, data, ends["i"], [layer], batch_size=16)[layer])]
        scores = stitch(model, data, ends["i"], layer, terms, batch_size=16)
        log_p = stitch(model, data, ends["i"], layer, terms, data.log_p, batch_size=16)
        state = model.state()
        copy = {key: value.clone() for key, value in state.items()}
        model.load(ends["i"])
        with torch.no_grad():
            plain = data.log_p(model, torch.arange(len(data)))
        model.load(copy)
        torch.testing.assert_close(log_p, plain, atol=1e-5, rtol=1e-5)
        assert torch.equal(scores, (log_p.argmax(1) == data.labels).float())


def test_a_stitch_after_the_last_block_mixes_what_the_head_sees() -> None:
    model, data = mlp()
    ends = {"i": moved(model, 1), "j": moved(model, 2)}
    terms = [(2.0, front(model, data, ends["i"], ["3"])["3"]), (-1.0, front(model, data, ends["j"], ["3"])["3"])]
    log_p = stitch(model, data, ends["i"], "3", terms, data.log_p, batch_size=16)
    hidden = {}
    for name, state in ends.items():
        model.load(state)
        hidden[name] = model.module[:4](data.inputs)  # type: ignore[index]
    model.load(ends["i"])
    expected = model.module[4](2 * hidden["i"] - hidden["j"]).log_softmax(1)  # type: ignore[index]
    torch.testing.assert_close(log_p, expected.detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("weight", [0.25, 0.5])
def test_the_loss_of_a_quadratic_model_has_its_exact_excess(weight: float) -> None:
    """δ = a(1 − a)/2 · dᵀHd for a quadratic loss; the kernel's features are linear in the weights there."""
    torch.manual_seed(0)
    inputs, targets = torch.randn(20, 5, dtype=torch.float64), torch.randn(20, 3, dtype=torch.float64)
    net = Network(nn.Linear(5, 3, bias=False, dtype=torch.float64))
    ends = {"i": moved(net, 1), "j": moved(net, 2)}
    data = Classification("rows", inputs, torch.zeros(20, dtype=torch.int64))
    path = Combination({"i": weight, "j": 1 - weight})
    measures = affine(net, {"a": data}, ends, {"path": path}, [""])["path"][""]
    assert measures.error.max() < 1e-25

    def loss(state: State) -> Tensor:
        return ((inputs @ state["weight"].T - targets) ** 2).sum()

    middle = combine([ends["i"], ends["j"]], [weight, 1 - weight])
    excess = loss(middle) - weight * loss(ends["i"]) - (1 - weight) * loss(ends["j"])
    d = inputs @ (ends["i"]["weight"] - ends["j"]["weight"]).T
    torch.testing.assert_close(excess, -weight * (1 - weight) * (d**2).sum())
