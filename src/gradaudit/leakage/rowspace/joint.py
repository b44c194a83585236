"""Rows under noise, by what all matrices of the first blocks say of them together.

What a row of the batch leaves in a matrix's gradient is as strong as the signal that comes back to that matrix: weak in
queries and keys (behind a softmax), many times stronger in the two matrices of the feed-forward and in the attention's
output, whose noise is the same. And what enters the feed-forward's second matrix has several times as many entries, of
which wrong rows fill more.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradaudit.leakage.rowspace.prefixes import Attended, leaf_values
from gradaudit.leakage.rowspace.subspace import Span, span
from gradaudit.types import Observation

_BLOCKS = 2
"""Blocks that are read: each deeper one costs as much again, and its directions are weaker."""
_FULL = 0.9
"""A row space of more than this share of the directions that it can have is all noise."""
_ODD = 1.5
"""A row space of so many times the usual number of directions holds noise: integers of one scale leave little else."""
_SPARE = 4
"""And so many more at least."""
_NOTHING = 1e-7
"""Distances below this are rounding."""


@dataclass(frozen=True)
class Joint:
    """The row spaces of an update under noise, each trusted or left out.

    Args:
        words: of what enters block 0's q, k and v, which is the same after any prefix; None where it is not readable.
        spans: the others of the first blocks.
        rank: how many directions they have in the middle: about the tokens of the batch.
    """

    words: Span | None
    spans: tuple[Span, ...]
    rank: int


def joint(seen: Observation, roles: Sequence[str] = ("q", "k", "v")) -> Joint:
    """Return what of a noisy update's first blocks can be read.

    Args:
        seen: a decoder's update.
        roles: which of q, k and v to stack.
    """
    first, second = (span(seen, layer, roles, sure=True) if layer < seen.model.depth else None for layer in (0, 1))
    keys = [(layer, role) for layer in range(min(_BLOCKS, seen.model.depth)) for role in "ofp"]
    found = [span(seen, layer, (role,), sure=True) for layer, role in keys]
    some = [s for s in (second, *found) if s is not None and 0 < s.rank < _FULL * len(s.values)]
    rank = round(statistics.median_low([s.rank for s in some])) if some else 0
    most = max(_ODD * rank, rank + _SPARE)
    words = first if first is not None and 0 < first.rank <= most else None
    return Joint(words, tuple(s for s in some if s.rank <= most), rank)


@torch.no_grad()
def joint_residuals(attended: Attended, spans: Sequence[Span], prefixes: Tensor, candidates: Tensor) -> Tensor:
    """Return the geometric mean, over some row spaces, of how far each candidate lies after each prefix, [P, C].

    Args:
        attended: what earlier positions' prefixes left, for as many blocks as the row spaces need.
        spans: row spaces.
        prefixes: [P, t] token ids, t may be 0.
        candidates: [C] token ids.
    """
    measures = [((s.layer, s.roles[0]), s.residual) for s in spans]
    values = leaf_values(attended, prefixes, candidates, measures)
    mean: Tensor = values.clamp_min(_NOTHING).log().mean(0).exp()
    return mean
