"""Coloured digits, small: the tasks are those of the transform, and the study on them runs whole."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from pydantic import ValidationError

from mergeflow.data.task import Place, transformed
from mergeflow.errors import MergeflowError
from mergeflow.modalities.classification import Classification
from mergeflow.modalities.nets import mlp
from mergeflow.modalities.vision.models import _check_tag
from mergeflow.modalities.vision.preparation import open_images
from studies.adviser import WAYS
from studies.coloured import middle_of_best
from studies.lab.digits import (
    Adapting,
    ClipBase,
    ColouredWorld,
    Digits,
    Look,
    accuracy,
    coloured,
    open_digits,
    pretrained,
    shown,
    small_transformer,
    ten_digits,
    trained,
    tuned,
)
from studies.lab.rows import select
from tasks.project.studies import find_study_modules, load_declaration
from tests.studies.small_lab import ROOT, run_result
from tests.vision.test_data_real_tasks import make_mnist

WORLD: dict[str, Any] = {
    "source": "suite:pocket-digits",
    "train": 300,
    "validation": 60,
    "test": 60,
    "width": 16,
    "depth": 1,
    "pretrain": {"steps": 20, "batch_size": 32, "learning_rate": 0.004},
    "tune": {"steps": 10, "learning_rate": 0.004},
}


@pytest.fixture(scope="module")
def world() -> ColouredWorld:
    return ColouredWorld.model_validate(WORLD)


@pytest.fixture(scope="module")
def splits(world: ColouredWorld) -> dict[str, Digits]:
    return open_digits(world, ROOT)


def images(task: Classification) -> np.ndarray:
    assert isinstance(task.inputs, torch.Tensor)
    return task.inputs.numpy()


def test_a_colouring_is_that_of_the_transform(splits: dict[str, Digits]) -> None:
    ours = coloured(splits["validation"], 0.8, "r0.8")
    raw = open_images("pocket-digits", "suite:pocket-digits?colour=0.8", root=ROOT)
    for row, example in zip(range(20), raw.splits["validation"](), strict=False):
        seen = transformed(raw, example, Place("validation", row, raw.seed))
        assert seen is not None
        assert int(ours.labels[row]) == seen.label
        np.testing.assert_array_equal(images(ours)[row], np.asarray(seen.edited(seen.read())))


def test_colour_goes_with_parity_as_often_as_it_should_and_noise_moves_labels(
    world: ColouredWorld, splits: dict[str, Digits]
) -> None:
    plain = splits["train"]
    noisy = open_digits(world.model_copy(update={"noise": 0.25, "validation": 16, "test": 16}), ROOT)["train"]
    for digits in (plain, noisy):
        task = coloured(digits, 0.9, "r0.9")
        red = images(task)[..., 0].reshape(len(task), -1).any(axis=1)
        odd = task.labels.numpy() == 1
        for share, is_red in ((0.9, np.asarray(red)[odd]), (0.1, np.asarray(red)[~odd])):
            assert abs(is_red.mean() - share) < 3 * (share * (1 - share) / len(is_red)) ** 0.5
    assert (plain.odd == plain.digit % 2).all()
    flipped = (noisy.odd != plain.odd).mean()
    assert abs(flipped - 0.25) < 3 * (0.25 * 0.75 / 300) ** 0.5
    assert (noisy.grey == plain.grey).all()


def test_tuning_learns_a_colour_from_a_base_that_all_experts_share(
    world: ColouredWorld, splits: dict[str, Digits]
) -> None:
    base, again = (pretrained(world, splits, 0) for _ in range(2))
    assert all((base.start[name] == again.start[name]).all() for name in base.start)
    longer = Adapting(steps=40, learning_rate=0.004)
    expert = trained(base.model, base.start, coloured(splits["train"], 0.95, "a"), longer, 0)
    shares = accuracy(base.model, expert, {f"{r}": coloured(splits["test"], r, f"{r}") for r in (0.95, 0.05)})
    assert shares["0.95"] > 80
    assert shares["0.05"] < 20


@pytest.mark.slow
@pytest.mark.parametrize("head", ["zero-shot", "trained"])
def test_a_clip_begins_with_a_head_from_prompts_and_learns_a_colour(
    world: ColouredWorld, splits: dict[str, Digits], head: str
) -> None:
    clip = world.model_copy(update={"clip": ClipBase(head=head, pretrained="pocket8")})
    white = shown(splits["test"], Look(), "white")
    ten = ten_digits(clip, splits, 0)
    assert accuracy(ten.model, ten.start, {"white": white})["white"] > 30  # chance is 10
    base = pretrained(clip, splits, 0)
    assert ("rows" in base.start) == (head == "trained")
    expert = tuned(clip, base, splits["train"], [0.95], 20, 0)["r0.95"]
    assert all((expert[name] != value).any() for name, value in base.start.items() if name == "rows")
    shares = accuracy(base.model, expert, {f"{r}": coloured(splits["test"], r, f"{r}") for r in (0.95, 0.05)})
    assert shares["0.95"] > 80
    assert shares["0.05"] < 20


def test_a_clip_takes_pictures_of_its_own_size(world: ColouredWorld, splits: dict[str, Digits]) -> None:
    with pytest.raises(MergeflowError, match="takes pictures of 32 pixels a side and the world's `size` is 28"):
        pretrained(world.model_copy(update={"clip": ClipBase(), "size": 28}), splits, 0)
    options = load_declaration(ROOT, find_study_modules(ROOT)["structure"], "structure").options
    with pytest.raises(ValidationError, match="leave `clip` out"):
        options.model_validate({"seeds": [0], "world": WORLD | {"clip": {}}, "lora_rate": 0.1})


def test_nets_that_are_drawn_at_once_are_those_that_are_drawn_alone(world: ColouredWorld) -> None:
    # The runner's stages are threads of one process, and torch has one generator for all of them.
    makers = [lambda seed: small_transformer(world, 10, seed).module, lambda seed: mlp([64, 64, 64, 10], seed)]
    jobs = [(make, seed) for seed in range(12) for make in makers]
    alone = [make(seed).state_dict() for make, seed in jobs]
    with ThreadPoolExecutor(8) as pool:
        for expected, concurrent in zip(alone, pool.map(lambda job: job[0](job[1]).state_dict(), jobs), strict=True):
            assert all(torch.equal(expected[name], concurrent[name]) for name in expected)


def test_a_source_without_digits_is_refused(world: ColouredWorld) -> None:
    with pytest.raises(MergeflowError, match="classes that name a number"):
        open_digits(world.model_copy(update={"source": "suite:pocket8/textures"}), ROOT)


SYSTEMS = ["P2", *["P5"] * 3, *["P6"] * 11, *["P7"] * 2, *["P8"] * 3]


def check_what_the_second_vector_does(rows: pd.DataFrame) -> None:
    """Check what the paper says of the sign of λ, which survives few steps and few pictures.

    Chance is 50 % everywhere. The limits are half of what was measured or less; a wrong sign changes the sign of each
    difference.
    """
    alpha = select(rows, part="pair", first="r0.95").set_index("second").alpha
    assert alpha["r0.9"] - alpha["r0.05"] > 1, "α̂ tells an aligned from a contradictory task"
    curve = select(rows, part="curve", case="contradictory").set_index("scale")
    taken, added = curve.loc[-1.0], curve.loc[2.0]
    assert added.validation_2 > taken.validation_2 + 25, "a contradictory task is learnt where λ > 0"
    assert taken.validation_1 > added.validation_1 + 25, "at the cost of T1"
    aligned = select(rows, part="chosen", way="addition", case="aligned")
    assert (aligned[["test_1", "test_2"]] > 80).all(axis=None), "aligned tasks are added"
    by_scale = select(rows, part="grid").groupby("scale").validation_1.mean()
    assert by_scale[-2.0] > by_scale[3.0] + 15, "the expert with opposite colours helps the third task where λ_2 < 0"
    for way, sign in (("addition", 1), ("unlearning", -1)):
        for chosen in select(rows, part="chosen", way=way).itertuples():
            tried = select(rows, part="curve", case=chosen.case).set_index("scale")
            goal = tried.validation_1 + sign * tried.validation_2
            assert goal[chosen.scale] == pytest.approx(goal.max()), "no other λ was better on validation"


@pytest.mark.slow
def test_coloured_digits_runs_whole(bare_root: Path, tmp_path: Path) -> None:
    options = {"seeds": [0], "world": WORLD, "lengths": [40], "samples": 16, "step": 1.0}
    result = run_result(bare_root, "coloured_digits", tmp_path / "scratch", **options)
    rows = result.rows
    assert set(rows.part) == {"pair", "curve", "chosen", "grid", "target"}
    # without ΔΨ_2 task 1 is the same in every case
    assert select(rows, part="chosen", way="λ = 0").test_1.nunique() == 1
    grid = select(rows, part="grid").set_index(["scale_1", "scale"])
    assert len(grid) == 36
    assert [finding.system for finding in result.findings] == SYSTEMS
    check_what_the_second_vector_does(rows)
    curve = select(rows, part="curve", case="contradictory")
    assert curve[curve.scale <= 0].validation_2.max() < 30, "every λ ≤ 0 unlearns it"
    assert curve[["validation_1", "validation_2"]].min(axis=1).max() < 70, "no λ adds it"
    promised = grid[grid["promised_0.2"] == 1]
    assert len(promised), "Equation 7 promises some points"
    assert promised.validation_1.min() > 70, "what Equation 7 promises is good"
    mirrored = [(-first, -two) for first, two in promised.index if (-first, -two) in grid.index]
    assert grid.loc[mirrored].validation_1.max() < 60, "and its mirror image is at chance or below"


@pytest.mark.parametrize(
    "study",
    [
        pytest.param("coloured_clip", marks=pytest.mark.slow),
        pytest.param("coloured_clip_head", marks=pytest.mark.nightly),
    ],
)
def test_the_same_is_measured_of_a_clip(study: str, bare_root: Path, tmp_path: Path) -> None:
    chosen = yaml.safe_load((ROOT / "studies/params.yaml").read_text())["studies"][study]
    world = {**chosen["world"], "train": 64, "validation": 16, "test": 16}
    options = {"seeds": [0], "world": world, "lengths": [4], "samples": 16, "step": 2.5}
    result = run_result(bare_root, study, tmp_path / "scratch", **options)
    assert [finding.system for finding in result.findings] == SYSTEMS
    grid = select(result.rows, part="grid")
    assert set(zip(grid.scale_1, grid.scale, strict=True)) == {(a, b) for a in (-2.0, 0.5, 3.0) for b in (-2, 0.5, 3)}
    check_what_the_second_vector_does(result.rows)


@pytest.mark.slow
def test_the_adviser_is_measured_on_pairs(bare_root: Path, tmp_path: Path) -> None:
    options = {"seeds": [0], "world": WORLD, "colours": [0.95, 0.5, 0.05], "lengths": [40], "sizes": [2]}
    result = run_result(bare_root, "adviser", tmp_path / "scratch", **options)
    sets, edits = (select(result.rows, part=part) for part in ("sets", "edits"))
    assert (len(sets), len(edits)) == (3, 6)
    assert set(sets.tried_grid) == {20}
    assert set(sets.tried_lengths) == {4}
    assert sets[[f"test_{way}" for way in WAYS]].apply(lambda column: column.between(0, 100)).all(axis=None)
    assert list(sets.low_lengths * 2) == pytest.approx(list(sets.high_lengths))
    names = [" ".join(sorted(pair, reverse=True)) for pair in zip(edits.keep, edits.forget, strict=True)]
    near, far = (edits[[name == pair for name in names]] for pair in ("r0.95 r0.5", "r0.95 r0.05"))
    assert far.changes.max() < near.changes.min() - 0.4
    assert far.left.max() < 25, "a contradictory task is unlearned, from 50 % where nothing is"
    assert far.loss.max() < 15, "and the other is kept"
    assert near.loss.mean() > far.loss.mean(), "which is not what a less contradictory one costs"
    added = sets.set_index("tasks")
    assert added.test_grid["r0.95 r0.05"] < added.test_grid["r0.95 r0.5"] - 8, "no λ adds contradictory tasks"
    cosines = edits.groupby(names).cosine.max()
    lows = list(added.low_lengths[cosines[added.index].sort_values().index])
    assert lows == sorted(lows, reverse=True), "the longer the sum of two task vectors, the smaller is λ"
    assert lows[0] > 1.15 * lows[-1]
    assert len(result.findings) == 10


def test_mnist_is_coloured_and_a_real_transformer_built_by_configuration(tmp_path: Path) -> None:
    (tmp_path / "inputs/torchvision").mkdir(parents=True)
    make_mnist(tmp_path / "inputs/torchvision")
    studies = yaml.safe_load((ROOT / "examples/theory/studies.yaml").read_text())["studies"]
    few = {"train": 32, "validation": 16, "test": 16}
    real = ColouredWorld.model_validate(studies["structure"]["world"] | few)
    clip = ColouredWorld.model_validate(studies["adviser"]["world"] | few).clip
    assert clip
    assert (clip.architecture, clip.pretrained, clip.head) == ("ViT-B-16-quickgelu", "openai", "trained")
    _check_tag(clip.architecture, clip.pretrained)
    digits = open_digits(real, tmp_path)
    assert digits["train"].grey.shape[1:] == (224, 224)
    assert (digits["test"].odd == digits["test"].digit % 2).all()
    net = small_transformer(real, 2, 0)
    assert 21e6 < sum(value.numel() for value in net.state().values()) < 23e6  # ViT-S/16
    seen = coloured(digits["test"], 0.95, "r0.95").log_p(net, torch.arange(2))
    assert seen.shape == (2, 2)


def test_of_equally_good_points_the_middle_one_is_taken() -> None:
    assert middle_of_best({(0.0,): 90.0, (0.2,): 95.0, (0.4,): 95.0, (0.6,): 95.0 - 1e-12, (0.8,): 94.0}) == (0.4,)
    assert middle_of_best({(0.0,): 95.0, (0.2,): 95.0}) == (0.0,)
    plateau = {(first, two): 95.0 for first in (0.0, 1.0, 2.0) for two in (0.0, 1.0, 2.0)}
    assert middle_of_best(plateau) == (1.0, 1.0)
    assert middle_of_best({**plateau, (2.0, 0.0): 96.0}) == (2.0, 0.0)
