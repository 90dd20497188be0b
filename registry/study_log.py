"""A finished study in MLflow: one run with its findings; no weights."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from registry.logging import log_pipeline
from registry.records import PipelineRecord
from registry.store import Store


class Finding(Protocol):
    """What a study found about one system of a paper."""

    @property
    def system(self) -> str: ...
    @property
    def claim(self) -> str: ...
    @property
    def holds(self) -> bool: ...


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
    files = sorted(path for path in folder.iterdir() if path.is_file())
    record = PipelineRecord(
        name=f"study {name}",
        fingerprint=hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest(),
        params={f"finding {number} {finding.system}": finding.claim for number, finding in enumerate(findings, 1)},
        metrics={f"holds/{number}": float(finding.holds) for number, finding in enumerate(findings, 1)},
        artifacts={"": tuple(str(path) for path in files)},
    )
    return log_pipeline(store, record, []).run_id
