"""Checkpoints: lazy state dicts over files, atomic streaming writers, fingerprints."""

from mergeflow.checkpoints.checks import check_compatible, check_finite, infos_of
from mergeflow.checkpoints.fingerprint import fingerprint, matches
from mergeflow.checkpoints.formats import open_checkpoint, read_state
from mergeflow.checkpoints.header import TensorInfo
from mergeflow.checkpoints.reader import LazyStateDict
from mergeflow.checkpoints.writer import StreamWriter, write_checkpoint, write_text

__all__ = [
    "LazyStateDict",
    "StreamWriter",
    "TensorInfo",
    "check_compatible",
    "check_finite",
    "fingerprint",
    "infos_of",
    "matches",
    "open_checkpoint",
    "read_state",
    "write_checkpoint",
    "write_text",
]
