"""What a learned attack gets to learn from: updates of public text, simulated for it on the client's side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Public:
    """Public text as token ids: the attacker's own, in none of the audited batches.

    Args:
        ids: [N, T] token ids, padded on the right.
        mask: [N, T] bool, True where a token is real.
        labels: [N] class labels; None for causal language modeling.
        where: the source in words, for records.
    """

    ids: Tensor
    mask: Tensor
    labels: Tensor | None
    where: str

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, rows: Tensor) -> Public:
        """Return some of the texts."""
        return Public(self.ids[rows], self.mask[rows], None if self.labels is None else self.labels[rows], self.where)


def drawn_like(texts: Public, count: int, rng: torch.Generator) -> Public:
    """Return texts of tokens drawn one by one from some texts' unigram distribution, with lengths and labels of theirs.

    Source: LTI, section 3.3 (LTI-P).
    """
    rows = torch.randint(len(texts), (count,), generator=rng).to(texts.ids.device)
    like = texts.take(rows)
    frequency = torch.bincount(texts.ids[texts.mask].cpu()).double()
    drawn = torch.multinomial(frequency, like.ids.numel(), replacement=True, generator=rng)
    ids = torch.where(like.mask, drawn.view_as(like.ids).to(like.ids), like.ids)
    return Public(ids, like.mask, like.labels, like.where)


@dataclass(frozen=True)
class Part:
    """One view's tensors of n simulated updates.

    Args:
        name: of the view.
        values: [n, ...] defended tensors.
        noise: [n] standard deviation of independent Gaussian noise that every entry is still to get: sums of entries
            may get it as a sum, which is the same in law and spares a draw an entry. None for none.
    """

    name: str
    values: Tensor
    noise: Tensor | None = None


class Simulation(Protocol):
    """Replays the client, its defenses included, on public text."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the tensors that are seen, by view name."""

    @property
    def random(self) -> bool:
        """True when the same text gives other `Part.values` the next time (dropout, pruning at random)."""

    def __call__(
        self, ids: Tensor, mask: Tensor, labels: Tensor | None, rng: torch.Generator
    ) -> Iterator[tuple[slice, Iterator[Part]]]:
        """Yield, for some updates at a time, which of the n they are and their tensors.

        Args:
            ids: [n, B, T] public token ids, B sentences an update.
            mask: [n, B, T].
            labels: [n, B]; None for causal language modeling.
            rng: of dropout and defenses; another one gives fresh noise.
        """
