"""How the study's models come about: fine-tuned together and alone, by adapters, by ascent, and without the book."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from mergeflow.evaluation.accuracy import accuracies
from mergeflow.modalities.causal.model import LanguageModel, load_model
from mergeflow.modalities.causal.packed import PackedText
from mergeflow.modalities.causal.perplexity import perplexity
from mergeflow.modality import Model
from mergeflow.training.loop import fine_tune
from mergeflow.training.lora import LoraModel
from mergeflow.training.settings import FineTuneSettings, LoraSettings
from studies.old.papers.unlearning.corpus import Corpus
from studies.old.papers.unlearning.options import BOOKS, FORGOTTEN

State = dict[str, Tensor]


@dataclass(frozen=True)
class Workshop:
    """What trains the models of a seed.

    Attributes:
        corpus: Of the seed.
        scratch: For resumable state.
    """

    corpus: Corpus
    scratch: Path

    @cached_property
    def base(self) -> State:
        """Ψ⁰."""
        return self._copy(self.model())

    def model(self, state: State | None = None) -> LanguageModel:
        """Return a model with the base's weights, or others."""
        model, _ = load_model(self.corpus.options.base, Path.cwd())
        model.module.to(self.corpus.device)
        if state is not None:
            model.load(state)
        return model

    def together(self) -> State:
        """Return Ψ⁰′, fine-tuned on all three books from the base."""
        return self._tuned("together", BOOKS, self.corpus.options.together)

    def without(self) -> State:
        """Return what the base is after fine-tuning on the other two books: the truth about unlearning."""
        return self._tuned("without", self._others, self.corpus.options.together)

    def alone(self, title: str) -> State:
        """Return the expert of one book, fine-tuned from the base."""
        return self._tuned(f"alone {title}", [title], self.corpus.options.alone)

    def adapted(self, title: str) -> State:
        """Return the expert of one book by adapters of the base."""
        options = self.corpus.options
        settings = LoraSettings(rank=options.rank, alpha=2 * options.rank, targets=options.targets)
        model = LoraModel.of(self.model(), settings, self.corpus.seed)
        return self._tuned(f"adapted {title}", [title], options.alone, model, options.adapter_rate)

    def after_the_rest(self, state: State) -> State:
        """Return a model after further fine-tuning on the other two books."""
        return self._tuned("rest", self._others, self.corpus.options.rest, self.model(state))

    def ascended(self, state: State, until: float) -> tuple[State, int]:
        """Return a model after gradient ascent on the forgotten book, and the steps that it took.

        Args:
            state: Ψ⁰′.
            until: it ends where the logarithm of the book's perplexity on validation is this large.
        """
        options, model = self.corpus.options, self.model(state)
        texts = self.corpus.texts("ascent", [FORGOTTEN], "train")
        parameters = list(model.module.parameters())
        optimiser = torch.optim.AdamW(parameters, lr=options.ascent_rate, weight_decay=0.0)
        order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(self.corpus.seed))
        for step in range(options.ascent_steps):
            rows = order.roll(-step * options.batch)[: options.batch]
            optimiser.zero_grad()
            (-texts.loss(model, rows)).backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimiser.step()
            if math.log(perplexity(model, self.corpus.held_out[FORGOTTEN, "validation"])) >= until:
                break
        return self._copy(model), step + 1

    @property
    def _others(self) -> list[str]:
        return [title for title in BOOKS if title != FORGOTTEN]

    def _tuned(
        self,
        name: str,
        titles: Sequence[str],
        epochs: int,
        model: Model | None = None,
        rate: float | None = None,
    ) -> State:
        options, model = self.corpus.options, model or self.model()
        settings = FineTuneSettings.model_validate(
            {
                "regime": "epochs",
                "epochs": epochs,
                "batch_size": options.batch,
                "learning_rate": rate or options.rate,
                "weight_decay": 0.01,
                "precision": options.precision,
                "save_every": 10**6,
            }
        )
        texts = self.corpus.texts(name, titles, "train")
        saved = self.scratch / f"{name.replace(' ', '_')}.pt"
        fine_tune(model, [texts], settings, self.corpus.seed, saved, self._validation(model, titles))
        return self._copy(model)

    def _validation(self, model: Model, titles: Sequence[str]) -> Callable[[], float]:
        held_out: dict[str, PackedText] = {title: self.corpus.held_out[title, "validation"] for title in titles}

        def validate() -> float:
            found = accuracies(model, held_out, 32)
            return sum(found.values()) / len(found)

        return validate

    def _copy(self, model: Model) -> State:
        return {name: value.to("cpu", copy=True) for name, value in model.state().items()}
