"""Pruning by rows: against its definition, on layouts that store neurons otherwise, and what it is for."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2Model, MixtralConfig, MixtralModel

from mergeflow.errors import MergeflowError
from mergeflow.merging import configure, prepare
from studies.theory.reduced import row_pruned
from tests.merging import helpers
from tests.merging.helpers import draw

MLP = "blocks.0.mlp.c_fc.weight"


def direction(taus, weights=None, name=MLP, **args):
    return helpers.direction("row_prune", taus, weights, name=name, **args)


def pruned(tau, keep, smallest=False):
    """The rows one by one."""
    norms = [float(row.square().sum()) for row in tau]
    order = sorted(range(len(norms)), key=lambda index: norms[index] if smallest else -norms[index])
    strongest = set(order[: int(keep * len(norms) + 1e-9)])
    return torch.stack([row if index in strongest else torch.zeros_like(row) for index, row in enumerate(tau)])


@settings(max_examples=40)
@given(st.integers(2, 9), st.integers(2, 6), st.floats(0, 1), st.booleans(), st.integers(0, 99))
def test_it_is_what_its_formula_says(rows, columns, keep, smallest, seed):
    taus, weights = draw(3, rows, columns, seed=seed), [0.5, -1.0, 2.0]
    expected = sum(weight * pruned(tau, keep, smallest) for weight, tau in zip(weights, taus, strict=True))
    which = "smallest" if smallest else "largest"
    change = direction(taus, {f"e{index}": weight for index, weight in enumerate(weights)}, keep=keep, rows=which)
    torch.testing.assert_close(change, expected)


def test_keeping_all_is_task_arithmetic_and_keeping_nothing_leaves_the_base():
    taus = draw(3, 6, 4)
    assert torch.equal(direction(taus, keep=1.0), taus.sum(0))
    assert not direction(taus, keep=0.0).any()


def test_of_rows_of_one_length_the_first_stay():
    change = direction(torch.ones(1, 4, 3, dtype=torch.float64), keep=0.5)
    assert change.any(1).tolist() == [True, True, False, False]


def test_attention_stays_whole_unless_asked_for():
    attention = "blocks.0.attn.out_proj.weight"
    tau = {MLP: draw(6, 4), attention: draw(6, 4, seed=1)}
    base = {name: torch.zeros_like(value) for name, value in tau.items()}

    def rows_left(**args):
        changes = prepare(configure("row_prune", {"keep": 0.5, **args}), base, {"a": tau}).direction
        return {name: int(value.any(1).sum()) for name, value in changes.items()}

    assert rows_left() == {MLP: 3, attention: 6}
    assert rows_left(matrices="attn_mlp") == {MLP: 3, attention: 3}
    with pytest.raises(MergeflowError, match=r"`matrices: mlp` takes none of the matrices"):
        direction(draw(2, 6, 4), name=attention)


def test_a_neuron_is_a_column_where_weights_are_stored_the_other_way_round():
    torch.manual_seed(0)
    model = GPT2Model(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=16, n_positions=8))
    base = {name: value.detach() for name, value in model.state_dict().items()}
    expert = {name: value + torch.randn_like(value) for name, value in base.items()}
    prepared = prepare(configure("row_prune", {"keep": 0.25}), base, {"a": expert}, config=model.config.to_dict())
    moved = prepared.direction["h.0.mlp.c_fc.weight"]  # [in, out]
    assert moved.shape == (8, 32)
    assert int(moved.any(0).sum()) == 8
    assert int(moved.any(1).sum()) == 8


def test_each_expert_of_a_stack_keeps_its_own_share():
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = MixtralConfig(**sizes, num_key_value_heads=1, num_local_experts=3, vocab_size=16)
    base = {name: value.detach() for name, value in MixtralModel(config).state_dict().items()}
    expert = {name: value + torch.randn_like(value) for name, value in base.items()}
    changes = prepare(configure("row_prune", {"keep": 0.5}), base, {"a": expert}, config=config.to_dict()).direction
    name, down = next((name, value) for name, value in changes.items() if name.endswith("down_proj"))
    assert down.shape == (3, 8, 12), name
    assert down.any(-1).sum(-1).tolist() == [4, 4, 4]


def test_the_large_rows_of_a_bimodal_task_vector_are_enough():
    """Corollary 2's picture: few neurons have moved far, and the rest hardly at all."""
    tau = torch.cat([draw(4, 16), 0.01 * draw(28, 16, seed=1)])[torch.randperm(32)]
    inputs = draw(16, 200, seed=2)

    def lost(which):
        strongest = direction(tau[None], keep=0.125, rows=which)
        return float(((tau - strongest) @ inputs).norm() / (tau @ inputs).norm())

    assert lost("largest") < 0.05
    assert lost("smallest") > 0.95


def test_it_prunes_what_the_study_of_structure_prunes():
    names = ("transformer.resblocks.0.mlp.c_fc.weight", "transformer.resblocks.0.attn.out_proj.weight")
    taus = {name: draw(8, 4, seed=index) for index, name in enumerate(names)}
    base = {name: torch.zeros_like(value) for name, value in taus.items()}
    changes = prepare(configure("row_prune", {"keep": 0.25, "scale": 1.0}), base, {"a": taus}).direction
    for name, value in row_pruned(taus, 0.25).vector.items():
        assert torch.equal(changes[name], value), name


def test_a_share_above_one_is_refused():
    with pytest.raises(MergeflowError, match="keep"):
        direction(draw(1, 4, 4), keep=1.5)
