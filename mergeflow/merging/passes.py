"""A first pass over the whole model, for methods that need a fact about all of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from mergeflow.merging.stack import Elementwise, Model, Stack


@dataclass(frozen=True)
class Pass:
    """A first pass over the whole model, for methods that need a fact about all of it.

    Each worker folds what it sees into an accumulator of its own; accumulators are merged at the end, so both steps
    must give the same result in any order (integers, or pieces that `finish` sums exactly).

    Attributes:
        name: Key of the result in `Model.known`.
        start: Makes an empty accumulator.
        observe: Folds one stack into the accumulator and returns it.
        merge: Joins two accumulators.
        finish: Turns the whole into the result.
        sampled: Whether runs of elements spread over the model are enough; their stacks are flat.
        finds: Names of further results that `finish` puts among what is known, where it can.
        unless: Name of a result that makes the pass needless where it is known already.
        only: (args, tensor's name, model) → whether a tensor is read; all are by default.
        within: Whether it finds something of each tensor by itself: then a tensor is read for it right before it is
            merged, and what is known has a result for each tensor, by name.
        held: (model, elements that are read of each expert, workers) → bytes that its accumulators hold at most.
    """

    name: str
    start: Callable[[Model, Any], Any]
    observe: Callable[[Any, Stack, Any], Any]
    merge: Callable[[Any, Any], Any]
    finish: Callable[[Any, Model, Any], Any]
    sampled: bool = False
    finds: tuple[str, ...] = ()
    unless: str = ""
    only: Elementwise | None = None
    within: bool = False
    held: Callable[[Model, int, int], int] = lambda _model, _elements, _workers: 0

    def with_arguments(self, inner: Callable[[Any], Any]) -> Pass:
        """Return the same pass for a method that wraps another: it sees `inner(args)` instead of args."""
        only = self.only
        return replace(
            self,
            only=only and (lambda args, name, model: only(inner(args), name, model)),
            start=lambda model, args: self.start(model, inner(args)),
            observe=lambda total, stack, args: self.observe(total, stack, inner(args)),
            finish=lambda total, model, args: self.finish(total, model, inner(args)),
        )
