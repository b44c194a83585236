"""Sentences of an encoder put together from the words of each position, judged by their first row alone.

A first row of block 1 is what block 0 makes of the first token's attention to the whole sentence. Keys and values are
those of (word, position) pairs, which are few, so that only one row a sentence goes through the wide part of the block.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gradaudit.models.base import TextModel


class Products:
    """All sentences that take one word of each position.

    Args:
        model: an encoder.
        columns: token ids of each position.
    """

    def __init__(self, model: TextModel, columns: Sequence[Sequence[int]]) -> None:
        self._model = model
        device = model.word_vectors().device
        self._ids = [torch.tensor(list(column), device=device) for column in columns]
        self.count = math.prod(len(column) for column in columns)
        rows = [model.first_inputs(position, ids) for position, ids in enumerate(self._ids)]
        self._first = rows[0]
        query = model.project(0, "q", self._first)  # [words at 0, heads, size]
        keys = [model.project(0, "k", some) for some in rows]
        bias = model.attention_bias(len(rows))
        self._scores, self._values = [], [model.project(0, "v", some) for some in rows]
        for position, key in enumerate(keys):
            score = torch.einsum("qhs,whs->qwh", query, key) / math.sqrt(key.shape[-1])
            self._scores.append(score if bias is None else score + bias[:, 0, position])

    def picks(self, start: int, count: int) -> Tensor:
        """Return which word each position takes, [count, T], of products in their order, the last position first."""
        left = torch.arange(start, start + count, device=self._first.device)
        found = []
        for ids in reversed(self._ids):
            found.append(left % len(ids))
            left = left // len(ids)
        return torch.stack(found[::-1], 1)

    def drawn(self, count: int, rng: torch.Generator) -> Tensor:
        """Return the same for products drawn at random, with replacement."""
        picks = [torch.randint(len(ids), (count,), generator=rng) for ids in self._ids]
        return torch.stack(picks, 1).to(self._first.device)

    def ids(self, picks: Tensor) -> Tensor:
        """Return the sentences, [N, T] token ids."""
        return torch.stack([ids[pick] for ids, pick in zip(self._ids, picks.unbind(1), strict=True)], 1)

    @torch.no_grad()
    def first_rows(self, picks: Tensor) -> Tensor:
        """Return what enters block 1 at the first position of each sentence, [N, d]."""
        begins, *_ = columns = picks.unbind(1)
        scores = torch.stack([s[begins, pick] for s, pick in zip(self._scores, columns, strict=True)], 1)  # [N, T, h]
        shares = scores.softmax(1)
        mixed = torch.zeros_like(self._values[0][begins])
        for position, pick in enumerate(columns):
            mixed.addcmul_(shares[:, position, :, None], self._values[position][pick])
        return self._model.after_attention(0, self._first[begins], mixed.flatten(1))
