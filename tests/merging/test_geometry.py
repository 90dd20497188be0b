"""SLERP, Karcher mean, Model Stock and LiNeS."""

import math

import pytest
import torch

from mergeflow.errors import MergeflowError
from mergeflow.merging import configure, prepare
from mergeflow.merging.architectures.blocks import depth
from tests.merging.helpers import draw, single_tensor


def merged(name, thetas, scale=1.0, **args):
    """The result for experts θ_t on a base of zeros."""
    base, experts = single_tensor(thetas)
    (state,) = prepare(configure(name, args), base, experts).at(scale).values()
    return state


def test_slerp_formula():
    a, b = draw(2, 30)
    angle = math.acos(float(a @ b / a.norm() / b.norm()))
    expected = (math.sin(0.7 * angle) * a + math.sin(0.3 * angle) * b) / math.sin(angle)
    torch.testing.assert_close(merged("slerp", torch.stack([a, b]), t=0.3), expected)


def test_slerp_keeps_the_norm_and_is_linear_for_parallel_weights():
    a, b = draw(2, 30)
    pair = torch.stack([a / a.norm(), b / b.norm()])
    assert float(merged("slerp", pair, t=0.4).norm()) == pytest.approx(1)
    torch.testing.assert_close(merged("slerp", torch.stack([a, 2 * a]), t=0.25), 1.25 * a)
    torch.testing.assert_close(merged("slerp", torch.stack([a, 0 * a]), t=0.25), 0.75 * a)


def test_slerp_goes_from_the_first_listed_expert_to_the_second():
    a, b = draw(2, 30)
    base = {"w": torch.zeros(30, dtype=torch.float64)}
    listed = {"z": {"w": a}, "a": {"w": b}}
    state = prepare(configure("slerp", {"t": 0.0}), base, listed).at(1)
    torch.testing.assert_close(state["w"], a)


def test_karcher_of_two_is_the_spherical_midpoint():
    a, b = draw(2, 30)
    pair = torch.stack([a / a.norm(), b / b.norm()])
    torch.testing.assert_close(merged("karcher", pair), merged("slerp", pair))


def test_karcher_is_where_the_logarithms_cancel():
    thetas = draw(4, 30)
    units = thetas / thetas.norm(dim=1, keepdim=True)
    mean_weights = merged("karcher", thetas, iterations=50, tolerance=1e-12)
    assert float(mean_weights.norm()) == pytest.approx(float(thetas.norm(dim=1).mean()))
    mean = mean_weights / mean_weights.norm()
    cosines = units @ mean
    logs = (
        torch.arccos(cosines)[:, None] * (units - cosines[:, None] * mean) / torch.sin(torch.arccos(cosines))[:, None]
    )
    assert float(logs.mean(0).norm()) < 1e-9


def test_karcher_of_opposites_and_zeros_is_finite():
    a = draw(1, 30)[0]
    assert merged("karcher", torch.stack([a, -a])).isfinite().all()
    assert not merged("karcher", torch.zeros(2, 5, dtype=torch.float64)).any()


def test_model_stock_formula():
    taus = draw(3, 30)
    taus[1] = taus[0] + 0.5 * taus[1]
    cosine = (
        sum(float(torch.nn.functional.cosine_similarity(taus[i], taus[j], dim=0)) for i, j in ((0, 1), (0, 2), (1, 2)))
        / 3
    )
    t = 3 * cosine / (1 + 2 * cosine)
    torch.testing.assert_close(merged("model_stock", taus), max(t, 0) * taus.mean(0))


def test_model_stock_of_equal_and_of_orthogonal_experts():
    tau = draw(1, 30)[0]
    torch.testing.assert_close(merged("model_stock", torch.stack([tau, tau])), tau)
    assert merged("model_stock", torch.eye(4, dtype=torch.float64)).abs().max() < 1e-12


def test_model_stock_is_nearer_to_the_truth_than_noisy_runs_of_one_task():
    truth = draw(1, 400)[0]
    runs = truth + draw(3, 400, seed=1)
    stock = merged("model_stock", runs)
    assert (stock - truth).norm() < min(float((run - truth).norm()) for run in runs)
    assert (stock - truth).norm() < (runs.mean(0) - truth).norm()


def blocks(values):
    return {f"visual.resblocks.{index}.w": torch.full((2,), value).double() for index, value in enumerate(values)}


def test_lines_scales_with_depth():
    base = {
        **blocks([0.0] * 5),
        "visual.conv1.weight": torch.zeros(2).double(),
        "visual.ln_post.weight": torch.zeros(2),
    }
    base["visual.ln_post.weight"] = base["visual.ln_post.weight"].double()
    expert = {name: torch.ones(2).double() for name in base}
    call = configure("lines", {"alpha": 0.2, "beta": 0.4})
    changes = prepare(call, base, {"a": expert, "b": expert}).direction
    for index in range(5):
        torch.testing.assert_close(
            changes[f"visual.resblocks.{index}.w"], torch.full((2,), 2 * (0.2 + 0.1 * index)).double()
        )
    torch.testing.assert_close(changes["visual.conv1.weight"], torch.full((2,), 0.4).double())
    torch.testing.assert_close(changes["visual.ln_post.weight"], torch.full((2,), 1.2).double())


@pytest.mark.parametrize(
    ("at", "names"),
    [
        (0.0, "visual.class_embedding visual.positional_embedding visual.conv1.weight visual.ln_pre.bias"),
        (1.0, "visual.ln_post.bias visual.proj text_projection logit_scale ln_final.weight"),
        (0.0, "cls_token pos_embed patch_embed.proj.weight patch_embed.norm.bias norm_pre.weight"),
        (1.0, "norm.weight fc_norm.bias head.weight"),
        (
            0.0,
            "vision_model.embeddings.patch_embedding.weight vision_model.pre_layrnorm.bias embeddings.LayerNorm",
        ),
        (1.0, "vision_model.post_layernorm.bias visual_projection.weight bert.pooler.dense.bias cls.predictions.bias"),
        (0.0, "model.embed_tokens.weight transformer.wte.weight shared.weight conv_proj.weight"),
        (0.0, "encoder.conv2.weight audio_tower.conv2.bias conv2.weight encoder.conv.conv_layers.1.weight"),
        (0.0, "feature_extractor.conv_layers.6.conv.weight feature_projection.projection.weight"),
        (0.0, "vision_model.layernorm_pre.weight encoder.input_linear.weight input_ff_layer.input_layer.weight"),
        (0.0, "decoder.layernorm_embedding.weight class_pos_emb encoder.subsampling.conv_in.weight"),
        (
            1.0,
            "embedding_norm.weight vision_encoder.neck.conv1.weight decoder.final_layer_norm.bias encoder.norm.weight",
        ),
        (1.0, "model.norm.weight transformer.ln_f.bias lm_head.weight encoder.final_layer_norm.weight"),
    ],
)
def test_lines_knows_what_stands_before_and_after_the_blocks(at, names):
    for name in names.split():
        assert depth(name, {}) == at, name


def test_every_list_of_blocks_is_a_tower_of_its_own():
    names = [f"{tower}.{index}.w" for tower, count in (
        ("encoder.layer", 3), ("encoder.x_layers", 5), ("encoder.r_layers", 2), ("model.gated_cross_attn_layers", 3),
    ) for index in range(count)]  # fmt: skip
    depths = [depth(name, dict.fromkeys(names, (4, 4))) for name in names]
    assert depths == [0, 0.5, 1, 0, 0.25, 0.5, 0.75, 1, 0, 1, 0, 0.5, 1]


def test_lines_finds_alpha_from_the_length_of_the_direction():
    base, experts = blocks([0.0] * 3), {"a": blocks([1.0, 2.0, 3.0]), "b": blocks([3.0, 2.0, -1.0])}
    plain = prepare(configure("lines", {"beta": 0.0}), base, experts).direction
    mean = prepare(configure("average"), base, experts).direction
    for name in base:
        torch.testing.assert_close(plain[name], mean[name])
    of = {"of": "ties", "of_args": {"keep": 1.0}, "beta": 0.0}
    scaled = torch.cat(list(prepare(configure("lines", of), base, experts).direction.values()))
    assert float(scaled.norm()) == pytest.approx(float(torch.cat(list(mean.values())).norm()))


def test_lines_refuses_methods_without_a_direction_from_the_base():
    for name in ("cart", "lines", "slerp", "fisher"):
        with pytest.raises(MergeflowError, match="anchored at θ0"):
            configure("lines", {"of": name})
    with pytest.raises(MergeflowError, match="did you mean 'keep'"):
        configure("lines", {"of": "ties", "of_args": {"kep": 1}})
