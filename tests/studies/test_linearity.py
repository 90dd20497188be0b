"""The studies of linearity, reduced: each runs whole on small nets, and what survives the reduction is asserted."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from mergeflow.errors import MergeflowError
from mergeflow.linearity.affine import combine
from mergeflow.modalities.nets import mlp
from mergeflow.modality import Network
from studies import linearity_spawning
from studies.lab.claims import UNTESTED
from studies.lab.linearity import direction, loss_gaps, with_statistics, worst_share
from studies.lab.rows import select
from studies.linearity_edits import edited, edits
from tests.studies.small_lab import ROOT, check_two_processes, rows_by_study, run_result
from tests.studies.toy_lab import make_toy_lab

pytestmark = pytest.mark.slow

FAST = {"learning_rate": 0.1, "epochs": 3, "batch_size": 32}
DIGITS: dict[str, Any] = {
    "source": "suite:pocket-digits",
    "angles": [0, 22.5, 67.5],
    "size": 14,
    "train": 800,
    "test": 150,
    "architecture": "mlp",
    "hidden": [32, 32],
    "pretrain": FAST,
    "tune": FAST,
}
SPLITS: dict[str, Any] = {
    **DIGITS,
    "angles": [],
    "splits": ["classes=0-1", "classes=2-3", "classes=4-5"],
    "size": 8,
    "train": 96,
    "test": 40,
    "architecture": "resnet20",
    "width": 8,
    "pretrain": {"learning_rate": 0.05, "epochs": 4, "batch_size": 16},
    "tune": {"learning_rate": 0.05, "epochs": 3, "batch_size": 16},
}
CHOICES: dict[str, dict[str, Any]] = {
    "linearity_pairs": {"worlds": {"digits": DIGITS}},
    "linearity_controls": {"digits": DIGITS, "pair": [22.5, 67.5], "splits": SPLITS, "rates": [0.05, 0.02]},
    "linearity_matching": {"worlds": {"digits": {**DIGITS, "angles": [0, 22.5, 45]}, "splits": SPLITS}},
    "linearity_edits": {"world": DIGITS, "scale": 0.4, "scales": [0.4]},
    "linearity_stitches": {"world": DIGITS, "add": [0.3, 1.0], "negate": [0.0, 1.0]},
    "linearity_why": {
        "world": DIGITS,
        "stages": [20, 75],
        "regimes": {"near": {"task": "22.5°", "rates": [0.005, 0.01, 0.02], "steps": 25}},
        "sample": 150,
    },
    "linearity_averages": {
        "world": DIGITS,
        "task": "22.5°",
        "rates": [0.02, 0.05],
        "epochs": [1, 2],
        "orders": 1,
        "averages": [3],
    },
    "linearity_spawning": {"world": {**SPLITS, "splits": ["classes=0-3"]}, "spawn": [0, 3], "epochs": 4},
}
Run = Callable[[str], pd.DataFrame]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return rows_by_study(ROOT, tmp_path_factory.mktemp("linearity"), CHOICES, seeds=[0])


def test_two_processes_measure_the_same_to_the_bit(tmp_path: Path) -> None:
    check_two_processes("linearity_edits", tmp_path, **{**CHOICES["linearity_edits"], "seeds": [0, 1]})


def test_features_of_averaged_weights_are_the_averaged_features(run: Run) -> None:
    rows = run("linearity_pairs")
    features = select(rows, part="features")
    assert set(features.alpha) == {0.25, 0.5, 0.75}
    assert float(worst_share(features[features.layer != "logits"]).max()) < 0.35
    assert set(select(rows, part="simplex").models) == {2}
    assert float(loss_gaps(select(rows, part="paths")).gap.max()) > 0.1


def test_no_pretraining_is_less_linear_and_matching_brings_some_of_it_back(run: Run) -> None:
    mean = select(run("linearity_controls"), world="digits").groupby("combination").distance.mean()
    assert mean["normal"] < mean["weight matching"] < mean["none"]
    assert mean["common start"] < mean["weight matching"]
    assert mean["none"] > 3 * mean["normal"]


def test_matching_mends_averages_of_different_starts_and_leaves_others_alone(run: Run) -> None:
    rows = run("linearity_matching")
    assert len(rows) == 2 * 3 * 2, "worlds, starts, one task and two"
    by = rows.set_index(["world", "start", "tasks"])
    for tasks in ("one task", "two tasks"):
        tuned, apart = by.loc["digits", "pre-trained", tasks], by.loc["digits", "different starts", tasks]
        assert tuned.moved < 5
        assert apart.moved > 50
        assert apart.accuracy_matched > apart.accuracy_plain + 10
        assert apart.loss_matched < apart.loss_plain
    assert by.loc["splits", "different starts", "one task"].moved > 50


def test_edits_are_linear_and_a_zero_edit_is_exact(run: Run) -> None:
    rows = run("linearity_edits")
    two, single = (select(rows, equation=f"Eq. 2, ends {ends}") for ends in ("2λ", "λ"))
    assert float(worst_share(pd.concat([two, single])).max()) < 0.2
    assert float(worst_share(select(rows, equation="Eq. 3")).max()) < 0.5
    assert single.error.max() < two.error.max(), "longer edits are less linear"
    assert select(rows, equation="Eq. 4").error.max() < 0.3


def test_edits_add_up_to_the_weights_of_the_equations() -> None:
    """Both are added (Eq. 2), the base comes back (Eq. 3), one is taken away (Eq. 4)."""
    start = {"w": torch.tensor([5.0, 5.0])}
    tuned = {"i": {"w": torch.tensor([6.0, 5.0])}, "j": {"w": torch.tensor([5.0, 6.0])}}
    moved = {}
    for name, (edit, _) in edits(tuned, 0.4, [0.3]).items():
        ends = [edited(start, tuned, end) for end in edit.weights]
        moved[name] = (combine(ends, list(edit.weights.values()))["w"] - start["w"]).tolist()
    expected = {"2λ i – j": [0.4, 0.4], "λ i – j": [0.2, 0.2], "3 i 0.3": [0, 0], "4 i 0.3": [-0.3, 0]}
    expected |= {"3 j 0.3": [0, 0], "4 j 0.3": [0, -0.3]}
    assert moved == {name: pytest.approx(value, abs=1e-6) for name, value in expected.items()}


def test_negation_by_features_and_by_weights_agree(run: Run) -> None:
    rows = select(run("linearity_stitches"), what="negation")
    still = select(rows, scale=0.0)
    assert len(still[["seed", "tasks", "first", "second"]].drop_duplicates()) == 2, "λ = 0 is the base"
    wide = rows.pivot(index=["seed", "index", "tasks", "scale"], columns="kind", values="second")
    assert (wide.mirrored - wide.negated).abs().mean() < 12


def test_the_second_order_term_predicts_near_pairs_and_the_bound_bounds_them(run: Run) -> None:
    rows = run("linearity_why")
    assert (rows.second_order <= rows["product"] * 1.01).all()
    assert (rows.delta <= rows["product"]).mean() >= 0.9
    assert (rows.flatness > 0).all()
    assert 0.4 < rows.second_order.abs().sum() / rows.delta.sum() < 1.2  # 0.66 here; twice or half the factor fails


def test_averaged_weights_are_as_good_as_averaged_logits(run: Run) -> None:
    rows = select(run("linearity_averages"), part="triples")
    assert len(rows) == 4, "C(4, 3) triples"
    assert (rows.weights - rows.logits).abs().max() < 8


def test_a_soup_of_training_runs_is_measured_as_nets_trained_here_are(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    settings = {f"soup_{n}": {"tasks": 1, "learning_rate": rate} for n, rate in enumerate((0.01, 0.02, 0.04, 0.05))}
    lab = make_toy_lab(tmp_path_factory.mktemp("soup") / "lab", settings, classes=6, widths=[32, 32])
    rows = run_result(lab, "texts_soups", tmp_path, runs=list(settings), task="north", averages=[2, 4], images=64).rows
    of_triples, features = select(rows, part="triples"), select(rows, part="features")
    assert set(of_triples.groupby("seed").nets.nunique()) == {4}, "C(4, 3)"
    assert (of_triples.weights - of_triples.logits).abs().max() < 8
    assert set(features.combination) == {"2 nets", "4 nets"}
    assert features.distance.max() < features.base.max()
    with pytest.raises(MergeflowError, match="west"):
        run_result(lab, "texts_soups", tmp_path / "other", runs=list(settings), task="west", averages=[2], images=64)


def test_training_together_makes_features_linear(run: Run) -> None:
    rows = select(run("linearity_spawning"), part="features")
    last = select(rows, depth=rows.depth.max()).set_index("k").distance
    assert last[3] < last[0]


def test_spawning_is_judged_with_either_statistics_of_the_middle() -> None:
    options = linearity_spawning.Options.model_validate({**CHOICES["linearity_spawning"], "seeds": [0, 1, 2]})
    rows = pd.DataFrame(
        {
            "part": "barriers",
            "seed": seed,
            "k": k,
            "ends": 90,
            "interpolated": averaged + seed,
            "recomputed": 0.1 * seed,
        }
        for seed in options.seeds
        for k, averaged in ((0, 60), (3, -5))
    )
    ending = [claim for claim in linearity_spawning.claims_on_spawning(options) if "end in one" in str(claim.says)]
    verdicts = {claim.setting: claim.judge(rows).verdict for claim in ending}
    assert verdicts == {"statistics averaged": "holds", "statistics computed again": UNTESTED}


def test_a_net_without_batchnorm_keeps_its_weights() -> None:
    net = Network(mlp([4, 3, 2]))
    state = {name: value + 1 for name, value in net.state().items()}
    state_again = with_statistics(net, state, [])
    assert all(torch.equal(state_again[name], value) for name, value in state.items())


def test_baselines_that_are_nothing_decide_nothing() -> None:
    claim = direction("L1", "It holds.", lambda rows: rows)
    rows = [{"seed": seed, "distance": 0.001, "base": base, "coef": 1.0} for seed in range(3) for base in (0.0, 0.02)]
    assert claim.judge(pd.DataFrame(rows)).holds is None
    decided = [*rows, *({"seed": seed, "distance": 0.001, "base": 0.5, "coef": 1.0} for seed in range(3))]
    assert claim.judge(pd.DataFrame(decided)).holds is True


def test_a_path_with_a_hill_or_with_uneven_ends_is_not_connected() -> None:
    def gap(*losses: float) -> float:
        path = [{"alpha": 1 - n / (len(losses) - 1), "loss": loss} for n, loss in enumerate(losses)]
        return float(loss_gaps(pd.DataFrame(path).assign(seed=0, pair="i – j", on="i")).gap.iloc[0])

    assert gap(1.0, 1.0, 1.0) == 0
    assert gap(1.0, 1.5, 1.0) == pytest.approx(0.5)
    assert gap(1.0, 1.2, 1.8) == pytest.approx(0.8)
