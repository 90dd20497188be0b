"""A finished study in MLflow: one run with its findings; no weights."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from registry.logging import log_pipeline
from registry.records import Params, PipelineRecord
from registry.store import Store


class Finding(Protocol):
    """What a study found about one system of a paper."""

    @property
    def system(self) -> str: ...
    @property
    def claim(self) -> str: ...
    @property
    def verdict(self) -> str: ...


def log_study(store: Store, name: str, findings: Sequence[Finding], folder: Path) -> str:
    """Log a study's result, once: the same files again give the same run.

    Args:
        store: the open registry.
        name: the study's name.
        findings: what was found.
        folder: the study's outputs; its files become artifacts.

    Returns:
        The id of the study's run.
    """
    params: Params = {}
    for number, one in enumerate(findings, 1):
        params |= {f"finding {number} {one.system}": one.claim, f"verdict {number}": one.verdict}
    verdicts = Counter(one.verdict for one in findings)
    files = sorted(path for path in folder.iterdir() if path.is_file())
    record = PipelineRecord(
        name=f"study {name}",
        fingerprint=hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest(),
        params=params,
        metrics={f"verdicts/{word}": float(count) for word, count in verdicts.items()},
        artifacts={"": tuple(str(path) for path in files)},
    )
    return log_pipeline(store, record, []).run_id
