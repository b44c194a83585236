"""What a learned attack gets to learn from: updates of public text, simulated for it on the client's side."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
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

    def parts(self) -> tuple[Tensor | None, ...]:
        """Return all that decides what is learned from them."""
        return self.ids, self.mask, self.labels

    def take(self, rows: Tensor) -> Public:
        """Return some of the texts."""
        return Public(self.ids[rows], self.mask[rows], None if self.labels is None else self.labels[rows], self.where)


def drawn_like(texts: Public, count: int, special: Collection[int], rng: torch.Generator, piece: float = 1.0) -> Public:
    """Return texts of words drawn from some texts, with lengths, labels and special tokens of theirs.

    Args:
        texts: what is drawn from.
        count: how many are drawn.
        special: token ids that stay where they are and are drawn nowhere else.
        rng: draws.
        piece: words that are drawn together, in the mean: a piece goes on with the word behind, and ends by chance or
            where its text does. With 1 each is drawn by itself, which is the unigram distribution of the texts.

    Source: LTI, section 3.3 (LTI-P), for a piece of 1; longer ones are ours.
    """
    device = texts.ids.device
    words = texts.mask & ~torch.isin(texts.ids, torch.tensor(sorted(special), device=device))
    if not bool(words.any()):
        return texts.take(torch.randint(len(texts), (count,), generator=rng).to(device))
    like = texts.take(torch.randint(len(texts), (count,), generator=rng).to(device))
    free = like.mask & ~torch.isin(like.ids, torch.tensor(sorted(special), device=device))
    places = words.flatten().nonzero().flatten()
    drawn = places[torch.randint(len(places), like.ids.shape, generator=rng).to(device)]
    going_on = (torch.rand(like.ids.shape, generator=rng) >= 1 / piece).to(device)
    # where a word has another one behind it, in the same text
    followed = F.pad(words[:, 1:] & words[:, :-1], (0, 1)).flatten()
    for at in range(1, like.ids.shape[1]):
        before = drawn[:, at - 1]
        drawn[:, at] = torch.where(going_on[:, at] & free[:, at - 1] & followed[before], before + 1, drawn[:, at])
    ids = torch.where(free, texts.ids.flatten()[drawn], like.ids)
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


class ReplaysText(Protocol):
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
