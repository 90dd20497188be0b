"""A finished study in MLflow: one run with its findings, its rows, and what they were measured from; no weights."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from registry.logging import log_pipeline
from registry.records import Params, PipelineRecord, Point, flat
from registry.store import Store


class Finding(Protocol):
    """What a study found about one system of a paper."""

    @property
    def system(self) -> str: ...
    @property
    def claim(self) -> str: ...
    @property
    def verdict(self) -> str: ...


class Result(Protocol):
    """What a study leaves."""

    @property
    def findings(self) -> Sequence[Finding]: ...
    @property
    def rows(self) -> Sequence[Mapping[str, Any]]: ...


def log_study(store: Store, name: str, result: Result, folder: Path, locked: Mapping[str, Any]) -> str:
    """Log a study's result, once: the same files from the same inputs again give the same run.

    A column `c` of numbers becomes the metric `rows/c`, whose step is the number of the row, counted from 0: all values
    of a row have one step, and the file rows.parquet, which is among the run's files, says what the row is of.

    Args:
        store: the open registry.
        name: the study's name.
        result: what was found.
        folder: the study's outputs; its files become artifacts.
        locked: the study's entry in DVC's lock file, empty where DVC has recorded none. Its parameters (seeds, choices,
            the digest of the code) become the run's, and so do the hashes of its inputs and outputs.

    Returns:
        The id of the study's run.
    """
    params: Params = flat({key: value for file in locked.get("params", {}).values() for key, value in file.items()})
    for number, one in enumerate(result.findings, 1):
        params |= {f"finding {number} {one.system}": one.claim, f"verdict {number}": one.verdict}
    hashes = {file["path"]: file["md5"] for key in ("deps", "outs") for file in locked.get(key, []) if "md5" in file}
    verdicts = Counter(one.verdict for one in result.findings)
    files = sorted(path for path in folder.iterdir() if path.is_file())
    measured_from = json.dumps([params, hashes], sort_keys=True, default=str).encode()
    record = PipelineRecord(
        name=f"study {name}",
        fingerprint=hashlib.sha256(measured_from + b"".join(path.read_bytes() for path in files)).hexdigest(),
        params=params,
        metrics={f"verdicts/{word}": float(count) for word, count in verdicts.items()},
        steps=tuple(_points(result.rows)),
        dvc=hashes,
        artifacts={"": tuple(str(path) for path in files)},
    )
    return log_pipeline(store, record, []).run_id


def _points(rows: Sequence[Mapping[str, Any]]) -> Iterator[Point]:
    for number, row in enumerate(rows):
        for column, value in row.items():
            if isinstance(value, int | float):
                yield f"rows/{column}", number, float(value)
