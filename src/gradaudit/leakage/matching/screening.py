"""Ranking many guesses by a part of their update, before the whole of the best is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradaudit.leakage.matching.factored import Observed


@dataclass(frozen=True)
class Factors:
    """A parameter's gradient by its factors, over all of its uses: see `leakage.factored.gradient`."""

    how: str
    slope: Tensor
    read: Tensor

    def only(self, candidates: Tensor | slice) -> Factors:
        """Return those of some candidates."""
        return Factors(self.how, self.slope[candidates], self.read[candidates] if self.read.numel() else self.read)


Made = dict[str, Factors]
"""Candidates' gradients by parameter."""


class Heat:
    """A ranking of candidates that come in turn: who goes on is among the best so far.

    Args:
        most: so many.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._best: Tensor | None = None

    @property
    def begun(self) -> bool:
        """Whether any were ranked."""
        return self._best is not None

    def among(self, values: Tensor) -> Tensor:
        """Return the indices, ascending, of the values [N] that are among the lowest so far."""
        before = values[:0] if self._best is None else self._best
        order = torch.cat([before, values]).argsort(stable=True)[: self.most]
        self._best = torch.cat([before, values])[order]
        return (order[order >= len(before)] - len(before)).sort().values


def as_slice(indices: Tensor) -> Tensor | slice:
    """Return indices that follow one another as a slice: what it takes is a view, and nothing is copied."""
    first, last = int(indices[0]), int(indices[-1])
    in_order = last - first == len(indices) - 1 and bool((indices[1:] > indices[:-1]).all())
    return slice(first, last + 1) if in_order else indices


@dataclass(frozen=True)
class Base:
    """What other sentences add to a batch's update.

    Args:
        observed: by part, what the update is compared with once these were added.
        size: sentences, or predicted tokens, of the whole batch.
    """

    observed: tuple[Observed, ...]
    size: int


Beside = Sequence[tuple[Base, Tensor]]
"""What the sentences that are not given add, and the indices of the candidates that it is added to."""
