"""Causal models outside of a project's stages: opened from a file or a folder, loaded, saved as a folder."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from mergeflow.checkpoints import open_checkpoint, write_checkpoint, write_text
from mergeflow.errors import MergeflowError
from mergeflow.modalities.causal.model import LanguageModel, build_model, load_model
from mergeflow.modalities.causal.tokenizer import CausalTokenizer, load_tokenizer
from mergeflow.modalities.recorded import SECTION, is_recorded


@dataclass(frozen=True)
class Opened:
    """A causal model, and what its texts are tokens by.

    Attributes:
        model: With the weights that were loaded last.
        config: Its configuration, as the base's record has it.
        tokenizer: Of its base.
    """

    model: LanguageModel
    config: str
    tokenizer: CausalTokenizer

    def load(self, path: str | Path) -> None:
        """Load other weights of the same architecture; second names of tied weights are passed over.

        Args:
            path: a checkpoint: a file, or a folder in the layout of Hugging Face.

        Raises:
            MergeflowError: it cannot be read or does not fit.
        """
        second = self.model.module.state_dict().keys() - self.model.state().keys()
        with open_checkpoint(path) as state:
            if state.is_task_vector:
                raise MergeflowError(f"{path} is a task vector, which is not a model: add it to its base first.")
            self.model.load({name: state[name] for name in state if name not in second})

    def save(self, folder: Path, state: Mapping[str, Tensor] | None = None) -> None:
        """Write a folder that transformers reads: config.json, the tokenizer, model.safetensors.

        Args:
            folder: made where it is missing.
            state: the weights; those of the model by default.
        """
        words = {"tokenizer": self.tokenizer.content, "end": str(self.tokenizer.end)}
        write_companions({"config": self.config, **words}, folder)
        state = self.model.state() if state is None else state
        write_checkpoint(folder / "model.safetensors", state, {"format": "pt"})


def open_language(base: str, root: Path) -> Opened:
    """Open a causal model by its base.

    Args:
        base: the file of weights that the stage `base` wrote, a folder in the layout of Hugging Face, the name of an
            embedded base, or an id of the hub.
        root: what a relative folder starts from.

    Raises:
        MergeflowError: it cannot be read, or is not a causal model.
    """
    if not is_recorded(base):
        model, config = load_model(base, root)
        return Opened(model, config, load_tokenizer(base, root))
    with open_checkpoint(root / base) as state:
        record = dict(state.metadata)
        if not is_causal(record):
            raise MergeflowError(
                f"{base} does not say that it is a causal model: give the base that the stage `base` of a project of "
                "causal models has written, or a folder with config.json, model.safetensors and tokenizer.json."
            )
        model = build_model(record["config"])
        model.load(state)
    return Opened(model, record["config"], CausalTokenizer(record["tokenizer"], int(record["end"])))


def is_causal(record: Mapping[str, str]) -> bool:
    """Return whether the metadata of a base's weights are those of a causal model.

    Example:
        >>> is_causal({"role": "base"}), is_causal({"model": '{"modality": "causal"}'})
        (False, True)
    """
    return bool(json.loads(record.get(SECTION, "{}")).get("modality") == "causal")


def write_companions(record: Mapping[str, str], folder: Path) -> None:
    """Write what a folder of transformers has beside the weights: config.json and the tokenizer.

    Args:
        record: `config`, `tokenizer` and `end` of a base's metadata.
        folder: made where it is missing.
    """
    from tokenizers import Tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "config.json", record["config"] + "\n")
    write_text(folder / "tokenizer.json", record["tokenizer"])
    end = Tokenizer.from_str(record["tokenizer"]).id_to_token(int(record["end"]))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
    write_text(folder / "tokenizer_config.json", json.dumps(told, ensure_ascii=False) + "\n")
