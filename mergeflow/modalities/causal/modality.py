"""Causal language models as a modality: the whole model is merged, and no task has a head."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from mergeflow.checkpoints import write_checkpoint
from mergeflow.data import load_manifest, load_split
from mergeflow.errors import MergeflowError
from mergeflow.modalities.catalog import SECTION
from mergeflow.modalities.causal.model import LanguageModel, build_model, check_vocabulary, draw_model, load_model
from mergeflow.modalities.causal.sections import DataSection, ModelSection
from mergeflow.modalities.causal.tokenizer import ASSETS, load_tokenizer
from mergeflow.modalities.heads import Head
from mergeflow.modalities.modules import activations, likeliest
from mergeflow.modalities.pretrained import check_folder, check_prepared, find_place
from mergeflow.modality import Base, Modality, Model

_ROWS = 8192  # that are read at once: 17 MiB


class Blocks(NamedTuple):
    """All tokens of a split.

    Attributes:
        ids: int32 [N, block]; a shorter block is filled with the end token.
        lengths: int64 [N], 2 … block.
    """

    ids: Tensor
    lengths: Tensor


def stream(ids: np.ndarray, lengths: np.ndarray, documents: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return the tokens of all pieces in a row, int32 [T], an end token where a text ends or its next piece is missing.

    Of a piece: `ids` [P, R], filled with the end token; lengths [P] below R; documents and places in these, [P].
    """
    goes_on = (np.diff(documents) == 0) & (np.diff(places) == 1)
    taken = lengths + np.append(~goes_on, True)
    columns = np.arange(ids.shape[1])
    return np.concatenate(
        [ids[at : at + _ROWS][columns < taken[at : at + _ROWS, None]] for at in range(0, len(ids), _ROWS)]
    )


def cut(tokens: np.ndarray, block: int, end: int) -> Blocks:
    """Cut tokens into blocks: every token is in one block, once, and no block has a single token.

    The first token of a block is predicted from nothing and has no loss, so a single one would have no loss at all: the
    block before it gives it its last token.

    Args:
        tokens: int [T], T ≥ 2.
        end: the token that fills a shorter block.

    Example:
        >>> [row[:n].tolist() for row, n in zip(*cut(np.arange(7), 3, 0))]
        [[0, 1, 2], [3, 4], [5, 6]]
    """
    count = -(-len(tokens) // block)
    lengths = np.full(count, block)
    lengths[-1] = len(tokens) - (count - 1) * block
    if count > 1 and lengths[-1] == 1:
        lengths[-2:] = block - 1, 2
    ids = np.full((count, block), end, np.int32)
    ids[np.arange(block) < lengths[:, None]] = tokens
    return Blocks(torch.from_numpy(ids), torch.from_numpy(lengths))


def windows(blocks: Blocks, stride: int) -> tuple[Blocks, Tensor]:
    """Lay overlapping windows of block length over the tokens; each token is new in exactly one.

    Args:
        stride: tokens between the beginnings of two windows, 1 to block − 1.

    Returns:
        The windows, whose `ids` share memory where they overlap; and int64 [N], the place of the first token in each
        that no window before it has: 0 in the first one, block − stride in the others.

    Example:
        >>> over, first = windows(cut(np.arange(7), 4, 0), 2)
        >>> [row[:n].tolist() for row, n in zip(*over, strict=True)], first.tolist()
        ([[0, 1, 2, 3], [2, 3, 4, 5], [4, 5, 6]], [0, 2, 2])
    """
    block = blocks.ids.shape[1]
    if not 1 <= stride < block:
        raise MergeflowError(
            f"the stride is {stride}; expected 1 to {block - 1}: a window of {block} tokens begins with one that the "
            "window before it has predicted."
        )
    tokens = blocks.ids[torch.arange(block) < blocks.lengths[:, None]]
    starts = torch.arange(0, max(len(tokens) - block + stride, 1), stride)
    behind = int(starts[-1]) + block - len(tokens)
    padded = torch.cat([tokens, tokens[-1:].expand(behind)])
    first = torch.full_like(starts, block - stride)
    first[0] = 0
    return Blocks(padded.unfold(0, block, stride), (len(tokens) - starts).clamp(max=block)), first


IGNORED = -100  # the target where nothing is predicted: behind a block's end


@dataclass(frozen=True)
class PackedText:
    """One split of a task of texts; an example is a block.

    A token is predicted from those before it in its block; the first one of a block is predicted from the start token,
    or not at all where there is none.

    Attributes:
        start: The token that the base's tokenizer puts before every text, so that the base was trained with it.
    """

    task: str
    blocks: Blocks
    device: torch.device
    start: int | None = None
    head: None = None
    metric: None = None

    def __len__(self) -> int:
        return len(self.blocks.lengths)

    def loss(self, model: Model, rows: Tensor) -> Tensor:
        r"""Return −(1/M) Σ log p(x_j | x_<j) over the M predicted tokens of `rows`, a scalar [], in nats."""
        logits, targets = self._predicted(model, rows)
        return cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)

    def scores(self, model: Model, rows: Tensor) -> Tensor:
        """Return the next-token accuracy of each of `rows`, float32 [n] in [0, 1].

        It is the share of a block's predicted tokens that are the likeliest one.
        """
        logits, targets = self._predicted(model, rows)
        right = (likeliest(logits) == targets).sum(dim=1)
        return right / (targets != IGNORED).sum(dim=1)

    def log_p(self, model: Model, rows: Tensor) -> Tensor:
        """Return log p(· | x_<j) for every predicted token of `rows`, [m, V]."""
        logits, targets = self._predicted(model, rows)
        return logits[targets != IGNORED].log_softmax(dim=1)

    def token_losses(self, model: Model, rows: Tensor) -> Tensor:
        """Return −log p of each predicted token of `rows`, one block after the other, float32 [m]."""
        logits, targets = self._predicted(model, rows)
        losses = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none")
        return losses[targets.flatten() != IGNORED]

    def features(self, model: Model, rows: Tensor, layers: Sequence[str]) -> dict[str, Tensor]:
        ids = self._read(rows)[0]
        return activations(model.module, layers, lambda: model.module(ids))

    @property
    def first(self) -> int:
        """The first place of a block whose token is predicted."""
        return 1 if self.start is None else 0

    def _read(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ids that the model reads, and the id behind each of them, int64 [n, block] each."""
        ids = self.blocks.ids[rows].to(self.device, torch.int64)
        if self.start is None:
            return ids, torch.cat([ids[:, 1:], ids[:, :1]], dim=1)
        return torch.cat([torch.full_like(ids[:, :1], self.start), ids[:, :-1]], dim=1), ids

    def _predicted(self, model: Model, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [n, block, V], and the token that each place predicts, [n, block]."""
        ids, following = self._read(rows)
        places = torch.arange(self.first, self.first + ids.shape[1])
        inside = (places < self.blocks.lengths[rows][:, None]).to(self.device)
        return _logits(model, ids), following.masked_fill(~inside, IGNORED)


def _logits(model: Model, ids: Tensor) -> Tensor:
    """Return logits [n, L, V] of ids [n, L], in float32 or wider."""
    logits: Tensor = model.module(ids)
    return logits.float() if logits.dtype.itemsize < 4 else logits


# The log-likelihood of a choice that a question does not have. Not −∞, of which p·log p is not a number.
_ABSENT = -1e4


class _Batch(NamedTuple):
    """The choices of some questions, each after its question.

    ids: int64 [c, L], the end token behind them. choice: bool [c, L], True where a token is predicted that belongs to
    the choice. places: which question, and which of its choices, int64 [c] each.
    """

    ids: Tensor
    choice: Tensor
    places: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Questions:
    r"""One split of a task of questions, each with choices of which one is right.

    The likelihood of a choice is that of its tokens after the question's: ℓ_k = Σ_j log p(x_kj | question, x_k,<j). It
    is not divided by the choice's length.

    Attributes:
        ids: int32 [N, R]: the question's tokens, then those of each choice; it may lie on disk.
        ends: int32 [N, K + 1]: where the question and each choice end; what is behind the last repeats its end.
        answers: int64 [N], on the processor.
        end: The id that fills rows.
        start: The token before every question, as of `PackedText`.
    """

    task: str
    ids: np.ndarray
    ends: np.ndarray
    answers: Tensor
    end: int
    device: torch.device
    start: int | None = None
    head: None = None
    metric: None = None

    def __len__(self) -> int:
        return len(self.answers)

    def loss(self, model: Model, rows: Tensor) -> Tensor:
        """Return −(1/M) Σ log p over the M tokens of the right choices of `rows`, a scalar [], in nats."""
        batch = self._batch(rows, self.answers[rows])
        return -self._tokens(model, batch)[batch.choice].mean()

    def scores(self, model: Model, rows: Tensor) -> Tensor:
        """Return 1 where the right choice has the largest likelihood, else 0: float32 [n]."""
        return (likeliest(self.likelihoods(model, rows)) == self.answers[rows].to(self.device)).float()

    def log_p(self, model: Model, rows: Tensor) -> Tensor:
        """Return log-probabilities of the choices, [n, K]: the log-softmax of their log-likelihoods."""
        return self.likelihoods(model, rows).log_softmax(dim=1)

    def likelihoods(self, model: Model, rows: Tensor) -> Tensor:
        """Return ℓ of each choice, [n, K] in nats; −10⁴ where a question has fewer than K choices."""
        batch = self._batch(rows)
        log_p = self._tokens(model, batch).masked_fill(~batch.choice, 0.0).sum(dim=1)
        likelihoods = log_p.new_full((len(rows), self.ends.shape[1] - 1), _ABSENT)
        return likelihoods.index_put(batch.places, log_p)

    def features(self, model: Model, rows: Tensor, layers: Sequence[str]) -> dict[str, Tensor]:
        batch = self._batch(rows, self.answers[rows])
        return activations(model.module, layers, lambda: model.module(batch.ids))

    def _tokens(self, model: Model, batch: _Batch) -> Tensor:
        """Return the log-probability of each place's next token, [c, L]."""
        logits, following = _logits(model, batch.ids), batch.ids.roll(-1, dims=1)
        return -cross_entropy(logits.transpose(1, 2), following, reduction="none")

    def _batch(self, rows: Tensor, only: Tensor | None = None) -> _Batch:
        """Return all choices of `rows`, or of each the choice `only`."""
        numbers = rows.numpy()
        ids, ends = np.asarray(self.ids[numbers]), np.asarray(self.ends[numbers])
        wanted = [
            (row, choice)
            for row in range(len(numbers))
            for choice in ([int(only[row])] if only is not None else range(int((np.diff(ends[row]) > 0).sum())))
        ]
        begin = np.array([] if self.start is None else [self.start], np.int32)
        sequences = [
            np.concatenate([begin, ids[row, : ends[row, 0]], ids[row, ends[row, k] : ends[row, k + 1]]])
            for row, k in wanted
        ]
        longest = max(map(len, sequences))
        filled = np.full((len(sequences), longest), self.end, np.int64)
        choice = np.zeros((len(sequences), longest), bool)
        for line, ((row, _), tokens) in enumerate(zip(wanted, sequences, strict=True)):
            filled[line, : len(tokens)] = tokens
            first = len(begin) + ends[row, 0] - 1  # a token is predicted by the place before it
            choice[line, first : len(tokens) - 1] = True
        question, number = (torch.tensor(column, device=self.device) for column in zip(*wanted, strict=True))
        on_device, of_choice = (torch.from_numpy(part).to(self.device) for part in (filled, choice))
        return _Batch(on_device, of_choice, (question, number))


def perplexity(model: Model, examples: PackedText, batch_size: int = 32, stride: int | None = None) -> float:
    r"""Compute exp(−(1/M) Σ_j log p(x_j | x_<j)) over all M predicted tokens of a split, at least 1.

    Without a stride x_<j are the tokens before x_j in its block. With one they are at least the block − stride tokens
    before x_j, or all there are. Where texts begin with a start token each block does, and all tokens are predicted;
    where not, the first one of a block, and with a stride of the split, is not.

    Args:
        batch_size: blocks that are computed at once; it changes the result by rounding alone.
        stride: tokens between the beginnings of two windows as long as a block, 1 to block − 1; None for blocks that do
            not overlap. It takes block / stride times as long.
    """
    total, count = total_loss(model, examples, batch_size, stride)
    return math.exp(total / count)


@torch.inference_mode()
def total_loss(
    model: Model, examples: PackedText, batch_size: int = 32, stride: int | None = None
) -> tuple[float, int]:
    """Return −Σ_j log p(x_j | x_<j) in nats, summed in float64, and how many tokens are predicted."""
    blocks, first = examples.blocks, torch.zeros(len(examples), dtype=torch.int64)
    if stride is not None:
        blocks, first = windows(blocks, stride)
    examples = replace(examples, blocks=blocks)
    total, count, places = 0.0, 0, torch.arange(examples.first, blocks.ids.shape[1])
    for rows in torch.arange(len(examples)).split(batch_size):
        losses = examples.token_losses(model, rows)
        new = (places >= first[rows][:, None])[places < blocks.lengths[rows][:, None]]
        losses = losses[new.to(losses.device)].double()
        total, count = total + float(losses.sum()), count + len(losses)
    return total, count


def build(section: ModelSection, record: Mapping[str, str]) -> LanguageModel:
    """Build the model from the configuration in the base's record; its weights are arbitrary."""
    if "config" not in record:
        raise MergeflowError("the base's weights have no record of a causal model: run the stage `base` again.")
    return build_model(record["config"])


def check_base(section: ModelSection, data: DataSection, root: Path) -> None:
    """Check that base and tokenizer exist; their content is not read."""
    find_place(data.tokenizer, root, ASSETS)
    if section.pretrained != "none":
        check_folder(section.pretrained, root, ASSETS)


def make_base(section: ModelSection, data: DataSection, manifests: Mapping[str, Any], base: Base) -> None:
    """Write the base with its configuration and tokenizer in the record."""
    tokenizer = load_tokenizer(data.tokenizer if section.pretrained == "none" else section.pretrained, base.root)
    check_prepared(manifests, tokenizer.digest, data.tokenizer, section.pretrained)
    if section.pretrained == "none":
        model, config = draw_model(section.config, section.seed, tokenizer.size)
    else:
        model, config = load_model(section.pretrained, base.root)
    check_vocabulary(model, tokenizer.size, data.block)
    record = {"role": "base", SECTION: section.model_dump_json(), "config": config, **tokenizer.record}
    state = {name: value.contiguous() for name, value in model.state().items()}
    write_checkpoint(base.model, state, record)


def open_examples(
    task: str, folder: Path, split: str, head: Head | None, device: torch.device
) -> PackedText | Questions:
    """Return one prepared split: texts as blocks, or questions."""
    if head is not None:
        raise MergeflowError(
            f"task '{task}' has a head, which a causal model has no use for: run the stage `base` again."
        )
    data, stored = load_split(folder, split), load_manifest(folder)["decoding"]
    start = stored.get("start")
    if "ends" in data.arrays:
        answers = torch.from_numpy(np.array(data.answers))
        return Questions(task, data.ids, data.ends, answers, stored["end"], device, start)
    tokens = stream(data.ids, np.asarray(data.lengths), np.asarray(data.documents), np.asarray(data.places))
    least = stored["block"] if split == "train" else 2
    if len(tokens) < least:
        raise MergeflowError(
            f"task '{task}': {len(tokens)} tokens in its split {split}, end tokens included; expected at least {least} "
            f"(data.block is {stored['block']}). Give it more text, or lower data.block."
        )
    return PackedText(task, cut(tokens, stored["block"], stored["end"]), device, start)


def blank(model: Model, section: ModelSection, data: DataSection, count: int, classes: int) -> PackedText:
    """Return blocks without content, to predict memory."""
    ids, lengths = torch.zeros(count, data.block, dtype=torch.int32), torch.full((count,), data.block)
    return PackedText("blank", Blocks(ids, lengths), torch.device("cpu"))


MODALITY = Modality("causal", build, make_base, open_examples, blank=blank, check_base=check_base)
