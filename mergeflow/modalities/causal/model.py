"""A causal language model of transformers: built, loaded, drawn, opened by its base and saved as a folder."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mergeflow.checkpoints import open_checkpoint, write_checkpoint, write_text
from mergeflow.errors import MergeflowError
from mergeflow.modalities.catalog import SECTION, is_recorded
from mergeflow.modalities.causal.tokenizer import ASSETS, CausalTokenizer, load_tokenizer
from mergeflow.modalities.modules import own_generator
from mergeflow.modalities.pretrained import architecture_text, check_whole, load_pretrained, quiet, transformers
from mergeflow.modality import Network


class LanguageModule(nn.Module):
    """The parts of a model of `AutoModelForCausalLM` by their own names, with tokens in and logits out.

    Training, adapters and linearisation call a module with tensors and get a tensor; transformers' models take names
    and give records.
    """

    def __init__(self, whole: Any) -> None:
        super().__init__()
        for name, part in whole.named_children():
            self.add_module(name, part)
        assert self.state_dict().keys() == whole.state_dict().keys(), "weights outside of the model's parts"
        self._whole = (whole,)  # not registered as a part, because its parts are registered here

    @property
    def whole(self) -> Any:
        """The transformers model; it shares all weights."""
        return self._whole[0]

    @property
    def positions(self) -> int:
        """Tokens that the model sees at once; 2³¹ where its configuration sets no limit."""
        return getattr(self.whole.config, "max_position_embeddings", None) or 2**31

    def train(self, mode: bool = True) -> "LanguageModule":
        """Set the mode of the parts, and of the model that they are parts of."""
        super().train(mode)
        self.whole.training = mode
        return self

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits [n, L, V] of tokens [n, L]; what follows a token has no influence on its logits."""
        logits: Tensor = self.whole(input_ids=ids, use_cache=False).logits
        return logits


@dataclass(frozen=True)
class LanguageModel(Network):
    """A causal language model all of whose weights are shared; of tied weights there is one."""

    module: LanguageModule

    def state(self) -> dict[str, Tensor]:
        """Return the weights by transformers' names, a tied weight by its first; they share memory with the module."""
        tied = self.tied()
        return {name: value.detach() for name, value in self.module.state_dict().items() if name not in tied}

    def tied(self) -> dict[str, str]:
        """Return the first name of each tied weight by its further ones."""
        first: dict[int, str] = {}
        named = list(self.module.named_parameters(remove_duplicate=False))
        for name, parameter in named:
            first.setdefault(id(parameter), name)
        return {name: first[id(parameter)] for name, parameter in named if first[id(parameter)] != name}


def build_model(config: str) -> LanguageModel:
    """Build the model of a configuration; its weights are arbitrary."""
    return LanguageModel(_drawn(json.loads(config), 0))


def draw_model(values: Mapping[str, Any], seed: int, tokens: int) -> tuple[LanguageModel, str]:
    """Draw the weights of a configuration, which may lack `vocab_size`, as transformers draws them."""
    if "model_type" not in values:
        raise MergeflowError(
            "model.config says no model_type; expected one such as gpt2, llama, qwen2 or phi. It is needed where "
            "model.pretrained is none."
        )
    try:
        module = _drawn({"vocab_size": tokens, **values}, seed)
    # Configurations and models raise errors of many types, transformers' own validators others again.
    except Exception as error:
        first = (str(error.__cause__ or error).strip().splitlines() or [""])[0]
        raise MergeflowError(
            f"model.config does not describe a causal model of transformers ({type(error).__name__}: {first[:200]}): "
            "correct its values."
        ) from error
    return LanguageModel(module), architecture_text(module.whole.config.to_dict())


def _drawn(values: Mapping[str, Any], seed: int) -> LanguageModule:
    rest = {name: value for name, value in values.items() if name != "model_type"}
    with quiet(), own_generator(seed):
        config = transformers("AutoConfig").for_model(values["model_type"], **rest)
        model = transformers("AutoModelForCausalLM").from_config(config, dtype=torch.float32)
    return LanguageModule(model).eval()


def load_model(place: str, root: Path) -> tuple[LanguageModel, str]:
    """Load a pre-trained causal model."""
    model, lacking = load_pretrained("AutoModelForCausalLM", "the causal model", place, root, ASSETS)
    check_whole(place, lacking)
    return LanguageModel(LanguageModule(model).eval()), architecture_text(model.config.to_dict())


def check_vocabulary(model: LanguageModel, tokens: int, block: int) -> None:
    """Refuse a tokenizer with more tokens, or blocks with more positions, than the model knows."""
    config = model.module.whole.config
    if tokens > config.vocab_size:
        raise MergeflowError(
            f"the tokenizer has {tokens} tokens and the model {config.vocab_size}: it is the tokenizer of another "
            "base. Give data.tokenizer and model.pretrained the same name."
        )
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and block > limit:
        raise MergeflowError(
            f"data.block is {block}, which this model cannot take (its max_position_embeddings: {limit}): lower it, or "
            "choose another base."
        )


@dataclass(frozen=True)
class Opened:
    """A causal model and its tokenizer."""

    model: LanguageModel
    config: str
    tokenizer: CausalTokenizer

    def load(self, path: str | Path) -> None:
        """Load other weights of the same architecture; second names of tied weights are ignored."""
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
    """Return whether the metadata of a base's weights are those of a causal model."""
    return bool(json.loads(record.get(SECTION, "{}")).get("modality") == "causal")


def write_companions(record: Mapping[str, str], folder: Path) -> None:
    """Write the other files of a transformers folder: config.json and the tokenizer."""
    from tokenizers import Tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "config.json", record["config"] + "\n")
    write_text(folder / "tokenizer.json", record["tokenizer"])
    tokenizer, places = Tokenizer.from_str(record["tokenizer"]), {"bos_token": "start", "eos_token": "end"}
    marks = {name: tokenizer.id_to_token(int(record[place])) for name, place in places.items() if place in record}
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", **marks}
    write_text(folder / "tokenizer_config.json", json.dumps(tokenizer_config, ensure_ascii=False) + "\n")
