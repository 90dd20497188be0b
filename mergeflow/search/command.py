"""Score with a command that prints a JSON object of scores by task."""

import hashlib
import json
import os
import shlex
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

from mergeflow.errors import MergeflowError
from mergeflow.search.score_file import CommandScore, name_of
from mergeflow.search.scorer import Candidate, CandidateModel, CheckedScorer

_SHOWN = 200  # characters of a command's output that a message repeats


def command_scorer(part: CommandScore) -> tuple[CheckedScorer, str]:
    """Return the scorer, and a digest of the files that the command names.

    The command runs without a shell, with {model} and {split} filled in; the candidate stands in the environment
    variable MERGEFLOW_CANDIDATE as JSON.

    Raises:
        MergeflowError: The command is not a list of words, as a shell would split it.
    """
    try:
        words = shlex.split(part.command)
    except ValueError as error:
        raise MergeflowError(f"score.command: {error}, found {part.command!r:.80}.") from None

    def score(model: CandidateModel, candidate: Candidate) -> Any:
        with model.folder() as folder:
            filled = [word.replace("{model}", str(folder)).replace("{split}", candidate.split) for word in words]
            return _json(_run(filled, candidate, part.timeout))

    return CheckedScorer(score, name_of(part)), _digest(words)


def _run(words: list[str], candidate: Candidate, timeout: float | None) -> str:
    told = json.dumps({"name": candidate.name, "args": dict(candidate.args), "split": candidate.split})
    environment = {**os.environ, "MERGEFLOW_CANDIDATE": told}
    try:
        # A session of its own, so that a command is stopped with all it has started.
        process = subprocess.Popen(
            words,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise MergeflowError(f"it cannot be started: {error.strerror}") from None
    try:
        printed, complaint = process.communicate(timeout=timeout)
    except BaseException as error:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise MergeflowError(f"it took longer than {timeout:g} s and was stopped") from None
        raise
    if process.returncode:
        raise MergeflowError(f"it ended with status {process.returncode}: {_tail(complaint or printed)}")
    return printed


def _json(text: str) -> Any:
    """Return the output as JSON, or its last line, where a command prints more than the scores."""
    lines = text.strip().splitlines()
    for part in (text, lines[-1] if lines else ""):
        try:
            return json.loads(part)
        except ValueError:
            continue
    raise MergeflowError(f"its output is not JSON: {_tail(text)}")


def _tail(text: str) -> str:
    found = text.strip()
    return repr(found[-_SHOWN:]) if found else "it printed nothing"


def _digest(words: list[str]) -> str:
    whole = hashlib.sha256()
    for word in words:
        if Path(word).is_file():
            whole.update(hashlib.sha256(Path(word).read_bytes()).digest())
    return whole.hexdigest()
