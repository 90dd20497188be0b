"""Study `gradients`: against autograd and on a small laboratory; the paper's findings on the documented result."""

from pathlib import Path

import pytest
import torch

from mergeflow.analysis.gradients import mean_gradient
from mergeflow.modalities.classification import Classification
from mergeflow.modality import Network
from tasks.studies.papers.gradients import study as gradients
from tasks.studies.pieces import Row
from tasks.studies.results import StudyResult
from tests.studies.documented import documented
from tests.studies.small_lab import study_io


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


def test_every_gradient_is_measured_on_every_task(lab: Path, tmp_path: Path) -> None:
    gradients.run(study_io(lab, "gradients", tmp_path, images=12, steps=[1e-5]))
    folder = tmp_path / "building/outputs/studies/gradients"
    share, cosine, tasks = StudyResult.read(folder).tables
    kinds = ["batches", "step", "all images", "GD 1e-05"]
    assert [row["gradient"] for row in share.rows] == [row["gradient"] for row in cosine.rows] == kinds
    assert all(
        float(str(row["epoch 1"])) + float(str(row["epoch 2"])) == pytest.approx(1, abs=0.011) for row in share.rows
    )
    assert {row["epoch 1"] for row in cosine.rows} == {"1.00"}
    assert float(str(cosine.rows[3]["epoch 2"])) > 0.99  # a tiny step of gradient descent keeps the gradient
    assert [row["task"] for row in tasks.rows] == ["red", "blue", "grey"]
    assert (folder / "epochs.svg").exists()


def made_up(kind: str, share: list[float], cosine: list[float]) -> Row:
    return {"task": "a", "seed": 0, "kind": kind, "moved": 1.0, "share": share, "cosine": cosine}


def test_findings_follow_the_numbers() -> None:
    kinds = ("batches", "all images", "GD 0.1")
    good = [made_up(kind, [0.6, 0.4], [1.0, 0.9]) for kind in kinds]
    assert all(finding.holds for finding in gradients.findings(good))
    bad = [made_up(kind, [0.4, 0.6], [1.0, 0.1]) for kind in kinds]
    assert not any(finding.holds for finding in gradients.findings(bad))


def test_findings_of_the_paper() -> None:
    held = documented("gradients")
    assert held("largest gradient share (batches)")
    assert held("five epochs (GD")
