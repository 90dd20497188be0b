"""torch.compile where it works, and the plain module where it does not."""

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from mergeflow.modality import Model, Network

T = TypeVar("T")


class Forward:
    """A model's forward pass, compiled where that is asked for and works; messages name the `setting` that asks."""

    def __init__(self, model: Model, compiled: bool, setting: str = "finetune.compile") -> None:
        self._plain, self.compiled, self._setting = model, compiled, setting
        made: Any = torch.compile(model.module) if compiled else model.module
        self._network = Network(made)

    def run(self, work: Callable[[Model], T]) -> T:
        """Do work with the model; if compiling fails, warn once and repeat the work with the plain module."""
        if not self.compiled:
            return work(self._network)
        from torch._dynamo.exc import TorchDynamoException
        from torch._inductor.exc import InductorError

        try:
            return work(self._network)
        except (TorchDynamoException, InductorError) as error:
            first = str(error).strip().splitlines()[0]
            warnings.warn(
                f"{self._setting}: torch.compile failed ({first}). The run goes on without it; set compile to false, "
                "or install what it needs: a C++ compiler, and on CUDA Triton.",
                stacklevel=2,
            )
            self.compiled, self._network = False, Network(self._plain.module)
            return work(self._network)
