"""Ways to put less into task vectors, as the studies of their structure compare them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from studies.theory.reduced import Reduced, Vector, low_rank, row_pruned, thinned, trimmed

FULL, LORA, SVD = "full", "LoRA", "SVD"
ROWS, CONTROL, TIES, DARE = "largest rows", "smallest rows", "TIES", "DARE"
PRUNED = (ROWS, CONTROL, TIES, DARE)


@dataclass(frozen=True)
class Variant:
    """The task vectors of all experts, reduced in one way.

    Attributes:
        kind: The way.
        amount: The rank, or the share that is kept; None of whole vectors.
        vectors: By task.
        stored: Bytes, as a share of the whole vectors'.
    """

    kind: str
    amount: float | None
    vectors: dict[str, Vector]
    stored: float

    @property
    def name(self) -> str:
        """The way and its amount.

        Example:
            >>> Variant("SVD", 4, {}, 0.1).name
            'SVD 4'
        """
        return self.kind if self.amount is None else f"{self.kind} {self.amount:g}"


def variants(
    vectors: Mapping[str, Vector], ranks: Sequence[int], keeps: Sequence[float], seed: int
) -> Iterator[Variant]:
    """Yield the whole task vectors and each way of reducing them.

    Args:
        vectors: by task.
        ranks: of matrices.
        keeps: shares of the rows or entries of MLP matrices.
        seed: of the entries that DARE drops; each task has its own.
    """
    whole = sum(4 * value.numel() for vector in vectors.values() for value in vector.values())

    def variant(kind: str, amount: float, reduced: Mapping[str, Reduced]) -> Variant:
        stored = sum(one.bytes for one in reduced.values()) / whole
        return Variant(kind, amount, {task: one.vector for task, one in reduced.items()}, stored)

    yield Variant(FULL, None, dict(vectors), 1.0)
    for rank in ranks:
        yield variant(SVD, rank, {task: low_rank(vector, rank) for task, vector in vectors.items()})
    for keep in keeps:
        yield variant(ROWS, keep, {task: row_pruned(vector, keep) for task, vector in vectors.items()})
        yield variant(CONTROL, keep, {task: row_pruned(vector, keep, True) for task, vector in vectors.items()})
        yield variant(TIES, keep, {task: trimmed(vector, keep) for task, vector in vectors.items()})
        seeds = {task: 1000 * seed + number for number, task in enumerate(vectors)}
        yield variant(DARE, keep, {task: thinned(vector, keep, seeds[task]) for task, vector in vectors.items()})
