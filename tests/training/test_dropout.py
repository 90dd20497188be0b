"""Models with dropout: trained beside each other in threads they get the bits that they get alone."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import torch
from torch import nn

from mergeflow.modalities.classification import Classification
from mergeflow.modalities.modules import own_generator
from mergeflow.modality import Network
from mergeflow.training import FineTuneSettings, fine_tune


def trained(folder: Path, task: str, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    with own_generator(0):  # torch's layers draw their first weights from the generator that dropout draws from
        net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2))
    net.load_state_dict(
        {name: torch.randn(value.shape, generator=generator) for name, value in net.state_dict().items()}
    )
    inputs = torch.randn(64, 6, generator=generator)
    data = Classification(task, inputs, (inputs[:, 0] > 0).long())
    settings = FineTuneSettings(steps=60, batch_size=8, learning_rate=0.01, save_every=20)
    fine_tune(Network(net), [data], settings, seed, folder / f"{task}.pt", lambda: 0.0)
    return torch.cat([value.flatten() for value in net.state_dict().values()])


def test_threads_do_not_draw_from_each_other(tmp_path: Path) -> None:
    alone = [trained(tmp_path, f"alone{seed}", seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda seed: trained(tmp_path, f"beside{seed}", seed), range(4)))
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))
    assert not torch.equal(alone[0], alone[1])


def test_who_draws_nothing_leaves_the_generator_to_those_who_draw() -> None:
    inside, drawn = Event(), Event()

    def train_without_dropout() -> None:  # a stage in another thread
        with own_generator(5, torch.device("cpu"), alone=False):
            inside.set()
            drawn.wait(10)

    with own_generator(3):
        alone = torch.rand(4)
    with own_generator(3), ThreadPoolExecutor(1) as pool:
        first = torch.rand(2)
        other = pool.submit(train_without_dropout)
        assert inside.wait(10)
        then = torch.rand(2)
        drawn.set()
        other.result()
    assert torch.equal(torch.cat([first, then]), alone)
