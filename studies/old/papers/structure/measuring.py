"""What the study `structure` measures of one seed: what less in the task vectors costs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from mergeflow.memory import training_needs
from mergeflow.modalities.classification import Classification
from mergeflow.modalities.nets import on_pixels
from mergeflow.training import FineTuneSettings, LoraModel
from mergeflow.training.settings import LoraSettings
from studies.lab.coloured import (
    ColouredWorld,
    Digits,
    Pretrained,
    accuracy,
    coloured,
    name_of,
    small_transformer,
)
from studies.lab.reductions import FULL, LORA, Variant, variants
from studies.lab.scales import combined, task_vector
from studies.lab.tuning import trained
from studies.old.papers.coloured_digits.measuring import CASES, FIRST, ONTO, TARGET
from studies.old.pieces import grid
from studies.old.rows import Row
from studies.theory.reduced import Vector, bimodality

COLOURS = tuple(dict.fromkeys((FIRST, *CASES.values(), *ONTO)))
SCALES = grid(-1, 2, 0.25)
ONTO_SCALES = grid(-1, 2, 0.5)
TARGETS = ["self_attention", "0", "3", "head"]  # attention, the two layers of an MLP, and the head


def adapter_settings(rank: int) -> LoraSettings:
    """Return adapters of a rank on all matrices of the transformer; alpha is twice the rank.

    Args:
        rank: of B·A.
    """
    return LoraSettings(rank=rank, alpha=2 * rank, targets=TARGETS)


def lora_vectors(
    world: ColouredWorld, base: Pretrained, digits: Digits, rank: int, rate: float, steps: int, seed: int
) -> tuple[dict[str, dict[str, Tensor]], float]:
    """Return the task vectors of experts tuned with adapters, and the share of the numbers that is trained.

    Args:
        world: whose net it is.
        base: where the experts begin.
        digits: the training split.
        rank: of the adapters.
        rate: the learning rate.
        steps: of tuning.
        seed: of the adapters and of the order of the examples.
    """
    adapting = world.tune.model_copy(update={"steps": steps, "learning_rate": rate})
    model = LoraModel.of(small_transformer(world, 2, seed), adapter_settings(rank), seed)
    found = {}
    for one in COLOURS:
        state = trained(model, base.start, coloured(digits, one, name_of(one)), adapting, seed)
        found[name_of(one)] = task_vector(state, base.start)
    numbers: int = sum(value.numel() for value in (*model.module.down, *model.module.up))
    return found, numbers / sum(value.numel() for value in base.start.values())


def memory_rows(world: ColouredWorld, ranks: Sequence[int]) -> Iterator[Row]:
    """Yield what a step of tuning takes of a device's memory at its peak, foretold, of all weights and of adapters.

    Args:
        world: its net and batch.
        ranks: of adapters.
    """
    settings: FineTuneSettings = world.tune.settings()

    def blank(count: int) -> Classification:
        images = torch.zeros(count, world.size, world.size, 3, dtype=torch.uint8)
        return Classification("blank", images, torch.zeros(count, dtype=torch.int64), encode=on_pixels)

    for rank in (None, *ranks):
        net = small_transformer(world, 2, 0)
        model = net if rank is None else LoraModel.of(net, adapter_settings(rank), 0)
        need, _ = training_needs(model, blank, settings)
        yield {"part": "memory", "kind": FULL if rank is None else LORA, "amount": rank, "bytes": need.total}


@dataclass(frozen=True)
class Bench:
    """A seed's net and digits.

    Attributes:
        base: The net and Ψ^(0).
        splits: The digits.
    """

    base: Pretrained
    splits: Mapping[str, Digits]

    def accuracies(
        self, variant: Variant, scales: Mapping[float, float], judged: Sequence[float], split: str
    ) -> list[float]:
        """Return the accuracy of Ψ^(0) + Σ λ ΔΨ on tasks, in %.

        Args:
            variant: whose task vectors.
            scales: r_o → λ.
            judged: r_o of the tasks.
            split: train, validation or test.
        """
        state: dict[str, Tensor] = combined(
            self.base.start, variant.vectors, {name_of(one): scale for one, scale in scales.items()}
        )
        tasks = {name_of(one): coloured(self.splits[split], one, name_of(one)) for one in judged}
        return list(accuracy(self.base.model, state, tasks).values())


def measured_rows(
    bench: Bench,
    vectors: Mapping[str, Vector],
    adapted: Mapping[int, Mapping[str, Vector]],
    shares: Mapping[int, float],
    ranks: Sequence[int],
    keeps: Sequence[float],
    seed: int,
) -> list[Row]:
    """Return the rows of one seed.

    Args:
        bench: the net and the digits.
        vectors: whole task vectors, by task.
        adapted: rank → task vectors of experts tuned with adapters.
        shares: rank → share of the numbers that is trained.
        ranks, keeps: of the reduced variants.
        seed: of what DARE drops.
    """
    lora = [Variant(LORA, rank, dict(found), shares[rank]) for rank, found in adapted.items()]
    rows: list[Row] = [{"part": "rows", "task": task, "bimodality": bimodality(one)} for task, one in vectors.items()]
    for variant in (*variants(vectors, ranks, keeps, seed), *lora):
        told = {"kind": variant.kind, "amount": variant.amount, "stored": 100 * variant.stored}
        rows += [row | told for row in (*_case_rows(bench, variant), *_target_rows(bench, variant))]
    return rows


def _case_rows(bench: Bench, variant: Variant) -> Iterator[Row]:
    """Yield test accuracies of T1 and T2 where λ was chosen on validation, for addition and for unlearning T2."""
    for case, second in CASES.items():
        pair = (FIRST, second)

        def judged(scale: float, split: str, pair: tuple[float, float] = pair) -> list[float]:
            return bench.accuracies(variant, {pair[0]: 1.0, pair[1]: scale}, pair, split)

        found = {scale: judged(scale, "validation") for scale in SCALES}
        chosen = {
            "addition": max(SCALES, key=lambda scale: sum(found[scale])),
            "unlearning": max(SCALES, key=lambda scale: found[scale][0] - found[scale][1]),
        }
        for way, scale in chosen.items():
            one, two = judged(scale, "test")
            yield {"part": "case", "case": case, "way": way, "scale": scale, "test_1": one, "test_2": two}


def _target_rows(bench: Bench, variant: Variant) -> Iterator[Row]:
    """Yield test accuracy on the third task where λ_1 and λ_2 were chosen on validation."""
    points = list(product(ONTO_SCALES, ONTO_SCALES))

    def judged(point: tuple[float, ...], split: str) -> float:
        return bench.accuracies(variant, dict(zip(ONTO, point, strict=True)), [TARGET], split)[0]

    best = max(points, key=lambda point: judged(point, "validation"))
    at = {"scale_1": best[0], "scale": best[1]}
    yield {"part": "target", "way": "a third task", **at, "test_1": judged(best, "test")}
