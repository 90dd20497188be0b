"""A small causal language model, two experts of it, and the scorer of causal.yaml: perplexity by task.

`python examples/sweeps/tiny_causal.py` builds the base and the experts, Llama models of 30,000 parameters on the bytes
of made-up sentences: no download, some seconds of one CPU core. With a real model, leave this part out and keep
`score`; a real tokenizer and texts then take the place of `tokens`.
"""

import sys
from functools import cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

FOLDER = Path("outputs/causal")
WORDS = {
    "sums": ("one", "two", "three", "plus", "minus", "makes"),
    "weather": ("rain", "wind", "snow", "north", "falls", "blows"),
}


def tokens(task: str, split: str, sentences: int = 24, words: int = 6) -> torch.Tensor:
    """Return the bytes of made-up sentences of one task: int64 [sentences, length], other ones in each split."""
    seed = ("train", "validation", "test").index(split)
    generator = torch.Generator().manual_seed(seed)
    vocabulary = WORDS[task]
    drawn = torch.randint(len(vocabulary), (sentences, words), generator=generator)
    # A word follows from the one before it half of the time, so that there is something to learn.
    drawn[:, 1::2] = (drawn[:, ::2] + 1) % len(vocabulary)
    texts = [" ".join(vocabulary[word] for word in row).ljust(36)[:36] for row in drawn.tolist()]
    return torch.tensor([list(text.encode()) for text in texts])


def score(state, candidate):
    """Return minus the log-perplexity of each task: larger is better, 0 would be certainty.

    Args:
        state: The candidate's state dict.
        candidate: What it is; `candidate.split` says which sentences are asked for.
    """
    model = _network()
    model.load_state_dict(state, strict=False, assign=False)
    model.tie_weights()
    with torch.inference_mode():
        batches = {task: tokens(task, candidate.split) for task in WORDS}
        return {task: -float(model(batch, labels=batch).loss) for task, batch in batches.items()}


@cache
def _network() -> PreTrainedModel:
    """The architecture, built once for all candidates."""
    return AutoModelForCausalLM.from_pretrained(FOLDER / "base").eval()


def build(folder: Path, steps: int = 45) -> None:
    """Write the base, which has seen a little of both tasks, and an expert of each."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # more threads than that cost time on tensors of this size
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    base = LlamaForCausalLM(config)
    _train(base, list(WORDS), steps // 3)
    base.save_pretrained(folder / "base")
    for task in WORDS:
        expert = AutoModelForCausalLM.from_pretrained(folder / "base")
        _train(expert, [task], steps)
        expert.save_pretrained(folder / task)


def _train(model: PreTrainedModel, tasks: list[str], steps: int) -> None:
    batches = torch.cat([tokens(task, "train") for task in tasks])
    optimiser = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(steps):
        loss = model(batches, labels=batches).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()


if __name__ == "__main__":
    build(Path(sys.argv[1]) if sys.argv[1:] else FOLDER)
