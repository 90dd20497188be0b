"""What unlearning is held to: which weight is chosen, in accuracies, losses and Rouge-L."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flows.rebuild.unlearn import Bounds, Figures, Tried, choose, written
from mergeflow.errors import MergeflowError
from mergeflow.modalities.causal.modality import PackedText, Questions, cut

BEFORE = Figures({"tale": 0.6, "rest": 0.6}, {"tale": 1.0, "rest": 1.0})
BOUNDS = Bounds()
BASE = Figures({"tale": 0.4, "rest": 0.5}, {"tale": 2.0, "rest": 1.5})


def tried(scale: float, tale: tuple[float, float], rest: tuple[float, float], bounds: Bounds = BOUNDS) -> Tried:
    figures = Figures({"tale": tale[0], "rest": rest[0]}, {"tale": tale[1], "rest": rest[1]})
    return Tried(scale, figures, bounds.criteria(figures, BEFORE, BASE, "tale"))


def test_of_texts_the_loss_counts_beside_the_accuracy() -> None:
    alone = tried(0.0, (0.5, 1.4), (0.6, 1.0))
    likely = tried(-0.5, (0.38, 1.9), (0.6, 1.0))  # few of its tokens are named, and still it is likelier than before
    both = tried(-1.0, (0.39, 2.1), (0.6, 1.04))
    costly = tried(-2.0, (0.1, 5.0), (0.6, 1.06))
    assert [trial.forgotten for trial in (alone, likely, both, costly)] == [0, 1, 2, 2]
    assert [trial.keeps for trial in (alone, likely, both, costly)] == [True, True, True, False]
    assert choose([alone, likely, both, costly], "tale") is both
    assert [criterion.form for criterion in both.criteria] == ["accuracy", "accuracy", "loss", "loss"]


def test_of_texts_what_is_recited_counts_beside_the_loss() -> None:
    before = Figures({"tale": 0.6, "rest": 0.6}, {"tale": 1.0, "rest": 1.0}, {"tale": 0.5, "rest": 0.4})
    base = Figures({"tale": 0.4, "rest": 0.5}, {"tale": 2.0, "rest": 1.5}, {"tale": 0.2, "rest": 0.2})

    def held(tale: float, rest: float, bounds: Bounds = BOUNDS) -> tuple[bool, bool]:
        figures = Figures({"tale": 0.39, "rest": 0.6}, {"tale": 2.1, "rest": 1.0}, {"tale": tale, "rest": rest})
        judged = bounds.criteria(figures, before, base, "tale")
        assert [criterion.form for criterion in judged] == ["accuracy", "accuracy", "loss", "loss", "recall", "recall"]
        weight = Tried(-1.0, figures, judged)
        return weight.forgotten == 3, weight.keeps

    assert held(0.2, 0.35) == (True, True)
    assert held(0.21, 0.34) == (False, False)
    assert held(0.29, 0.3, Bounds(fall=0.1, recited=0.3)) == (True, True)


def test_a_bound_that_is_given_replaces_the_bases_figure() -> None:
    trial = tried(-1.0, (0.3, 1.6), (0.6, 1.3), Bounds(at_most=0.2, at_least=1.5, rise=0.3))
    assert {(criterion.kept, criterion.form): criterion.holds for criterion in trial.criteria} == {
        (False, "accuracy"): False,
        (True, "accuracy"): True,
        (False, "loss"): True,
        (True, "loss"): True,
    }


@pytest.mark.slow
@given(st.lists(st.tuples(st.floats(-2, 0), st.floats(0, 1), st.floats(0.5, 0.6)), min_size=1))
def test_the_chosen_weight_keeps_the_others_and_none_that_does_forgets_more(
    rows: list[tuple[float, float, float]],
) -> None:
    """Without texts the accuracies alone decide."""
    before, base = Figures({"tale": 0.6, "rest": 0.6}), Figures({"tale": 0.4, "rest": 0.5})
    weights = [Tried(0.0, before, Bounds().criteria(before, before, base, "tale"))]
    for scale, tale, rest in rows:
        figures = Figures({"tale": tale, "rest": rest})
        weights.append(Tried(scale, figures, Bounds().criteria(figures, before, base, "tale")))
    able = [trial for trial in weights if trial.scale < 0 and trial.figures.accuracy["rest"] >= 0.6 - 0.02 - 1e-12]
    if not any(trial.scale < 0 for trial in weights):
        return
    if not able:
        with pytest.raises(MergeflowError, match="no weight below 0 for 'tale'"):
            choose(weights, "tale")
        return
    chosen = choose(weights, "tale")
    assert chosen.keeps
    assert chosen.figures.accuracy["tale"] == min(trial.figures.accuracy["tale"] for trial in able)


def test_where_leaving_it_out_costs_too_much_already_the_message_says_so() -> None:
    aligned = [tried(0.0, (0.5, 1.2), (0.5, 1.4)), tried(-0.1, (0.5, 1.2), (0.4, 1.5))]
    with pytest.raises(MergeflowError, match=r"at λ = -0\.1 rest must be kept.*leaving it out \(λ = 0\) breaks a boun"):
        choose(aligned, "tale")


def test_texts_are_told_from_questions() -> None:
    texts = PackedText("tale", cut(np.arange(20), 8, 0), torch.device("cpu"))
    asked = Questions("exam", np.zeros((1, 3)), np.ones((1, 2)), torch.zeros(1), 0, torch.device("cpu"))
    assert list(written({"tale": texts, "exam": asked})) == ["tale"]


@pytest.mark.parametrize(
    "bounds",
    [Bounds(lose=5), Bounds(at_most=-0.1), Bounds(rise=-1), Bounds(at_least=-1), Bounds(fall=5), Bounds(recited=2)],
)
def test_bounds_that_cannot_be_meant_are_refused(bounds: Bounds) -> None:
    with pytest.raises(MergeflowError, match="expected 0"):
        bounds.check()
