"""Pieces and blocks: nothing of a text is lost, doubled or joined where it does not belong."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mergeflow.modalities.causal.modality import cut, stream
from mergeflow.modalities.causal.preparation import pieces

END = 9


@given(st.text(alphabet="ab é\n😀", max_size=80), st.integers(4, 40))
def test_pieces_are_the_text_and_small(text: str, limit: int) -> None:
    parts = list(pieces(text, limit))
    assert "".join(parts) == text
    assert all(0 < len(piece.encode()) <= limit for piece in parts)


def test_pieces_end_before_white_space() -> None:
    parts = list(pieces("one two  three\nfour " * 40, 16))
    assert all(piece[0].isspace() and not piece[-1].isspace() for piece in parts[1:-1])
    assert list(pieces("x" * 9, 4)) == ["xxxx", "xxxx", "x"]


@settings(max_examples=60)
@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=5), min_size=1, max_size=6), st.data())
def test_an_end_token_stands_where_a_text_ends_or_a_piece_is_missing(
    documents: list[list[int]], data: st.DataObject
) -> None:
    """Each document is a list of its pieces' lengths; some pieces went to another split."""
    rows = [(d, p, length) for d, lengths in enumerate(documents) for p, length in enumerate(lengths)]
    chosen = [row for row in rows if data.draw(st.booleans())] or rows
    ids = np.full((len(chosen), 6), END)
    for at, (d, p, length) in enumerate(chosen):
        ids[at, :length] = [100 * d + 10 * p + k for k in range(length)]
    tokens = stream(ids, *(np.array([row[k] for row in chosen]) for k in (2, 0, 1))).tolist()
    expected: list[int] = []
    for at, (d, p, length) in enumerate(chosen):
        expected += [100 * d + 10 * p + k for k in range(length)]
        if at + 1 == len(chosen) or chosen[at + 1][:2] != (d, p + 1):
            expected.append(END)
    assert tokens == expected


@given(st.integers(2, 200), st.integers(3, 20))
def test_every_token_is_in_one_block_once(count: int, block: int) -> None:
    blocks = cut(np.arange(1, count + 1), block, 0)
    whole = [row[:length] for row, length in zip(blocks.ids, blocks.lengths, strict=True)]
    assert torch.cat(whole).tolist() == list(range(1, count + 1))
    assert all(2 <= length <= block for length in blocks.lengths.tolist())
    assert all(int(row[length:].sum()) == 0 for row, length in zip(blocks.ids, blocks.lengths, strict=True))
    assert (blocks.lengths[:-2] == block).all()
