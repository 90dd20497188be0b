"""What a sweep reads: checkpoints, the scorer and what it looks at; and a digest of each."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mergeflow.checkpoints import LazyStateDict, fingerprint
from mergeflow.checkpoints.fingerprint import SCHEME
from mergeflow.merging import make_recipe
from mergeflow.merging.device import check_device
from mergeflow.merging.files.inputs import Inputs
from mergeflow.merging.files.opening import open_inputs
from mergeflow.search.command import command_scorer
from mergeflow.search.functions import function_scorer
from mergeflow.search.lm_eval import lm_eval_scorer
from mergeflow.search.score_file import CommandScore, FunctionScore
from mergeflow.search.scorer import SweepScorer
from mergeflow.search.sweep_file import Sweep
from mergeflow.version import version


@dataclass(frozen=True)
class SweepInputs:
    """The opened inputs of a sweep.

    Attributes:
        checkpoints: Base, experts and statistics, read lazily.
        score: Who scores a model.
        record: A digest of each input, by name.
    """

    checkpoints: Inputs
    score: SweepScorer
    record: dict[str, Any]


@contextmanager
def open_sweep(
    sweep: Sweep,
    folder: Path,
    resolve: Callable[[str], str] | None = None,
    say: Callable[[str], None] = lambda _: None,
    scheme: str = SCHEME,
) -> Iterator[SweepInputs]:
    """Open everything a sweep reads; `source:` tasks are prepared where they are not yet.

    Args:
        sweep: The sweep.
        folder: Where tasks are prepared.
        resolve: Turns `models:/…` into a path; None outside of a project.
        say: Told what is opened next.
        scheme: Of the fingerprints: that of the journal where there is one.

    Raises:
        MergeflowError: a file that is missing or does not fit, or a device that is not there.
    """
    check_device(sweep.device)
    scorer = None if sweep.score is None else _open_scorer(sweep)
    # The average takes any experts and needs no statistics: it opens and checks what all methods share.
    data = {kind: dict(paths) for kind, paths in sweep.data.items()}
    opening = make_recipe({**sweep.inputs(), "method": "average", "data": data})
    with open_inputs(opening, resolve) as checkpoints:
        score, facts = scorer or _images(sweep, folder, checkpoints.base, say)
        say("fingerprints")
        record = {
            "version": version(),
            "split": sweep.split,
            "base": fingerprint(checkpoints.base, scheme),
            **{f"expert {name}": fingerprint(state, scheme) for name, state in checkpoints.experts.items()},
            **{
                f"{kind} {name}": fingerprint(state, scheme)
                for kind, states in checkpoints.data.items()
                for name, state in states.items()
            },
            **_choices(sweep),
            **facts,
        }
        yield SweepInputs(checkpoints, score, record)


def _choices(sweep: Sweep) -> dict[str, Any]:
    """Return what candidates have beside their weights; nothing where the sweep says nothing of it."""
    return {key: value for key, value in sweep.inputs().items() if key in ("tokenizer", "chat_template") and value}


def _open_scorer(sweep: Sweep) -> tuple[SweepScorer, dict[str, Any]]:
    """Return the user's scorer, and what its scores depend on."""
    part = sweep.score
    if isinstance(part, FunctionScore):
        score, digest = function_scorer(part)
    elif isinstance(part, CommandScore):
        score, digest = command_scorer(part)
    else:
        assert part is not None
        score, digest = lm_eval_scorer(part, sweep.device)
    return score, {"score": part.model_dump(mode="json"), "files of the scorer": digest}


def _images(
    sweep: Sweep, folder: Path, base: LazyStateDict, say: Callable[[str], None]
) -> tuple[SweepScorer, dict[str, Any]]:
    from mergeflow.search.images import open_images  # what merges language models needs no open_clip

    return open_images(sweep, folder, base, say)
