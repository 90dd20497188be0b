"""Study `gradients` on small nets, and its verdicts on made-up rows."""

from pathlib import Path
from statistics import fmean

import pytest
import torch

from mergeflow.modalities.classification import Classification
from mergeflow.modality import Network
from studies.lab.inputs import Laboratory
from studies.old.papers.gradients import study as gradients
from studies.old.papers.gradients.vectors import COSINES, vector_cosines, vector_findings
from studies.old.results import StudyResult
from studies.old.rows import Row
from studies.theory.gradients import mean_gradient
from tests.studies.small_lab import run_study, study_io
from tests.studies.toy_lab import NAMES


class Pixels(torch.nn.Module):
    """Class logits as a linear function of the pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(12, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.linear(images.flatten(1) / 255)
        return features


def test_the_gradient_in_chunks_is_that_of_the_mean_loss() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (7, 2, 2, 3), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, 3, (7,), generator=generator)
    model = Pixels()
    torch.nn.functional.cross_entropy(model(images), labels).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    found = mean_gradient(Network(model), Classification("t", images, labels), batch_size=3)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.slow
def test_small_nets_show_what_the_paper_shows(toy_lab: Path, tmp_path: Path) -> None:
    """G6: how far an epoch goes decides which direction the next gradients have."""
    runs = {"paper": "cold", "hot": "converged"}
    folder = run_study(toy_lab, "gradients", tmp_path, runs=runs, images=100, steps=[1e-5])
    result = StudyResult.read(folder)
    share, cosine, vectors, tasks = result.tables
    kinds = [(run, kind) for run in runs for kind in ("batches", "all images", "step")] + [("GD", "GD 1e-05")]
    assert [(row["run"], row["gradient"]) for row in share.rows] == kinds
    assert {str(row["epoch 1"])[:4] for row in cosine.rows} == {"1.00"}
    assert float(str(cosine.rows[-1]["epoch 2"])[:4]) > 0.99  # a tiny step of gradient descent keeps the gradient
    assert [row["task"] for row in tasks.rows] == list(NAMES)
    assert (folder / "epochs.svg").exists()
    for run, kind in kinds:
        sums: dict[tuple[int, str], float] = {}
        for row in result.rows:
            if (row["run"], row["kind"]) == (run, kind):
                sums[row["seed"], row["task"]] = sums.get((row["seed"], row["task"]), 0.0) + row["share"]
        assert sums
        assert all(value == pytest.approx(1) for value in sums.values())

    def mean(run: str, kind: str, epoch: int) -> float:
        wanted = (run, kind, epoch)
        return fmean(r["cosine"] for r in result.rows if (r["run"], r["kind"], r["epoch"]) == wanted)

    assert mean("paper", "all images", 2) > 0.95
    assert mean("hot", "all images", 2) < mean("paper", "all images", 2) - 0.1
    assert [finding.ours for finding in result.findings] == [False] * 3 + [True, False] + [True] * 5
    assert [row["cosine"] for row in vectors.rows] == [*COSINES.values()] * 2
    last = f"epoch {max(row['epoch'] for row in result.rows if row['whole'] is not None)}"
    assert {str(row[last])[:4] for row in vectors.rows if row["cosine"] == COSINES["whole"]} == {"1.00"}


def test_a_cosine_is_with_the_gradient_at_the_base(toy_lab: Path, tmp_path: Path) -> None:
    inputs = Laboratory(study_io(toy_lab, "gradients", tmp_path, runs={"paper": "converged"}))
    options = gradients.Options(runs={"paper": "converged"}, images=100, steps=[])
    found = {row["kind"]: row for row in gradients._measure(inputs, options, "paper", "north", 0)["rows"]}
    data, states = gradients._subset(inputs, "north", 100), [inputs.base, inputs.run("converged").epoch(0, "north", 1)]
    flat = []
    for state in states:
        inputs.model.load(state)
        flat.append(torch.cat([one.flatten() for one in mean_gradient(inputs.model, data).values()]))
    assert found["all images"]["cosine"][1] == pytest.approx(float(torch.cosine_similarity(*flat, dim=0)), abs=1e-6)


def test_a_small_step_of_full_batch_descent_goes_down_the_gradient() -> None:
    base, gradient = {"w": torch.zeros(2)}, {"w": torch.tensor([3.0, 4.0])}
    states = [{"w": torch.tensor([-3.0, -4.0])}, {"w": torch.tensor([-4.0, 3.0])}]
    found = vector_cosines(base, states, gradient)
    assert found == {"whole": pytest.approx([0, 1]), "descent": pytest.approx([1, 0])}


def made_up(kind: str, share: list[float], cosine: list[float], **vectors: list[float]) -> list[Row]:
    known = {"task": "a", "run": "paper", "kind": kind, "moved": 1.0, "share": share, "cosine": cosine, **vectors}
    return [{**known, "seed": seed} for seed in range(3)]


ALIGNED = made_up("step", [0.6, 0.4], [1.0, 0.9], whole=[0.9, 1.0], descent=[0.5, 0.4])


@pytest.mark.parametrize(
    ("whole", "descent", "verdicts"),
    [
        ([0.9, 1.0], [0.5, 0.4], [True, True, True]),
        ([0.82, 1.0], [0.5, 0.4], [True, False, True]),  # orthogonal epochs of 0.6 and 0.4 give 0.83
        ([0.7, 1.0], [0.4, 0.5], [False, False, False]),
    ],
)
def test_first_epoch_vectors_are_judged(whole: list[float], descent: list[float], verdicts: list[bool]) -> None:
    rows = made_up("step", [0.6, 0.4], [1.0, 0.9], whole=whole, descent=descent)
    assert [finding.holds for finding in vector_findings(rows, "paper", ours=False)] == verdicts


def test_the_first_epoch_is_held_against_the_largest_later_one() -> None:
    rows = [row for kind in ("batches", "all images") for row in made_up(kind, [0.4, 0.5, 0.1], [1.0, 0.9, 0.85])]
    assert [finding.holds for finding in gradients.findings(rows + ALIGNED, "paper")][:2] == [False, True]


def test_findings_follow_the_numbers() -> None:
    kinds = ("batches", "all images")
    good = [row for kind in kinds for row in made_up(kind, [0.6, 0.4], [1.0, 0.9])]
    assert [finding.holds for finding in gradients.findings(good + ALIGNED, "paper")] == [True] * 5
    bad = [row for kind in kinds for row in made_up(kind, [0.4, 0.6], [1.0, 0.1])]
    assert [finding.holds for finding in gradients.findings(bad + ALIGNED, "paper")] == [False, False, True, True, True]
