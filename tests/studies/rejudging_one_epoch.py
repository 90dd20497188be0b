"""What the study one_epoch measured, put together again from its tidy rows, and judged by its own rules."""

from collections.abc import Mapping, Sequence

from tasks.studies.papers.one_epoch import study as one_epoch
from tasks.studies.results import Finding
from tasks.studies.rows import Row, of
from tests.studies.rejudging_cart import accuracy, grouped


def of_one_epoch(rows: Sequence[Row], further: Mapping[str, str]) -> list[Finding]:
    found = measured([row for row in rows if row["run"]], "seed", "run", "epoch", "steps")
    curve = of(found, run="converged")
    last = max(row["epoch"] for row in curve)
    compared = {one_epoch.SHORT: of(found, run="one_epoch"), one_epoch.LONG: of(curve, epoch=last)}
    pairs = [(of(found, run=one), of(found, run=other)) for one, other in further.items()]
    return one_epoch.findings(compared, curve, pairs)


def measured(rows: Sequence[Row], *settings: str) -> list[Row]:
    """Return one row for each setting, with the accuracy of every model by task."""
    return [
        dict(zip(settings, key, strict=True)) | {model: accuracy(one) for (model,), one in grouped(own, "model")}
        for key, own in grouped(rows, *settings)
    ]
