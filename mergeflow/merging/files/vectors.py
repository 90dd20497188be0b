"""Arithmetic of task vectors in files: extract, add, negate, scale, analogy. Streaming, like every merge."""

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from math import isfinite
from pathlib import Path

import torch

from mergeflow.checkpoints.align_names import doubtful, fit_inputs
from mergeflow.checkpoints.checks import all_finite, check_all_copied, not_finite, same_values
from mergeflow.checkpoints.fingerprint import BLOCK, fingerprint, matches, short
from mergeflow.checkpoints.formats import open_checkpoint
from mergeflow.checkpoints.header import FLOAT32, FLOAT64, TensorInfo
from mergeflow.checkpoints.reader import BASE, KIND, LazyStateDict
from mergeflow.checkpoints.writer import StreamWriter
from mergeflow.errors import MergeflowError
from mergeflow.merging.files.output import check_file
from mergeflow.merging.files.plan import another_base, no_task_vector, open_base
from mergeflow.merging.preflight import Remark, warnings_of

Pathlike = str | Path


def extract(
    base: Pathlike,
    expert: Pathlike,
    out: Pathlike,
    *,
    force: bool = False,
    remark: Remark = lambda _notes, _warnings: None,
) -> str:
    """Write the task vector of an expert.

    τ = θ_t − θ0, float32 (float64 where an input is); integer tensors have none

    Args:
        base: Path of θ0, a whole model.
        expert: Path of θ_t, with the base's names and shapes as a merge asks for them; or of an adapter, or a task
            vector, which is copied.
        out: The `.safetensors` file to make; its metadata names base and expert by fingerprint.
        force: Replace `out` even if mergeflow did not make it.
        remark: Told what was done to make the inputs fit, and what a vector does not keep, as settings that differ.

    Returns:
        The fingerprint of the task vector.
    """
    with open_base(base) as origin, open_checkpoint(expert) as opened:
        target = check_file(out, {"base": origin.path, "expert": opened.path}, force)
        fitted = fit_inputs(origin, {"expert": opened})
        fitted.check()
        tuned = fitted.experts["expert"]
        check_all_copied(origin, tuned.path, tuned)
        remark(fitted.notes, warnings_of((origin, opened), fitted))
        origin_digest, taken = fingerprint(origin), tuned.metadata.get(BASE)
        if tuned.is_task_vector and taken and not matches(origin, taken, origin_digest):
            raise another_base(tuned.path, taken, origin_digest)
        # That one of two tied weights does not change has to be said: a zero under its name.
        still = (0.0, _only(fitted.base, fitted.base.infos.keys() - origin.infos.keys()))
        if tuned.is_task_vector and not tuned.absolute:
            return _combine([(1.0, tuned), still], target, {BASE: origin_digest})
        whole = _only(fitted.base, tuned.absolute) if tuned.is_task_vector else origin
        names = tuned.infos.keys() - _bounds(whole, tuned)
        terms = [(1.0, _only(tuned, names)), (-1.0, _only(whole, names & whole.infos.keys())), still]
        return _combine(terms, target, {BASE: origin_digest, "mergeflow.expert": fingerprint(tuned)})


def add(
    vectors: Sequence[Pathlike], out: Pathlike, weights: Sequence[float] | None = None, *, force: bool = False
) -> str:
    """Write the weighted sum of task vectors, Σ w_t τ_t; return its fingerprint.

    Args:
        weights: One per vector, any real numbers; all 1 by default.
        force: Replace `out` even if mergeflow did not make it.
    """
    factors = [1.0] * len(vectors) if weights is None else list(weights)
    if not vectors or len(factors) != len(vectors):
        raise MergeflowError(
            f"{len(factors)} weights for {len(vectors)} task vectors: give one vector at least, and a weight for each."
        )
    if not all(map(isfinite, factors)):
        raise MergeflowError(f"the factors of task vectors must be finite numbers, found {factors}.")
    with ExitStack() as opened:
        states = [opened.enter_context(open_vector(path)) for path in vectors]
        target = check_file(out, {state.path: state.path for state in states}, force)
        return _combine(list(zip(factors, states, strict=True)), target, _common_base(states))


def scale(vector: Pathlike, factor: float, out: Pathlike, *, force: bool = False) -> str:
    return add([vector], out, [factor], force=force)


def negate(vector: Pathlike, out: Pathlike, *, force: bool = False) -> str:
    """Write −τ, which unlearns what τ learned, as `add`.

    Source:
        Ilharco et al. 2023, Editing Models with Task Arithmetic, section 3.
    """
    return scale(vector, -1.0, out, force=force)


def analogy(a: Pathlike, b: Pathlike, c: Pathlike, out: Pathlike, *, force: bool = False) -> str:
    """Write τ_c + (τ_b − τ_a), as `add`: "a is to b as c is to" the result.

    Source:
        Ilharco et al. 2023, Editing Models with Task Arithmetic, section 5.
    """
    return add([c, b, a], out, [1.0, 1.0, -1.0], force=force)


def open_vector(path: Pathlike) -> LazyStateDict:
    state = open_checkpoint(path)
    fault = None
    if not state.is_task_vector:
        fault = no_task_vector(path)
    elif state.absolute:
        fault = MergeflowError(
            f"adapter '{path}' holds whole weights ('{min(state.absolute)}') and differences: make a task "
            "vector of it first with `mergeflow vector extract BASE ADAPTER`."
        )
    elif (square := doubtful(state)) is not None:
        fault = MergeflowError(
            f"adapter '{path}' does not say whether the square '{square}' is stored [in, out]; its base does: make a "
            "task vector of it first with `mergeflow vector extract BASE ADAPTER`."
        )
    if fault is not None:
        state.close()
        raise fault
    return state


def _only(state: LazyStateDict, names: Collection[str]) -> LazyStateDict:
    """Return some tensors of a state dict; the files stay the state dict's."""
    entries = {name: state.entries[name] for name in names}
    return LazyStateDict(state.path, entries, {name: state.infos[name] for name in names}, state.metadata)


def _bounds(base: LazyStateDict, expert: LazyStateDict) -> set[str]:
    """Return the tensors whose infinities both share and that differ nowhere, which a merge keeps as they are."""
    floats = [name for name, info in base.infos.items() if info.dtype.is_floating_point and name in expert]
    starts = {name: range(0, base.infos[name].numel, BLOCK) for name in floats}
    return {
        name
        for name, places in starts.items()
        if not all(all_finite(base.read(name, at, min(at + BLOCK, base.infos[name].numel))) for at in places)
        and same_values(base[name].double(), expert[name].double())
    }


def _common_base(states: Sequence[LazyStateDict]) -> dict[str, str]:
    bases = {state.path: state.metadata[BASE] for state in states if BASE in state.metadata}
    if len(set(bases.values())) > 1:
        listed = ", ".join(f"{path} of {short(base)}…" for path, base in bases.items())
        raise MergeflowError(f"the task vectors are of different bases ({listed}): their sum means nothing.")
    return {BASE: next(iter(bases.values()))} if bases else {}


def _combine(terms: Sequence[tuple[float, LazyStateDict]], target: Path, notes: dict[str, str]) -> str:
    """Write Σ factor · state over the floating-point tensors, block by block."""
    infos = _joint_infos([state for _, state in terms])
    with StreamWriter(target, infos, {"format": "pt", KIND: "task_vector", **notes}) as writer:
        for name, info in infos.items():
            for start in range(0, info.numel, BLOCK):
                count = min(BLOCK, info.numel - start)
                total = torch.zeros(count, dtype=info.dtype.torch)
                for factor, state in terms:
                    if name in state:
                        piece = state.read(name, start, start + count)
                        if not all_finite(piece):
                            raise not_finite(state.path, name)
                        total += piece.to(info.dtype.torch) * factor
                if not all_finite(total):
                    raise MergeflowError(
                        f"tensor '{name}' of the result overflows {info.dtype}: choose smaller factors or inputs."
                    )
                writer.write(name, start, total)
        return writer.commit()


def _joint_infos(states: Sequence[LazyStateDict]) -> dict[str, TensorInfo]:
    infos: dict[str, TensorInfo] = {}
    wide = any(info.dtype == FLOAT64 for state in states for info in state.infos.values())
    for state in states:
        for name, info in state.infos.items():
            if not info.dtype.is_floating_point:
                continue
            if name in infos and infos[name].shape != info.shape:
                raise MergeflowError(
                    f"tensor '{name}' has shape {list(info.shape)} in '{state.path}' and {list(infos[name].shape)} in "
                    "another task vector: they are of different models."
                )
            infos[name] = TensorInfo(info.shape, FLOAT64 if wide else FLOAT32)
    return dict(sorted(infos.items()))
