"""Causal models outside of a project's stages: opened from a file or a folder, loaded, saved as a folder."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mergeflow.checkpoints import open_checkpoint, write_checkpoint, write_text
from mergeflow.errors import MergeflowError
from mergeflow.modalities.catalog import SECTION, is_recorded
from mergeflow.modalities.causal.model import LanguageModel, build_model, load_model
from mergeflow.modalities.causal.tokenizer import CausalTokenizer, load_tokenizer


@dataclass(frozen=True)
class Opened:
    """A causal model, and what its texts are tokens by."""

    model: LanguageModel
    config: str
    tokenizer: CausalTokenizer

    def load(self, path: str | Path) -> None:
        """Load other weights of the same architecture; second names of tied weights are passed over."""
        tied = self.model.tied()
        with open_checkpoint(path) as state:
            if state.is_task_vector:
                raise MergeflowError(f"{path} is a task vector, which is not a model: add it to its base first.")
            for second, first in tied.items():
                if second in state and first in state and not torch.equal(state[second], state[first]):
                    raise MergeflowError(
                        f"{path}: '{second}' is another weight than '{first}', and the base ties the two: give a "
                        "folder whose config.json says `tie_word_embeddings: false`."
                    )
            self.model.load({name: state[name] for name in state if name not in tied})

    def save(self, folder: Path, state: Mapping[str, Tensor] | None = None) -> None:
        """Write a folder that transformers reads: config.json, the tokenizer, model.safetensors."""
        write_companions({"config": self.config, **self.tokenizer.record}, folder)
        state = self.model.state() if state is None else state
        write_checkpoint(folder / "model.safetensors", state, {"format": "pt"})


def open_language(base: str, root: Path, tokenizer: CausalTokenizer | None = None) -> Opened:
    """Open a causal model by its base.

    Args:
        base: the file of weights that the stage `base` wrote, a folder in the layout of Hugging Face, the name of an
            embedded base, or an id of the hub.
    """
    if not is_recorded(base):
        model, config = load_model(base, root)
        words = tokenizer or load_tokenizer(base, root)
        rows = model.module.whole.config.vocab_size
        if words.size > rows:
            raise MergeflowError(
                f"the tokenizer of '{base}' has {words.size} tokens and its model {rows}: texts would have ids that "
                "the model does not know. Save it with its own tokenizer, or give it rows with "
                "`resize_token_embeddings`."
            )
        return Opened(model, config, words)
    with open_checkpoint(root / base) as state:
        record = dict(state.metadata)
        if not is_causal(record):
            raise MergeflowError(
                f"{base} does not say that it is a causal model: give the base that the stage `base` of a project of "
                "causal models has written, or a folder with config.json, model.safetensors and tokenizer.json."
            )
        model = build_model(record["config"])
        model.load(state)
    return Opened(model, record["config"], CausalTokenizer.of_record(record))


def is_causal(record: Mapping[str, str]) -> bool:
    """Return whether the metadata of a base's weights are those of a causal model.

    Example:
        >>> is_causal({"role": "base"}), is_causal({"model": '{"modality": "causal"}'})
        (False, True)
    """
    return bool(json.loads(record.get(SECTION, "{}")).get("modality") == "causal")


def write_companions(record: Mapping[str, str], folder: Path) -> None:
    """Write what a folder of transformers has beside the weights: config.json and the tokenizer."""
    from tokenizers import Tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "config.json", record["config"] + "\n")
    write_text(folder / "tokenizer.json", record["tokenizer"])
    tokenizer, places = Tokenizer.from_str(record["tokenizer"]), {"bos_token": "start", "eos_token": "end"}
    marks = {name: tokenizer.id_to_token(int(record[place])) for name, place in places.items() if place in record}
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", **marks}
    write_text(folder / "tokenizer_config.json", json.dumps(tokenizer_config, ensure_ascii=False) + "\n")
