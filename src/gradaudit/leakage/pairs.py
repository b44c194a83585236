"""Which word stood where, with dropout off: the sparsest signals that explain block 0's gradient.

Without dropout x(t, p) = LN(word t + position p), so the rows of two words at the same two positions are dependent and
every batch word fits every linked position: the row space alone cannot tell. The gradient says more. It is
dW = sum over pairs c of E_c x_c^T with one signal E_c a pair, of 3 d numbers when q, k and v are stacked, and only the
pairs that occurred carry any. The signals of least total norm that explain dW (a group lasso with equality, or basis
pursuit for multiple measurement vectors: Tropp, 2006) put nearly all of it on the right pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradaudit.leakage.subspace import Span, VocabularyCheck, cut_by_gap, near_tokens
from gradaudit.models.base import TextModel

_ROUNDING, _UNRELATED = 5e-6, 0.05
"""Residuals of right rows in float32 are at most about the first, those of unrelated rows at least the second."""


@dataclass(frozen=True)
class Pairs:
    """Tokens at positions that lie in block 0's span.

    Args:
        positions: [n].
        tokens: [n] ids.
        rows: [n, d] their inputs, float64.
    """

    positions: Tensor
    tokens: Tensor
    rows: Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    def pick(self, chosen: Tensor) -> Pairs:
        """Return the chosen ones (indices or a mask)."""
        return Pairs(self.positions[chosen], self.tokens[chosen], self.rows[chosen])


def candidate_pairs(model: TextModel, first: Span, longest: int) -> Pairs:
    """Return every (position, token) whose input lies in the span: at least all that occurred.

    Special tokens are taken where they may stand: the first one at position 0 alone, the last one after it.

    Args:
        model: an encoder, dropout off.
        first: block 0's span.
        longest: positions looked at, until one holds no token.
    """
    check = VocabularyCheck(model.first_input_parts(), first)
    special = model.special
    inner_never = torch.tensor(sorted(special.ids - set(special.suffix)), dtype=torch.long, device=first.basis.device)
    positions, tokens, rows = [], [], []
    for position in range(min(longest, model.max_length)):
        near = near_tokens(model, check, first, position, _UNRELATED)
        ids = near.below(cut_by_gap(near.residuals, _ROUNDING, _UNRELATED)).ids
        opening = position == 0 and bool(special.prefix)
        ids = ids[ids == special.prefix[0]] if opening else ids[~torch.isin(ids, inner_never)]
        if len(ids) == 0:
            break
        positions.append(torch.full_like(ids, position))
        tokens.append(ids)
        rows.append(model.first_inputs(position, ids).double())
    if not tokens:
        none = torch.zeros(0, dtype=torch.long, device=first.basis.device)
        return Pairs(none, none, torch.zeros((0, len(first.basis)), dtype=torch.double, device=first.basis.device))
    return Pairs(torch.cat(positions), torch.cat(tokens), torch.cat(rows))


@torch.no_grad()
def sparse_signals(gradient: Tensor, rows: Tensor, basis: Tensor, steps: int = 60) -> Tensor:
    """Return [n, out], the signals of least total norm that explain a gradient.

    Minimizes sum_c ||E_c|| with E^T rows = gradient by reweighted least squares (weights ||E_c||, smoothed by an eps
    that falls from 1 by 0.9 a step): the convex problem, whose solution does not depend on the start. Sharper penalties
    find sparser answers and wrong ones: a batch may hold more pairs than the rank of their rows.

    Args:
        gradient: [out, d], its rows in the span of `rows`.
        rows: [n, d] candidate inputs, linearly dependent.
        basis: [d, r] orthonormal basis of the gradient's row space.
        steps: reweighting steps.
    """
    short, target = rows @ basis, (gradient @ basis).T
    weights = torch.ones(len(rows), dtype=rows.dtype, device=rows.device)
    signals = torch.zeros((len(rows), len(gradient)), dtype=rows.dtype, device=rows.device)
    identity = torch.eye(basis.shape[1], dtype=rows.dtype, device=rows.device)
    eps = 1.0
    for _ in range(steps):
        normal = (short * weights[:, None]).T @ short
        normal = normal + 1e-13 * normal.diagonal().mean() * identity
        signals = weights[:, None] * (short @ torch.linalg.solve(normal, target))
        square = signals.square().sum(1)
        square = square / square.max().clamp_min(1e-300)
        weights = (square + eps**2).sqrt()
        eps = max(eps * 0.9, 1e-5)
    return signals
