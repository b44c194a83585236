"""Ridge regression with its own leave-one-out predictions, in closed form."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

RIDGES = (1e-3, 1e-2, 1e-1)
"""Penalties that are tried, for inputs of mean square norm 1 a row: the best leaves one out best."""


@dataclass(frozen=True)
class Ridge:
    """A fitted regression: wanted = inputs @ weights + offset.

    Args:
        weights: [p, m].
        offset: [m].
        left_out: [n, m] predictions of each row by the regression that was fitted without it (its mean aside).
        penalty: the chosen one.
    """

    weights: Tensor
    offset: Tensor
    left_out: Tensor
    penalty: float


def fit_ridge(inputs: Tensor, wanted: Tensor, penalties: Sequence[float] = RIDGES) -> Ridge:
    """Return the regression whose leave-one-out predictions have the smallest squared error.

    Args:
        inputs: [n, p], centered; written to.
        wanted: [n, m].
        penalties: to choose from.

    With H = A (A'A + r)^-1 A' the residual of a row that was left out is its own over 1 - H_ii (Allen, 1974, PRESS);
    with fewer rows than inputs, (A A' + r)^-1 gives both at once. Products are float32's, systems float64's.
    """
    unit = inputs.square().sum(1).mean().sqrt().clamp_min(torch.finfo(inputs.dtype).tiny)
    inputs /= unit
    offset = wanted.mean(0)
    centered = (wanted - offset).double()
    rows = len(inputs) <= inputs.shape[1]
    products = (inputs @ inputs.T if rows else inputs.T @ inputs).double()
    along = None if rows else inputs.T.double() @ centered
    best: tuple[float, float, Tensor, Tensor] | None = None
    for penalty in penalties:
        held = products.clone()
        held.diagonal().add_(penalty)
        factor, failed = torch.linalg.cholesky_ex(held)
        if int(failed):
            continue
        inverse = torch.cholesky_inverse(factor)
        if rows:
            solved = inverse @ centered
            left = solved / inverse.diagonal()[:, None]
        else:
            assert along is not None
            solved = inverse @ along
            leverage = ((inputs @ inverse.float()) * inputs).sum(1).double()
            left = (centered - inputs.double() @ solved) / (1 - leverage).clamp_min(1e-6)[:, None]
        error = float(left.square().mean())
        if best is None or error < best[0]:
            best = error, penalty, solved, left
    assert best is not None  # the largest penalty is far above rounding
    _, penalty, solved, left = best
    weights = inputs.T @ solved.float() if rows else solved.float()
    return Ridge(weights / unit, offset, wanted - left.to(wanted), penalty)
