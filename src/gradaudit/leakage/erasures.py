"""Decoding rows that dropout has masked: a code word with erasures, found again by robust regression.

With dropout after the embedding LayerNorm (BERT, RoBERTa, MPNet), token (t, p) enters block 0 as
m * x(t, p) / (1 - rate), m in {0, 1}^d. For a token of the batch there is a c with R c = x on the kept coordinates
and R c = 0 on the dropped ones, where R [d, r] spans the gradient's row space: d equations in r unknowns, of which
every one holds. No other token meets them while r stays clearly below d. The dropped coordinates are outliers of the
regression of x on R, so reweighted least squares finds nearly all of the mask, as in decoding by linear programming
(Candes and Tao, 2005); flipping coordinates while that brings the masked row nearer to the span finds the rest. What
is left then is rounding: the test for membership is as sharp as without dropout.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import linprog
from torch import Tensor

_SMALLEST = 1e-2
"""Coordinates below this share of a typical one (about 1 after a LayerNorm) are compared at this scale."""
_POWER, _START, _FALL, _END = 1.8, 0.3, 0.78, 1e-3
"""Weights 1 / (rel^1.8 + eps^1.8), eps falling from 0.3 by 0.78 a step to 0.001 (feasibility trial)."""


@dataclass(frozen=True)
class Fit:
    """Where reweighted least squares stands for some candidates.

    Args:
        kept: [n, d] bool, coordinates read as not dropped.
        share: [n] share of coordinates explained: R c equals x or 0 there.
        weights: [n, d] weights to go on from.
    """

    kept: Tensor
    share: Tensor
    weights: Tensor


def _solve(basis: Tensor, products: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted least-squares fit of each row in the span, [n, d]."""
    rank = basis.shape[1]
    normal = (weights @ products).view(-1, rank, rank)
    # 1e-10: a larger ridge bends exact solutions (trial: 1e-5 spoils them)
    diagonal = normal.diagonal(dim1=1, dim2=2)
    diagonal += 1e-10 * diagonal.mean(1, keepdim=True)
    factor = torch.linalg.cholesky(normal)
    c = torch.cholesky_solve(((weights * rows) @ basis).unsqueeze(2), factor).squeeze(2)
    return c @ basis.T


def outer_products(basis: Tensor) -> Tensor:
    """Return [d, r * r] products of a basis with itself, shared by every regression on it."""
    return (basis[:, :, None] * basis[:, None, :]).reshape(len(basis), -1)


def decode(
    basis: Tensor,
    products: Tensor,
    rows: Tensor,
    *,
    start: Tensor | None,
    first: int,
    steps: int,
    tolerance: float = 0.02,
) -> Fit:
    """Run some steps of reweighted least squares on every candidate at once.

    Args:
        basis: [d, r] orthonormal, float64.
        products: `outer_products(basis)`.
        rows: [n, d] clean inputs x(t, p), float64.
        start: [n, d] starting weights; all equal when None.
        first: number of steps done before (the weights sharpen with the steps).
        steps: how many now.
        tolerance: relative error up to which a coordinate counts as explained.
    """
    scale = rows.abs().clamp_min(_SMALLEST)
    weights = torch.ones_like(rows) if start is None else start
    values = rows
    for step in range(first, first + steps):
        values = _solve(basis, products, rows, weights / scale**2)
        error = (values - rows).abs() / scale
        eps = max(_END, _START * _FALL**step)
        weights = 1 / (error**_POWER + eps**_POWER)
        weights = weights / weights.mean(1, keepdim=True)
    off, zero = (values - rows).abs() / scale, values.abs() / scale
    share = ((off < tolerance) | (zero < tolerance)).double().mean(1)
    return Fit(off <= zero, share, weights)


@torch.no_grad()
def refine(outside: Tensor, rows: Tensor, kept: Tensor, flips: int = 80) -> tuple[Tensor, Tensor]:
    """Correct a nearly right mask coordinate by coordinate until the masked row lies in the span.

    The masked row's part outside the span is linear in the mask, so what flipping one coordinate does to its squared
    norm has a closed form; the best flip is taken while one helps. At the right mask nothing is left but rounding.

    Args:
        outside: [d, d] projector onto the span's complement, float64.
        rows: [n, d] clean inputs.
        kept: [n, d] bool, masks to start from.
        flips: most flips a row.

    Returns:
        The masks, and [n] the norm of what lies outside the span, relative to the masked row's.
    """
    kept = kept.clone()
    left = torch.where(kept, rows, torch.zeros_like(rows)) @ outside
    leverage = outside.diagonal()
    every = torch.arange(len(rows), device=rows.device)
    for _ in range(flips):
        move = torch.where(kept, -rows, rows)
        change = 2 * move * left + move.square() * leverage
        best = change.argmin(1)
        helps = change[every, best] < -1e-14 * rows.square().sum(1)
        if not bool(helps.any()):
            break
        at, which = every[helps], best[helps]
        left[at] += move[at, which][:, None] * outside[which]
        kept[at, which] ^= True
    masked = torch.where(kept, rows, torch.zeros_like(rows))
    left = masked @ outside  # anew: the running sum has gathered rounding
    return kept, left.norm(dim=1) / masked.norm(dim=1).clamp_min(1e-300)


def another_copy(basis: Tensor, row: Tensor, known: Tensor, rng: torch.Generator) -> Tensor | None:
    """Return the mask of a further copy of a token, nearly right, by linear programming; None without a solution.

    Copies of one (token, position) have masks of their own, and each is a corner of the polytope of all m with
    0 <= m <= 1 and m * x in the span. Maximizing the sum of m over the coordinates that the known copies have dropped
    (and a little over all others, at random) leads to a corner where those are kept: another copy.

    Args:
        basis: [d, r].
        row: [d] clean input x.
        known: [k, d] bool, masks of the copies found so far; one full mask when there are none.
        rng: for the random part of the objective.
    """
    usable = (row.abs() > _SMALLEST).cpu().numpy()
    matrix = (basis / row[:, None]).cpu().numpy()
    noise = torch.rand(len(row), generator=rng, dtype=torch.double).numpy()
    wanted = 0.2 + (~known).any(0).double().cpu().numpy()
    inside = matrix[usable]
    objective = -(wanted * (0.1 + noise))[usable] @ inside
    bounds = np.concatenate([np.ones(len(inside)), np.zeros(len(inside))])
    solved = linprog(
        objective, A_ub=np.concatenate([inside, -inside]), b_ub=bounds, bounds=(None, None), method="highs"
    )
    if solved.x is None:
        return None
    return torch.from_numpy(matrix @ solved.x > 0.5).to(row.device)
