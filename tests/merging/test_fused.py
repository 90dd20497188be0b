"""Fused weights: cut where transformers' own classes cut them, and merged as their parts would be."""

import pytest
import torch
from torch import Tensor

from mergeflow.errors import MergeflowError
from mergeflow.merging import check_recipe, configure, prepare
from mergeflow.merging.architectures.architecture import COLUMNS, FAMILIES, ROWS, Cut, Form, architecture_of
from tests.merging.tiny_models import tiny

IDS = torch.tensor([[3, 7, 1, 9, 5]])
FALCON_7B = {"new_decoder_architecture": False, "multi_query": True, "parallel_attn": True}
FALCON_1B = {"new_decoder_architecture": False, "multi_query": False, "num_kv_heads": 4}
# model, changes of its configuration, the fused weight, the projection behind attention, places of q, k, v
ATTENTION = [
    ("gpt2", {}, "c_attn", "attn.c_proj", (0, 1, 2)),
    ("gpt_bigcode", {}, "c_attn", "attn.c_proj", (0, 1, 2)),
    ("gpt_bigcode", {"multi_query": False}, "c_attn", "attn.c_proj", (0, 1, 2)),
    ("gpt_neox", {}, "query_key_value", "attention.dense", (0, 1, 2)),
    ("bloom", {}, "query_key_value", "self_attention.dense", (0, 1, 2)),
    ("falcon", {}, "query_key_value", "self_attention.dense", (0, 1, 2)),
    ("falcon", FALCON_7B, "query_key_value", "self_attention.dense", (0, 1, 2)),
    ("falcon", FALCON_1B, "query_key_value", "self_attention.dense", (0, 1, 2)),
    ("phi3", {}, "qkv_proj", "o_proj", (0, 1, 2)),
    ("mpt", {}, "Wqkv", "attn.out_proj", (0, 1, 2)),
    ("dbrx", {}, "Wqkv", "attn.out_proj", (0, 1, 2)),
    ("modernbert", {}, "Wqkv", "attn.Wo", (0, 1, 2)),
    ("codegen", {}, "qkv_proj", "attn.out_proj", (0, 2, 1)),
    ("deberta", {"relative_attention": False}, "in_proj", "attention.output.dense", (0, 1, 2)),
]


def _scaled(model, suffix: str, factors: dict[int, float]) -> None:
    """Multiply parts of every fused weight, as its form cuts them, in place."""
    architecture = architecture_of({}, model.config.to_dict())
    fused = [name for name, _ in model.named_parameters() if name.endswith((f"{suffix}.weight", suffix))]
    assert fused
    for name in fused:
        weight = model.get_parameter(name)
        parts = architecture.form(name, weight.shape, True).split(weight.data)
        scaled = [part * factors.get(index % len(parts), 1.0) for index, part in enumerate(parts)]
        weight.data = architecture.form(name, weight.shape, True).join(scaled)


def _without_biases(model):
    for name, value in model.named_parameters():
        if name.endswith("bias") and "norm" not in name.lower():
            value.data.zero_()
    return model


@pytest.mark.parametrize(("name", "changes", "fused", "out", "order"), ATTENTION)
@torch.no_grad()
def test_queries_keys_and_values_are_where_the_model_takes_them(name, changes, fused, out, order):
    """(2 q)ᵀ(k/2) = qᵀk, and 2 v before half a projection is v: only a right cut leaves the outputs as they were."""
    model = _without_biases(tiny(name, **changes))
    before = model(IDS).logits
    query, key, value = order
    _scaled(model, fused, {query: 2.0, key: 0.5})
    torch.testing.assert_close(model(IDS).logits, before, rtol=1e-5, atol=1e-6)
    _scaled(model, fused, {value: 2.0})
    assert (model(IDS).logits - before).abs().max() > 1e-4
    _scaled(model, out, {0: 0.5})
    torch.testing.assert_close(model(IDS).logits, before, rtol=1e-5, atol=1e-6)
    _scaled(model, fused, {query: 2.0})
    assert (model(IDS).logits - before).abs().max() > 1e-6


@pytest.mark.parametrize(
    ("name", "fused", "down"),
    [
        ("phi3", "gate_up_proj", "mlp.down_proj"),
        ("glm", "gate_up_proj", "mlp.down_proj"),
        ("modernbert", "mlp.Wi", "mlp.Wo"),
        ("mixtral", "experts.gate_up_proj", "experts.down_proj"),
        ("granitemoe", "experts.gate_up_proj", "experts.down_proj"),
        ("llama4_text", "experts.gate_up_proj", "experts.down_proj"),
        ("deepseek_v3", ".experts.gate_up_proj", ".experts.down_proj"),
    ],
)
@torch.no_grad()
def test_gates_are_where_the_model_takes_them(name, fused, down):
    """The second half passes linearly: twice it before half of the next weight changes nothing."""
    model = tiny(name)
    if name == "llama4_text":  # its experts' weights are not initialised
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
    before = model(IDS).logits
    architecture = architecture_of({}, model.config.to_dict())
    for key, value in model.named_parameters():
        if key.endswith((fused, f"{fused}.weight")):
            form = architecture.form(key, value.shape, True)
            parts = form.split(value.data)
            assert len(parts) == 2 * (len(value) if value.ndim == 3 else 1)
            value.data = form.join([part * (1 + index % 2) for index, part in enumerate(parts)])
        elif key.endswith((down, f"{down}.weight")):
            value.data = value.data * 0.5
    torch.testing.assert_close(model(IDS).logits, before, rtol=1e-5, atol=1e-6)


def test_gpt_oss_has_gate_and_up_in_turn():
    weight = torch.randn(4, 32, 96)
    form = architecture_of({}, {"model_type": "gpt_oss"}).form("l.0.mlp.experts.gate_up_proj", weight.shape, True)
    parts = form.split(weight)
    torch.testing.assert_close(parts[2], weight[1, :, ::2].T)
    torch.testing.assert_close(parts[3], weight[1, :, 1::2].T)
    torch.testing.assert_close(form.join(parts), weight)


@torch.no_grad()
def test_latent_keys_and_values_of_deepseek():
    model = tiny("deepseek_v3")
    before = model(IDS).logits
    _scaled(model, "kv_b_proj", {1: 2.0})
    assert (model(IDS).logits - before).abs().max() > 1e-4
    _scaled(model, "self_attn.o_proj", {0: 0.5})
    torch.testing.assert_close(model(IDS).logits, before, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "form",
    [
        Form(),
        Form(transposed=True),
        Form(cut=Cut(ROWS, 1, (2, 1, 3))),
        Form(cut=Cut(COLUMNS, 2, (1, 2)), transposed=True),
        Form(stacked=True, cut=Cut(ROWS, 3, (1, 1))),
        Form(stacked=True),
    ],
)
def test_parts_put_together_are_the_weight(form):
    weight = torch.randn(5, 4, 6, 6) if form.stacked else torch.randn(4, 6, 6)
    torch.testing.assert_close(form.join(form.split(weight)), weight)
    sizes = len(form.cut.sizes) if form.cut else 1
    assert len(form.split(weight[0])) == sizes * (4 if form.stacked else 1)


def _rows(name: str) -> list[list[int]]:
    """Rows (of GPT-2: columns) of q, k and v, written out for 4 heads of 8 and, where grouped, 2 of keys."""
    if name in ("gpt2", "mpt"):
        return [list(range(start, start + 32)) for start in (0, 32, 64)]
    if name in ("bloom", "gpt_neox"):
        return [[head * 24 + part * 8 + row for head in range(4) for row in range(8)] for part in range(3)]
    if name == "phi3":
        return [list(range(32)), list(range(32, 48)), list(range(48, 64))]
    assert name == "falcon"  # of each of two groups two query heads, a key, a value
    return [
        [group * 32 + row for group in range(2) for row in range(16)],
        [group * 32 + 16 + row for group in range(2) for row in range(8)],
        [group * 32 + 24 + row for group in range(2) for row in range(8)],
    ]


FUSED = {
    "gpt2": "transformer.h.0.attn.c_attn.weight",
    "mpt": "transformer.blocks.0.attn.Wqkv.weight",
    "bloom": "transformer.h.0.self_attention.query_key_value.weight",
    "gpt_neox": "gpt_neox.layers.0.attention.query_key_value.weight",
    "phi3": "model.layers.0.self_attn.qkv_proj.weight",
    "falcon": "transformer.h.0.self_attention.query_key_value.weight",
}


@pytest.mark.parametrize(
    ("name", "method", "args"),
    [*((name, "low_rank", {"rank_ratio": 0.25}) for name in FUSED), ("gpt2", "cart", {"rank_ratio": 0.25}),
     ("mpt", "tsv", {}), ("bloom", "iso_c", {}), ("gpt_neox", "iso_cts", {}), ("phi3", "knots", {}),
     ("falcon", "wudi", {"steps": 5, "lr": 1e-3})],
)  # fmt: skip
def test_a_split_merge_is_the_merge_of_the_parts(name, method, args):
    """On real layouts: q, k and v taken out by written-out rows and merged as three plain matrices."""
    models = [tiny(name, seed).double() for seed in range(4)]
    config, fused = models[0].config.to_dict(), FUSED[name]
    base, *experts = [{fused: model.state_dict()[fused]} for model in models]

    def parts(state: dict[str, Tensor]) -> dict[str, Tensor]:
        weight = state[fused].T if name == "gpt2" else state[fused]
        return {f"attn.{part}.weight": weight[rows] for part, rows in zip("qkv", _rows(name), strict=True)}

    call = configure(method, {**args, "split_qkv": True})
    merged = prepare(call, base, dict(zip("abc", experts, strict=True)), config=config).at(0.7)
    plain = configure(method, args)
    wanted = prepare(plain, parts(base), dict(zip("abc", map(parts, experts), strict=True))).at(0.7)
    torch.testing.assert_close(parts(merged), wanted)


STACKS = {
    "mixtral": "layers.0.mlp.experts.down_proj",
    "gpt_oss": "layers.0.mlp.experts.down_proj",
    "dbrx": "blocks.0.ffn.experts.mlp.w2",
}


@pytest.mark.parametrize(
    ("layout", "method"),
    [*((layout, "cart") for layout in STACKS), ("mixtral", "low_rank"), ("gpt_oss", "tsv"), ("dbrx", "iso_c"),
     ("mixtral", "iso_cts"), ("gpt_oss", "knots"), ("dbrx", "core_space"), ("mixtral", "wudi"), ("dbrx", "adamerging")],
)  # fmt: skip
def test_stacked_experts_are_merged_as_listed_ones(layout, method):
    """[E, d, I] of Mixtral; stored transposed: [E, I, d] of gpt-oss, [E·I, d] of DBRX. Against E matrices [out, in]."""
    models = [tiny(layout, seed) for seed in range(4)]
    suffix = STACKS[layout]
    states = [{key: v.double() for key, v in model.state_dict().items() if key.endswith(suffix)} for model in models]
    for seed, state in enumerate(states):
        for key in state:
            state[key] = torch.randn(state[key].shape, generator=torch.Generator().manual_seed(seed)).double()

    def listed(state: dict[str, Tensor]) -> dict[str, Tensor]:
        (stack,) = state.values()
        flat = stack.reshape(-1, 48, 32).mT if layout == "dbrx" else stack.mT if layout == "gpt_oss" else stack
        return {f"mlp.experts.{index}.w2.weight": matrix.contiguous() for index, matrix in enumerate(flat)}

    args = {"steps": 5, "lr": 1e-3} if method == "wudi" else {"on": "cart"} if method == "adamerging" else {}
    base, *experts = states
    config = models[0].config.to_dict()
    merged = prepare(configure(method, args), base, dict(zip("abc", experts, strict=True)), config=config).at(0.7)
    wanted = prepare(
        configure(method, args), listed(base), dict(zip("abc", map(listed, experts), strict=True))
    ).at(0.7)  # fmt: skip
    torch.testing.assert_close(listed(merged), wanted)


@torch.no_grad()
def test_dbrx_experts_are_where_the_model_takes_them():
    """Below each other, cut without being asked: the third expert alone is changed, and only its tokens notice."""
    model = tiny("dbrx", ffn_config={"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 1})
    architecture = architecture_of({}, model.config.to_dict())
    block, seen = model.transformer.blocks[0], {}
    block.ffn.router.register_forward_hook(lambda *call: seen.update(chosen=call[2].argmax(-1).flatten()))
    block.ffn.register_forward_hook(lambda *call: seen.update(out=call[2].flatten(0, -2)))
    tokens = torch.arange(16)[None]
    model(tokens)
    before, chosen = seen["out"], seen["chosen"]
    name, weight = "transformer.blocks.0.ffn.experts.mlp.w1", block.ffn.experts.mlp.w1
    form = architecture.form(name, weight.shape, False)
    weight.data = form.join([part * (0 if expert == 2 else 1) for expert, part in enumerate(form.split(weight.data))])
    model(tokens)
    touched = (seen["out"] != before).any(1)
    assert touched.any()
    assert torch.equal(touched, chosen == 2)


def test_dbrx_without_its_configuration_is_refused_with_a_way_out(tmp_path):
    tiny("dbrx").save_pretrained(tmp_path / "base")
    (tmp_path / "base/config.json").unlink()
    file = str(tmp_path / "base/model.safetensors")
    with pytest.raises(MergeflowError, match=r"the experts below each other.*config\.json next to") as raised:
        check_recipe({"method": "cart", "base": file, "experts": {"a": file}, "out": str(tmp_path / "out")})
    assert "split_qkv" not in str(raised.value)


def test_what_check_says_of_gpt_oss_and_dbrx(tmp_path):
    """Biases of experts are [E, n] and no matrices, and what is left out is embeddings, heads and routers."""
    for name in ("gpt_oss", "dbrx"):
        for seed, place in enumerate(("base", "a")):
            tiny(name, seed).save_pretrained(tmp_path / name / place)
        paths = {"base": str(tmp_path / name / "base"), "experts": {"a": str(tmp_path / name / "a")}}
        plan = check_recipe({"method": "cart", **paths, "split_qkv": True, "out": str(tmp_path / name / "out")})
        text = "\n".join(plan.lines())
        left = [line.split()[2] for line in plan.lines() if line.startswith("not treated")]
        assert left == ["router:", "embedding:", "head:"]
        assert "_bias" not in text
        if name == "dbrx":
            assert "ffn.experts.mlp.w2: rows 4 × 48" in text
        else:
            assert "experts.gate_up_proj: columns 2 × 1, 48 times in turn of each expert" in text


def _one(name: str, *shape: int):
    base = {name: torch.zeros(shape)}
    return base, {"a": {name: torch.randn(shape, generator=torch.Generator().manual_seed(1))}}


@pytest.mark.parametrize(
    ("name", "shape", "config", "message"),
    [
        ("l.0.attention.query_key_value.weight", (96, 32), None, r"no rule says how 1 × l\.\*\.attention"),
        ("l.0.self_attn.qkv_proj.weight", (96, 32), {"model_type": "strange"}, "a model of unknown"),
        ("l.0.self_attn.qkv_proj.weight", (96, 32), {"model_type": "phi3"}, "num_attention_heads.*config.json"),
        (
            "l.0.self_attn.qkv_proj.weight",
            (96, 32),
            {"model_type": "phi3", "num_attention_heads": 7, "num_key_value_heads": 7},
            "config.json is of another model",
        ),
        ("h.0.attn.c_attn.weight", (96, 32), {"model_type": "gpt2"}, "has 32 columns"),  # not a Conv1D
        ("l.0.self_attn.q_proj.weight", (32, 32), {"model_type": "llama"}, "none of the 1 treated matrices is a fused"),
    ],
)
def test_a_layout_that_is_not_known_is_refused(name, shape, config, message):
    with pytest.raises(MergeflowError, match=message):
        prepare(configure("low_rank", {"split_qkv": True}), *_one(name, *shape), config=config)
    prepare(configure("low_rank"), *_one(name, *shape), config=config)


def test_gpt2_and_mpt_are_known_by_their_names():
    """A state dict without config.json: GPT-2's columns were taken for rows."""
    for name, shape, cut in (
        ("h.0.attn.c_attn.weight", (32, 96), Cut(COLUMNS, 1, (32, 32, 32))),
        ("transformer.blocks.0.attn.Wqkv.weight", (96, 32), Cut(ROWS, 1, (32, 32, 32))),
    ):
        assert architecture_of({name: torch.zeros(1)}).form(name, shape, True).cut == cut


def test_check_says_how_each_fused_weight_is_cut(tmp_path):
    tiny("falcon").save_pretrained(tmp_path / "base")
    tiny("falcon", 1).save_pretrained(tmp_path / "a")
    recipe = {"method": "cart", "base": str(tmp_path / "base"), "experts": [str(tmp_path / "a")], "split_qkv": True}
    lines = check_recipe(recipe).lines()
    assert (
        "cut           2 × transformer.h.*.self_attention.query_key_value.weight: rows 16/8/8, 2 times in turn" in lines
    )


def test_a_matrix_thinner_than_the_experts_is_averaged_by_tsv():
    """⌊2/3⌋ = 0 directions each: one each would be three in a plane."""
    taus = torch.randn(3, 2, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    base = {"mlp.w": torch.zeros(2, 16, dtype=torch.float64)}
    merged = prepare(configure("tsv"), base, {f"e{i}": {"mlp.w": tau} for i, tau in enumerate(taus)}).at(1.0)
    torch.testing.assert_close(merged["mlp.w"], taus.mean(0))


def test_every_rule_has_words():
    assert all(rule.words for family in FAMILIES for _, rule in family.fused)
